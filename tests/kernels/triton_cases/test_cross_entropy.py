"""Vocab-parallel cross-entropy in Triton against fp64; shards come one after the other, in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.kernels import vocab_parallel_cross_entropy
from megalite.kernels.cross_entropy import combine, cross_entropy_backward, cross_entropy_statistics
from tests.kernels.triton_cases.exactness import DEVICE, DTYPES, Operation, check, random, run
from tests.kernels.triton_cases.layouts import GRADIENTS, STRIDED, far_apart

Layout = Callable[[Tensor], Tensor]
IGNORED = -100


def ours(vocab_size: int, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Operation:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits, target, 0, vocab_size, label_smoothing=label_smoothing, z_loss=z_loss, backend="triton"
        )

    return loss


def torchs(vocab_size: int, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Operation:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        wide = logits[..., :vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
        each = torch.nn.functional.cross_entropy(
            wide.flatten(0, -2), target.long().flatten(), label_smoothing=label_smoothing, reduction="none"
        ).view(target.shape)
        return each + z_loss * wide.logsumexp(-1).square().masked_fill(target == IGNORED, 0.0)

    return loss


def targets(*shape: int, vocab_size: int, ignored: int = 1, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, vocab_size, shape, generator=generator)
    target.view(-1)[:ignored] = IGNORED
    return target.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "vocab_size"),
    [
        (1, 1),
        (7, 7),
        (208, 203),
        (4096, 4096),
        (8200, 8191),
        (50304, 50257),
        (65537, 65537),
        (102400, 102400),
        (129920, 129920),
    ],
)
def test_vocabularies(dtype: torch.dtype, width: int, vocab_size: int) -> None:
    logits = random(3, width, dtype=dtype, scale=2.0)
    target, grad = targets(3, vocab_size=vocab_size), random(3, seed=1)
    check(ours(vocab_size), torchs(vocab_size), (logits, target), (grad,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.1, 0.0), (0.0, 1e-2), (0.1, 1e-2)])
def test_label_smoothing_and_z_loss(dtype: torch.dtype, label_smoothing: float, z_loss: float) -> None:
    logits, target = random(2, 4, 5008, dtype=dtype, scale=2.0), targets(2, 4, vocab_size=5003)
    options = (5003, label_smoothing, z_loss)
    check(ours(*options), torchs(*options), (logits, target), (random(2, 4, seed=1),))


def test_finite_for_a_logit_gap_of_200() -> None:
    """Liger and Megatron-LM take log(exp(x - max)) for the smoothing: infinite from a gap of about 100."""
    logits = random(4, 203)
    logits[:, 7] += 200.0
    check(ours(203, 0.1), torchs(203, 0.1), (logits, targets(4, vocab_size=203)), (random(4, seed=1),))


@pytest.mark.parametrize("gap", [8.0, 10.0, 12.0])
def test_gradient_keeps_its_digits_where_p_nears_1(gap: float) -> None:
    """TE#3193: p - 1 taken in bf16 is 0 there."""
    logits = torch.zeros(4, 16, device=DEVICE)
    logits[:, 3] = gap + 20.0 * torch.arange(4, device=DEVICE)
    logits[:, :3] += 20.0 * torch.arange(4, device=DEVICE)[:, None]
    target = torch.full((4,), 3, device=DEVICE)
    _, grad = run(ours(16), (logits, target), (torch.ones(4, device=DEVICE),))
    _, exact = run(torchs(16), (logits.double(), target), (torch.ones(4, device=DEVICE).double(),))
    assert float((grad[:, 3] / exact[:, 3] - 1).abs().max()) < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("widths", [(208,), (112, 96), (64, 64, 64, 16), (203, 5)])
def test_any_cut_of_the_vocabulary(
    dtype: torch.dtype, label_smoothing: float, widths: tuple[int, ...]
) -> None:
    """Uneven shards, and shards of nothing but padding, give the numbers of the whole."""
    vocab_size, z_loss = 203, 1e-3
    whole, target, grad = (
        random(6, 208, dtype=dtype, scale=3.0),
        targets(6, vocab_size=203),
        random(6, seed=1),
    )
    target[1:3] = torch.tensor([0, vocab_size - 1])

    def sharded(logits: Tensor, target: Tensor) -> list[Tensor]:
        shards = logits.split(widths, -1)
        starts = [sum(widths[:index]) for index in range(len(widths))]
        statistics = torch.stack([
            cross_entropy_statistics(shard, target, start, vocab_size, IGNORED, True, "triton")
            for shard, start in zip(shards, starts, strict=True)
        ])  # fmt: skip
        loss, normaliser = combine(statistics, target, vocab_size, IGNORED, label_smoothing, z_loss)
        gradients = [
            cross_entropy_backward(
                grad, shard, target, normaliser, start, vocab_size, IGNORED, label_smoothing, z_loss, "triton"
            )
            for shard, start in zip(shards, starts, strict=True)
        ]
        return [loss, torch.cat(gradients, -1)]

    loss, gradient = sharded(whole, target)
    exact_loss, exact_gradient = run(
        torchs(203, label_smoothing, z_loss), (whole.double(), target), (grad.double(),)
    )
    usual_loss, usual_gradient = run(torchs(203, label_smoothing, z_loss), (whole, target), (grad,))
    for mine, theirs, exact in ((loss, usual_loss, exact_loss), (gradient, usual_gradient, exact_gradient)):
        allowed = (
            2 * (theirs.double() - exact).abs().max() + 0.25 * torch.finfo(mine.dtype).eps * exact.abs().max()
        )
        assert (mine.double() - exact).abs().max() <= allowed
    assert gradient[:, vocab_size:].eq(0).all()
    assert gradient[0].eq(0).all()


