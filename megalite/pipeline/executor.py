"""Runs one rank's part of a schedule: computes, sends and receives what the table says."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.parallel.traffic import Traffic
from megalite.parallel.weight_gradients import WeightGradients
from megalite.pipeline import p2p
from megalite.pipeline.links import ChunkLinks, Link
from megalite.pipeline.schedule import Action, Kind
from megalite.pipeline.simulation import describe

# (batch, hidden states or None on the first stage) -> hidden states, or what the last stage makes of them
Stage = Callable[[Any, torch.Tensor | None], torch.Tensor]


def run_schedule(
    actions: Sequence[Action],
    stages: Sequence[Stage],
    microbatches: Sequence[Any],
    links: Sequence[ChunkLinks],
    *,
    hidden_shape: Sequence[int],
    hidden_dtype: torch.dtype,
    device: torch.device,
    loss_grad: torch.Tensor | None = None,
    weight_gradients: WeightGradients | None = None,
    sends_in_flight: int = 2,
    traffic: Traffic | None = None,
) -> list[torch.Tensor]:
    """Work through `actions` (`schedule[rank]`); return the last stage's results, detached, by micro-batch.

    `stages` and `links` have an entry for each chunk of the rank. `stage(batch, hidden)` gets None for
    `hidden` on the first stage. It returns hidden states of shape `hidden_shape` (seq, micro_batch, hidden)
    in `hidden_dtype`, on the last stage the micro-batch's loss, a scalar. Autograd accumulates gradients into
    the parameters; the loss's own gradient is `loss_grad` (a scalar: the loss scale), by default 1.
    With `weight_gradients`, those of the stages, an I puts them off until its W. A table without backwards
    runs without autograd, and the last stage may then return a tensor of any shape. `sends_in_flight` is the
    schedule's. Other stages than the last return an empty list.

    Raises ValueError when a stage returns a wrong shape or dtype, when the batches do not match the table,
    and for split backwards without `weight_gradients`.
    """
    _check_arguments(actions, stages, links, len(microbatches), weight_gradients is not None)
    run = _Run(
        stages,
        microbatches,
        links,
        _Wire(tuple(hidden_shape), hidden_dtype, device),
        training=any(action.kind is not Kind.F for action in actions),
        loss_grad=loss_grad,
        weight_gradients=weight_gradients,
        sends_in_flight=sends_in_flight,
        traffic=traffic or Traffic(),
    )
    with torch.set_grad_enabled(run.training):
        for index, action in enumerate(actions):
            run.post_receives(actions, index)
            if action.kind is Kind.F:
                run.forward(action)
            elif action.kind is Kind.W:
                run.add_weight_gradients(action)
            else:
                run.backward(action)
    run.finish()
    return [run.results[microbatch] for microbatch in sorted(run.results)]


@dataclass(frozen=True)
class _Wire:
    """What travels between two stages, forward and back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Saved:
    """What a backward needs of its forward: of the output only its node, so that its memory can go."""

    hidden: torch.Tensor | None
    output: GradientEdge


