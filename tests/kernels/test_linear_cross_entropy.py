"""Head and cross-entropy in chunks equal the two apart, for any number of chunks, ranks and accumulators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.kernels import linear_cross_entropy, linear_cross_entropy_reference
from megalite.kernels.linear_cross_entropy import chunk_rows
from megalite.parallel.weight_gradients import WeightGradients
from tests.pool import WorkerPool

VOCABULARY, WIDTH, HIDDEN = 13, 16, 5
TARGET = torch.tensor([0, 12, -100, 3, 7, 7, 2, 1])
TOKENS = len(TARGET)


def leaves(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, HIDDEN), (WIDTH, HIDDEN))
    hidden, weight = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes
    )
    return hidden.requires_grad_(), weight.requires_grad_()


def exact(*terms: float) -> tuple[Tensor, ...]:
    """Loss, gradient of hidden, gradient of weight, by the equations."""
    hidden, weight = leaves()
    loss = linear_cross_entropy_reference(hidden, weight, TARGET, VOCABULARY, -100, *terms)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


class Sink:
    """A main gradient that is not empty, and what was told to its owner."""

    def __init__(self, rows: int = WIDTH) -> None:
        self.main_grad = torch.ones(rows, HIDDEN, dtype=torch.float64)
        self.weight_gradients = WeightGradients()
        self.calls = 0

    def ready(self) -> None:
        self.calls += 1


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_any_number_of_chunks(rows: int) -> None:
    hidden, weight = leaves()

    def operation(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, TARGET, 0, VOCABULARY, label_smoothing=0.1, z_loss=1e-2, budget=rows * WIDTH * 8
        )

    torch.testing.assert_close(operation(hidden, weight), exact(0.1, 1e-2)[0], rtol=1e-13, atol=1e-13)
    assert gradcheck(operation, (hidden, weight), fast_mode=True)


def test_a_second_backward() -> None:
    hidden, weight = leaves()
    loss = linear_cross_entropy(hidden, weight, TARGET, 0, VOCABULARY, budget=3 * WIDTH * 8)
    for _ in range(2):
        got = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        torch.testing.assert_close(got, exact()[1:], rtol=1e-13, atol=1e-13)


def test_gradient_into_a_main_gradient() -> None:
    hidden, weight = leaves()
    sink, upstream = Sink(), torch.tensor(0.25, dtype=torch.float64)
    loss = linear_cross_entropy(
        hidden, weight, TARGET, 0, VOCABULARY, sink=sink, loss_grad=upstream, budget=2 * WIDTH * 8
    )
    assert sink.calls == 0, "the gradient is there, but its micro-batch is not done"
    with sink.weight_gradients.put_off() as later:
        loss.backward(upstream, retain_graph=True)
    assert sink.calls == 0
    for work in later:
        work()
    assert sink.calls == 1
    _, grad_hidden, grad_weight = exact()
    torch.testing.assert_close(sink.main_grad, 0.25 * grad_weight + 1, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(hidden.grad, 0.25 * grad_hidden, rtol=1e-13, atol=1e-13)
    assert weight.grad is None
    with pytest.raises(RuntimeError, match="counted already"):
        loss.backward(upstream)


def test_a_broken_promise_is_not_a_number() -> None:
    hidden, weight = leaves()
    upstream = torch.tensor(0.25, dtype=torch.float64)
    linear_cross_entropy(hidden, weight, TARGET, 0, VOCABULARY, sink=Sink(), loss_grad=upstream).backward(
        2 * upstream
    )
    assert hidden.grad is not None
    assert hidden.grad.isnan().all()


def test_a_main_gradient_is_left_alone_in_evaluation() -> None:
    hidden, weight = leaves()
    sink = Sink()
    with torch.no_grad():
        loss = linear_cross_entropy(
            hidden, weight, TARGET, 0, VOCABULARY, sink=sink, loss_grad=torch.ones(())
        )
    torch.testing.assert_close(loss, exact()[0], rtol=1e-13, atol=1e-13)
    assert sink.main_grad.eq(1).all()


def test_memory_is_one_chunk_and_the_hidden_states_gradient() -> None:
    """Bytes that wait for backward, and the largest tensor that ever was."""
    hidden, weight = leaves()
    saved: list[Tensor] = []
    largest = LargestTensor()

    def count(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x), largest:
        linear_cross_entropy(
            hidden, weight, TARGET, 0, VOCABULARY, sink=Sink(), loss_grad=torch.ones(()), budget=2 * WIDTH * 8
        )
    assert sum(x.numel() for x in saved) == hidden.numel() + 1  # and the promised scalar
    assert largest.elements == max(hidden.numel(), 2 * WIDTH)


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple) else (result,)
        for tensor in made:
            # Views of the weight and of the main gradient are none of it; all logits would be 128.
            if isinstance(tensor, Tensor) and tensor.numel() != WIDTH * HIDDEN:
                self.elements = max(self.elements, tensor.numel())
        return result


def test_many_chunks_in_bf16_accumulate_in_fp32() -> None:
    """Liger#512 and others: a bf16 accumulator drifts with the number of chunks."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(512, 8, generator=generator).bfloat16()
    weight = torch.randn(16, 8, generator=generator).bfloat16().requires_grad_()
    target = torch.randint(0, 16, (512,), generator=generator)
    wide = weight.detach().double().requires_grad_()
    linear_cross_entropy_reference(hidden.double(), wide, target, 16).backward()
    assert wide.grad is not None
    errors = []
    for rows in (512, 4):
        loss = linear_cross_entropy(hidden, weight, target, 0, 16, budget=rows * 16 * 2)
        (grad,) = torch.autograd.grad(loss, weight)
        errors.append(float((grad.double() - wide.grad).abs().max()))
    assert errors[1] <= 1.5 * errors[0]


