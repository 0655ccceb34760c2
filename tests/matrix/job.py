"""What the workers run: all model variants one after another on one layout."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from megalite.config import Config, kv_replicas
from megalite.parallel.topology import Topology, build_topology
from megalite.training.step import Trainer
from tests.matrix.batches import microbatches, read_microbatches
from tests.matrix.cases import LEARNING_RATES, STEPS, Layout
from tests.matrix.gather import LocalBlock, local_blocks


@dataclass(frozen=True)
class Trained:
    """One rank's view of one training. `losses` are this rank's parts, to be summed over dp."""

    losses: list[float]
    grad_norms: list[float]
    skipped: list[bool]
    gradients: list[list[LocalBlock]]
    weights: list[LocalBlock]
    parameter_count: int


def random_weight(name: str, shape: Sequence[int]) -> Tensor:
    """Weights that all matter: biases far from 0, norm weights not 1. A function of name and shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = 0.3 * torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return values + 1 if name.endswith("norm.weight") else values


def randomize(trainer: Trainer) -> None:
    """Fill what the rank keeps of the weights; the padding stays as it is."""
    with trainer.loading(with_optimizer=False) as blocks:
        for block in blocks:
            name, shape = block.name.removeprefix("model."), block.global_shape
            place = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.tensor.shape, strict=True))
            block.tensor.copy_(random_weight(name, shape)[place])


def topologies(layout: Layout, configs: Sequence[Config]) -> list[Topology]:
    """A topology for each config; one for all that share key/value heads alike."""
    replicas = [kv_replicas(config.model, layout.tensor) for config in configs]
    made = {
        number: build_topology(
            layout.tensor, layout.pipeline, torch.device("cpu"), timedelta(minutes=2), number
        )
        for number in dict.fromkeys(replicas)
    }
    return [made[number] for number in replicas]


def train_three_steps(layout: Layout, configs: Sequence[Config]) -> list[Trained]:
    results = []
    for config, topology in zip(configs, topologies(layout, configs), strict=True):
        trainer = Trainer(config, topology)
        randomize(trainer)
        losses, norms, skipped, gradients = [], [], [], []
        batches = read_microbatches(
            layout,
            topology.dp.rank,
            config.batch.micro_batch_size,
            config.data.reset_attention_mask,
            config.data.num_workers,
        )
        for step, mine in enumerate(batches):
            outcome = trainer.train_step(mine, LEARNING_RATES[step])
            losses.append(float(outcome.loss))
            norms.append(float(outcome.update.grad_norm))
            skipped.append(bool(outcome.update.skipped))
            gradients.append(
                [b for one in trainer.buckets.buckets for b in local_blocks(one.grads, one.slots)]
            )
        count = trainer.parameter_count()
        results.append(Trained(losses, norms, skipped, gradients, weights_of(trainer), count))
    return results


def initial_weights(layout: Layout, configs: Sequence[Config]) -> list[list[LocalBlock]]:
    return [weights_of(one) for one in map(Trainer, configs, topologies(layout, configs))]


def weights_of(trainer: Trainer) -> list[LocalBlock]:
    """What the rank holds of the weights."""
    trainer.buckets.wait_for_weights()
    return [block for one in trainer.buckets.held for block in local_blocks(one.weights, one.slots)]


def printed_losses(layout: Layout, configs: Sequence[Config], steps: int) -> list[list[float]]:
    """This rank's parts of the losses of so many steps on the same three batches over and over."""
    results = []
    for config, topology in zip(configs, topologies(layout, configs), strict=True):
        trainer = Trainer(config, topology)
        losses = []
        for step in range(steps):
            mine = microbatches(step % STEPS, layout, topology.dp.rank, config.batch.micro_batch_size)
            losses.append(float(trainer.train_step(mine, config.optimizer.lr).loss))
        results.append(losses)
    return results


@dataclass(frozen=True)
class Outcomes:
    """One rank's steps. `moved` tells whether any of its weights changed."""

    losses: list[float]
    skipped: list[bool]
    loss_scales: list[float]
    moved: list[bool]


def outcomes(layout: Layout, configs: Sequence[Config], steps: int) -> list[Outcomes]:
    results = []
    for config, topology in zip(configs, topologies(layout, configs), strict=True):
        trainer = Trainer(config, topology)
        one = Outcomes([], [], [], [])
        for step in range(steps):
            before = [bucket.weights.clone() for bucket in trainer.buckets.buckets]
            mine = microbatches(step % STEPS, layout, topology.dp.rank, config.batch.micro_batch_size)
            outcome = trainer.train_step(mine, config.optimizer.lr)
            after = [bucket.weights for bucket in trainer.buckets.buckets]
            one.losses.append(float(outcome.loss))
            one.skipped.append(bool(outcome.update.skipped))
            one.loss_scales.append(float(outcome.update.loss_scale))
            one.moved.append(not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        results.append(one)
    return results
