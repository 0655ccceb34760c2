"""A parameter knows how it is sharded: one record a parameter.

Initialisation, gradient reduction, norm, weight decay and checkpoints read it; nothing else in the project
keeps lists of parameter names.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import nn

from megalite.kernels.weight_gradient import GradientSink
from megalite.parallel.products import TensorParallel
from megalite.parallel.topology import Topology


@dataclass(frozen=True)
class ParamRecord:
    """How one local parameter belongs to its global tensor.

    `name`, `global_shape`: of the whole tensor, padding not counted.
    `offsets`: where the local part, a rectangle, starts in it; () at its first element.
    `replicated_over`: axes, besides dp, whose ranks all hold this same part.
    `sum_grad_over`: axes, besides dp, over which the local gradient is only a partial sum.
    `counted`: whether this rank's copy counts in the gradient norm: true on one rank of each set of replicas
    in a copy of the model.
    `decay`: whether weight decay applies.
    `uses`: how often a backward pass adds to the gradient (2 for an embedding that is also the head of the
    same stage).
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    replicated_over: tuple[str, ...] = ()
    sum_grad_over: tuple[str, ...] = ()
    counted: bool = True
    decay: bool = True
    uses: int = 1


def record_of(parameter: torch.Tensor) -> ParamRecord:
    """The record of `parameter`. Raises KeyError when it was not made by `ParameterFactory`."""
    record = getattr(parameter, "_record", None)
    if record is None:
        raise KeyError(
            f"a parameter of shape {tuple(parameter.shape)} has no record; create it with ParameterFactory"
        )
    return cast(ParamRecord, record)


def sink_of(parameter: torch.Tensor) -> GradientSink | None:
    """Where gradients of `parameter` are collected, or None when autograd keeps them in `.grad`."""
    return getattr(parameter, "_sink", None)


def attach_sink(parameter: torch.Tensor, sink: GradientSink) -> None:
    """From now on gradients of `parameter` go to `sink`."""
    parameter._sink = sink  # type: ignore[attr-defined]


