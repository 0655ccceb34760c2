"""What one micro-batch costs in one chunk of a stage, counted on the model's own forward and backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
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
class SplitCost:
    """Bytes of a backward in two parts.

    `input_gradient`, `weight_gradient`: most that exist within either, beyond what is held when it starts.
    `put_off`: held between the two. `left`: gradients that are still being reduced after the second.
    """

    input_gradient: Bytes
    put_off: Bytes
    weight_gradient: Bytes
    left: Bytes


@dataclass(frozen=True)
class ChunkCost:
    """Bytes by label of `live_bytes`.

    `saved`: held from the forward until the backward, the stage's input with it. `forward`, `backward`: most
    that exist within either, beyond what is held when it starts. `left`: gradients that are still being
    reduced after a backward; the next pass of the chunk frees them on its way, backward or already forward
    where the loss makes gradients there: `later_saved`, `later_forward` and `later_backward` are beyond
    them, and may be less than nothing. `split`: of a split backward, `later_split`: of one that finds
    `split.left`. `output_is_saved`, `gradient_is_put_off`: whether what is sent to the next stage, or back,
    is memory that `saved` or `put_off` holds already.
    """

    saved: Bytes
    forward: Bytes
    backward: Bytes
    left: Bytes
    later_saved: Bytes
    later_forward: Bytes
    later_backward: Bytes
    split: SplitCost
    later_split: SplitCost
    output_is_saved: bool
    gradient_is_put_off: bool


def measure_chunk(trainer: Trainer, chunk: int, batch: Batch) -> ChunkCost:
    """Run micro-batches through a chunk and back, in one part and in two. Gradients are added up.

    On fake tensors nothing is allocated.
    """
    stage, loss_grad = trainer.stages[chunk], trainer.optimizer.loss_scale
    call = trainer.calls(valid_tokens([batch]), loss_grad)[chunk]
    with LiveBytes(stage.recompute.bytes_on_host) as live, _head_labelled(stage, live):
        forward, saved, output_is_saved, edge, hidden = _forward(live, trainer, stage, call, batch)
        backward = later_backward = _backward(live, trainer, stage, edge, saved)
        later_saved, later_forward = saved, forward
        del edge, hidden
        if left := live.bytes():
            live.label = ACTIVATIONS
            live.restart()
            most, held, _, edge, hidden = _forward(live, trainer, stage, call, batch)
            later_saved, later_forward = _beyond_reduced(held, left), _beyond_reduced(most, left)
            later_backward = _backward(live, trainer, stage, edge, held)
            del edge, hidden
    with LiveBytes(stage.recompute.bytes_on_host) as live, _head_labelled(stage, live):
        split, gradient_is_put_off = _split_backward(live, trainer, stage, call, batch)
        later_split = split
        if split.left:
            live.label = ACTIVATIONS
            later_split, _ = _split_backward(live, trainer, stage, call, batch)
    return ChunkCost(
        saved,
        forward,
        backward,
        _being_reduced(left),
        later_saved,
        later_forward,
        later_backward,
        split,
        later_split,
        output_is_saved,
        gradient_is_put_off,
    )


def _split_backward(
    live: LiveBytes, trainer: Trainer, stage: GPTStage, call: Stage, batch: Batch
) -> tuple[SplitCost, bool]:
    """A forward and the two parts of its backward; whether what is sent back is held between them."""
    before = live.bytes()
    _, held, _, edge, hidden = _forward(live, trainer, stage, call, batch)
    with trainer.buckets.weight_gradients.put_off() as work:
        input_gradient = _backward(live, trainer, stage, edge, held)
    sent = None if hidden is None else _storage(hidden.grad)
    del edge, hidden
    between = live.bytes()
    live.restart()
    gradient_is_put_off = sent is not None and sent() is not None
    _do_all(work)
    weight_gradient = _beyond(live.peak, between)
    cost = SplitCost(input_gradient, _beyond(between, before), weight_gradient, _being_reduced(live.bytes()))
    return cost, gradient_is_put_off


def _do_all(work: list[Callable[[], None]]) -> None:
    """As the executor does: all is held until the last is done."""
    for each in work:
        each()
    work.clear()


def _being_reduced(left: Bytes) -> Bytes:
    return +Counter({COMMUNICATION: left.total()})


def _beyond_reduced(bytes_: Bytes, left: Bytes) -> Bytes:
    """`bytes_ - left`; what has become less are gradients that were being reduced."""
    beyond = _beyond(bytes_, left)
    freed = sum(value for value in beyond.values() if value < 0)
    beyond = +beyond
    beyond[COMMUNICATION] += freed
    return beyond


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
