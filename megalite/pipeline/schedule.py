"""Pipeline schedules as data: for each rank the list of what it computes, in order.

The model is a chain of stages; every rank holds one stage or several (its chunks). Sends and receives are not
part of a table, they follow from it: a forward receives from the stage before and sends to the stage after, a
backward the other way round. `checker.check` proves a table sound, `simulation.simulate` gives its times.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property


class Kind(Enum):
    """What one action computes for one micro-batch of one chunk."""

    F = "F"  # forward
    B = "B"  # backward: input and weight gradients
    I = "I"  # noqa: E741  input gradient only; the weight gradient follows as a W of its own
    W = "W"  # weight gradient put off by an I


@dataclass(frozen=True)
class Action:
    """One step of a rank: `kind` on micro-batch `microbatch` of this rank's chunk `chunk`."""

    kind: Kind
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True)
class Schedule:
    """The actions of all ranks; `schedule[rank]` is what `executor.run_schedule` takes.

    `stages[rank][chunk]` is the place of a chunk in the chain of stages. `max_in_flight[rank]` is the claimed
    bound on the activations a rank holds at once, in chunks' micro-batches: each from its forward until its
    last gradient. `sends_in_flight` bounds the sent tensors kept on one link: a further send waits until the
    first of them has been received. The checker proves that this cannot deadlock, the tests that it costs no
    time in any schedule here.
    """

    name: str
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    stages: tuple[tuple[int, ...], ...]
    max_in_flight: tuple[int, ...]
    sends_in_flight: int = 2

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        return self.actions[rank]

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return sum(len(chunks) for chunks in self.stages)

    def rank_of(self, stage: int) -> int | None:
        """The rank that holds `stage`, None beyond the ends of the chain."""
        return self._ranks.get(stage)

    @property
    def ends(self) -> tuple[int, int]:
        """The ranks that hold the first and the last stage."""
        return self._ranks[0], self._ranks[self.num_stages - 1]

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {stage: rank for rank, chunks in enumerate(self.stages) for stage in chunks}


