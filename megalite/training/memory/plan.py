"""The memory of every rank of a run of any size, told by the trainer's own code without allocating it.

The trainer of each pipeline rank is built on fake tensors, which have shapes and no memory, and in process
groups that are not there; one micro-batch goes through each of its chunks and back while the bytes that are
alive are counted. The schedule's table then gives the peak. Tensor- and data-parallel ranks of a stage are
equal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite.config import Config, kv_replicas, replace, stage_layers
from megalite.data.batch import Batch
from megalite.kernels.weight_gradient import ALLOCATIONS_ON_GPU, IMPLEMENTATIONS
from megalite.model.live_bytes import COMMUNICATION, HOST, LiveBytes
from megalite.model.recompute_budget import within_budget
from megalite.parallel.topology import planned_topology
from megalite.pipeline.configured import ConfiguredSchedule
from megalite.pipeline.schedule import Schedule
from megalite.training.memory.account import Account, account, buffer_bytes, peak
from megalite.training.memory.cost import ChunkCost, measure_chunk
from megalite.training.memory.timeline import Moment, moments
from megalite.training.step import Trainer


@dataclass(frozen=True)
class RankPlan:
    """A pipeline rank: the layers of its chunks, its bytes at the peak, and the moments of a step.

    `buffers`: what is held all the time, see `account.buffer_bytes`.
    """

    rank: int
    layers: tuple[range, ...]
    buffers: Counter[str]
    account: Account
    moments: tuple[Moment, ...]

    @property
    def in_flight(self) -> int:
        """Micro-batches of a chunk in flight at the peak."""
        return peak(self.moments).in_flight


@dataclass(frozen=True)
class MemoryPlan:
    """All pipeline ranks of a run."""

    config: Config
    world_size: int
    schedule: Schedule
    ranks: tuple[RankPlan, ...]

    @property
    def largest(self) -> RankPlan:
        """The rank that needs the most."""
        return max(self.ranks, key=lambda rank: rank.account.total)


@dataclass(frozen=True)
class _Stage:
    """What pipeline ranks of the same shape have in common."""

    buffers: Counter[str]
    costs: tuple[ChunkCost, ...]
    reduction: Counter[str]
    message: int


def plan_memory(config: Config, world_size: int, host_is_device: bool) -> MemoryPlan:
    """The memory of a valid configuration on `world_size` ranks. Needs neither GPUs nor processes.

    `host_is_device`: tensors live in host memory anyway, so that an offloaded optimizer needs no copies
    there. Raises `ConfigErrors` where --recompute-budget cannot be met.
    """
    chosen, _ = within_budget(config)
    schedule = ConfiguredSchedule(config).of(config.num_microbatches(world_size))
    layers = stage_layers(config)
    known: dict[tuple[tuple[int, bool, bool], ...], _Stage] = {}
    ranks = []
    for rank, stages in enumerate(schedule.stages):
        shape = tuple((len(layers[stage]), stage == 0, stage == len(layers) - 1) for stage in stages)
        if shape not in known:
            known[shape] = _measure(chosen, world_size, rank, host_is_device)
        stage = known[shape]
        found = moments(schedule, rank, stage.costs, stage.message, stage.reduction)
        chunks = tuple(layers[stage] for stage in stages)
        most_on_host = max(moment.held[HOST] for moment in found)
        told = account(stage.buffers, peak(found), most_on_host)
        ranks.append(RankPlan(rank, chunks, stage.buffers, told, tuple(found)))
    return MemoryPlan(config, world_size, schedule, tuple(ranks))


def _measure(config: Config, world_size: int, pipeline_rank: int, host_is_device: bool) -> _Stage:
    if config.optimizer.optimizer_impl == "apex":  # runs on GPUs only; its state is as large
        config = replace(config, optimizer_impl="auto")
    if config.precision.gradient_accumulation_fusion_impl == "apex":
        config = replace(config, gradient_accumulation_fusion_impl="native")
    parallel, device = config.parallel, torch.device("cpu")
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    first = pipeline_rank * (world_size // pipeline)
    with FakeTensorMode():
        replicas = kv_replicas(config.model, tensor)
        topology = planned_topology(world_size, first, tensor, pipeline, device, replicas)
        trainer = Trainer(config, topology, IMPLEMENTATIONS if host_is_device else ALLOCATIONS_ON_GPU)
        buffers = buffer_bytes(trainer)
        if not host_is_device:
            copies = sum(tensor.nbytes for tensor in trainer.optimizer.copied())
            buffers.update(optimizer=copies, offloaded=copies)
        batch = _batch(config, device)
        trainer.buckets.start_step(2)
        costs = tuple(measure_chunk(trainer, chunk, batch) for chunk in range(len(trainer.stages)))
        with LiveBytes() as live:
            live.label = COMMUNICATION
            trainer.buckets.finish()
        message = torch.empty(trainer.hidden_shape, dtype=trainer.dtype).nbytes
    return _Stage(buffers, costs, live.peak, message)


def _batch(config: Config, device: torch.device) -> Batch:
    """A micro-batch as the loader makes them."""
    micro, seq = config.batch.micro_batch_size, config.model.seq_length
    tokens = torch.zeros(micro, seq + 1, dtype=torch.int64, device=device)
    return Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        torch.ones((), device=device).expand(micro, seq),
        torch.arange(seq, device=device).expand(micro, seq),
        torch.zeros(micro, dtype=torch.int64),
    )
