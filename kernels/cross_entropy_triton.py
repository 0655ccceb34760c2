"""Triton kernels of vocab-parallel cross-entropy.

Bytes a bf16 logit: forward 2 read, backward 2 read and 2 written.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels import launch
from megalite.kernels.launch import as_rows, warn_unaligned

STATISTICS_BLOCK = 4096
STATISTICS_WARPS = 8
BACKWARD_BLOCK = 2048
BACKWARD_WARPS = 4


@triton.jit
def _fold(largest, exp_sum, x, LANES: tl.constexpr):
    """Fold a tile x (groups, LANES) into each group's running maximum and sum of exp(x - maximum).

    A group is what one thread reads at once, so the loop needs no exchange between threads and only 1 / LANES
    more exponentials than elements.
    """
    new = tl.maximum(largest, tl.max(x, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)  # a group of nothing but padding: exp(-inf - -inf) is NaN
    exp_sum = exp_sum * tl.exp(largest - safe) + tl.sum(tl.exp(x - safe[:, None]), 1)
    return new, exp_sum


@triton.jit
def statistics_kernel(
    LOGITS, TARGET, STATS, stride, rows, columns, vocab_start, ignore_index,
    SUM: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One row a program: maximum, sum of exp(x - maximum), the target's logit if here, sum of x if SUM."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGET + row).to(tl.int64)
    here = LOGITS + row * stride
    lane = tl.arange(0, BLOCK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest = tl.full((BLOCK // LANES,), float("-inf"), tl.float32)
    exp_sum = tl.zeros((BLOCK // LANES,), tl.float32)
    total = tl.zeros((BLOCK // LANES,), tl.float32)
    read = tl.where(target == ignore_index, 0, columns)  # an ignored row is not read
    whole = read // BLOCK * BLOCK
    # Whole tiles need no mask, which at a vocabulary that is no multiple of 16 would cost 128-bit loads.
    for start in range(0, whole, BLOCK):
        x = tl.load(here + start + lane).to(tl.float32)
        largest, exp_sum = _fold(largest, exp_sum, x, LANES)
        if SUM:
            total += tl.sum(x, 1)
    if whole < read:
        mask = whole + lane < read
        x = tl.load(here + whole + lane, mask=mask, other=float("-inf")).to(tl.float32)
        largest, exp_sum = _fold(largest, exp_sum, x, LANES)
        if SUM:
            total += tl.sum(tl.where(mask, x, 0.0), 1)
    row_largest = tl.max(largest, 0)
    safe = tl.where(row_largest == float("-inf"), 0.0, row_largest)
    local = target - vocab_start
    owned = (local >= 0) & (local < read)
    picked = tl.load(here + local, mask=owned, other=0.0).to(tl.float32)
    tl.store(STATS + row, row_largest)
    tl.store(STATS + rows + row, tl.sum(exp_sum * tl.exp(largest - safe), 0))
    tl.store(STATS + 2 * tl.cast(rows, tl.int64) + row, picked)
    tl.store(STATS + 3 * tl.cast(rows, tl.int64) + row, tl.sum(total, 0))


@triton.jit
def backward_kernel(
    GRAD, LOGITS, TARGET, NORMALISER, OUT, grad_stride, stride, out_stride, rows, width, columns, tiles,
    vocab_start, ignore_index, label_smoothing, smoothing_share, z_loss, BLOCK: tl.constexpr,
):  # fmt: skip
    """g (p (1 + 2 z lse) - smoothing / vocabulary - (1 - smoothing) [column is target]).

    0 for padding and ignored rows.
    """
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    column = program % tiles * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(TARGET + row).to(tl.int64)
    kept = target != ignore_index
    grad = tl.load(GRAD + row * grad_stride).to(tl.float32)
    largest = tl.load(NORMALISER + row)
    log_sum = tl.load(NORMALISER + rows + row)
    read = tl.where(kept, width, 0)  # an ignored row is not read
    x = tl.load(LOGITS + row * stride + column, mask=column < read, other=0.0).to(tl.float32)
    scale = 1.0 + 2.0 * tl.cast(z_loss, tl.float32) * (largest + log_sum)
    inner = tl.exp(x - largest - log_sum) * scale - tl.cast(smoothing_share, tl.float32)
    hit = column == target - vocab_start
    inner = tl.where(hit, inner - (1.0 - tl.cast(label_smoothing, tl.float32)), inner)
    result = tl.where(column < tl.where(kept, columns, 0), inner * grad, 0.0)
    tl.store(OUT + row * out_stride + column, result.to(OUT.dtype.element_ty), mask=column < width)


def statistics(
    logits: Tensor, target: Tensor, vocab_start: int, columns: int, ignore_index: int, with_sum: bool
) -> Tensor:
    """(4, *target) fp32: see `statistics_kernel`; `columns` of the local logits are vocabulary."""
    logit_rows = as_rows(logits)
    rows, width = logit_rows.shape
    warn_unaligned("the local vocabulary of cross_entropy", width, logits.element_size())
    stats = torch.empty((4, *target.shape), dtype=torch.float32, device=logits.device)
    arguments = {
        "LOGITS": logit_rows, "TARGET": target.contiguous(), "STATS": stats, "stride": logit_rows.stride(0),
        "rows": rows, "columns": columns, "vocab_start": vocab_start, "ignore_index": ignore_index,
        "SUM": with_sum, "BLOCK": STATISTICS_BLOCK, "LANES": 16 // logits.element_size(),
    }  # fmt: skip
    launch.run(statistics_kernel, (rows,), arguments, logits.device, num_warps=STATISTICS_WARPS)
    return stats


def backward(
    grad: Tensor, logits: Tensor, target: Tensor, normaliser: Tensor, vocab_start: int, vocab_size: int,
    columns: int, ignore_index: int, label_smoothing: float, z_loss: float, out: Tensor,
) -> None:  # fmt: skip
    """Write the gradient of the logits to `out`, which may be the logits themselves."""
    logit_rows, out_rows = as_rows(logits), out.view(-1, out.shape[-1])
    grad_rows = grad.reshape(-1)
    rows, width = logit_rows.shape
    tiles = -(-width // BACKWARD_BLOCK)
    arguments = {
        "GRAD": grad_rows, "LOGITS": logit_rows, "TARGET": target.contiguous(), "NORMALISER": normaliser,
        "OUT": out_rows, "grad_stride": grad_rows.stride(0), "stride": logit_rows.stride(0),
        "out_stride": out_rows.stride(0), "rows": rows, "width": width, "columns": columns, "tiles": tiles,
        "vocab_start": vocab_start, "ignore_index": ignore_index, "label_smoothing": label_smoothing,
        "smoothing_share": label_smoothing / vocab_size, "z_loss": z_loss, "BLOCK": BACKWARD_BLOCK,
    }  # fmt: skip
    launch.run(backward_kernel, (rows * tiles,), arguments, logits.device, num_warps=BACKWARD_WARPS)
