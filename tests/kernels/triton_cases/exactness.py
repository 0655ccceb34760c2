"""The yardstick of the kernel tests: an error against fp64 at most twice that of torch in that dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Operation = Callable[..., "Tensor | tuple[Tensor, ...]"]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers on the device under test, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def run(operation: Operation, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and input gradients of `operation`; strides of inputs and gradients are kept."""
    leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    outputs = operation(*leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    cast = [
        grad if grad.dtype == out.dtype else grad.to(out.dtype)
        for grad, out in zip(grads, outputs, strict=True)
    ]
    return [*outputs, *torch.autograd.grad(outputs, wanted, cast)]


def check(
    ours: Operation, torchs: Operation, inputs: Sequence[Tensor], grads: Sequence[Tensor], factor: float = 2.0
) -> None:
    """Hold `ours` and torch's own form against the latter in fp64 on the same, already rounded, inputs.

    Every value may be off by `factor` times torch's worst, plus a quarter of the dtype's last digit at the
    largest value. Inputs and gradients must be left as they were.
    """
    before = [(tensor, tensor.clone()) for tensor in (*inputs, *grads)]
    got = run(ours, inputs, grads)
    for tensor, copy in before:
        assert torch.equal(tensor, copy), "an input or a gradient was overwritten"
    usual = run(torchs, inputs, grads)
    double = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    exact = run(torchs, double, [grad.double() for grad in grads])
    for index, (mine, theirs, truth) in enumerate(zip(got, usual, exact, strict=True)):
        assert mine.dtype == theirs.dtype, f"result {index}: {mine.dtype}, torch gives {theirs.dtype}"
        assert mine.shape == truth.shape
        error, allowed = _worst(mine, truth), factor * _worst(theirs, truth)
        allowed += 0.25 * torch.finfo(mine.dtype).eps * float(truth.detach().abs().max())
        assert error <= allowed, f"result {index}: error {error:.3g}, allowed {allowed:.3g}"


def _worst(got: Tensor, truth: Tensor) -> float:
    assert got.isfinite().all()
    return float((got.detach().double() - truth.detach()).abs().max())
