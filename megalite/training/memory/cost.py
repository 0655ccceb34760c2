"""What one micro-batch costs in one chunk of a stage, counted on the model's own forward and backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.data.batch import Batch
from megalite.model.gpt import GPTStage
from megalite.model.live_bytes import ACTIVATIONS, COMMUNICATION, LOGITS, LiveBytes
from megalite.pipeline.executor import Stage
from megalite.training.step import Trainer, valid_tokens

Bytes = Counter[str]  # by label of `live_bytes`


@dataclass(frozen=True)
class ChunkCost:
    """Bytes by label of `live_bytes`.

    `saved`: held from the forward until the backward, the stage's input with it. `forward`, `backward`: most
    that exist within either, beyond what is held when it starts. `input_gradient`, `weight_gradient`: the
    same of a split backward; `put_off`: held between its two parts. `left`: gradients that are still being
    reduced after a backward; the next one of the chunk frees them on its way and has at most
    `later_backward` beyond them. `output_is_saved`,
    `gradient_is_put_off`: whether what is sent to the next stage, or back, is memory that `saved` or
    `put_off` holds already.
    """

    saved: Bytes
    forward: Bytes
    backward: Bytes
    input_gradient: Bytes
    put_off: Bytes
    weight_gradient: Bytes
    left: Bytes
    later_backward: Bytes
    output_is_saved: bool
    gradient_is_put_off: bool


def measure_chunk(trainer: Trainer, chunk: int, batch: Batch) -> ChunkCost:
    """Run one micro-batch through a chunk and back, twice. Gradients are added to those that are there.

    On fake tensors nothing is allocated.
    """
    stage, loss_grad = trainer.stages[chunk], trainer.optimizer.loss_scale
    call = trainer.calls(valid_tokens([batch]), loss_grad)[chunk]
    with LiveBytes(stage.recompute.bytes_on_host) as live, _head_labelled(stage, live):
        forward, saved, output_is_saved, edge, hidden = _forward(live, trainer, stage, call, batch)
        backward = later_backward = _backward(live, trainer, stage, edge, saved)
        del edge, hidden
        if left := live.bytes():
            live.label = ACTIVATIONS
            _, held, _, edge, hidden = _forward(live, trainer, stage, call, batch)
            later_backward = _backward(live, trainer, stage, edge, held)
            del edge, hidden
    with LiveBytes(stage.recompute.bytes_on_host) as live, _head_labelled(stage, live):
        _, _, _, edge, hidden = _forward(live, trainer, stage, call, batch)
        with trainer.buckets.weight_gradients.put_off() as work:
            split = _backward(live, trainer, stage, edge, saved)
        sent = None if hidden is None else _storage(hidden.grad)
        del edge, hidden
        put_off = live.bytes()
        live.restart()
        gradient_is_put_off = sent is not None and sent() is not None
        for each in work:
            each()
        late = _beyond(live.peak, put_off)
    return ChunkCost(
        saved,
        forward,
        backward,
        split,
        put_off,
        late,
        Counter({COMMUNICATION: left.total()}),
        later_backward,
        output_is_saved,
        gradient_is_put_off,
    )


def _forward(
    live: LiveBytes, trainer: Trainer, stage: GPTStage, call: Stage, batch: Batch
) -> tuple[Bytes, Bytes, bool, GradientEdge, torch.Tensor | None]:
    """Most bytes, bytes saved, whether the output is among these, its node, and the stage's input."""
    hidden = None
    if stage.embedding is None:
        hidden = torch.empty(trainer.hidden_shape, dtype=trainer.dtype, device=batch.tokens.device)
        hidden.requires_grad_()
    output = call(batch, hidden)
    edge, sent = get_gradient_edge(output), _storage(output)
    del output
    return live.peak, live.bytes(), sent() is not None, edge, hidden


def _backward(live: LiveBytes, trainer: Trainer, stage: GPTStage, edge: GradientEdge, saved: Bytes) -> Bytes:
    """Most bytes beyond `saved`."""
    loss_grad = trainer.optimizer.loss_scale
    live.label = COMMUNICATION
    gradient = (
        torch.empty(trainer.hidden_shape, dtype=trainer.dtype, device=loss_grad.device)
        if stage.head is None
        else loss_grad
    )
    live.label = ACTIVATIONS if stage.head is None else LOGITS
    live.restart()
    torch.autograd.backward(edge, gradient)
    return _beyond(live.peak, saved)


def _storage(tensor: torch.Tensor | None) -> weakref.ref[torch.UntypedStorage]:
    assert tensor is not None
    return weakref.ref(tensor.untyped_storage())


def _beyond(peak: Bytes, held: Bytes) -> Bytes:
    """`peak - held`, negative where a label has become less."""
    peak = Counter(peak)
    peak.subtract(held)
    return peak


@contextmanager
def _head_labelled(stage: GPTStage, live: LiveBytes) -> Iterator[None]:
    """What is made from the head's norm on counts as logits and loss, in backward until the norm is done."""
    if stage.head is None:
        yield
        return

    def enter(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        live.label = LOGITS
        if inputs[0].requires_grad:
            inputs[0].register_hook(leave)

    def leave(gradient: torch.Tensor) -> None:
        live.label = ACTIVATIONS

    handle = stage.head.norm.register_forward_pre_hook(enter)
    try:
        yield
    finally:
        handle.remove()
