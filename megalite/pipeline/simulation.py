"""How long a schedule takes and what it holds, from the times of its actions alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from megalite.pipeline.schedule import Action, Kind, Schedule

# (F, B or W; stage; micro-batch): what an action makes that others wait for. B and I make the same gradient.
Product = tuple[Kind, int, int]
# (sending rank, receiving rank, F or B): one way between two ranks, on which tensors keep their order.
LinkKey = tuple[int, int, Kind]


class ScheduleError(ValueError):
    """A schedule that cannot be run as it stands."""


@dataclass(frozen=True)
class Span:
    """One action with its start and finish, in the unit of the times given."""

    action: Action
    start: float
    finish: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step: the spans of each rank in order."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Time from the start of the step until the last rank has finished."""
        return max(spans[-1].finish for spans in self.spans)

    def busy(self, rank: int) -> float:
        """Time in which `rank` computes."""
        return sum(span.finish - span.start for span in self.spans[rank])

    @property
    def bubble_fraction(self) -> Fraction:
        """(makespan - ideal) / ideal, the busiest rank's work being ideal. Exact for ints."""
        ideal = Fraction(max(self.busy(rank) for rank in range(len(self.schedule))))
        return (Fraction(self.makespan) - ideal) / ideal

    @property
    def bubble_fraction_from_first_start(self) -> Fraction:
        """As `bubble_fraction`, but a rank's time counts from its own first action to its own last.

        This is the zero-bubble papers' measure: ranks that need not wait for each other at the end of a step
        start the next one staggered.
        """
        ideal = Fraction(max(self.busy(rank) for rank in range(len(self.schedule))))
        longest = max(Fraction(spans[-1].finish) - Fraction(spans[0].start) for spans in self.spans)
        return (longest - ideal) / ideal


def product_of(action: Action, stage: int) -> Product:
    """What `action` on `stage` makes available."""
    kind = Kind.B if action.kind is Kind.I else action.kind
    return kind, stage, action.microbatch


def input_of(action: Action, stage: int, num_stages: int) -> Product | None:
    """What `action` gets from a neighbouring stage, None at the ends of the chain."""
    if action.kind is Kind.W:
        return None
    kind, source = (Kind.F, stage - 1) if action.kind is Kind.F else (Kind.B, stage + 1)
    return (kind, source, action.microbatch) if 0 <= source < num_stages else None


def requirements(action: Action, stage: int, num_stages: int) -> list[Product]:
    """What must be finished before `action` on `stage` can start."""
    received = input_of(action, stage, num_stages)
    needed = [] if received is None else [received]
    if action.kind is Kind.W:
        needed.append((Kind.B, stage, action.microbatch))
    elif action.kind is not Kind.F:
        needed.append((Kind.F, stage, action.microbatch))
    return needed


def sending_link(action: Action, rank: int, schedule: Schedule) -> LinkKey | None:
    """The link on which `action` of `rank` sends its result, None when it stays on the rank."""
    if action.kind is Kind.W:
        return None
    kind, step = (Kind.F, 1) if action.kind is Kind.F else (Kind.B, -1)
    target = schedule.rank_of(schedule.stages[rank][action.chunk] + step)
    return None if target is None or target == rank else (rank, target, kind)


def simulate(
    schedule: Schedule,
    f: float = 1,
    b: float = 1,
    w: float = 1,
    transfer: float = 0,
    sends_in_flight: int | None = None,
) -> Timeline:
    """Run the table; forwards take `f`, input gradients `b`, weight gradients `w`, full backwards `b + w`.

    The rule is the executor's: a rank works through its list in order; an action starts when the rank is free
    and its inputs have arrived, `transfer` after they were sent by another rank; the rank is free again when
    the result is on its way, for which the send `sends_in_flight` (default: the schedule's) before it on the
    same link must have been received. Raises ScheduleError at a deadlock, naming where each rank is stuck.
    """
    capacity = schedule.sends_in_flight if sends_in_flight is None else sends_in_flight
    durations: Mapping[Kind, float] = {Kind.F: f, Kind.B: b + w, Kind.I: b, Kind.W: w}
    finished: dict[Product, tuple[float, int]] = {}  # finish time, rank
    received: dict[Product, float] = {}  # start time of the action on another rank that takes it
    sent: dict[LinkKey, list[Product]] = defaultdict(list)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    free: list[float] = [0] * len(schedule)  # when each rank can go on to its next action

    def advance(rank: int) -> bool:
        """Simulate the next action of `rank`; False if it must wait for another rank."""
        action = schedule.actions[rank][len(spans[rank])]
        stage = schedule.stages[rank][action.chunk]
        needed = requirements(action, stage, schedule.num_stages)
        link = sending_link(action, rank, schedule)
        blocker = sent[link][-capacity] if link is not None and len(sent[link]) >= capacity else None
        if any(product not in finished for product in needed) or (blocker and blocker not in received):
            return False
        start = free[rank]
        for product in needed:
            when, where = finished[product]
            start = max(start, when if where == rank else when + transfer)
        finish = start + durations[action.kind]
        free[rank] = max(finish, received[blocker]) if blocker else finish
        result = product_of(action, stage)
        finished[result] = free[rank], rank
        if (taken := input_of(action, stage, schedule.num_stages)) is not None:
            received[taken] = start
        if link is not None:
            sent[link].append(result)
        spans[rank].append(Span(action, start, finish))
        return True

    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while len(spans[rank]) < len(actions) and advance(rank):
                progress = True
    stuck = [rank for rank, actions in enumerate(schedule.actions) if len(spans[rank]) < len(actions)]
    if stuck:
        where = ", ".join(f"rank {r} at {describe(schedule.actions[r][len(spans[r])])}" for r in stuck)
        raise ScheduleError(f"{schedule.name}: deadlock, every unfinished rank waits for another: {where}")
    return Timeline(schedule, tuple(tuple(rank_spans) for rank_spans in spans))


def describe(action: Action) -> str:
    """Short name of an action for messages."""
    return f"{action.kind.value} of micro-batch {action.microbatch}, chunk {action.chunk}"


def in_flight_peaks(schedule: Schedule) -> tuple[int, ...]:
    """For each rank the most activations held at once, each from its F until its B, or its W where split.

    Counted in chunks' micro-batches (one of v chunks holds 1/v of the layers). All 0 without backward.
    """
    backward = any(action.kind is not Kind.F for action in schedule.actions[0])
    peaks = []
    for actions in schedule.actions:
        held = peak = 0
        for action in actions:
            if action.kind is Kind.F and backward:
                held += 1
            elif action.kind in (Kind.B, Kind.W):
                held -= 1
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
