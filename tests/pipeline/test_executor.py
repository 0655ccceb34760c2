"""The executor on real processes: exact gradients, memory as the table says, errors that surface."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megalite.parallel.topology import axis_ranks, build_topology
from megalite.pipeline.executor import run_schedule
from megalite.pipeline.links import ChunkLinks, build_links
from megalite.pipeline.schedule import (
    Action,
    Kind,
    Schedule,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    v_stages,
)
from megalite.pipeline.simulation import in_flight_peaks
from tests.pool import JobFailed, WorkerPool

CPU = torch.device("cpu")
SHAPE = (3, 2, 5)  # (seq, micro_batch, hidden)
LOSS_SCALE = 8.0


class Toy(nn.Module):
    """One stage of the toy model: linear and tanh, a squared-error loss on the last."""

    def __init__(self, index: int, last: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.weight = nn.Parameter(
            torch.randn(SHAPE[-1], SHAPE[-1], generator=generator, dtype=torch.float64)
        )
        self.last = last

    def forward(self, batch: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        output = torch.tanh((batch if hidden is None else hidden) @ self.weight)
        return (output - batch).square().sum() if self.last else output


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1234)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(count)]


def reference(stages: int, microbatches: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses by micro-batch and gradients by stage of the whole chain in this process."""
    chain = [Toy(index, index == stages - 1) for index in range(stages)]
    losses = []
    for batch in batches(microbatches):
        hidden: torch.Tensor | None = None
        for stage in chain:
            hidden = stage(batch, hidden)
        assert hidden is not None
        (hidden * LOSS_SCALE).backward()
        losses.append(hidden.detach())
    return losses, [gradient_of(stage) for stage in chain]


def gradient_of(stage: Toy) -> torch.Tensor:
    assert stage.weight.grad is not None
    return stage.weight.grad


def links_of(schedule: Schedule) -> list[ChunkLinks]:
    """One pipeline over all workers."""
    return build_links(schedule, [range(dist.get_world_size())], CPU, timedelta(seconds=60))


def train(schedules: list[Schedule]) -> list[tuple[list[torch.Tensor], dict[int, torch.Tensor]]]:
    """Run each schedule: this rank's losses, gradients by stage."""
    rank = dist.get_rank()
    links = links_of(schedules[0])
    outcome = []
    for schedule in schedules:
        chunks = {index: Toy(index, index == schedule.num_stages - 1) for index in schedule.stages[rank]}
        losses = run_schedule(
            schedule[rank],
            list(chunks.values()),
            batches(schedule.microbatches),
            links,
            hidden_shape=SHAPE,
            hidden_dtype=torch.float64,
            device=CPU,
            loss_grad=torch.tensor(LOSS_SCALE, dtype=torch.float64),
            sends_in_flight=schedule.sends_in_flight,
        )
        outcome.append((losses, {i: gradient_of(stage) for i, stage in chunks.items()}))
    return outcome


def folded(pp: int, microbatches: int) -> Schedule:
    """GPipe on a V of two chunks a rank: the last rank hands hidden states over to itself."""
    flat = gpipe(1, microbatches)[0]
    ranks = tuple(
        tuple(
            type(action)(action.kind, action.microbatch, chunk)
            for chunks, kind in (((0, 1), "F"), ((1, 0), "B"))
            for chunk in chunks
            for action in flat
            if action.kind.value == kind
        )
        for _ in range(pp)
    )
    return Schedule("folded", microbatches, ranks, v_stages(pp), (2 * microbatches,) * pp, microbatches)


def crossed(microbatches: int) -> Schedule:
    """One rank with two chunks: the second takes the micro-batches in the reverse order of the first."""
    there = range(microbatches)
    back = there[::-1]
    order = (("F", 0, there), ("F", 1, back), ("B", 1, there), ("B", 0, back))
    actions = tuple(Action(Kind(kind), m, chunk) for kind, chunk, batches in order for m in batches)
    return Schedule("crossed", microbatches, (actions,), ((0, 1),), (2 * microbatches,), microbatches)


