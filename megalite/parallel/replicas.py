"""Do the ranks that hold the same part of a parameter hold the same bits?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from megalite.parallel.flat import FlatWeights
from megalite.parallel.mappings import finish, start_all_gather
from megalite.parallel.params import record_of
from megalite.parallel.topology import Axis, Topology

PIECE = 2**20  # elements whose bits exist as int64 at one time
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as a signed number: odd, and its multiples are spread evenly


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of all bits of `tensor` and their places: int64 scalar on its device.

    The sum modulo 2^64 of each element's bits, read as an integer, times an odd number of its own. One
    changed element always changes it; several cancel out by chance only.
    """
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), PIECE):
        piece = bits[start : start + PIECE].to(torch.int64)
        places = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=tensor.device)
        total += (piece * (places * _GOLDEN | 1)).sum()
    return total


def differing_replicas(
    held: Sequence[FlatWeights], topology: Topology, shared_out: bool = False
) -> list[str]:
    """What each axis of this rank's says of weights in `held` that differ on it, all of this process's in
    order.

    Each entry names a parameter and the ranks that hold other bits than most. With `shared_out` each dp rank
    holds something else: there are no replicas over dp. A collective over every axis with replicas; one host
    synchronisation an axis.
    """
    found: list[str] = []
    pieces = [(slot.param, one.weights[slot.start : slot.stop]) for one in held for slot in one.slots]
    for name in ("tp", "kv", "embedding") if shared_out else ("dp", "tp", "kv", "embedding"):
        axis = topology.axis(name)
        shared = [one for one in pieces if name == "dp" or name in record_of(one[0]).replicated_over]
        if axis.size > 1 and shared:
            found += _differing_over(axis, shared)
    return found


def _differing_over(axis: Axis, pieces: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> Iterator[str]:
    mine = torch.stack([fingerprint(values) for _, values in pieces]).unsqueeze(0)
    by_rank = finish(start_all_gather(mine, axis)).t().tolist()  # for each parameter each rank's
    for (parameter, _), prints in zip(pieces, by_rank, strict=True):
        usual = max(prints, key=prints.count)
        same = [rank for rank, one in zip(axis.ranks, prints, strict=True) if one == usual]
        other = [rank for rank in axis.ranks if rank not in same]
        if other:
            yield f"{record_of(parameter).name}: {_listed(other)} differ from {_listed(same)}"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
