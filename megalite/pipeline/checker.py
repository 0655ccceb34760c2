"""Proof that a schedule can be run: complete, ordered, free of deadlocks, within its memory bound."""

from __future__ import annotations

from collections import Counter, defaultdict

from megalite.pipeline.schedule import Action, Kind, Schedule
from megalite.pipeline.simulation import (
    LinkKey,
    Product,
    ScheduleError,
    describe,
    in_flight_peaks,
    input_of,
    product_of,
    sending_link,
    simulate,
)


def check(schedule: Schedule) -> None:
    """Raise ScheduleError, naming rank and action, unless the executor can run the table to its end.

    Checked are: every stage has one rank; every micro-batch goes through every stage once, forward and
    (unless no rank has any backward) backward, as one B or as one I and one W; no action comes before what it
    needs; all ranks reach the end when receives block and a link holds `sends_in_flight` sends; on each
    directed link the order in which tensors are sent is that in which they are received; no rank holds more
    activations than `max_in_flight`.
    """
    _check_stages(schedule)
    _check_complete(schedule)
    simulate(schedule)  # raises at a deadlock; an action before what it needs of its own rank is one too
    _check_links(schedule)
    for rank, (peak, bound) in enumerate(zip(in_flight_peaks(schedule), schedule.max_in_flight, strict=True)):
        if peak > bound:
            raise ScheduleError(
                f"{schedule.name}: rank {rank} holds {peak} activations at once, bound {bound}"
            )


def _check_stages(schedule: Schedule) -> None:
    stages = sorted(stage for chunks in schedule.stages for stage in chunks)
    if stages != list(range(len(stages))):
        raise ScheduleError(
            f"{schedule.name}: stages are {stages}; each of 0..{len(stages) - 1} needs one rank"
        )
    if len(schedule.actions) != len(schedule.stages):
        raise ScheduleError(
            f"{schedule.name}: actions for {len(schedule.actions)} ranks, stages for {len(schedule.stages)}"
        )


def _check_complete(schedule: Schedule) -> None:
    backward = any(action.kind is not Kind.F for actions in schedule.actions for action in actions)
    for rank, actions in enumerate(schedule.actions):
        counts = Counter(actions)
        for action in counts:
            if not (
                0 <= action.microbatch < schedule.microbatches
                and 0 <= action.chunk < len(schedule.stages[rank])
            ):
                raise ScheduleError(
                    f"{schedule.name}: rank {rank} has {describe(action)}, outside its "
                    f"{schedule.microbatches} micro-batches and {len(schedule.stages[rank])} chunks"
                )
        for chunk in range(len(schedule.stages[rank])):
            for microbatch in range(schedule.microbatches):
                found = {kind: counts[Action(kind, microbatch, chunk)] for kind in Kind}
                forward, whole, inputs, weights = (found[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
                gradients = (whole, inputs, weights)
                allowed = [(1, 0, 0), (0, 1, 1)] if backward else [(0, 0, 0)]
                if forward != 1 or gradients not in allowed:
                    raise ScheduleError(
                        f"{schedule.name}: rank {rank} has for micro-batch {microbatch}, chunk {chunk}: "
                        + ", ".join(f"{count} {kind.value}" for kind, count in found.items())
                        + "; needed are 1 F and "
                        + ("1 B, or 1 I and 1 W" if backward else "no backward, as on the other ranks")
                    )


def _check_links(schedule: Schedule) -> None:
    """The k-th send of a link meets its k-th receive: both sides must list the same tensors in one order."""
    sent: dict[LinkKey, list[Product]] = defaultdict(list)
    received: dict[LinkKey, list[Product]] = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            stage = schedule.stages[rank][action.chunk]
            if (link := sending_link(action, rank, schedule)) is not None:
                sent[link].append(product_of(action, stage))
            taken = input_of(action, stage, schedule.num_stages)
            if taken is not None and (source := schedule.rank_of(taken[1])) is not None and source != rank:
                received[source, rank, taken[0]].append(taken)
    for link, tensors in sent.items():
        source, target, kind = link
        expected = received[link]
        for (_, stage, m), (_, wanted_stage, wanted) in zip(tensors, expected, strict=True):
            if (stage, m) != (wanted_stage, wanted):
                raise ScheduleError(
                    f"{schedule.name}: rank {source} sends rank {target} the {kind.value} result of stage "
                    f"{stage}, micro-batch {m}, where stage {wanted_stage}, micro-batch {wanted} is received"
                )
