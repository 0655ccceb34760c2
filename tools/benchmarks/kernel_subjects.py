"""What the kernel benchmark times: each fused operation at a shape, and who else can do it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite.config.rules.apex import has_fused_adam
from megalite.kernels import (
    add_rms_norm,
    linear_cross_entropy,
    rms_norm,
    rope,
    rotary_table,
    swiglu,
    vocab_parallel_cross_entropy,
)

Operation = Callable[..., "Tensor | tuple[Tensor, ...]"]


@dataclass(frozen=True)
class Subject:
    """One operation at one shape: providers, a maker of inputs, bytes that each direction must move."""

    operation: str
    shape: str
    providers: dict[str, Operation]
    inputs: Callable[[], tuple[Tensor, ...]]
    forward_bytes: int
    backward_bytes: int


def subjects(
    device: torch.device, sizes: Sequence[tuple[int, int, int]], vocabulary: int
) -> Iterator[Subject]:
    """`sizes`: (tokens, hidden, ffn) of each model."""
    functional = torch.nn.functional

    def normals(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)

    def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, 1e-6)

    def eager_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return eager_norm(total, weight), total

    def eager_swiglu(x: Tensor) -> Tensor:
        return functional.silu(x[:, 0]) * x[:, 1]

    for tokens, hidden, ffn in sizes:
        shape, n = f"{tokens}x{hidden}", tokens * hidden
        wide, weight = (tokens, hidden), (hidden,)
        norms: dict[str, Operation] = {"megalite": rms_norm, "torch": eager_norm, **_others("rms_norm")}
        yield Subject("rms_norm", shape, norms, normals(wide, weight), 4 * n, 6 * n)
        added: dict[str, Operation] = {"megalite": add_rms_norm, "torch": eager_add_norm}
        yield Subject("add_rms_norm", shape, added, normals(wide, wide, weight), 8 * n, 8 * n)
        gated: dict[str, Operation] = {"megalite": swiglu, "torch": eager_swiglu, **_others("swiglu")}
        elements = tokens * ffn
        stacked = f"{tokens}x2x{ffn}"
        yield Subject("swiglu", stacked, gated, normals((tokens, 2, ffn)), 6 * elements, 10 * elements)
        heads, groups = hidden // 128, max(1, hidden // 512)
        cos, sin = rotary_table(torch.arange(tokens, device=device), 128)
        turned: dict[str, Operation] = {
            "megalite": partial(rope, cos=cos, sin=sin),
            "torch": partial(_eager_rope, cos=cos, sin=sin),
        }
        inputs = normals((tokens, 1, heads, 128), (tokens, 1, groups, 128))
        moved = 4 * tokens * (heads + groups) * 128
        yield Subject("rope", f"{tokens}x{heads}+{groups}x128", turned, inputs, moved, moved)
        blocks: dict[str, Operation] = {
            "megalite": partial(_block, rms_norm, turned["megalite"], add_rms_norm, swiglu),
            "torch": partial(_block, eager_norm, turned["torch"], eager_add_norm, eager_swiglu),
        }
        rotated = (tokens, 1, heads, 128), (tokens, 1, groups, 128)
        inputs = normals(wide, weight, *rotated, wide, weight, (tokens, 2, ffn), wide)
        forward, backward = 18 * n + 6 * elements + moved, 14 * n + 10 * elements + moved
        yield Subject("llama_block", f"{shape}x{ffn}", blocks, inputs, forward, backward)
    tokens, hidden = sizes[0][:2] if device.type == "cuda" else (512, 512)
    target = torch.randint(0, vocabulary, (tokens,), device=device)
    logit_bytes = 2 * tokens * vocabulary

    def ours(x: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(x, target, 0, vocabulary)

    def eager(x: Tensor) -> Tensor:
        return functional.cross_entropy(x.float(), target, reduction="none")

    def narrow(x: Tensor) -> Tensor:
        return functional.cross_entropy(x, target, reduction="none")

    def chunked(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, target, 0, vocabulary, budget=logit_bytes // 4)

    losses: dict[str, Operation] = {
        "megalite": ours,
        "torch": eager,
        "torch in bf16": narrow,
        **_others("cross_entropy", target),
    }
    logits = normals((tokens, vocabulary))
    yield Subject("cross_entropy", f"{tokens}x{vocabulary}", losses, logits, logit_bytes, 2 * logit_bytes)
    heads_and_losses: dict[str, Operation] = {
        "megalite": chunked,
        "unfused": lambda x, weight: ours(x @ weight.t()).sum(),
        "torch": lambda x, weight: eager(x @ weight.t()).sum(),
        **_others("linear_cross_entropy", target),
    }
    shape = f"{tokens}x{hidden}x{vocabulary}"
    inputs = normals((tokens, hidden), (vocabulary, hidden))
    yield Subject("linear_cross_entropy", shape, heads_and_losses, inputs, logit_bytes, 2 * logit_bytes)


def _eager_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As model code writes it: x cos + rotate_half(x) sin in the dtype of x."""
    wide_cos, wide_sin = (torch.cat((table, table), -1).to(q.dtype)[:, None, None] for table in (cos, sin))

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * wide_cos + torch.cat((-second, first), -1) * wide_sin

    return turn(q), turn(k)


def _block(
    norm: Operation,
    turn: Operation,
    add_norm: Operation,
    gate: Operation,
    x: Tensor,
    first_weight: Tensor,
    q: Tensor,
    k: Tensor,
    attended: Tensor,
    second_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
) -> tuple[Tensor, ...]:
    """All of a Llama block but its matrix products and attention."""
    normed, total = add_norm(attended, x, second_weight)
    first, activated = norm(x, first_weight), gate(gate_up)
    assert isinstance(first, Tensor)
    assert isinstance(activated, Tensor)
    return (first, *turn(q, k), normed, activated, total + down)


def _others(operation: str, target: Tensor | None = None) -> dict[str, Operation]:
    """Liger-Kernel's and apex's forms, where they are installed and a GPU is there to run them."""
    found: dict[str, Operation] = {}
    if not torch.cuda.is_available():
        return found
    if has_fused_adam() and operation == "rms_norm":
        apex = importlib.import_module("apex.normalization.fused_layer_norm")
        found["apex"] = lambda x, w: apex.fused_rms_norm_affine(x, w, w.shape, 1e-6)
    if importlib.util.find_spec("liger_kernel") is None:
        return found
    liger = importlib.import_module("liger_kernel.transformers.functional")
    forms: dict[str, Operation] = {
        "rms_norm": lambda x, w: liger.liger_rms_norm(x, w, 1e-6, in_place=False),
        "swiglu": lambda x: liger.liger_swiglu(x[:, 0].contiguous(), x[:, 1].contiguous()),
        "cross_entropy": lambda x: liger.liger_cross_entropy(x * 1, target, reduction="none"),  # overwrites x
        "linear_cross_entropy": lambda x, w: liger.liger_fused_linear_cross_entropy(
            x, w, target, reduction="sum"
        ),
    }
    return found | {"liger": forms[operation]}