SWEEPS = {
    "gpipe": [gpipe(4, m) for m in range(1, 10)],
    "1f1b": [one_f_one_b(4, m) for m in range(1, 10)],
    "1f1b, 2 stages": [one_f_one_b(2, m) for m in range(1, 10)],
    "1f1b, 1 stage": [one_f_one_b(1, m) for m in range(1, 4)],
    "interleaved": [interleaved(4, m, 2) for m in range(1, 10)],
    "interleaved, 2 ranks": [interleaved(2, m, 3, group=4) for m in range(1, 10)],
    "folded": [folded(3, m) for m in range(1, 5)],
    "crossed": [crossed(m) for m in range(1, 5)],
}


@pytest.mark.parametrize("name", SWEEPS)
def test_gradients_equal_one_process(pool: WorkerPool, name: str) -> None:
    schedules = SWEEPS[name]
    by_rank = pool.run(len(schedules[0]), train, schedules)
    for case, schedule in enumerate(schedules):
        losses, gradients = reference(schedule.num_stages, schedule.microbatches)
        for rank, results in enumerate(by_rank):
            found, found_gradients = results[case]
            has_last = schedule.num_stages - 1 in schedule.stages[rank]
            torch.testing.assert_close(found, losses if has_last else [], rtol=0, atol=0)
            for stage, gradient in found_gradients.items():
                torch.testing.assert_close(gradient, gradients[stage], rtol=1e-13, atol=1e-13)


