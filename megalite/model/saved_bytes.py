"""Bytes of activations and FLOPs of recompute, counted exactly without memory, processes or a GPU.

One block, the embedding and the head are run forward and backward on fake tensors (shapes without memory), as
a rank of a tensor-parallel group of the configured size. What is counted is what is there: every storage that
an operation made and that is still alive, whoever holds it. The fused attention of the CPU saves the same
tensors as that of the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from megalite.config import ActivationConfig, Config, kv_replicas, stage_layers
from megalite.data.batch import Batch
from megalite.model.gpt import StagePlace, build_stages
from megalite.model.live_bytes import LiveBytes, device_bytes
from megalite.model.rebuild import storage_id
from megalite.model.recompute import layer_groups
from megalite.parallel.buckets import BucketOptions, GradientBuckets
from megalite.parallel.params import ParameterFactory
from megalite.parallel.topology import planned_topology

ELEMENTWISE = 10  # FLOPs an element of what is no matrix product: a GELU or a norm takes about as many
COPIES = ("copy_", "clone", "_to_copy", "cat", "zeros_like", "ones_like", "zero_", "fill_", "full", "zeros")
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # by operator: place of the left factor


@dataclass(frozen=True)
class Held:
    """Bytes of one micro-batch on one rank; storages are counted once, parameters and gradients never.

    `kept`: alive between forward and backward, the input among them where it is needed (`keeps_input`).
    `on_host`: what waits in host memory instead. `forward_peak`, `backward_peak`: most that is alive at once,
    kept, rebuilt and passing. `flops`: of forward and backward; `extra_flops`: the part of them that is done
    again.
    """

    kept: int
    keeps_input: bool
    on_host: int
    forward_peak: int
    backward_peak: int
    flops: int
    extra_flops: int = 0


@dataclass(frozen=True)
class ActivationBytes:
    """Of a whole model: `layers` by their number; `shared`: rotary angles, once a pipeline chunk."""

    embedding: Held
    layers: tuple[Held, ...]
    head: Held
    shared: int


def activation_bytes(config: Config) -> ActivationBytes:
    """What the configured run keeps on a rank for one micro-batch; takes some tenths of a second.

    Attention inside documents counts as attention over whole samples. Of a group of layers that is recomputed
    as one, the first has the bytes and FLOPs of all.
    """
    plain_config = replace(config, activations=ActivationConfig())
    measured = functools.cache(functools.partial(_group_bytes, config))
    plain = functools.cache(functools.partial(_group_bytes, plain_config, recomputed=False, offloaded=False))
    layers: list[Held] = []
    for chunk in stage_layers(config):
        for places, recomputed in layer_groups(config.activations, len(chunk)):
            offloaded = places.start < config.activations.cpu_offloading_num_layers
            first = measured(len(places), recomputed, offloaded)
            first = replace(first, extra_flops=first.flops - plain(len(places)).flops)
            other = replace(first, kept=0, keeps_input=False, on_host=0, flops=0, extra_flops=0)
            layers += [first, *[other] * (len(places) - 1)]
    head = head_bytes(config)
    head = replace(head, extra_flops=head.flops - head_bytes(plain_config).flops)
    with FakeTensorMode():
        shared = _FakeStage(config, 1, config.activations).shared()
    return ActivationBytes(embedding_bytes(config), tuple(layers), head, shared)


def embedding_bytes(config: Config) -> Held:
    """The embedding of tokens and positions."""
    with FakeTensorMode():
        return _FakeStage(config, 1, config.activations).embedding()


def layer_bytes(config: Config) -> Held:
    """One layer, the first of its chunk, by itself; its `extra_flops` are not told apart."""
    settings = config.activations
    return _group_bytes(
        config, 1, settings.recompute_granularity == "full", settings.cpu_offloading_num_layers > 0
    )


def head_bytes(config: Config) -> Held:
    """Final norm, output layer and loss; `extra_flops` are not told apart."""
    with FakeTensorMode():
        return _FakeStage(config, 1, config.activations).head()


def _group_bytes(config: Config, layers: int, recomputed: bool, offloaded: bool) -> Held:
    """Of consecutive layers that are recomputed as one, or of one layer."""
    settings = replace(config.activations, cpu_offloading_num_layers=layers if offloaded else 0)
    if settings.recompute_granularity == "full":
        whole = replace(settings, recompute_method="uniform", recompute_num_layers=layers)
        settings = whole if recomputed else replace(settings, recompute_granularity=None)
    with FakeTensorMode():
        return _FakeStage(config, layers, settings).layers()


class _FakeStage:
    """A pipeline of one stage, as tensor-parallel rank 0 sees it."""

    def __init__(self, config: Config, layers: int, settings: ActivationConfig) -> None:
        parallel, model = config.parallel, config.model
        tensor, cpu = parallel.tensor_model_parallel_size, torch.device("cpu")
        topology = planned_topology(tensor, 0, tensor, 1, cpu, kv_replicas(model, tensor))
        self.dtype: torch.dtype = getattr(torch, config.precision.params_dtype)
        make = ParameterFactory(
            topology, self.dtype, config.run.seed, parallel.sequence_parallel, parallel.tp_comm_overlap
        )
        (self.stage,) = build_stages(model, make, [StagePlace(range(layers))], config.loss, settings)
        self.weight_gradient_flops = 0

        def count(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
            """On a GPU the product is added where it is made, and takes no memory."""
            self.weight_gradient_flops += 2 * left.numel() * right.shape[-1]

        GradientBuckets(self.stage.parameters(), topology, BucketOptions(), accumulate=count)
        shape = config.batch.micro_batch_size, model.seq_length
        self.batch = Batch(
            tokens=torch.zeros(shape, dtype=torch.int64),
            labels=torch.zeros(shape, dtype=torch.int64),
            loss_mask=torch.ones(shape),
            position_ids=torch.zeros(shape, dtype=torch.int64),
            sample_index=torch.zeros(shape[:1], dtype=torch.int64),
        )
        shards = topology.tp.size if parallel.sequence_parallel else 1
        self.hidden_shape = model.seq_length // shards, shape[0], model.hidden_size

    def embedding(self) -> Held:
        embedding = self.stage.embedding
        assert embedding is not None  # a stage of one is the first
        batch = self.batch
        return self._measure(lambda _: embedding(batch.tokens, batch.position_ids, batch.sample_index))

    def layers(self) -> Held:
        sequences = self.stage.sequences(self.batch)
        return self._measure(lambda x: self.stage.through_layers(x, sequences))

    def head(self) -> Held:
        known = torch.ones(())  # as in training, where the loss knows its gradient
        return self._measure(lambda x: self.stage.loss(x, self.batch, known))

    def shared(self) -> int:
        with LiveBytes() as live:
            sequences = self.stage.sequences(self.batch)
        return live.bytes().total() if sequences.rotation is not None else 0

    def _measure(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> Held:
        """Run `forward` on hidden states, and its backward."""
        self.weight_gradient_flops = 0
        given = torch.zeros(self.hidden_shape, dtype=self.dtype, requires_grad=True)
        with _Counter(self.stage.recompute.bytes_on_host) as counter:
            x = given.clone()  # no leaf: it lives for as long as somebody keeps it
            reference = StorageWeakRef(x.untyped_storage())
            output = forward(x)
            edge, gradient = get_gradient_edge(output), torch.ones_like(output)
            del x, output
            forward_peak = device_bytes(counter.peak)
            counter.restart()
            kept = device_bytes(counter.bytes()) - gradient.untyped_storage().nbytes()
            keeps_input, on_host = not reference.expired(), self.stage.recompute.bytes_on_host()
            torch.autograd.backward(edge, gradient)
        flops = counter.flops + self.weight_gradient_flops
        return Held(kept, keeps_input, on_host, forward_peak, device_bytes(counter.peak), flops)


class _Counter(LiveBytes):
    """Counts the FLOPs of the operations, too."""

    def __init__(self, elsewhere: Callable[[], int] = lambda: 0) -> None:
        super().__init__(elsewhere)
        self.flops = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {storage_id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        results = super().__torch_dispatch__(func, types, args, kwargs)
        made = [each for each in tree_leaves(results) if isinstance(each, torch.Tensor)]
        self.flops += flops_of(func, args, made, any(storage_id(each) not in given for each in made))
        return results


def flops_of(operation: Any, args: Sequence[Any], results: list[torch.Tensor], makes_new: bool) -> int:
    """FLOPs of one operation: 2 a multiply-add of a product, causal attention half of the full square."""
    name = operation.overloadpacket.__name__
    if name in PRODUCTS:
        return 2 * results[0].numel() * int(args[PRODUCTS[name]].shape[-1])
    if name.startswith("_scaled_dot_product"):
        query, key = (each for each in args[1:3]) if name.endswith("backward") else args[:2]
        products = 5 if name.endswith("backward") else 2
        return products * int(query.numel()) * int(key.shape[-2])
    if name in COPIES:
        return 0
    in_place = name.endswith("_")
    return ELEMENTWISE * max((each.numel() for each in results), default=0) if makes_new or in_place else 0