class _Run:
    """State of one call of `run_schedule`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        microbatches: Sequence[Any],
        links: Sequence[ChunkLinks],
        wire: _Wire,
        *,
        training: bool,
        loss_grad: torch.Tensor | None,
        weight_gradients: WeightGradients | None,
        sends_in_flight: int,
        traffic: Traffic,
    ) -> None:
        self.stages = stages
        self.microbatches = microbatches
        self.links = links
        self.wire = wire
        self.training = training
        self.loss_grad = loss_grad
        self.weight_gradients = weight_gradients
        self.put_off: dict[tuple[int, int], list[Callable[[], None]]] = {}  # (chunk, micro-batch)
        self.sends_in_flight = sends_in_flight
        self.traffic = traffic
        self.results: dict[int, torch.Tensor] = {}
        self.saved: dict[tuple[int, int], _Saved] = {}  # (chunk, micro-batch)
        self.posted = 0  # receives of the actions before this index have been posted
        self.receives: deque[tuple[int, p2p.Receive]] = deque()  # (index of its action, receive)
        self.sends: dict[int, deque[p2p.Send]] = defaultdict(deque)  # by id of the link

    def post_receives(self, actions: Sequence[Action], index: int) -> None:
        """Post the receives up to action `index`, and one more that can arrive while this one computes."""
        while self.posted < len(actions) and not (self.receives and self.receives[-1][0] > index):
            action, wire = actions[self.posted], self.wire
            link = self._incoming(action)
            if link is not None:
                receive = p2p.receive(wire.shape, wire.dtype, wire.device, link, action.microbatch)
                self.receives.append((self.posted, receive))
            self.posted += 1

    def forward(self, action: Action) -> None:
        links = self.links[action.chunk]
        hidden = self._arrived() if links.forward_in is not None else None
        if hidden is not None and self.training:
            hidden.requires_grad_()
        output = self.stages[action.chunk](self.microbatches[action.microbatch], hidden)
        if links.forward_out is not None:
            self._check_hidden(output, action)
            self._send(output.detach(), links.forward_out, action.microbatch)
        else:
            if self.training:
                _check_loss(output, action)
            self.results[action.microbatch] = output.detach()
        if self.training:
            self.saved[action.chunk, action.microbatch] = _Saved(hidden, get_gradient_edge(output))

    def backward(self, action: Action) -> None:
        links = self.links[action.chunk]
        saved = self.saved.pop((action.chunk, action.microbatch))
        if links.backward_in is not None:
            gradient = self._arrived()
        else:
            loss = self.results[action.microbatch]
            gradient = torch.ones_like(loss) if self.loss_grad is None else self.loss_grad.reshape(loss.shape)
        if action.kind is Kind.I and self.weight_gradients is not None:
            with self.weight_gradients.put_off() as work:
                torch.autograd.backward(saved.output, gradient)
            self.put_off[action.chunk, action.microbatch] = work
        else:
            torch.autograd.backward(saved.output, gradient)
        if saved.hidden is not None and links.backward_out is not None:
            if saved.hidden.grad is None:
                raise ValueError(
                    f"{describe(action)}: the stage's output does not depend on the hidden states"
                )
            self._send(saved.hidden.grad, links.backward_out, action.microbatch)

    def add_weight_gradients(self, action: Action) -> None:
        for work in self.put_off.pop((action.chunk, action.microbatch)):
            work()

    def finish(self) -> None:
        """Wait for what is still on its way."""
        for pending in self.sends.values():
            for sending in pending:
                sending.wait()

    def _incoming(self, action: Action) -> Link | None:
        links = self.links[action.chunk]
        if action.kind is Kind.W:
            return None
        return links.forward_in if action.kind is Kind.F else links.backward_in

    def _arrived(self) -> torch.Tensor:
        _, receive = self.receives.popleft()
        with self.traffic.waiting("pp"):
            return receive.wait()

    def _send(self, tensor: torch.Tensor, link: Link, microbatch: int) -> None:
        pending = self.sends[id(link)]
        if len(pending) == self.sends_in_flight:
            with self.traffic.waiting("pp"):
                pending.popleft().wait()
        pending.append(p2p.send(tensor, link, microbatch))

    def _check_hidden(self, output: torch.Tensor, action: Action) -> None:
        if tuple(output.shape) != self.wire.shape or output.dtype != self.wire.dtype:
            raise ValueError(
                f"{describe(action)}: the stage returned {tuple(output.shape)} of {output.dtype}, "
                f"but the next stage receives {self.wire.shape} of {self.wire.dtype}"
            )


def _check_loss(output: torch.Tensor, action: Action) -> None:
    if output.numel() != 1:
        raise ValueError(
            f"{describe(action)}: the last stage returned {tuple(output.shape)}, not a scalar loss"
        )


def _check_arguments(
    actions: Sequence[Action],
    stages: Sequence[Stage],
    links: Sequence[ChunkLinks],
    microbatches: int,
    can_split: bool,
) -> None:
    if len(stages) != len(links):
        raise ValueError(
            f"{len(stages)} stages with {len(links)} sets of links; each chunk needs one of both"
        )
    chunks = 1 + max((action.chunk for action in actions), default=0)
    if chunks > len(stages):
        raise ValueError(f"the table has {chunks} chunks, but {len(stages)} stages were given")
    needed = 1 + max((action.microbatch for action in actions), default=-1)
    if needed != microbatches:
        raise ValueError(f"the table is for {needed} micro-batches, but {microbatches} were given")
    split = [action for action in actions if action.kind in (Kind.I, Kind.W)]
    if split and not can_split:
        raise ValueError(f"{describe(split[0])}: the backward is split, but weight_gradients is not given")
