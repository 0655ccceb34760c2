"""AdamW whose state lies in host memory, for a share of a flat piece of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megalite.kernels.flat import Range, clipped
from megalite.optim.state import FlatState, StateOptions
from megalite.parallel.flat import ALIGNMENT

PIECE = 1 << 22  # elements: 16 MiB of gradients, long enough for the bus and short enough to overlap


class OffloadedState:
    """The interface of FlatState; the first `fraction` of the elements are updated on the host, the rest
    where the weights are. On a machine whose weights are in host memory nothing is copied.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        grads: torch.Tensor,
        decay_ranges: tuple[Range, ...],
        options: StateOptions,
        fraction: float,
        piece: int = PIECE,
    ):
        length = weights.numel()
        border = min(length, round(fraction * length / ALIGNMENT) * ALIGNMENT)
        host, device = slice(0, border), slice(border, length)
        self._host = HostState(
            weights[host], grads[host], clipped(decay_ranges, 0, border), options, piece=piece
        )
        self._device = FlatState(
            weights[device], grads[device], clipped(decay_ranges, border, length), options
        )

    def start_copies(self) -> None:
        """Begin to bring the gradients to the host; they do not change until `update` returns."""
        self._host.start_copies()

    def update(self, scalars: torch.Tensor, step: torch.Tensor) -> None:
        """As FlatState's. The device works on its part while the host waits for gradients and updates."""
        self._device.update(scalars, step)
        self._host.update(scalars)

    def take_weights(self) -> None:
        """As FlatState's."""
        self._host.take_weights()
        self._device.take_weights()

    def held(self) -> Iterator[torch.Tensor]:
        """As FlatState's."""
        yield from self._host.held()
        yield from self._device.held()

    def offloaded(self) -> Iterator[torch.Tensor]:
        """As FlatState's."""
        yield from self._host.held()

    def copied(self) -> Iterator[torch.Tensor]:
        """As FlatState's."""
        yield from self._host.copied()

    def logical(self) -> dict[str, torch.Tensor]:
        """As FlatState's, in host memory."""
        host, device = self._host.logical(), self._device.logical()
        return {kind: torch.cat([flat, device[kind].to(flat.device)]) for kind, flat in host.items()}

    def take_logical(self, values: Mapping[str, torch.Tensor]) -> None:
        """As FlatState's."""
        border = self._host.length
        self._host.take_logical({kind: flat[:border] for kind, flat in values.items()})
        self._device.take_logical({kind: flat[border:] for kind, flat in values.items()})


class HostState:
    """Master and moments of `weights` (n,) in host memory, updated there by the C++ AdamW, piece by piece.

    Weights on an accelerator have a copy on the host, pinned like all that is copied: their gradients come
    down on one stream while earlier pieces are updated, and new weights go up on another.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        grads: torch.Tensor,
        decay_ranges: tuple[Range, ...],
        options: StateOptions,
        piece: int,
    ):
        self.length = weights.numel()
        self._weights, self._grads = weights, grads
        self._bus = _Bus(weights.device) if weights.is_cuda else _OnePlace()
        self._state = FlatState(self._bus.on_host(weights), self._bus.on_host(grads), decay_ranges, options)
        self._pieces = [
            slice(start, min(start + piece, self.length)) for start in range(0, self.length, piece)
        ]

    def start_copies(self) -> None:
        """Queue the copies of the gradients, as they are once the work queued so far is done."""
        on_host = self._state.memory.grads
        self._bus.bring_down([(on_host[piece], self._grads[piece]) for piece in self._pieces])

    def update(self, scalars: torch.Tensor) -> None:
        """One step; returns when the host is done, with the last weights on their way up."""
        memory = self._state.memory
        on_host = scalars.to(memory.weights.device)
        for index, piece in enumerate(self._pieces):
            self._bus.wait_for_piece(index)
            self._state.update_piece(piece, on_host)
            self._bus.send_up(self._weights[piece], memory.weights[piece])
        self._bus.finish()

    @torch.no_grad()
    def take_weights(self) -> None:
        """As FlatState's."""
        self._state.memory.weights.copy_(self._weights)
        self._state.take_weights()

    def held(self) -> Iterator[torch.Tensor]:
        """State, and what there is on the host only to be copied."""
        yield from self._state.held()
        yield from self._bus.copies

    def copied(self) -> Iterator[torch.Tensor]:
        """What the bus copies, as it lies beside the weights."""
        yield from (self._weights, self._grads)

    def logical(self) -> dict[str, torch.Tensor]:
        """As FlatState's, in host memory."""
        return self._state.logical()

    @torch.no_grad()
    def take_logical(self, values: Mapping[str, torch.Tensor]) -> None:
        """As FlatState's, with the weights that a checkpoint has brought to the device by themselves."""
        self._state.memory.weights.copy_(self._weights)
        self._state.take_logical(values)
        self._weights.copy_(self._state.memory.weights)


class _OnePlace:
    """Weights and gradients are in host memory: there is nothing to copy."""

    def __init__(self) -> None:
        self.copies: list[torch.Tensor] = []

    def on_host(self, source: torch.Tensor) -> torch.Tensor:
        """`source` itself."""
        return source

    def bring_down(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None: ...
    def wait_for_piece(self, index: int) -> None: ...
    def send_up(self, target: torch.Tensor, source: torch.Tensor) -> None: ...
    def finish(self) -> None: ...


class _Bus(_OnePlace):
    """Copies between an accelerator and pinned host memory, beside the work of the current stream."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)  # device only
        self._arrived: list[torch.cuda.Event] = []

    def on_host(self, source: torch.Tensor) -> torch.Tensor:
        """Pinned memory with the same values."""
        self.copies.append(torch.empty_like(source, device="cpu", pin_memory=True))  # device only
        return self.copies[-1].copy_(source)

    def bring_down(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue (to, from) copies, in order, after what the current stream has been given."""
        self._down.wait_stream(torch.cuda.current_stream(self._down.device))  # device only
        self._arrived = []
        with torch.cuda.stream(self._down):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record(self._down)
                self._arrived.append(event)

    def wait_for_piece(self, index: int) -> None:
        """Until a copy of `bring_down` has arrived."""
        self._arrived[index].synchronize()  # device only

    def send_up(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy to the accelerator, after the current stream's use of the target."""
        self._up.wait_stream(torch.cuda.current_stream(self._up.device))  # device only
        with torch.cuda.stream(self._up):
            target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """What is given to the current stream from now on comes after the copies up."""
        torch.cuda.current_stream(self._up.device).wait_stream(self._up)  # device only
