"""Triton kernels over flat buffers: AdamW and the squared norm, one launch a bucket.

kernels.adamw says how many bytes each form of AdamW moves.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.kernels import launch
from megalite.kernels.adamw import FlatAdamW
from megalite.kernels.flat import Range
from megalite.kernels.launch import warn_unaligned

ADAMW_BLOCK = 2048
ADAMW_WARPS = 8
NORM_BLOCK = 4096
NORM_WARPS = 8


@triton.jit
def _inside(place, BORDERS, FIRST, BLOCK: tl.constexpr):
    """Which places of this tile lie in a range: the answer changes at each border (start, stop, start, ...).

    FIRST[t] counts the borders at or before the start of tile t, so a tile looks at its own few alone.
    """
    tile = tl.program_id(0)
    first = tl.load(FIRST + tile)
    last = tl.load(FIRST + tile + 1)
    passed = tl.zeros((BLOCK,), tl.int32) + first
    for index in range(first, last):
        passed += (place >= tl.load(BORDERS + index)).to(tl.int32)
    return passed % 2 == 1


@triton.jit
def adamw_kernel(
    MASTER, WEIGHTS, REMAINDER, GRADS, EXP_AVG, EXP_AVG_SQ, SCALARS, BORDERS, FIRST, n,
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step on BLOCK elements, none where the fifth scalar is set.

    The master is MASTER; where that is None, WEIGHTS and REMAINDER joined. WEIGHTS is None where the weights
    are MASTER; bf16 weights come as int16 (kernels.remainder).
    """
    if tl.load(SCALARS + 4) == 0.0:
        lr = tl.load(SCALARS)
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = place < n
        decay = tl.where(_inside(place, BORDERS, FIRST, BLOCK), tl.cast(weight_decay, tl.float32), 0.0)
        grad = tl.load(GRADS + place, mask=mask, other=0.0).to(tl.float32) * tl.load(SCALARS + 1)
        m = tl.load(EXP_AVG + place, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(EXP_AVG_SQ + place, mask=mask, other=0.0).to(tl.float32)
        if MASTER is None:
            low = tl.load(REMAINDER + place, mask=mask, other=0).to(tl.int32) & 0xFFFF
            high = tl.load(WEIGHTS + place, mask=mask, other=0).to(tl.int32) - (low >> 15)
            w = ((high << 16) | low).to(tl.float32, bitcast=True)
        else:
            w = tl.load(MASTER + place, mask=mask, other=0.0)
        m = m * tl.cast(beta1, tl.float32) + grad * tl.cast(one_minus_beta1, tl.float32)
        v = v * tl.cast(beta2, tl.float32) + grad * grad * tl.cast(one_minus_beta2, tl.float32)
        size = tl.sqrt(v * tl.load(SCALARS + 3)) + tl.cast(eps, tl.float32)
        w -= (m * tl.load(SCALARS + 2) / size + w * decay) * lr
        tl.store(EXP_AVG + place, m.to(EXP_AVG.dtype.element_ty), mask=mask)
        tl.store(EXP_AVG_SQ + place, v.to(EXP_AVG_SQ.dtype.element_ty), mask=mask)
        if MASTER is not None:
            tl.store(MASTER + place, w, mask=mask)
        if WEIGHTS is not None:
            if WEIGHTS.dtype.element_ty == tl.int16:
                bits = w.to(tl.int32, bitcast=True)
                weight = tl.where(w != w, 0x7FC0, (bits + 0x8000) >> 16).to(tl.int16)
                tl.store(WEIGHTS + place, weight, mask=mask)
                if REMAINDER is not None:
                    tl.store(REMAINDER + place, tl.where(w != w, 0, bits).to(tl.int16), mask=mask)
            else:
                tl.store(WEIGHTS + place, w.to(WEIGHTS.dtype.element_ty), mask=mask)


@triton.jit
def squared_norm_kernel(VALUES, PARTIAL, BORDERS, FIRST, n, BLOCK: tl.constexpr):
    """The sum of squares of BLOCK elements within the ranges, in fp64 so that no fp32 number overflows."""
    tile = tl.program_id(0)
    place = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(VALUES + place, mask=place < n, other=0.0).to(tl.float64)
    squares = tl.where(_inside(place, BORDERS, FIRST, BLOCK), x * x, 0.0)
    tl.store(PARTIAL + tile, tl.sum(squares, 0))


@functools.lru_cache(maxsize=256)
def _tables(ranges: tuple[Range, ...], n: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Borders of the ranges, and for each tile's start (and the end) how many borders lie at or before it."""
    borders = torch.tensor([place for pair in ranges for place in pair] or [n], dtype=torch.int64)
    starts = torch.arange(-(-n // block) + 1, dtype=torch.int64) * block
    first = torch.searchsorted(borders, starts, right=True)
    return borders.to(device), first.to(torch.int32).to(device)


def adamw(
    flat: FlatAdamW, scalars: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float,
    decay_ranges: Sequence[Range],
) -> None:  # fmt: skip
    """One step in place; see `megalite.kernels.adamw.adamw`."""
    n, device = flat.weights.numel(), flat.weights.device
    warn_unaligned("the flat buffer of adamw", n, 2)
    borders, first = _tables(tuple(decay_ranges), n, ADAMW_BLOCK, device)
    own = flat.master is None and flat.remainder is None
    bf16 = flat.weights.dtype == torch.bfloat16
    arguments = {
        "MASTER": flat.weights if own else flat.master,
        "WEIGHTS": None if own else flat.weights.view(torch.int16) if bf16 else flat.weights,
        "REMAINDER": flat.remainder, "GRADS": flat.grads, "EXP_AVG": flat.exp_avg,
        "EXP_AVG_SQ": flat.exp_avg_sq, "SCALARS": scalars, "BORDERS": borders, "FIRST": first, "n": n,
        "beta1": beta1, "one_minus_beta1": 1.0 - beta1, "beta2": beta2, "one_minus_beta2": 1.0 - beta2,
        "eps": eps, "weight_decay": weight_decay, "BLOCK": ADAMW_BLOCK,
    }  # fmt: skip
    launch.run(adamw_kernel, (-(-n // ADAMW_BLOCK),), arguments, device, num_warps=ADAMW_WARPS)


def squared_norm(values: Tensor, ranges: Sequence[Range]) -> Tensor:
    """fp64 scalar; see `megalite.kernels.squared_norm.squared_norm`. Tiles are added in one fixed order."""
    n = values.numel()
    tiles = -(-n // NORM_BLOCK)
    borders, first = _tables(tuple(ranges), n, NORM_BLOCK, values.device)
    partial = torch.empty(tiles, dtype=torch.float64, device=values.device)
    arguments = {
        "VALUES": values, "PARTIAL": partial, "BORDERS": borders, "FIRST": first, "n": n, "BLOCK": NORM_BLOCK,
    }  # fmt: skip
    launch.run(squared_norm_kernel, (tiles,), arguments, values.device, num_warps=NORM_WARPS)
    return partial.sum()
