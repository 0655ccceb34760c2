"""Optimizer steps over real buckets: formula, clipping, loss scale, skipped steps, master, state."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megalite.config import PrecisionConfig
from megalite.kernels.remainder import round_to
from megalite.optim import Optimizer
from megalite.parallel.buckets import GradientBuckets, main_grad
from megalite.parallel.params import record_of
from megalite.parallel.topology import Axis
from tests.optim.flat import HandAdamW, draw_gradients, make_buckets, make_optimizer
from tests.pool import WorkerPool

LOW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, *LOW)


def _memory(buckets: GradientBuckets, optimizer: Optimizer) -> list[torch.Tensor]:
    """Copies of weights and optimizer state."""
    state = [block.values for block in optimizer.state_blocks()]
    return [tensor.clone() for tensor in [*(bucket.weights for bucket in buckets.buckets), *state]]


def _state(optimizer: Optimizer, kind: str) -> dict[torch.nn.Parameter, torch.Tensor]:
    """One kind of state by parameter, in the parameter's shape."""
    blocks = [block for block in optimizer.state_blocks() if block.kind == kind]
    return {block.param: block.values.view(block.param.shape) for block in blocks}


def _equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_fp64_steps_follow_the_formula(clip: float) -> None:
    buckets = make_buckets(torch.float64)
    optimizer = make_optimizer(buckets, clip_grad=clip)
    by_hand = [HandAdamW(param, optimizer.config) for param in buckets.parameters]
    for step, lr in enumerate((1e-2, 3e-3, 1e-3)):
        draw_gradients(buckets, step)
        grads = [main_grad(param) for param in buckets.parameters]
        norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads))
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        stats = optimizer.step(lr)
        assert stats.grad_norm.item() == pytest.approx(norm, rel=1e-13)
        for param, grad, hand in zip(buckets.parameters, grads, by_hand, strict=True):
            torch.testing.assert_close(param.data, hand.step(grad * factor, lr), rtol=1e-12, atol=1e-12)


