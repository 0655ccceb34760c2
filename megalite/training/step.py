"""One process's share of a model in training: parameters, buckets, optimizer, schedule, and what a step does
with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from megalite.checkpoint import Block
from megalite.config import Config
from megalite.data.batch import Batch
from megalite.model.gpt import GPTStage
from megalite.optim.optimizer import Optimizer
from megalite.parallel.buckets import GradientBuckets
from megalite.parallel.mappings import all_reduce
from megalite.parallel.params import global_block, narrow_to_block, record_of
from megalite.parallel.topology import Axis, Topology
from megalite.pipeline.executor import run_schedule
from megalite.pipeline.schedule import forward_only, one_f_one_b


@dataclass(frozen=True)
class StepOutcome:
    """Results of a step, scalars on the device so that nothing waits for them.

    ``loss``: this rank's part of the mean over the global batch's tokens; its sum over dp is the loss (0
    before the last stage). The rest are the optimizer's StepStats."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    loss_scale: torch.Tensor
    stuck: torch.Tensor


def valid_tokens(microbatches: Sequence[Batch], dp: Axis) -> torch.Tensor:
    """Number of tokens that count in the loss of the global batch, int64 scalar."""
    count = torch.stack([(batch.loss_mask != 0).sum() for batch in microbatches]).sum()
    return all_reduce(count, dp)


class Trainer:
    """The model stage of this process and all that updates it."""

    def __init__(self, config: Config, topology: Topology):
        self.config, self.topology = config, topology
        dtype: torch.dtype = getattr(torch, config.precision.params_dtype)
        sequence_parallel = config.parallel.sequence_parallel
        self.model = GPTStage(config.model, topology, dtype, config.run.seed, sequence_parallel)
        parallel = config.parallel
        self.buckets = GradientBuckets(
            self.model.parameters(), topology, parallel.ddp_bucket_size, parallel.overlap_grad_reduce
        )
        self.optimizer = Optimizer(
            self.buckets.buckets, config.optimizer, config.precision, topology.model, topology.device
        )

    def train_step(self, microbatches: Sequence[Batch], learning_rate: float) -> StepOutcome:
        """Forward and backward over this rank's micro-batches, reduction, update."""
        tokens = valid_tokens(microbatches, self.topology.dp).clamp(min=1)

        def stage(batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
            output = self.model(batch, hidden)
            return output / tokens if self.topology.is_last_stage else output

        self.buckets.zero_grads()
        losses = run_schedule(
            one_f_one_b(self.topology.pp.size, len(microbatches))[self.topology.pp.rank],
            stage,
            microbatches,
            self.topology.edges,
            hidden_shape=self.model.hidden_shape(self.config.batch.micro_batch_size),
            hidden_dtype=self.model.dtype,
            device=self.topology.device,
            loss_grad=self.optimizer.loss_scale,
            before_last_backward=self.buckets.start_last_backward,
        )
        self.buckets.finish()
        stats = self.optimizer.step(learning_rate)
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=self.topology.device)
        return StepOutcome(loss, stats.grad_norm, stats.skipped, stats.loss_scale, stats.stuck)

    def evaluate(self, batches: Iterator[Sequence[Batch]], iterations: int) -> torch.Tensor:
        """Mean loss over the valid tokens of ``iterations`` global batches: fp64, right on the last stage."""
        total = torch.zeros(2, dtype=torch.float64, device=self.topology.device)  # summed loss, tokens
        for _ in range(iterations):
            microbatches = next(batches)
            for loss in self.forward(microbatches):
                total[0] += loss
            total[1] += torch.stack([(batch.loss_mask != 0).sum() for batch in microbatches]).sum()
        all_reduce(total, self.topology.dp)
        return total[0] / total[1].clamp(min=1)

    def forward(self, microbatches: Sequence[Batch]) -> list[torch.Tensor]:
        """Summed loss of each micro-batch, on the last stage; empty elsewhere."""
        return run_schedule(
            forward_only(self.topology.pp.size, len(microbatches))[self.topology.pp.rank],
            self.model,
            microbatches,
            self.topology.edges,
            hidden_shape=self.model.hidden_shape(self.config.batch.micro_batch_size),
            hidden_dtype=self.model.dtype,
            device=self.topology.device,
        )

    def blocks(self, with_optimizer: bool = True) -> Iterator[Block]:
        """Every tensor that a checkpoint holds, as this rank's rectangle of the global tensor."""
        for param in self.buckets.parameters:
            yield from parameter_block("model", param, param.detach())
        if with_optimizer:
            for kind, param, state in self.optimizer.state_blocks():
                yield from parameter_block(f"optimizer.{kind}", param, state)

    def parameter_count(self) -> int:
        """Parameters of the whole model, each counted once, vocabulary padding not counted. A collective over
        tp x pp.
        """
        counted = [param for param in self.buckets.parameters if record_of(param).counted]
        local = sum(prod(global_block(param)[1]) for param in counted)
        return int(all_reduce(torch.tensor(local, device=self.topology.device), self.topology.model).item())


def parameter_block(prefix: str, param: torch.nn.Parameter, tensor: torch.Tensor) -> Iterator[Block]:
    """The block of one tensor shaped as ``param``; none where the rank holds only padding."""
    record = record_of(param)
    offsets, sizes = global_block(param)
    if prod(sizes):
        yield Block(f"{prefix}.{record.name}", record.global_shape, offsets, narrow_to_block(tensor, param))
