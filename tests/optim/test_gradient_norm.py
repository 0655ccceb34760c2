"""Every parameter counts once, whatever the layout, and a bad number anywhere is seen everywhere."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megalite.optim import clip_coefficient, gradient_norm
from megalite.optim.gradient_norm import merged_ranges
from megalite.parallel.buckets import main_grad
from megalite.parallel.topology import Axis
from tests.optim.flat import CPU, draw_gradients, make_buckets
from tests.pool import WorkerPool

ALONE = Axis("model")


def test_norm_of_hand_made_gradients() -> None:
    buckets = make_buckets(torch.float32, shapes=((2,), (1, 2)))
    for param, values in zip(buckets.parameters, ([3.0, 0.0], [0.0, 4.0]), strict=True):
        main_grad(param).copy_(torch.tensor(values).view(param.shape))
    assert gradient_norm(buckets.buckets, ALONE, CPU).item() == 5.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_counted_parameters_count(dtype: torch.dtype) -> None:
    counted = (True, False, True, True, False)
    buckets = make_buckets(dtype, counted=counted)
    grads = [main_grad(param).double() for param in reversed(buckets.parameters)]
    expected = math.sqrt(sum(float((g**2).sum()) for g, counts in zip(grads, counted, strict=True) if counts))
    assert gradient_norm(buckets.buckets, ALONE, CPU).item() == pytest.approx(expected, rel=1e-13)


def test_ranges_merge_over_padding_but_not_over_other_parameters() -> None:
    buckets = make_buckets(torch.float32, shapes=((4, 4), (3, 2), (5,), (2, 2)))
    # Laid out in reverse: (2, 2), (5,), (3, 2), (4, 4), each from a multiple of 128.
    (bucket,) = buckets.buckets
    assert merged_ranges(bucket, lambda record: record.decay) == ((0, 4), (256, 400))
    assert merged_ranges(bucket, lambda record: True) == ((0, 400),)
    assert merged_ranges(bucket, lambda record: False) == ()


def test_squares_beyond_fp32_are_no_overflow() -> None:
    buckets = make_buckets(torch.float32, shapes=((2,),))
    main_grad(buckets.parameters[0]).copy_(torch.tensor([3e30, 4e30]))
    assert gradient_norm(buckets.buckets, ALONE, CPU).item() == pytest.approx(5e30, rel=1e-6)


def _norm_of_a_shared_model(bad_rank: int | None) -> float:
    """Each rank has a first parameter of its own; both hold the second, which is counted on rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    buckets = make_buckets(torch.float64, shapes=((40, 30), (50,)), counted=(True, rank == 0))
    draw_gradients(buckets, 7)
    own, replicated = reversed(buckets.parameters)
    main_grad(own).fill_(0.25 * (rank + 1))
    main_grad(replicated).fill_(2.0)
    if rank == bad_rank:
        main_grad(own)[3, 5] = math.inf
    group = dist.new_group(list(range(size)))
    assert isinstance(group, dist.ProcessGroup)
    axis = Axis("model", size, rank, group, tuple(range(size)))
    return gradient_norm(buckets.buckets, axis, CPU).item()


def test_a_replicated_parameter_counts_once(pool: WorkerPool) -> None:
    expected = math.sqrt(1200 * (0.25**2 + 0.5**2) + 50 * 4)
    assert pool.run(2, _norm_of_a_shared_model, None) == [pytest.approx(expected, rel=1e-14)] * 2


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_an_infinite_gradient_on_one_rank_is_seen_on_all(pool: WorkerPool, bad_rank: int) -> None:
    assert not any(math.isfinite(norm) for norm in pool.run(2, _norm_of_a_shared_model, bad_rank))


@pytest.mark.parametrize(
    ("norm", "clip", "expected"),
    [(2.0, 1.0, 1.0 / (2.0 + 1e-6)), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (100.0, 0.0, 1.0)],
)
def test_clip_coefficient(norm: float, clip: float, expected: float) -> None:
    assert clip_coefficient(torch.tensor(norm, dtype=torch.float64), clip).item() == pytest.approx(
        expected, rel=1e-15
    )