def test_fp32_steps_equal_torch_adamw_to_rounding() -> None:
    buckets = make_buckets(torch.float32)
    optimizer = make_optimizer(buckets)
    copies = [torch.nn.Parameter(param.detach().clone()) for param in buckets.parameters]
    decays = [record_of(param).decay for param in buckets.parameters]
    groups = [
        {
            "params": [copy for copy, decay in zip(copies, decays, strict=True) if decay is wanted],
            "weight_decay": 0.1 * wanted,
        }
        for wanted in (True, False)
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step in range(20):
        draw_gradients(buckets, step)
        for param, copy in zip(buckets.parameters, copies, strict=True):
            copy.grad = main_grad(param).clone()
        optimizer.step(1e-2)
        theirs.step()
    for param, copy in zip(buckets.parameters, copies, strict=True):
        torch.testing.assert_close(param.data, copy.data, rtol=2e-6, atol=2e-6)


def test_clipping_equals_torch_clip_grad_norm() -> None:
    buckets = make_buckets(torch.float64)
    optimizer = make_optimizer(buckets, clip_grad=0.5)
    copies = [torch.nn.Parameter(param.detach().clone()) for param in buckets.parameters]
    for param, copy in zip(buckets.parameters, copies, strict=True):
        copy.grad = main_grad(param).clone()
    norm = torch.nn.utils.clip_grad_norm_(copies, 0.5)
    assert optimizer.step(0.0).grad_norm.item() == pytest.approx(norm.item(), rel=1e-13)
    moments = _state(optimizer, "exp_avg")
    for param, copy in zip(buckets.parameters, copies, strict=True):
        assert copy.grad is not None
        torch.testing.assert_close(moments[param], 0.1 * copy.grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_weights_are_the_rounded_master(dtype: torch.dtype) -> None:
    """Updates too small for the weights' format add up in the master."""
    buckets = make_buckets(dtype)
    optimizer = make_optimizer(buckets, weight_decay=0.0, loss_scale=1.0)
    master = _state(optimizer, "master")
    start = {param: param.detach().clone() for param in buckets.parameters}
    optimizer.step(1e-6)
    assert all((param == start[param]).float().mean() > 0.9 for param in buckets.parameters)
    for _ in range(200):
        optimizer.step(1e-4)
    for param in buckets.parameters:
        assert master[param].dtype == torch.float32
        assert torch.equal(param.data, round_to(master[param], dtype))
        assert (param != start[param]).float().mean() > 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_step_with_a_bad_gradient_changes_nothing(dtype: torch.dtype, bad: float) -> None:
    buckets = make_buckets(dtype)
    optimizer = make_optimizer(buckets, clip_grad=1.0)
    optimizer.loss_scale.fill_(1.0)
    optimizer.step(1e-2)
    before, step = _memory(buckets, optimizer), optimizer.scalars()["step"]
    main_grad(buckets.parameters[1]).view(-1)[3] = bad
    stats = optimizer.step(1e-2)
    assert bool(stats.skipped)
    assert _equal(_memory(buckets, optimizer), before)
    assert optimizer.scalars()["step"] == step == 1


def test_a_skipped_step_leaves_no_trace_in_the_next() -> None:
    """Bias corrections count applied steps: a skipped one between changes no bit of what follows."""
    results = []
    for with_skip in (False, True):
        buckets = make_buckets(torch.float32)
        optimizer = make_optimizer(buckets)
        optimizer.step(1e-2)
        if with_skip:
            main_grad(buckets.parameters[0]).fill_(math.nan)
            assert bool(optimizer.step(1e-2).skipped)
        draw_gradients(buckets, 11)
        optimizer.step(1e-2)
        results.append(_memory(buckets, optimizer))
    assert _equal(*results)


def test_the_loss_scale_cancels_exactly() -> None:
    results = []
    for scale in (1.0, 2.0**20):
        buckets = make_buckets(torch.float16)
        optimizer = make_optimizer(buckets, loss_scale=scale, clip_grad=1.0)
        for bucket in buckets.buckets:
            bucket.grads.mul_(optimizer.loss_scale)
        stats = optimizer.step(1e-2)
        assert stats.loss_scale.item() == scale
        results.append([*_memory(buckets, optimizer), stats.grad_norm])
    assert _equal(*results)


def test_fp16_scales_dynamically_and_others_do_not() -> None:
    assert make_optimizer(make_buckets(torch.float16)).loss_scale.item() == 2.0**32
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        buckets = make_buckets(dtype)
        optimizer = make_optimizer(buckets)
        main_grad(buckets.parameters[0]).fill_(math.inf)
        for _ in range(4):
            stats = optimizer.step(1e-2)
        assert optimizer.loss_scale.item() == 1.0
        assert int(stats.stuck) == 4


def test_the_reported_scale_is_the_one_of_the_step() -> None:
    buckets = make_buckets(torch.float16)
    optimizer = make_optimizer(buckets, hysteresis=1, initial_loss_scale=4.0)
    main_grad(buckets.parameters[0]).fill_(math.inf)
    stats = [optimizer.step(1e-2) for _ in range(5)]
    assert [entry.loss_scale.item() for entry in stats] == [4.0, 2.0, 1.0, 1.0, 1.0]
    assert [int(entry.stuck) for entry in stats] == [0, 0, 1, 2, 3]


def _scale_after_overflow_on_rank(bad_rank: int) -> tuple[float, bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(size)))
    assert isinstance(group, dist.ProcessGroup)
    buckets = make_buckets(torch.float16)
    optimizer = make_optimizer(buckets, hysteresis=1)
    optimizer.norm_axis = Axis("model", size, rank, group, tuple(range(size)))
    before = _memory(buckets, optimizer)
    if rank == bad_rank:
        main_grad(buckets.parameters[0]).view(-1)[0] = math.inf
    optimizer.step(1e-2)
    return optimizer.loss_scale.item(), _equal(before, _memory(buckets, optimizer))


def test_an_overflow_on_one_rank_lowers_the_scale_of_all(pool: WorkerPool) -> None:
    assert pool.run(2, _scale_after_overflow_on_rank, 1) == [(2.0**31, True)] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    def train(optimizer: Optimizer, buckets: GradientBuckets, seeds: range) -> None:
        for seed in seeds:
            draw_gradients(buckets, seed)
            optimizer.step(1e-2)

    straight_buckets, stopped_buckets, resumed_buckets = (make_buckets(dtype) for _ in range(3))
    straight, stopped = (
        make_optimizer(buckets, clip_grad=1.0) for buckets in (straight_buckets, stopped_buckets)
    )
    train(straight, straight_buckets, range(6))
    train(stopped, stopped_buckets, range(3))
    for target, source in zip(resumed_buckets.buckets, stopped_buckets.buckets, strict=True):
        target.weights.copy_(source.weights)
    resumed = make_optimizer(resumed_buckets, clip_grad=1.0)
    with resumed.loading() as blocks:
        for empty, full in zip(blocks, stopped.state_blocks(), strict=True):
            empty.values.copy_(full.values)
    resumed.load_scalars(stopped.scalars())
    train(resumed, resumed_buckets, range(3, 6))
    assert _equal(_memory(resumed_buckets, resumed), _memory(straight_buckets, straight))
    assert resumed.scalars() == straight.scalars()


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_blocks_have_the_elements_of_their_parameter(dtype: torch.dtype) -> None:
    buckets = make_buckets(dtype)
    blocks = list(make_optimizer(buckets).state_blocks())
    kinds = (
        ["exp_avg", "exp_avg_sq"]
        if dtype in (torch.float32, torch.float64)
        else ["master", "exp_avg", "exp_avg_sq"]
    )
    assert [block.kind for block in blocks] == kinds * len(buckets.parameters)
    assert all(
        block.values.shape == (block.param.numel(),) and block.values.dtype == main_grad(block.param).dtype
        for block in blocks
    )


def test_padding_stays_zero() -> None:
    buckets = make_buckets(torch.float32)
    optimizer = make_optimizer(buckets)
    for _ in range(3):
        optimizer.step(1e-2)
    for bucket in buckets.buckets:
        padding = torch.ones_like(bucket.weights, dtype=torch.bool)
        for slot in bucket.slots:
            padding[slot.start : slot.stop] = False
        assert padding.any()
        assert not bucket.weights[padding].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_step_never_waits_for_the_device(dtype: torch.dtype) -> None:
    """Tensors on the meta device have no values: whatever read one to the host would raise."""
    buckets = make_buckets(dtype, device=torch.device("meta"))
    optimizer = make_optimizer(buckets, clip_grad=1.0)
    stats = optimizer.step(1e-2)
    assert stats.skipped.is_meta
    with pytest.raises(RuntimeError):
        bool(stats.skipped)


def test_an_optimizer_without_buckets_is_refused() -> None:
    config = make_optimizer(make_buckets(torch.float32)).config
    with pytest.raises(ValueError, match="no buckets"):
        Optimizer([], config, PrecisionConfig(), Axis("model"), torch.device("cpu"))
