"""Tensors that backward makes again instead of keeping them.

Within a `Watch` autograd holds, for each tensor that it saves, a `Packed`: something that is called for the
tensor when its backward runs. Most only hold it. One that comes from a region (a function called through the
watch) holds the region instead; the first that is asked for runs the function again and hands every other one
of the region its tensor. So a region's results and what autograd saved within it take no memory in between,
whichever operation saved them. Nothing random is in a forward pass, so nothing but the inputs must be kept;
an input may itself come from another region.

This is the non-reentrant form: the graph is that of the first forward, and a backward may be split, done
twice, or come after any other forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

Packed = Callable[[], torch.Tensor]  # stands for a tensor in the graph; called when backward needs it
KeepFunction = Callable[[torch.Tensor], Packed]
Results = TypeVar("Results", bound=torch.Tensor | tuple[torch.Tensor, ...])


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the tensor's memory while it is alive; also where there is none (fake tensors)."""
    return tensor.untyped_storage()._cdata


def held(tensor: torch.Tensor) -> Packed:
    """Keeps the tensor as it is."""
    kept = tensor.detach()  # with its own grad_fn it would keep its node alive in a cycle
    return lambda: kept


class Watch:
    """One forward pass through some layers: knows which tensors can be made again.

    `parameters`: those of the layers; a saved one is looked up when it is needed, since its memory may have
    moved by then. `keep` packs all that cannot be made again. Regions must not be nested: RuntimeError.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = (), keep: KeepFunction = held) -> None:
        self._keep = keep
        self._parameters = {_place(each): each.detach for each in parameters}
        self._results: dict[int, tuple[StorageWeakRef, _Region, int]] = {}  # by storage
        self._inside = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Autograd saves what this watch makes of each tensor."""
        try:
            with saved_tensors_hooks(self.pack, _unpack):
                yield
        finally:
            self._results.clear()  # autograd holds on to the hooks, and so to this watch, until backward

    def pack(self, tensor: torch.Tensor) -> Packed:
        """What the graph holds in place of `tensor`."""
        parameter = self._parameters.get(_place(tensor))
        if parameter is not None:
            return parameter
        found = self._results.get(storage_id(tensor))
        return self._keep(tensor) if found is None else found[1].stand_in(found[2], tensor)

    def run(self, function: Callable[..., Results], *inputs: torch.Tensor) -> Results:
        """`function(*inputs)`, whose results and saved tensors are made again in backward."""
        if self._inside:
            raise RuntimeError("recompute inside recompute: a region contains another; choose one of the two")
        region = _Region(function, [self.pack(each) for each in inputs], inputs, saves=True)

        def pack(tensor: torch.Tensor) -> Packed:
            place = region.next_place()
            return self._parameters.get(_place(tensor)) or region.stand_in(place, tensor)

        self._inside = True
        try:
            with saved_tensors_hooks(pack, _unpack):
                results = function(*inputs)
        finally:
            self._inside = False
        self._register(region, results, inputs)
        return results

    def discard(
        self,
        results: Results,
        function: Callable[..., Results],
        *inputs: torch.Tensor,
    ) -> None:
        """Whoever saves one of `results` from now on gets it from `function(*inputs)` in backward.

        What the operation that made them saved is kept.
        """
        if self._inside:
            raise RuntimeError("recompute inside recompute: a region discards its results already")
        region = _Region(function, [self.pack(each) for each in inputs], inputs, saves=False)
        self._register(region, results, inputs)

    def _register(
        self,
        region: _Region,
        results: torch.Tensor | tuple[torch.Tensor, ...],
        inputs: Iterable[torch.Tensor],
    ) -> None:
        given = {storage_id(each) for each in inputs}
        for number, result in enumerate(_tuple(results)):
            if storage_id(result) not in given:  # an input that is passed through stays what it is
                # The weak reference keeps the address from being given to another storage.
                reference = StorageWeakRef(result.untyped_storage())
                self._results[storage_id(result)] = reference, region, _result_place(number)


