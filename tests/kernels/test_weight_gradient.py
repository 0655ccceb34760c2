"""Products added to a wider total, by each implementation."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.kernels import weight_gradient
from megalite.kernels.weight_gradient import ALLOCATIONS_ON_GPU, IMPLEMENTATIONS

N, K, TOKENS = 37, 12, 29


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As a linear layer has them: the output's gradient transposed, and the input."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, N), (TOKENS, K))
    grad_output, x = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return grad_output.t(), x


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes beside `known`."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.storage, self.elements = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            isinstance(out, Tensor)
            and not out._is_view()
            and out.untyped_storage().data_ptr() != self.storage
        ):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("piece", [1, 5 * K * 2, 2**22])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["native", "none"])
def test_the_product_is_added(
    name: str, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_gradient, "CPU_PIECE", piece)
    left, right = factors(dtype)
    total = torch.ones(N, K, dtype=torch.promote_types(dtype, torch.float32))
    exact = 1 + left.double() @ right.double()
    IMPLEMENTATIONS[name](total, left, right)
    # one rounding of the product to the factors' type, and sums of 29 products of normal numbers
    magnitude = left.double().abs() @ right.double().abs()
    bound = torch.finfo(dtype).eps * (exact - 1).abs() + 40 * torch.finfo(total.dtype).eps * (1 + magnitude)
    assert ((total.double() - exact).abs() <= bound).all()


def test_a_product_on_the_cpu_is_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = factors(torch.bfloat16)
    total = torch.zeros(N, K)
    monkeypatch.setattr(weight_gradient, "CPU_PIECE", 5 * K * 2)
    with Largest(total) as largest:
        IMPLEMENTATIONS["native"](total, left, right)
    assert 0 < largest.elements <= 5 * K


def test_apex_is_given_input_gradient_and_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of its kernel, as matrices of contiguous rows; a stand-in, the kernel being for GPUs."""

    def wgrad_gemm_accum_fp32(x: Tensor, grad_output: Tensor, total: Tensor) -> None:
        assert x.is_contiguous()
        assert grad_output.is_contiguous()
        total += grad_output.float().t() @ x.float()

    module = ModuleType("fused_weight_gradient_mlp_cuda")
    monkeypatch.setattr(module, "wgrad_gemm_accum_fp32", wgrad_gemm_accum_fp32, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    left, right = factors(torch.bfloat16)
    total, expected = torch.ones(N, K), torch.ones(N, K)
    IMPLEMENTATIONS["apex"](total, left, right)
    expected += left.float() @ right.float()
    torch.testing.assert_close(total, expected)
    wide = torch.zeros(N, K, dtype=torch.float64)  # apex has no kernel for it
    IMPLEMENTATIONS["apex"](wide, left.double(), right.double())
    torch.testing.assert_close(wide, left.double() @ right.double())


@pytest.mark.parametrize(("name", "elements"), [("native", 0), ("apex", 0), ("none", N * K)])
def test_a_plan_for_a_gpu_takes_the_memory_of_each_implementation_there(name: str, elements: int) -> None:
    assert set(ALLOCATIONS_ON_GPU) == set(IMPLEMENTATIONS)
    total, (left, right) = torch.zeros(N, K), factors(torch.bfloat16)
    with Largest(total) as largest:
        ALLOCATIONS_ON_GPU[name](total, left, right)
    assert largest.elements == elements