def test_all_targets_ignored() -> None:
    """torch's own chunked form gives NaN weight gradients here."""
    hidden, weight = leaves()
    loss = linear_cross_entropy(hidden, weight, torch.full((TOKENS,), -100), 0, VOCABULARY, budget=256)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss == 0
    assert all(grad.eq(0).all() for grad in grads)


def test_frozen_weight_and_frozen_hidden() -> None:
    hidden, weight = leaves()
    loss = linear_cross_entropy(hidden, weight.detach(), TARGET, 0, VOCABULARY)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], exact()[1], rtol=1e-13, atol=1e-13)
    loss = linear_cross_entropy(hidden.detach(), weight, TARGET, 0, VOCABULARY)
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], exact()[2], rtol=1e-13, atol=1e-13)


def test_compiles_into_one_graph() -> None:
    hidden, weight = leaves(torch.float32)

    def operation(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, TARGET, 0, VOCABULARY, budget=3 * WIDTH * 4)

    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, weight), operation(hidden, weight))
    expected = torch.autograd.grad(operation(hidden, weight), (hidden, weight))
    for got, wanted in zip(
        torch.autograd.grad(compiled(hidden, weight), (hidden, weight)), expected, strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_arguments_that_do_not_fit() -> None:
    hidden, weight = leaves()
    with pytest.raises(ValueError, match="must be positive"):
        linear_cross_entropy(hidden, weight, TARGET, 0, VOCABULARY, budget=0)
    with pytest.raises(ValueError, match="one id a row"):
        linear_cross_entropy(hidden, weight, TARGET[:3], 0, VOCABULARY)
    with pytest.raises(ValueError, match="must be final"):
        linear_cross_entropy(hidden, weight, TARGET, 0, VOCABULARY, sink=Sink())


def shard(sequence_parallel: bool, into_main_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of hidden (of this rank's shard), and gradient of its rows of the weight."""
    hidden, weight = leaves()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    width = WIDTH // ranks
    mine = weight.detach()[rank * width : (rank + 1) * width].requires_grad_()
    states = hidden.detach()
    if sequence_parallel:
        states = states.chunk(ranks)[rank]
    states.requires_grad_()
    upstream = torch.tensor(0.5, dtype=torch.float64)
    sink = Sink(width) if into_main_grad else None
    loss = linear_cross_entropy(
        states, mine, TARGET, rank * width, VOCABULARY, torch.distributed.group.WORLD,
        sequence_parallel=sequence_parallel, budget=3 * width * 8,
        sink=sink, loss_grad=None if sink is None else upstream,
    )  # fmt: skip
    loss.backward(upstream)
    assert states.grad is not None
    grad_weight = mine.grad if sink is None else sink.main_grad - 1
    assert grad_weight is not None
    return loss.detach(), states.grad, grad_weight


@pytest.mark.parametrize("into_main_grad", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_cut_of_the_vocabulary(
    pool: WorkerPool, ranks: int, sequence_parallel: bool, into_main_grad: bool
) -> None:
    expected, grad_hidden, grad_weight = exact()
    parts = pool.run(ranks, shard, sequence_parallel, into_main_grad)
    for loss, grad, _ in parts:
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
        if not sequence_parallel:
            torch.testing.assert_close(grad, 0.5 * grad_hidden, rtol=1e-12, atol=1e-13)
    if sequence_parallel:
        whole = torch.cat([part[1] for part in parts])
        torch.testing.assert_close(whole, 0.5 * grad_hidden, rtol=1e-12, atol=1e-13)
    whole = torch.cat([part[2] for part in parts])
    torch.testing.assert_close(whole, 0.5 * grad_weight, rtol=1e-12, atol=1e-13)


def test_chunks_follow_the_budget() -> None:
    assert chunk_rows(8192, 131072, 2, 512 * 2**20) == 2048
    assert chunk_rows(8193, 131072, 2, 512 * 2**20) == 1639  # five even chunks, not four and a rest of one
    assert chunk_rows(8, 1000, 2, 1) == 1
    assert chunk_rows(0, 1000, 2, 1) == 1
