"""Graph capture, no host synchronisation, more than 2^31 elements, and the fp32 product accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from megalite.config.rules.apex import WEIGHT_GRADIENT
from megalite.kernels import (
    add_rms_norm,
    linear_cross_entropy,
    rms_norm,
    rope,
    rotary_table,
    swiglu,
    vocab_parallel_cross_entropy,
)
from megalite.kernels.adamw import FlatAdamW, adamw
from megalite.kernels.dropout import dropout
from megalite.kernels.squared_norm import squared_norm
from megalite.kernels.weight_gradient import IMPLEMENTATIONS

BF16 = torch.bfloat16


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


def operations() -> Iterator[tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]]:
    x, weight = normal(64, 2, 512), normal(512)
    yield "rms_norm", rms_norm, (x, weight)
    yield "add_rms_norm", lambda x, weight: torch.cat(add_rms_norm(x, x, weight)), (x, weight)
    yield "swiglu", swiglu, (normal(64, 2, 512),)
    cos, sin = rotary_table(torch.arange(64, device="cuda"), 64)
    yield "rope", lambda q: rope(q, q, cos, sin)[0], (normal(64, 2, 8, 64),)
    samples = torch.arange(2, device="cuda")
    yield "dropout", lambda x: dropout(x, samples, 7, 0.1, 0, 64, residual=x), (normal(64, 2, 512),)
    target = torch.randint(0, 1000, (64,), device="cuda")
    yield "cross_entropy", lambda x: vocab_parallel_cross_entropy(x, target, 0, 1000), (normal(64, 1024),)
    yield (
        "linear_cross_entropy",
        lambda x, weight: linear_cross_entropy(x, weight, target, 0, 1000, budget=2**16),
        (normal(64, 128), normal(1024, 128)),
    )


def step(operation: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    y = operation(*inputs)
    return (y, *torch.autograd.grad(y.float().square().sum(), inputs))


OPERATIONS = pytest.mark.parametrize(
    "name",
    ["rms_norm", "add_rms_norm", "swiglu", "rope", "dropout", "cross_entropy", "linear_cross_entropy"],
)


def named(name: str) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    return next((operation, inputs) for found, operation, inputs in operations() if found == name)


@OPERATIONS
def test_no_host_synchronisation(name: str) -> None:
    operation, inputs = named(name)
    step(operation, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(operation, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@OPERATIONS
def test_capture_in_a_graph(name: str) -> None:
    operation, inputs = named(name)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = step(operation, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(operation, inputs)
    graph.replay()
    for got, wanted in zip(captured, expected, strict=True):
        torch.testing.assert_close(got, wanted)


@OPERATIONS
def test_compiled_by_inductor(name: str) -> None:
    operation, inputs = named(name)
    for got, wanted in zip(
        step(torch.compile(operation, fullgraph=True), inputs), step(operation, inputs), strict=True
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["native", "apex", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_in_fp32(name: str, dtype: torch.dtype) -> None:
    """Against fp64: fused, the product is never rounded to 8 or 11 bits; then it is, once."""
    if name == "apex" and find_spec(WEIGHT_GRADIENT) is None:
        pytest.skip(f"NVIDIA apex is not installed with {WEIGHT_GRADIENT}")
    grad_output, x = (torch.randn(512, n, device="cuda", dtype=dtype) for n in (384, 256))
    total = torch.ones(384, 256, device="cuda")
    exact = 1 + grad_output.double().t() @ x.double()
    IMPLEMENTATIONS[name](total, grad_output.t(), x)
    eps = torch.finfo(dtype).eps if name == "none" else 2**-16  # sums of 512 products in fp32
    assert float((total.double() - exact).abs().max()) < eps * float(exact.abs().max())


def test_optimizer_in_a_graph() -> None:
    n = 2**20
    weights, master, grads, m = (torch.randn(n, device="cuda") for _ in range(4))
    v, cast = torch.rand(n, device="cuda"), weights.bfloat16()
    scalars = torch.tensor([1e-3, 1.0, 1.0, 1.0, 0.0], device="cuda")

    def update() -> Tensor:
        flat = FlatAdamW(cast, grads, m, v, master)
        adamw(flat, scalars, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decay_ranges=[(0, n // 2)])
        return squared_norm(grads, [(0, n)])

    update()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = update()
    before = master.clone()
    graph.replay()
    assert not torch.equal(master, before)
    assert float(norm) == pytest.approx(float(grads.double().square().sum()), rel=1e-12)


def test_more_than_two_to_the_31_logits() -> None:
    rows, vocabulary = 16400, 131072
    logits = torch.zeros(rows, vocabulary, dtype=BF16, device="cuda").requires_grad_()
    target = torch.full((rows,), 5, device="cuda")
    loss = vocab_parallel_cross_entropy(logits * 1, target, 0, vocabulary, inplace=True)
    loss.sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(loss[-1].item(), float(torch.log(torch.tensor(float(vocabulary)))))
    assert float(logits.grad[-1, 5]) == pytest.approx(-1.0, abs=1e-2)
    assert float(logits.grad[-1, 6]) > 0


def test_more_than_two_to_the_31_elements_in_the_norm_and_swiglu() -> None:
    x = torch.ones(2**19 + 8, 4096, dtype=BF16, device="cuda")
    y = rms_norm(x, torch.ones(4096, dtype=BF16, device="cuda"))
    assert float(y[-1].float().sum()) == pytest.approx(4096, rel=1e-2)
    gated = swiglu(x.view(-1, 2, 2048))
    assert float(gated[-1, -1]) == pytest.approx(float(torch.sigmoid(torch.tensor(1.0))), rel=1e-2)


def test_more_than_two_to_the_31_parameters() -> None:
    n = 2**31 + 4096
    master, grads, m, v = (torch.full((n,), value, device="cuda") for value in (1.0, 1.0, 0.0, 0.0))
    scalars = torch.tensor([1e-3, 1.0, 10.0, 20.0, 0.0], device="cuda")
    flat = FlatAdamW(master, grads, m, v)
    adamw(flat, scalars, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, decay_ranges=[])
    assert float(master[-1]) == pytest.approx(0.999, rel=1e-5)
    assert float(squared_norm(grads, [(0, n)])) == n


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tensor_of_another_device_than_the_current() -> None:
    x = torch.randn(8, 512, device="cuda:1", dtype=BF16)
    weight = torch.ones(512, device="cuda:1", dtype=BF16)
    torch.testing.assert_close(rms_norm(x, weight), torch.nn.functional.rms_norm(x, (512,), weight, 1e-6))