def train_on_topology(microbatches: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    topology = build_topology(tensor=2, pipeline=2, device=CPU)
    schedule = one_f_one_b(2, microbatches)
    stage = Toy(topology.pp.rank, topology.pp.rank == 1)
    losses = run_schedule(
        schedule[topology.pp.rank],
        [stage],
        batches(microbatches),
        build_links(schedule, axis_ranks(8, 2, 2)["pp"], CPU, timedelta(seconds=60)),
        hidden_shape=SHAPE,
        hidden_dtype=torch.float64,
        device=CPU,
        loss_grad=torch.tensor(LOSS_SCALE, dtype=torch.float64),
    )
    return losses, gradient_of(stage)


def test_pipelines_side_by_side_on_the_products_topology(pool: WorkerPool) -> None:
    losses, gradients = reference(2, 5)
    for rank, (found, gradient) in enumerate(pool.run(8, train_on_topology, 5)):
        stage = rank // 4
        torch.testing.assert_close(found, losses if stage == 1 else [], rtol=0, atol=0)
        torch.testing.assert_close(gradient, gradients[stage], rtol=1e-13, atol=1e-13)


class Held:
    """What autograd gets to keep in a saved tensor's place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def count_activations(schedule: Schedule) -> tuple[int, int, int, int]:
    """Micro-batches with living saved tensors and living inputs: both peaks, then both after the run."""
    rank = dist.get_rank()
    toy = Toy(rank, rank == dist.get_world_size() - 1)
    saved: weakref.WeakKeyDictionary[Held, int] = weakref.WeakKeyDictionary()
    inputs: weakref.WeakSet[Any] = weakref.WeakSet()
    peaks = [0, 0]

    def stage(batch: tuple[int, torch.Tensor], hidden: torch.Tensor | None) -> torch.Tensor:
        microbatch, values = batch

        def pack(tensor: torch.Tensor) -> Held:
            held = Held(tensor)
            saved[held] = microbatch
            return held

        if hidden is not None:
            inputs.add(hidden.grad_fn or hidden)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            output = toy(values, hidden)
        peaks[:] = [max(peaks[0], len(set(saved.values()))), max(peaks[1], len(inputs))]
        return output

    run_schedule(
        schedule[rank],
        [stage],
        list(enumerate(batches(schedule.microbatches))),
        links_of(schedule),
        hidden_shape=SHAPE,
        hidden_dtype=torch.float64,
        device=CPU,
    )
    return peaks[0], peaks[1], len(saved), len(inputs)


@pytest.mark.parametrize(
    "schedule", [gpipe(4, 6), one_f_one_b(4, 6), one_f_one_b(4, 2)], ids=lambda s: s.name
)
def test_activations_live_as_long_as_the_table_says(pool: WorkerPool, schedule: Schedule) -> None:
    expected = in_flight_peaks(schedule)
    for rank, counts in enumerate(pool.run(4, count_activations, schedule)):
        assert counts == (expected[rank], expected[rank] if rank else 0, 0, 0)


def evaluate(microbatches: int) -> tuple[list[torch.Tensor], bool]:
    """The last stage returns hidden states, not a loss."""
    rank = dist.get_rank()
    schedule = forward_only(one_f_one_b(dist.get_world_size(), microbatches))
    with_graph: list[bool] = []

    def stage(batch: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        output = toy(batch, hidden)
        with_graph.append(output.requires_grad)
        return output

    toy = Toy(rank, last=False)
    results = run_schedule(
        schedule[rank],
        [stage],
        batches(microbatches),
        links_of(schedule),
        hidden_shape=SHAPE,
        hidden_dtype=torch.float64,
        device=CPU,
    )
    return results, any(with_graph)


def test_forward_only_keeps_no_graph(pool: WorkerPool) -> None:
    by_rank = pool.run(3, evaluate, 7)
    assert not any(with_graph for _, with_graph in by_rank)
    assert [len(results) for results, _ in by_rank] == [0, 0, 7]
    for result, batch in zip(by_rank[2][0], batches(7), strict=True):
        hidden = None
        for index in range(3):
            hidden = Toy(index, last=False)(batch, hidden)
        torch.testing.assert_close(result, hidden, rtol=0, atol=0)


def misbehave(fault: str) -> None:
    """Rank 1 of 3 does not do what its neighbours count on."""
    rank = dist.get_rank()
    toy = Toy(rank, rank == 2)

    def stage(batch: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        output = toy(batch, hidden)
        if fault == "raise" and rank == 1:
            raise RuntimeError("this stage is broken")
        if fault == "shape" and rank == 1:
            return output[:-1]
        if fault == "dtype" and rank == 1:
            return output.float()
        if fault == "loss" and rank == 2:
            return output.expand(4)
        if fault == "constant" and rank == 1:
            return toy.weight.sum().expand(SHAPE)
        return output

    schedule = one_f_one_b(3, 4)
    run_schedule(
        schedule[rank],
        [stage],
        batches(4),
        links_of(schedule),
        hidden_shape=SHAPE,
        hidden_dtype=torch.float64,
        device=CPU,
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"rank 1 of 3 failed(?s:.*)this stage is broken"),
        ("shape", r"F of micro-batch 0, chunk 0: the stage returned \(2, 2, 5\) .* receives \(3, 2, 5\)"),
        ("dtype", r"torch.float32, but the next stage receives .* of torch.float64"),
        ("loss", r"F of micro-batch 0, chunk 0: the last stage returned \(4,\), not a scalar loss"),
        ("constant", r"B of micro-batch 0, chunk 0: the stage's output does not depend on the hidden states"),
    ],
)
def test_a_faulty_stage_surfaces(pool: WorkerPool, fault: str, message: str) -> None:
    with pytest.raises(JobFailed, match=message):
        pool.run(3, misbehave, fault)


def nothing(batch: Any, hidden: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(())


@pytest.mark.parametrize(
    ("schedule", "count", "message"),
    [
        (one_f_one_b(1, 3), 2, "the table is for 3 micro-batches, but 2 were given"),
        (interleaved(1, 2, 2), 2, "the table has 2 chunks, but 1 stages were given"),
    ],
)
def test_tables_that_do_not_fit_are_refused(schedule: Schedule, count: int, message: str) -> None:
    links = build_links(one_f_one_b(1, 1), [[0]], CPU, timedelta(seconds=60))
    with pytest.raises(ValueError, match=message):
        run_schedule(
            schedule[0],
            [nothing],
            batches(count),
            links,
            hidden_shape=SHAPE,
            hidden_dtype=torch.float64,
            device=CPU,
        )