def loop_stages(pp: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Chunk c of rank r is stage c * pp + r: the chain runs through all ranks, then again from rank 0."""
    return tuple(tuple(chunk * pp + rank for chunk in range(chunks)) for rank in range(pp))


def v_stages(pp: int) -> tuple[tuple[int, ...], ...]:
    """Two chunks: the chain runs down the ranks and back up, so rank 0 holds the first and the last stage."""
    return tuple((rank, 2 * pp - 1 - rank) for rank in range(pp))


def forward_only(schedule: Schedule) -> Schedule:
    """A schedule's forwards in its order, for evaluation: nothing is kept for backward."""
    ranks = tuple(tuple(action for action in rank if action.kind is Kind.F) for rank in schedule.actions)
    return replace(schedule, name="forward-only", actions=ranks, max_in_flight=(0,) * len(schedule))


def gpipe(pp: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2019). Bubble (pp - 1) / microbatches."""
    _require_positive(pp=pp, microbatches=microbatches)
    actions = tuple(Action(kind, m) for kind in (Kind.F, Kind.B) for m in range(microbatches))
    return Schedule("gpipe", microbatches, (actions,) * pp, loop_stages(pp), (microbatches,) * pp)


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """PipeDream-flush (Narayanan et al., 2021): GPipe's time, but rank k holds at most pp - k activations."""
    _require_positive(pp=pp, microbatches=microbatches)
    forwards = [Action(Kind.F, m) for m in range(microbatches)]
    backwards = [Action(Kind.B, m) for m in range(microbatches)]
    ranks = (_alternate(forwards, backwards, warmup=pp - rank - 1) for rank in range(pp))
    bounds = tuple(min(microbatches, pp - rank) for rank in range(pp))
    return Schedule("1f1b", microbatches, tuple(ranks), loop_stages(pp), bounds)


def interleaved(pp: int, microbatches: int, chunks: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., 2021): bubble (pp - 1) / (microbatches * chunks).

    Micro-batches go in groups of `group` (default pp, the smallest that keeps every rank busy): a rank takes
    a whole group through one chunk before it turns to the next. An incomplete last group is allowed. Raises
    ValueError for a group smaller than pp.
    """
    group = pp if group is None else group
    _require_positive(pp=pp, microbatches=microbatches, chunks=chunks)
    if group < pp:
        raise ValueError(
            f"group of {group} micro-batches is smaller than pp {pp}: ranks would wait in every group"
        )
    # A short last group is planned like a full one, then what it lacks is left out: every order stays valid.
    planned = -(-microbatches // group) * group
    order = [
        (microbatch, chunk)
        for first in range(0, planned, group)
        for chunk in range(chunks)
        for microbatch in range(first, first + group)
    ]
    forwards = [Action(Kind.F, m, chunk) for m, chunk in order]
    backwards = [Action(Kind.B, m, chunks - 1 - chunk) for m, chunk in order]
    ranks = []
    bounds = []
    for rank in range(pp):
        warmup = pp - rank - 1 if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * group
        ranks.append(_without_surplus(_alternate(forwards, backwards, warmup), microbatches))
        bounds.append(min(microbatches * chunks, warmup + 1))
    # The last rank sends the first a whole group before the first turns to its next chunk.
    sends = max(2, group - pp + 1)
    return Schedule("interleaved", microbatches, tuple(ranks), loop_stages(pp, chunks), tuple(bounds), sends)


def zb_h1(pp: int, microbatches: int) -> Schedule:
    """Zero-bubble H1 (Qi et al., 2023): weight gradients fill bubbles, in the memory of 1F1B's first rank.

    Rank k puts each weight gradient off by k micro-batches. The bubble lasts (pp - 1) * (f + i - w), a third
    of 1F1B's when the three take the same time.
    """
    _require_positive(pp=pp, microbatches=microbatches)
    ranks = []
    for rank in range(pp):
        forwards = [Action(Kind.F, m) for m in range(microbatches)]
        inputs = [Action(Kind.I, m) for m in range(microbatches)]
        actions: list[Action] = []
        for action in _alternate(forwards, inputs, warmup=pp - rank - 1):
            actions.append(action)
            if action.kind is Kind.I and action.microbatch >= rank:
                actions.append(Action(Kind.W, action.microbatch - rank))
        actions += [Action(Kind.W, m) for m in range(max(0, microbatches - rank), microbatches)]
        ranks.append(tuple(actions))
    bounds = (min(microbatches, pp),) * pp
    return Schedule("zb-h1", microbatches, tuple(ranks), loop_stages(pp), bounds)


def zb_v(pp: int, microbatches: int) -> Schedule:
    """Zero-bubble V (Qi et al., 2024): two chunks, no bubble once a rank has started, 1F1B's peak memory.

    The order is that of the paper's Figure 5 for equal times of F, I and W.
    """
    _require_positive(pp=pp, microbatches=microbatches)
    planned = max(2 * pp - 1, microbatches)  # the pattern needs this many; surplus ones are left out again
    ranks = tuple(_without_surplus(_zb_v_rank(pp, rank, planned), microbatches) for rank in range(pp))
    bounds = (min(2 * microbatches, 2 * pp),) * pp
    return Schedule("zbv", microbatches, ranks, v_stages(pp), bounds)


def _zb_v_rank(pp: int, rank: int, microbatches: int) -> list[Action]:
    actions: list[Action] = []
    done = {(kind, chunk): 0 for kind in (Kind.F, Kind.I, Kind.W) for chunk in (0, 1)}

    def add(kind: Kind, chunk: int) -> None:
        actions.append(Action(kind, done[kind, chunk], chunk))
        done[kind, chunk] += 1

    def add_backward(chunk: int) -> None:
        add(Kind.I, chunk)
        add(Kind.W, chunk)

    # Warm-up: down the first leg of the V, both legs in turn, then the second leg with its first backwards.
    for _ in range(2 * (pp - rank) - 1):
        add(Kind.F, 0)
    for _ in range(rank):
        add(Kind.F, 1)
        add(Kind.F, 0)
    for _ in range(pp - rank):
        add(Kind.F, 1)
        add_backward(1)
    # Steady state: forward, input and weight gradient of either chunk in turn.
    while done[Kind.F, 1] < microbatches:
        if done[Kind.F, 0] < microbatches:
            add(Kind.F, 0)
        add_backward(0)
        add(Kind.F, 1)
        add_backward(1)
    # Cool-down: input gradients first, other ranks wait for them.
    for _ in range(rank):
        add(Kind.I, 0)
        add(Kind.I, 1)
    for _ in range(pp - rank):
        add(Kind.I, 0)
        add(Kind.W, 0)
    for chunk in (1, 0):
        while done[Kind.W, chunk] < microbatches:
            add(Kind.W, chunk)
    return actions


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    actions = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        actions += [forward, backward]
    return tuple(actions + backwards[steady:])


def _without_surplus(actions: Iterable[Action], microbatches: int) -> tuple[Action, ...]:
    return tuple(action for action in actions if action.microbatch < microbatches)


def _require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; a schedule needs at least 1")


MAKERS = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zbv": zb_v}


@functools.cache
def make_schedule(
    name: str, pp: int, microbatches: int, chunks: int = 1, group: int | None = None
) -> Schedule:
    """The schedule called `name`, one of MAKERS or interleaved, which alone reads `chunks` and `group`."""
    if name == "interleaved":
        return interleaved(pp, microbatches, chunks, group)
    return MAKERS[name](pp, microbatches)
