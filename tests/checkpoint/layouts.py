"""A model's worth of global tensors, and the blocks that a rank of a layout holds of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint import Block, load, save

LAYERS = 4
VOCAB = 10  # not divisible by 4: the last tensor-parallel ranks hold padding rows


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis, fastest first."""

    tp: int
    dp: int
    pp: int

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """tp, dp and pp rank."""
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)


@dataclass(frozen=True)
class Weight:
    """A global tensor, the dim that tp splits, and the layer it belongs to (-1: the first stage)."""

    name: str
    shape: tuple[int, ...]
    split_dim: int | None
    dtype: torch.dtype
    layer: int


def weights() -> list[Weight]:
    """An embedding with padded vocabulary, and for each layer one tensor of each kind of split."""
    found = [Weight("model.embedding.tokens.weight", (VOCAB, 6), 0, torch.float32, -1)]
    for i in range(LAYERS):
        found += [
            Weight(f"model.layers.{i}.attention.qkv.weight", (4, 3, 2, 6), 0, torch.bfloat16, i),
            Weight(f"model.layers.{i}.mlp.gate_up.weight", (2, 8, 6), 1, torch.bfloat16, i),
            Weight(f"model.layers.{i}.mlp.down.weight", (6, 8), 1, torch.float64, i),
            Weight(f"model.layers.{i}.mlp_norm.weight", (6,), None, torch.float16, i),
        ]
    return found


def content(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The global tensor of a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Held:
    """A block, what it must contain, and the whole local tensor that it may be a view of."""

    block: Block
    expected: Tensor
    local: Tensor


def held_by(layout: Layout, rank: int, fill: bool) -> list[Held]:
    """What a rank holds: parameters, replicated over dp, and moments, split over dp by uneven rows.

    Tensors have their right values if `fill`, else -1. Padding rows are always -1.
    """
    tp, dp, pp = layout.coordinates(rank)
    held: list[Held] = []
    for weight in weights():
        if (weight.layer >= 0 and weight.layer * layout.pp // LAYERS != pp) or weight.layer < 0 < pp:
            continue
        offsets, sizes = [0] * len(weight.shape), list(weight.shape)
        local_sizes = list(weight.shape)
        if weight.split_dim is not None:
            full = weight.shape[weight.split_dim]
            local_sizes[weight.split_dim] = -(-full // layout.tp)
            offsets[weight.split_dim] = min(full, tp * local_sizes[weight.split_dim])
            sizes[weight.split_dim] = min(full - offsets[weight.split_dim], local_sizes[weight.split_dim])
        held.append(_held(weight.name, weight.shape, weight.dtype, offsets, sizes, local_sizes, fill))

        start, stop = sizes[0] * dp // layout.dp, sizes[0] * (dp + 1) // layout.dp
        rows = [stop - start, *sizes[1:]]
        moment = weight.name.replace("model.", "optimizer.exp_avg.")
        shifted = [offsets[0] + start, *offsets[1:]]
        held.append(_held(moment, weight.shape, torch.float32, shifted, rows, rows, fill))
    return held


def _held(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    offsets: list[int],
    sizes: list[int],
    local_sizes: list[int],
    fill: bool,
) -> Held:
    box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    expected = content(name, shape, dtype)[box]
    local = torch.full(local_sizes, -1.0, dtype=dtype)
    view = local[tuple(slice(0, n) for n in sizes)]
    if fill:
        view.copy_(expected)
    return Held(Block(name, shape, tuple(offsets), view), expected, local)


def save_layout(directory: str, layout: Layout, iteration: int = 1) -> None:
    """Runs on every rank: save what this rank holds."""
    held = held_by(layout, dist.get_rank(), fill=True)
    save(directory, iteration, (h.block for h in held), {"layout": [layout.tp, layout.dp, layout.pp]})


def load_layout(directories: list[str], layout: Layout) -> list[str]:
    """Runs on every rank: load each checkpoint; the names of tensors that are not right to the bit."""
    wrong: list[str] = []
    for directory in directories:
        held = held_by(layout, dist.get_rank(), fill=False)
        load(directory, (h.block for h in held))
        for h in held:
            bits = h.block.tensor.contiguous().view(torch.uint8), h.expected.contiguous().view(torch.uint8)
            filled = h.block.tensor.numel()
            padding_kept = (h.local == -1).sum().item() >= h.local.numel() - filled
            if not torch.equal(*bits) or not padding_kept:
                wrong.append(f"{directory}: {h.block.name}")
    return wrong
