"""Which layers and parts of a pipeline chunk are made again in backward, and what waits in host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from megalite.config import ActivationConfig
from megalite.model.offload import HostMemory
from megalite.model.rebuild import KeepFunction, Packed, Results, Watch, held
from megalite.parallel.mappings import finish, start_all_gather
from megalite.parallel.topology import Axis, Topology


class Parts:
    """Asked by a layer where one of its parts runs; does what was chosen for the part.

    `names`: the parts that are made again. `host`: where what is kept waits, None to leave it on the device.
    """

    def __init__(self, names: Collection[str] = (), host: HostMemory | None = None) -> None:
        self._names, self._host = frozenset(names), host
        self._watch: Watch | None = None  # of the forward pass that is running

    @contextmanager
    def watching(self, module: nn.Module, x: torch.Tensor) -> Iterator[None]:
        """Within, `module`, which holds the parts, works on its input `x`."""
        if not (self._names or self._host) or not torch.is_grad_enabled():
            yield
            return
        keep = held if self._host is None else self._host.keeper(x)
        self._watch = Watch(module.parameters(), keep)
        try:
            with self._watch.saving():
                yield
        finally:
            self._watch = None

    def run(self, part: str, function: Callable[..., Results], *inputs: torch.Tensor) -> Results:
        """`function(*inputs)`; of a chosen part nothing but the inputs stays."""
        if self._watch is None or part not in self._names:
            return function(*inputs)
        return self._watch.run(function, *inputs)

    def discard(
        self, part: str, results: Results, function: Callable[..., Results], *inputs: torch.Tensor
    ) -> None:
        """`results` have been made; those of a chosen part come from `function(*inputs)` in backward."""
        if self._watch is not None and part in self._names:
            self._watch.discard(results, function, *inputs)


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers of a chunk, by their place in it.

    `recomputed`: of all of them only the first one's input stays; in `host` memory if given, cut over the
    ranks of `axis`, on which it is the same, if given.
    """

    layers: range
    recomputed: bool
    axis: Axis | None = None
    host: HostMemory | None = None

    def run(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """`function(x)`: the layers of the group, one after another."""
        if not self.recomputed or not torch.is_grad_enabled():
            return function(x)
        keep = held if self.host is None else self.host.keeper(x)
        return Watch(keep=keep if self.axis is None else _distributed(self.axis, keep)).run(function, x)


class ChunkRecompute:
    """What is made again in one pipeline chunk of `layers` layers.

    `groups`: all layers in order. `parts`: of each layer. `head`: those of the head.
    """

    def __init__(self, settings: ActivationConfig, layers: int, topology: Topology) -> None:
        self.host = host = HostMemory(topology.device) if settings.cpu_offloading_num_layers else None
        hosts = [host if place < settings.cpu_offloading_num_layers else None for place in range(layers)]
        axis = topology.tp if settings.distribute_saved_activations else None
        names = selected_parts(settings)
        self.head = Parts(names & {"logits"})
        self.groups = [
            LayerGroup(places, recomputed, axis, hosts[places.start])
            for places, recomputed in layer_groups(settings, layers)
        ]
        self.parts = [
            Parts(names - {"logits"}, None if group.recomputed else hosts[place])
            for group in self.groups
            for place in group.layers
        ]

    def start_forward(self) -> None:
        """A micro-batch enters the first layer."""
        if self.host is not None:
            self.host.start_chunk()

    def bytes_on_host(self) -> int:
        """Bytes of activations that wait in host memory now."""
        return 0 if self.host is None else self.host.bytes_held()


def layer_groups(settings: ActivationConfig, layers: int) -> list[tuple[range, bool]]:
    """The layers of a chunk in groups, and whether each is recomputed as a whole.

    Uniform makes groups of N layers (the last may be smaller), block recomputes the first N one by one.
    """
    number = settings.recompute_num_layers or 0
    full = settings.recompute_granularity == "full"
    if full and settings.recompute_method == "uniform":
        starts = range(0, layers, number)
        return [(range(start, min(start + number, layers)), True) for start in starts]
    return [(range(place, place + 1), full and place < number) for place in range(layers)]


def selected_parts(settings: ActivationConfig) -> frozenset[str]:
    """The parts that selective recompute makes again."""
    return frozenset(settings.recompute_modules if settings.recompute_granularity == "selective" else ())


def _distributed(axis: Axis, keep: KeepFunction) -> KeepFunction:
    """Keeps of a tensor that is the same on all ranks of `axis` one part each, gathered when needed."""

    def keep_part(tensor: torch.Tensor) -> Packed:
        part = keep(tensor.detach().chunk(axis.size)[axis.rank].clone())
        return lambda: finish(start_all_gather(part(), axis))

    return keep_part