def global_block(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of the rectangle of the global tensor that `parameter` holds.

    Sizes are smaller than the local shape where the local part ends in padding (vocabulary rows beyond the
    last token), possibly 0.
    """
    shape, starts = record_of(parameter).global_shape, record_of(parameter).offsets
    offsets = tuple(map(min, starts or (0,) * len(shape), shape))
    sizes = tuple(
        min(length, full - offset)
        for length, full, offset in zip(parameter.shape, shape, offsets, strict=True)
    )
    return offsets, sizes


def narrow_to_block(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """View of `tensor` (shaped as `parameter`) without the padding, which is not of the global tensor."""
    return tensor[tuple(slice(size) for size in global_block(parameter)[1])]


def seeded_normal(
    seed: int, name: str, global_shape: tuple[int, ...], rows: np.ndarray, std: float
) -> torch.Tensor:
    """Normal values of the given rows of a global tensor: float64 `(len(rows), row_length)`.

    `std`: their standard deviation. `rows`: int64; a row is the last dim, rows are numbered over all
    others. Row r is a function of (seed, name, r) alone: its uniform numbers are the outputs of Philox4x64
    (Salmon et al. 2011) from a counter that starts at r times the row's blocks, mapped through the inverse
    normal distribution function.
    """
    length = global_shape[-1]
    key = np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), dtype=np.uint64)
    blocks = math.ceil(length / 4)  # Philox gives four numbers a counter value
    uniform = np.empty((len(rows), blocks * 4))
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for run in np.split(np.arange(len(rows)), breaks):  # one generator for each run of consecutive rows
        if len(run):
            bits = np.random.Philox(key=key)
            bits.advance(int(rows[run[0]]) * blocks)
            uniform[run[0] : run[-1] + 1] = np.random.Generator(bits).random((len(run), blocks * 4))
    open_interval = torch.from_numpy(uniform[:, :length]) + 2.0**-54  # (0, 1): the inverse is finite
    return torch.special.ndtri(open_interval).mul_(std)


class ParameterFactory:
    """Makes parameters that carry their record and their initial values, the same values on every layout."""

    def __init__(
        self,
        topology: Topology,
        dtype: torch.dtype,
        seed: int,
        sequence_parallel: bool = False,
        tp_comm_overlap: bool = False,
        prefix: str = "",
        deferred: bool = False,
    ):
        """`deferred`: parameters have their shape but no memory until somebody calls `draw_into`."""
        self.topology = topology
        self.dtype = dtype
        self.seed = seed
        self.sequence_parallel = sequence_parallel
        self.tensor_parallel = TensorParallel(topology.tp, sequence_parallel, tp_comm_overlap)
        self.prefix = prefix
        self.deferred = deferred

    def within(self, prefix: str) -> ParameterFactory:
        """The same factory with `prefix.` put before every name."""
        return ParameterFactory(
            self.topology,
            self.dtype,
            self.seed,
            self.sequence_parallel,
            self.tensor_parallel.overlap,
            f"{self.prefix}{prefix}.",
            self.deferred,
        )

    def sharded(
        self,
        name: str,
        shape: tuple[int, ...],
        split_dim: int,
        *,
        std: float = 0.0,
        padded: int | None = None,
        decay: bool = True,
        replicated_over: tuple[str, ...] = (),
        sum_grad_over: tuple[str, ...] = (),
        uses: int = 1,
    ) -> nn.Parameter:
        """A parameter whose `split_dim` is cut over the tp axis.

        `padded`: the length that is cut, by default that of the dim. Raises ValueError when tp does not
        divide it.
        """
        tp = self.topology.tp
        length = shape[split_dim] if padded is None else padded
        if length % tp.size:
            raise ValueError(
                f"{self.prefix}{name}: dimension {split_dim} of length {length} is not divisible by tp "
                f"{tp.size}"
            )
        part = length // tp.size
        offsets = tuple(tp.rank * part if dim == split_dim else 0 for dim in range(len(shape)))
        return self.part(
            name,
            shape,
            offsets,
            (*shape[:split_dim], part, *shape[split_dim + 1 :]),
            std=std,
            decay=decay,
            replicated_over=replicated_over,
            sum_grad_over=sum_grad_over,
            uses=uses,
        )

    def replicated(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        std: float = 0.0,
        constant: float = 0.0,
        decay: bool = True,
    ) -> nn.Parameter:
        """A parameter that every tp rank holds whole; with sequence parallelism its gradient is partial."""
        return self.part(
            name,
            shape,
            (0,) * len(shape),
            shape,
            std=std,
            constant=constant,
            decay=decay,
            replicated_over=("tp",),
            sum_grad_over=("tp",) if self.sequence_parallel else (),
        )

    def part(
        self,
        name: str,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        *,
        std: float = 0.0,
        constant: float = 0.0,
        decay: bool = True,
        replicated_over: tuple[str, ...] = (),
        sum_grad_over: tuple[str, ...] = (),
        uses: int = 1,
    ) -> nn.Parameter:
        """The rectangle of `sizes` at `offsets` of a global tensor of `shape`, drawn with `std` or constant.

        What lies beyond the global tensor is padding: `constant` there too.
        """
        first = all(self.topology.axis(axis).rank == 0 for axis in replicated_over)
        record = ParamRecord(
            self.prefix + name, shape, offsets, replicated_over, sum_grad_over, first, decay, uses
        )
        data = torch.empty(sizes, dtype=self.dtype, device=self.topology.device)
        parameter = nn.Parameter(data)
        parameter._record = record  # type: ignore[attr-defined]

        @torch.no_grad()
        def draw(target: torch.Tensor) -> None:
            target.fill_(constant)
            if std and not self.topology.planned:
                values = _initial_block(self.seed, record, *global_block(parameter), std)
                narrow_to_block(target, parameter).copy_(values)

        if self.deferred:
            data.untyped_storage().resize_(0)
            parameter._draw = draw  # type: ignore[attr-defined]
        else:
            draw(data)
        return parameter


def draw_into(target: torch.Tensor, parameter: nn.Parameter) -> None:
    """Write the initial values of a parameter to `target`, shaped as it, and make this its memory."""
    draw = getattr(parameter, "_draw", None)
    if draw is None:
        with torch.no_grad():
            target.copy_(parameter)
    else:
        draw(target)
        del parameter._draw  # type: ignore[attr-defined]
    parameter.data = target


def _initial_block(
    seed: int, record: ParamRecord, offsets: tuple[int, ...], sizes: tuple[int, ...], std: float
) -> torch.Tensor:
    """Initial values of one rectangle of the global tensor, cut out of its whole rows."""
    shape = record.global_shape
    outer = zip(offsets[:-1], sizes[:-1], strict=True)
    grid = np.ix_(*(np.arange(start, start + size) for start, size in outer))
    rows = np.ravel_multi_index(grid, shape[:-1]).ravel() if len(shape) > 1 else np.zeros(1, dtype=np.int64)
    drawn = seeded_normal(seed, record.name, shape, rows, std)
    return drawn[:, offsets[-1] : offsets[-1] + sizes[-1]].reshape(sizes)
