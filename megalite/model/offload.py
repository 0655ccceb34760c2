"""Activations that wait in host memory between a forward pass and its backward.

On a GPU the copies run on streams of their own beside the compute: a layer's tensors leave while the next
layers compute, and come back while the backward of the layer above does. On a CPU a copy is plain.
"""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megalite.model.rebuild import KeepFunction, Packed, held, storage_id

WORTH_MOVING = 16  # what is smaller than the layer's input by this factor stays: its copy would cost latency


class HostMemory:
    """Keeps tensors of a pipeline chunk's layers in host memory."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        # One stream a direction: what comes back must not wait for what still leaves.
        self.leaving = torch.cuda.Stream(device) if on_gpu else None  # device only
        self.returning = torch.cuda.Stream(device) if on_gpu else None  # device only
        self._below: weakref.ref[_Layer] | None = None
        self._copies: weakref.WeakSet[_HostCopy] = weakref.WeakSet()
        self._being_made = 0

    def bytes_held(self) -> int:
        """Bytes in host memory now, those of a copy that is being made among them."""
        return self._being_made + sum(copy.host.untyped_storage().nbytes() for copy in self._copies)

    def copy(self, tensor: torch.Tensor) -> _HostCopy:
        """The whole storage of `tensor`, on its way to the host."""
        self._being_made = tensor.untyped_storage().nbytes()
        made = _HostCopy(tensor, self)
        self._copies.add(made)
        self._being_made = 0
        return made

    def start_chunk(self) -> None:
        """The next layer is the first of a forward pass."""
        self._below = None

    def keeper(self, x: torch.Tensor) -> KeepFunction:
        """Keeps the tensors of the forward pass of one layer with input `x`."""
        least = x.untyped_storage().nbytes() // WORTH_MOVING
        layer = _Layer(self, self._below)
        self._below = weakref.ref(layer)

        def keep(tensor: torch.Tensor) -> Packed:
            if not tensor.is_floating_point() or tensor.untyped_storage().nbytes() < least:
                return held(tensor)
            return layer.send(tensor)

        return keep


class _Layer:
    """The copies of one layer's tensors; `below`: the layer whose backward comes next."""

    def __init__(self, memory: HostMemory, below: weakref.ref[_Layer] | None) -> None:
        self.memory, self.below = memory, below
        self.copies: dict[int, tuple[StorageWeakRef, _HostCopy]] = {}  # by storage, which views share
        self.fetched = False

    def send(self, tensor: torch.Tensor) -> Packed:
        key = storage_id(tensor)
        if key not in self.copies:
            # The weak reference keeps the address from being given to another storage.
            reference = StorageWeakRef(tensor.untyped_storage())
            self.copies[key] = reference, self.memory.copy(tensor)
        copy = self.copies[key][1]
        copy.readers += 1
        view = tensor.size(), tensor.stride(), tensor.storage_offset()

        def fetch() -> torch.Tensor:
            self.fetch()
            if self.below is not None and (below := self.below()) is not None:
                below.fetch()
            return copy.take().as_strided(*view)

        return fetch

    def fetch(self) -> None:
        """Begin to bring everything back, once."""
        if not self.fetched:
            for _, copy in self.copies.values():
                copy.fetch()
        self.fetched = True


class _HostCopy:
    """One storage in host memory, and on the device again from `fetch` until its last reader took it."""

    def __init__(self, tensor: torch.Tensor, memory: HostMemory) -> None:
        self.memory, self.device, self.readers = memory, tensor.device, 0
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = tensor.detach().as_strided((length,), (1,), 0)
        self.returned: torch.Tensor | None = None
        self.host = torch.empty_like(whole, device="cpu", pin_memory=memory.leaving is not None)
        if memory.leaving is None:
            self.host.copy_(whole)
            return
        memory.leaving.wait_stream(torch.cuda.current_stream(self.device))  # device only
        with torch.cuda.stream(memory.leaving):  # device only
            self.host.copy_(whole, non_blocking=True)  # device only
        whole.record_stream(memory.leaving)  # device only

    def fetch(self) -> None:
        """Begin to copy back."""
        if self.memory.returning is None:
            self.returned = self.host.clone()
            return
        assert self.memory.leaving is not None  # device only
        self.memory.returning.wait_stream(self.memory.leaving)  # device only
        with torch.cuda.stream(self.memory.returning):  # device only
            self.returned = self.host.to(self.device, non_blocking=True)  # device only

    def take(self) -> torch.Tensor:
        """The storage as a flat tensor on the device."""
        if self.returned is None:
            self.fetch()  # the graph is run backward once more
        whole = self.returned
        assert whole is not None  # fetch brought it
        self.readers -= 1
        if self.readers <= 0:
            self.returned = None
        if self.memory.returning is not None:
            stream = torch.cuda.current_stream(self.device)  # device only
            stream.wait_stream(self.memory.returning)  # device only
            whole.record_stream(stream)  # device only
        return whole
