"""Flat parameter and gradient memory, cut into buckets that are reduced over dp while backward goes on.

A bucket is reduced as soon as the last gradient of the last micro-batch is in it. Gradients are summed, not
averaged: the loss is already divided by the token count of the global batch.

`zero_stage` says what the data-parallel ranks share out (Rajbhandari et al. 2020, arXiv 1910.02054). Each
bucket is cut into as many equal parts as there are ranks, wherever a border falls; a rank updates its part.
Stage 0: that part is everything. Stage 1: gradients are reduced to the parts, and weights gathered from them
after the update. Stage 2: the gradients of each micro-batch are, and only their sum in the part is kept.
Stage 3: weights are kept as parts too; those of one unit of the model (a layer) at a time are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from megalite.kernels.flat import flat_zeros
from megalite.kernels.weight_gradient import Accumulate, accumulate_fused
from megalite.parallel.flat import (
    FlatBucket,
    FlatWeights,
    Slot,
    bucket_length,
    cut,
    default_bucket_size,
    held_elements,
    main_grad_dtype,
    place,
    plan_buckets,
)
from megalite.parallel.gathering import BucketWeights, GatherAhead, Unit, wait_before_use
from megalite.parallel.mappings import all_reduce
from megalite.parallel.params import attach_sink, draw_into, record_of, sink_of
from megalite.parallel.reduction import BucketGradients, Queue
from megalite.parallel.topology import Axis, Topology
from megalite.parallel.weight_gradients import WeightGradients


class _Sink:
    """Receives the gradient of one parameter and tells its bucket."""

    def __init__(self, slot: Slot, gradients: BucketGradients, weight_gradients: WeightGradients):
        self.slot, self.gradients = slot, gradients
        self.weight_gradients = weight_gradients

    @property
    def main_grad(self) -> torch.Tensor:
        return self.gradients.view(self.slot)

    def ready(self) -> None:
        self.gradients.count()


@dataclass(frozen=True)
class BucketOptions:
    """How gradients are reduced and what is shared out.

    `bucket_size`: elements, or `num_buckets`: how many there are to be; by default large enough for any
    network, and at stage 2 a unit of the model, because each needs memory of its own. `overlap`:
    reduce during backward. `zero_stage`: see the module. `overlap_gather`: go on after an update while
    weights are gathered, until they are used. `prefetch_units`: at stage 3 how many units are gathered ahead
    of the one that computes. `reduce_in_bf16`: gradients travel in bf16. `main_grads`: their dtype, None for
    the usual.
    """

    bucket_size: int | None = None
    overlap: bool = False
    zero_stage: int = 0
    overlap_gather: bool = False
    prefetch_units: int = 1
    main_grads: torch.dtype | None = None
    num_buckets: int | None = None
    reduce_in_bf16: bool = False


class GradientBuckets:
    """Moves the parameters of a process into flat memory and reduces their gradients.

    A step is: `start_step`; the backward passes of all micro-batches, in any order, during which a bucket is
    reduced when its last gradient has come in, if overlap is set; `finish`; an update of `buckets`;
    `gather_weights`.

    `buckets`: what this rank updates. `held`: the weights it keeps between steps. `held_elements`: how much
    it holds, by formula.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        topology: Topology,
        options: BucketOptions,
        units: Sequence[Unit] = (),
        accumulate: Accumulate = accumulate_fused,
    ):
        """`units`: modules that the model calls in this order, which together use all parameters.
        `accumulate`: how linear layers add their weight gradients.
        """
        self.topology, self.options = topology, options
        self.stage = options.zero_stage if topology.dp.size > 1 else 0
        self.weight_gradients = WeightGradients(accumulate)
        ordered = list(reversed(list(dict.fromkeys(parameters))))
        if not ordered:
            raise ValueError("a stage needs at least one parameter")
        sized = options.bucket_size is not None or options.num_buckets is not None
        if self.stage == 3 or (self.stage == 2 and not sized):
            groups = _by_unit(ordered, units)
        else:
            groups = _by_size(ordered, _bucket_size(ordered, options, topology.dp.size))
        self._layouts = [place(group) for group in groups]
        self._allocate(self._layouts)
        for slots, gradients in zip(self._layouts, self._gradients, strict=True):
            for slot in slots:
                _connect(slot, gradients, self.weight_gradients)
        self._ahead: GatherAhead | None = None
        if self.stage == 3:
            self._ahead = GatherAhead(units, self._weights_of, options.prefetch_units)
            self._ahead.give_up_all()
        elif self.stage and options.overlap_gather:
            wait_before_use(units, self._weights_of)

    def _allocate(self, layouts: Sequence[tuple[Slot, ...]]) -> None:
        """Weights and gradients in flat memory, cut into buckets and those into parts."""
        dp, first = self.topology.dp, layouts[0][0].param
        ranks = dp.size if self.stage else 1
        self.lengths = [bucket_length([slot.param.numel() for slot in slots], ranks) for slots in layouts]
        parts = [length // ranks for length in self.lengths]
        self.held_elements = held = held_elements(self.lengths, ranks, self.stage)
        grads_dtype = self.options.main_grads or main_grad_dtype(first.dtype)
        weights = flat_zeros(held.weights, first.dtype, first.device)
        grads = flat_zeros(held.grads, grads_dtype, first.device)
        queue = Queue() if self.stage > 1 else None
        kept_weights = weights.split(parts if self.stage > 2 else self.lengths)
        kept_grads = grads.split(parts if self.stage > 1 else self.lengths)
        self.buckets: list[FlatBucket] = []
        self.held: list[FlatWeights] = []
        self._gradients: list[BucketGradients] = []
        self._weights: list[BucketWeights] = []
        kept = zip(layouts, parts, kept_weights, kept_grads, strict=True)
        for index, (slots, part, some_weights, some_grads) in enumerate(kept):
            start = dp.rank * part if self.stage else 0
            mine, my_slots = slice(start, start + part), cut(slots, start, start + part)
            whole = weights.new_zeros(part * ranks) if self.stage > 2 else some_weights
            _move(slots, whole)
            if self.stage > 2:
                some_weights.copy_(whole[mine])
            my_weights = some_weights if self.stage > 2 else whole[mine]
            my_grads = some_grads if self.stage > 1 else some_grads[mine]
            self.buckets.append(FlatBucket(my_weights, my_grads, my_slots))
            self.held.append(FlatWeights(some_weights, my_slots if self.stage > 2 else slots))
            params = [slot.param for slot in slots]
            self._weights.append(BucketWeights(whole, my_weights, dp, index, params))
            self._gradients.append(
                BucketGradients(
                    slots,
                    my_grads,
                    dp,
                    index,
                    whole=None if self.stage > 1 else some_grads,
                    queue=queue,
                    overlap=self.options.overlap,
                    in_bf16=self.options.reduce_in_bf16,
                )
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in buffer order."""
        return [slot.param for slots in self._layouts for slot in slots]

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(purpose, tensor) of what is held from construction on: parameters and gradients."""
        for held, updated in zip(self.held, self.buckets, strict=True):
            yield "parameters", held.weights
            yield "gradients", updated.grads

    @property
    def gathered_bytes(self) -> int:
        """At stage 3, the most that gathered weights take at one time; 0 elsewhere."""
        return 0 if self._ahead is None else self._ahead.most_bytes

    @property
    def norm_axis(self) -> Axis:
        """The ranks that add up the gradient norm in one collective, so that all get the same bits.

        Equal replicas of a model on one rank each need none.
        """
        shared = self.stage or self.topology.model.size > 1
        return self.topology.world if shared else self.topology.model

    @property
    def counted_in_norm(self) -> bool:
        """Whether this rank's `buckets` count there: of equal replicas those of the first alone do."""
        return self.stage > 0 or self.topology.model.size == 1 or self.topology.dp.rank == 0

    def start_step(self, microbatches: int) -> None:
        """Clear all gradients; as many backward passes will now add to each."""
        for gradients in self._gradients:
            gradients.start_step(microbatches)

    def finish(self) -> None:
        """Reduce what is left and wait: now the gradients in `buckets` are those of the global batch."""
        for gradients in self._gradients:
            gradients.start_rest()
        for gradients in self._gradients:
            gradients.wait()
        self.give_up_weights()
        for name in ("tp", "kv", "embedding"):
            self._sum_partial_gradients(self.topology.axis(name))

    def gather_weights(self) -> None:
        """Make the weights whole from the updated parts, those that forward uses first first."""
        if self.stage not in (1, 2):
            return
        for weights in reversed(self._weights):
            weights.start_gathering()
        if not self.options.overlap_gather:
            self.wait_for_weights()

    def wait_for_weights(self) -> None:
        """Wait until all weights are whole: before they are read by other means than the units' forward."""
        for weights in self._weights:
            weights.wait()

    def give_up_weights(self) -> None:
        """At stage 3: free the weights that are still whole after a forward or backward pass."""
        if self._ahead is not None:
            self._ahead.give_up_all()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within, every parameter is whole and may be read, on every stage. A collective over dp.

        For scripts that look at weights: what trains, validates and saves needs them in part or a layer at a
        time.
        """
        self.wait_for_weights()
        if self._ahead is not None:
            self._ahead.recall_all()
        try:
            yield
        finally:
            self.give_up_weights()

    def _weights_of(self, module: nn.Module) -> list[BucketWeights]:
        used = set(module.parameters())
        return [
            weights
            for slots, weights in zip(self._layouts, self._weights, strict=True)
            if any(slot.param in used for slot in slots)
        ]

    def _sum_partial_gradients(self, axis: Axis) -> None:
        """Sum, in one message, the gradients of which each rank of `axis` has only a part.

        Its ranks have equal layouts, hence equal parts: no gradient has to be whole for it.
        """
        if axis.size == 1:
            return
        grads = [
            bucket.grads[slot.start : slot.stop]
            for bucket in self.buckets
            for slot in bucket.slots
            if axis.name in record_of(slot.param).sum_grad_over
        ]
        if not grads:
            return
        message = all_reduce(torch.cat(grads), axis)
        for grad, total in zip(grads, message.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total)


def main_grad(param: nn.Parameter) -> torch.Tensor:
    """Where gradients of a parameter that lives in a bucket are added up; same shape as the parameter.

    After a step it is the reduced gradient only where nothing is shared out (stage 0).
    """
    sink = sink_of(param)
    if sink is None:
        raise KeyError(f"{record_of(param).name} is in no bucket")
    return sink.main_grad


def _bucket_size(params: Sequence[nn.Parameter], options: BucketOptions, dp_size: int) -> int:
    if options.num_buckets is not None:
        return -(-sum(param.numel() for param in params) // options.num_buckets)
    return options.bucket_size or default_bucket_size(dp_size)


def _by_size(params: Sequence[nn.Parameter], bucket_size: int) -> list[list[nn.Parameter]]:
    alone = ["embedding" in record_of(param).sum_grad_over for param in params]
    groups = plan_buckets([param.numel() for param in params], alone, bucket_size)
    return [[params[index] for index in group] for group in groups]


def _by_unit(params: Sequence[nn.Parameter], units: Sequence[Unit]) -> list[list[nn.Parameter]]:
    """The parameters of each unit, in the order of `params`; one that several units use is alone."""
    users: dict[nn.Parameter, list[int]] = {param: [] for param in params}
    for index, unit in enumerate(units):
        for param in unit.module.parameters():
            users[param].append(index)
    groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for param in params:
        groups.setdefault(tuple(users[param]), []).append(param)
    return list(groups.values())


def _move(slots: Sequence[Slot], flat: torch.Tensor) -> None:
    """Make each parameter a view of `flat`, with the values it had."""
    for slot in slots:
        draw_into(flat[slot.start : slot.stop].view(slot.param.shape), slot.param)


def _connect(slot: Slot, gradients: BucketGradients, weight_gradients: WeightGradients) -> None:
    """Send every gradient of a parameter to its bucket."""
    sink = _Sink(slot, gradients, weight_gradients)
    attach_sink(slot.param, sink)

    def move_gradient(leaf: torch.Tensor) -> None:
        """For norms and biases; linear layers and embeddings bring their gradients themselves."""
        if leaf.grad is not None:
            sink.main_grad.add_(leaf.grad)
            leaf.grad = None
            sink.ready()

    slot.param.register_post_accumulate_grad_hook(move_gradient)