def test_a_target_of_another_rank_never_meets_a_padded_column() -> None:
    """apple/ml-cross-entropy#59: the place of a foreign target fell on a padded column."""
    shard = random(2, 112, dtype=torch.bfloat16)
    target = torch.tensor([100, 105], device=DEVICE)  # beyond this shard's 96 columns of vocabulary
    statistics = cross_entropy_statistics(shard, target, 0, 96, IGNORED, False, "triton")
    assert statistics[2].eq(0).all()
    normaliser = torch.stack((statistics[0], statistics[1].log()))
    grad = torch.ones(2, device=DEVICE)
    gradient = cross_entropy_backward(grad, shard, target, normaliser, 0, 96, IGNORED, 0.0, 0.0, "triton")
    assert gradient[:, 96:].eq(0).all()
    assert gradient.ge(0).all()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_all_targets_ignored(reduction: str) -> None:
    logits = random(3, 64).requires_grad_()
    target = torch.full((3,), IGNORED, device=DEVICE)
    loss = vocab_parallel_cross_entropy(logits, target, 0, 64, reduction=reduction, backend="triton")
    assert loss.eq(0).all()
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.eq(0).all()


def test_ignored_rows_are_not_read() -> None:
    logits = random(3, 64)
    logits[0] = torch.nan
    loss, grad = run(ours(64), (logits, targets(3, vocab_size=64)), (random(3),))
    assert loss.isfinite().all()
    assert grad.isfinite().all()


def test_a_foreign_id_is_nan() -> None:
    target = torch.tensor([64, -1, 2], device=DEVICE)
    assert ours(64)(random(3, 80), target).isnan().tolist() == [True, True, False]  # type: ignore[union-attr]


@STRIDED
def test_strided_logits(layout: Layout) -> None:
    logits, target = layout(random(3, 4, 48, dtype=torch.bfloat16)), targets(3, 4, vocab_size=48)
    check(ours(48), torchs(48), (logits, target), (random(3, 4, seed=1),))


@GRADIENTS
def test_strided_gradients(grad_layout: Layout) -> None:
    logits, target = random(3, 4, 48), targets(3, 4, vocab_size=48)
    check(ours(48), torchs(48), (logits, target), (grad_layout(random(3, 4, seed=1)),))


def test_int32_targets() -> None:
    logits, target = random(5, 48), targets(5, vocab_size=48).int()
    check(ours(48), torchs(48), (logits, target), (random(5, seed=1),))


def test_rows_beyond_two_to_the_31() -> None:
    logits, target, grad = (
        far_apart(random(3, 208, dtype=torch.bfloat16)),
        targets(3, vocab_size=203),
        random(3),
    )
    near = run(ours(203), (logits.clone(), target), (grad,))
    for got, expected in zip(run(ours(203), (logits, target), (grad,)), near, strict=True):
        assert torch.equal(got, expected)


def test_in_place_gradient_and_what_it_forbids() -> None:
    source, target = random(5, 48, dtype=torch.bfloat16).requires_grad_(), targets(5, vocab_size=48)
    (expected,) = torch.autograd.grad(ours(48)(source * 1, target).sum(), source)  # type: ignore[union-attr]
    logits = source * 1
    loss = vocab_parallel_cross_entropy(
        logits, target, 0, 48, inplace=True, reduction="sum", backend="triton"
    )
    other = logits.exp().sum()
    (got,) = torch.autograd.grad(loss, source, retain_graph=True)
    assert torch.equal(got, expected)
    assert torch.equal(logits, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, source)
    torch.autograd.grad(other, source)  # saved its own result, untouched


def test_microbatches_of_unequal_counts_add_up() -> None:
    """The sum over micro-batches equals the whole, which a mean over each does not."""
    logits, target = random(8, 48).requires_grad_(), targets(8, vocab_size=48, ignored=3)
    whole = vocab_parallel_cross_entropy(logits, target, 0, 48, reduction="sum", backend="triton")
    parts = sum(
        vocab_parallel_cross_entropy(part, ids, 0, 48, reduction="sum", backend="triton")
        for part, ids in zip(logits.split(4), target.split(4), strict=True)
    )
    torch.testing.assert_close(parts, whole)


def test_without_gradient() -> None:
    """Liger#507: the loss of inputs that need no gradient was 0."""
    logits, target = random(3, 48), targets(3, vocab_size=48)
    with torch.no_grad():
        torch.testing.assert_close(ours(48)(logits, target), torchs(48)(logits, target))