class _StandIn:
    """In the graph for a tensor of a region. Holds the tensor only from the rebuild until it is asked for."""

    __slots__ = ("__weakref__", "dtype", "layout", "region", "value")

    def __init__(self, region: _Region, tensor: torch.Tensor) -> None:
        self.region = region
        self.layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.dtype = tensor.dtype
        self.value: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        if self.value is None:
            self.region.rebuild()
        value, self.value = self.value, None
        assert value is not None  # rebuild gives every stand-in its tensor, or raises
        return value

    def accept(self, tensor: torch.Tensor, is_result: bool) -> None:
        """Take what was saved: `tensor`, or of a result the same view of its memory."""
        size, stride, offset = self.layout
        end = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
        fits = end * tensor.element_size() <= tensor.untyped_storage().nbytes()
        if tensor.dtype != self.dtype or not (fits if is_result else tensor.size() == size):
            raise RuntimeError(
                f"recompute made {tuple(tensor.shape)} of {tensor.dtype} where {tuple(size)} of {self.dtype} "
                "was saved: the function is not the same the second time"
            )
        self.value = tensor.as_strided(size, stride, offset) if is_result else tensor


class _Done(Exception):
    """All that a region's graph needs has been made again."""


class _Region:
    """A function call that can be done again, and the stand-ins of its tensors.

    Places: the number of a saved tensor in the order of saving, or `_result_place` of a result.
    """

    def __init__(
        self,
        function: Callable[..., Results],
        packed: list[Packed],
        inputs: Iterable[torch.Tensor],
        saves: bool,
    ) -> None:
        self.function, self.packed, self.saves = function, packed, saves
        self.differentiable = [each.requires_grad for each in inputs]
        self.places = 0
        self.stand_ins: list[tuple[int, weakref.ref[_StandIn]]] = []

    def next_place(self) -> int:
        self.places += 1
        return self.places - 1

    def stand_in(self, place: int, tensor: torch.Tensor) -> _StandIn:
        made = _StandIn(self, tensor)
        self.stand_ins.append((place, weakref.ref(made)))
        return made

    def rebuild(self) -> None:
        """Call the function again and give each stand-in that is still in a graph its tensor."""
        waiting = [(place, made) for place, each in self.stand_ins if (made := each()) is not None]
        tensors = self._call_again({place for place, _ in waiting})
        for place, made in waiting:
            if place not in tensors:
                raise RuntimeError("recompute saved fewer tensors than the first forward pass")
            made.accept(tensors[place], is_result=place < 0)

    def _call_again(self, wanted: set[int]) -> dict[int, torch.Tensor]:
        inputs = [
            each().detach().requires_grad_(differentiable)
            for each, differentiable in zip(self.packed, self.differentiable, strict=True)
        ]
        made: dict[int, torch.Tensor] = {}
        place = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal place
            if place in wanted:
                made[place] = tensor.detach()
            place += 1
            if len(made) == len(wanted):
                raise _Done

        try:
            with torch.set_grad_enabled(self.saves), saved_tensors_hooks(pack, _refuse):
                results = self.function(*inputs)
            made |= {_result_place(n): each.detach() for n, each in enumerate(_tuple(results))}
        except _Done:  # the rest of the function, and its communication, is not needed
            pass
        return made


def _unpack(packed: Packed) -> torch.Tensor:
    return packed()


def _refuse(_: object) -> torch.Tensor:
    raise RuntimeError("a backward pass inside a function that is being recomputed")


def _result_place(number: int) -> int:
    return -1 - number


def _place(tensor: torch.Tensor) -> tuple[int, int, torch.Size]:
    """Where a parameter lies: in flat memory many share one storage."""
    return storage_id(tensor), int(tensor.storage_offset()), tensor.shape


def _tuple(results: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
