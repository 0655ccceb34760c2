"""One process's share of a model in training, from its parameters to its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch

from megalite.checkpoint import Block, parameter_blocks
from megalite.config import Config, stage_layers, zero_stage
from megalite.data.batch import Batch
from megalite.kernels.weight_gradient import IMPLEMENTATIONS, Accumulate
from megalite.model.gpt import GPTStage, StagePlace, build_stages
from megalite.optim.optimizer import Optimizer, StateBlock, StepStats
from megalite.optim.state import narrow_dtype
from megalite.parallel.buckets import BucketOptions, GradientBuckets
from megalite.parallel.mappings import all_reduce
from megalite.parallel.params import ParameterFactory, global_block, record_of
from megalite.parallel.topology import Topology, axis_ranks, join_ends
from megalite.parallel.weight_gradients import WeightGradients
from megalite.pipeline.configured import ConfiguredSchedule
from megalite.pipeline.executor import Stage, run_schedule
from megalite.pipeline.links import build_links
from megalite.pipeline.schedule import Schedule, forward_only


@dataclass(frozen=True)
class StepOutcome:
    """Results of a step, scalars on the device so that nothing waits for them.

    `loss`: this rank's part of the mean over the global batch's tokens, 0 where the last stage is not; its
    sum over dp and pp is the loss. `update`: what the optimizer did.
    """

    loss: torch.Tensor
    update: StepStats


def valid_tokens(microbatches: Sequence[Batch]) -> torch.Tensor:
    """Number of tokens that count in the loss, int64 scalar."""
    return torch.stack([(batch.loss_mask != 0).sum() for batch in microbatches]).sum()


class Trainer:
    """The pipeline stages of this process and all that updates them."""

    def __init__(
        self,
        config: Config,
        topology: Topology,
        weight_gradients: Mapping[str, Accumulate] = IMPLEMENTATIONS,
    ):
        """`weight_gradients`: how linear layers add theirs, by --gradient-accumulation-fusion-impl; `none`:
        without fusion.
        """
        self.config = config
        self.dtype: torch.dtype = getattr(torch, config.precision.params_dtype)
        parallel = config.parallel
        self.schedule = ConfiguredSchedule(config)
        placement, layers = self.schedule.placement, stage_layers(config)
        pipelines = axis_ranks(
            topology.world_size, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        )["pp"]
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        self.topology = topology = join_ends(topology, pipelines, placement.ends, timeout)
        make = ParameterFactory(
            topology,
            self.dtype,
            config.run.seed,
            parallel.sequence_parallel,
            parallel.tp_comm_overlap,
            deferred=True,
        )
        places = [
            StagePlace(layers[stage], first=stage == 0, last=stage == len(layers) - 1)
            for stage in placement.stages[topology.pp.rank]
        ]
        self.stages = build_stages(config.model, make, places, config.loss, config.activations)
        self.links = [] if topology.planned else build_links(placement, pipelines, topology.device, timeout)
        parameters = [parameter for stage in self.stages for parameter in stage.parameters()]
        fusion = config.precision.gradient_accumulation_fusion_impl
        accumulate = weight_gradients[fusion if config.precision.gradient_accumulation_fusion else "none"]
        options = BucketOptions(
            bucket_size=parallel.ddp_bucket_size,
            num_buckets=parallel.ddp_num_buckets,
            overlap=parallel.overlap_grad_reduce,
            reduce_in_bf16=parallel.grad_reduce_in_bf16,
            main_grads=narrow_dtype(config.precision.main_grads_dtype),
            zero_stage=zero_stage(config),
            overlap_gather=parallel.overlap_param_gather,
            prefetch_units=parallel.zero_prefetch_layers,
        )
        units = [unit for stage in self.stages for unit in stage.units()]
        self.buckets = GradientBuckets(parameters, topology, options, units, accumulate)
        self.optimizer = Optimizer(
            self.buckets.buckets,
            config.optimizer,
            config.precision,
            self.buckets.norm_axis,
            topology.device,
            self.buckets.counted_in_norm,
        )

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """Of what stages pass on: (seq, micro_batch, hidden), with sequence parallelism a shard."""
        model = self.config.model
        shards = self.topology.tp.size if self.config.parallel.sequence_parallel else 1
        return model.seq_length // shards, self.config.batch.micro_batch_size, model.hidden_size

    def activation_bytes_on_host(self) -> int:
        """Bytes of activations that wait in host memory now."""
        return sum(stage.recompute.bytes_on_host() for stage in self.stages)

    def calls(self, normaliser: torch.Tensor | None, loss_grad: torch.Tensor | None) -> list[Stage]:
        """The stages as a schedule calls them; the last one's loss is over `normaliser`.

        `loss_grad`: what backward will hand in for that, if it is known by now.
        """

        def call_of(stage: GPTStage) -> Stage:
            if stage.head is None or normaliser is None:
                return stage
            summed_loss_grad = None if loss_grad is None else loss_grad / normaliser
            return lambda batch, hidden: stage(batch, hidden, summed_loss_grad) / normaliser

        return [call_of(stage) for stage in self.stages]

    def train_step(self, microbatches: Sequence[Batch], learning_rate: float) -> StepOutcome:
        """Forward and backward over this rank's micro-batches, reduction, update."""
        tokens = all_reduce(valid_tokens(microbatches), self.topology.dp).clamp(min=1)
        self.buckets.start_step(len(microbatches))
        losses = self._run(
            self.schedule.of(len(microbatches)),
            microbatches,
            normaliser=tokens,
            loss_grad=self.optimizer.loss_scale,
            weight_gradients=self.buckets.weight_gradients,
        )
        self.buckets.finish()
        with self.topology.traffic.part("optimizer"):
            update = self.optimizer.step(learning_rate)
        self.buckets.gather_weights()
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=self.topology.device)
        return StepOutcome(loss, update)

    def evaluate(
        self, batches: Iterator[Sequence[Batch]], iterations: int, leave: Callable[[], bool]
    ) -> torch.Tensor | None:
        """Mean loss over the valid tokens of `iterations` global batches: fp64, the same on every rank. None
        where `leave`, asked after each, and the same on every rank, too, ended it before the last.
        """
        left = False
        total = torch.zeros(2, dtype=torch.float64, device=self.topology.device)  # summed loss, tokens
        for stage in self.stages:
            stage.eval()
        for number in range(1, iterations + 1):
            microbatches = next(batches)
            for loss in self._run(forward_only(self.schedule.of(len(microbatches))), microbatches):
                total[0] += loss
            if self.stages[-1].head is not None:
                total[1] += valid_tokens(microbatches)
            if left := number < iterations and leave():
                break
        for stage in self.stages:
            stage.train()
        self.buckets.give_up_weights()
        if left:
            return None
        all_reduce(all_reduce(total, self.topology.dp), self.topology.pp)
        return total[0] / total[1].clamp(min=1)

    def _run(
        self,
        schedule: Schedule,
        microbatches: Sequence[Batch],
        normaliser: torch.Tensor | None = None,
        loss_grad: torch.Tensor | None = None,
        weight_gradients: WeightGradients | None = None,
    ) -> list[torch.Tensor]:
        """Loss of each micro-batch, summed over tokens, over `normaliser`; where the last stage is."""
        return run_schedule(
            schedule[self.topology.pp.rank],
            self.calls(normaliser, loss_grad),
            microbatches,
            self.links,
            hidden_shape=self.hidden_shape,
            hidden_dtype=self.dtype,
            device=self.topology.device,
            loss_grad=loss_grad,
            weight_gradients=weight_gradients,
            sends_in_flight=schedule.sends_in_flight,
            traffic=self.topology.traffic,
        )

    def blocks(self, with_optimizer: bool = True) -> Iterator[Block]:
        """Every tensor that a checkpoint holds, as this rank's rectangle of the global tensor, to be read."""
        yield from self._weight_blocks()
        if with_optimizer:
            yield from _state_blocks(self.optimizer.state_blocks())

    @contextmanager
    def loading(self, with_optimizer: bool = True) -> Iterator[list[Block]]:
        """The same blocks to be filled; what was filled in counts when the context ends.

        Without the optimizer's state the weights are its new master.
        """
        if not with_optimizer:
            yield list(self._weight_blocks())
            self.optimizer.copy_weights_to_master()
            return
        with self.optimizer.loading() as states:
            yield [*self._weight_blocks(), *_state_blocks(states)]

    def _weight_blocks(self) -> Iterator[Block]:
        self.buckets.wait_for_weights()
        for bucket in self.buckets.held:
            for slot in bucket.slots:
                values = bucket.weights[slot.start : slot.stop]
                yield from parameter_blocks("model", slot.param, values, slot.first)

    def parameter_count(self) -> int:
        """Parameters of the whole model, each once, without vocabulary padding. A collective over tp x pp."""
        counted = [param for param in self.buckets.parameters if record_of(param).counted]
        local = sum(prod(global_block(param)[1]) for param in counted)
        return int(all_reduce(torch.tensor(local, device=self.topology.device), self.topology.model).item())


def _state_blocks(states: Iterable[StateBlock]) -> Iterator[Block]:
    for kind, param, values, first in states:
        yield from parameter_blocks(f"optimizer.{kind}", param, values, first)
