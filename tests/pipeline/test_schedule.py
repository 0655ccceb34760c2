"""Schedules are sound at any size, with textbook bubble and memory; the checker refuses broken tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

from megalite.pipeline.checker import check
from megalite.pipeline.schedule import (
    Action,
    Kind,
    Schedule,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from megalite.pipeline.simulation import ScheduleError, in_flight_peaks, simulate


def forwards(pp: int, microbatches: int) -> Schedule:
    return forward_only(one_f_one_b(pp, microbatches))


SCHEDULES = [forwards, gpipe, one_f_one_b, zb_h1, zb_v]


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7, 8, 16])
def test_every_size_is_sound(make: Callable[[int, int], Schedule], pp: int) -> None:
    for microbatches in [*range(1, 12), 2 * pp - 1, 2 * pp, 3 * pp + 1]:
        check(make(pp, microbatches))


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaved_is_sound_for_any_microbatches_and_group(pp: int, chunks: int) -> None:
    for group in (pp, pp + 1, pp + 3, 2 * pp):
        for microbatches in [*range(1, 12), 2 * pp + 1, 3 * pp]:
            check(interleaved(pp, microbatches, chunks, group))


# pp 4, m 4, written by hand from the figure of Narayanan et al. (2021).
FIGURE = {
    0: "F0 F1 F2 F3 B0 B1 B2 B3",
    1: "F0 F1 F2 B0 F3 B1 B2 B3",
    2: "F0 F1 B0 F2 B1 F3 B2 B3",
    3: "F0 B0 F1 B1 F2 B2 F3 B3",
}


def test_1f1b_is_the_papers_figure() -> None:
    schedule = one_f_one_b(4, 4)
    written = {rank: " ".join(f"{a.kind.value}{a.microbatch}" for a in schedule[rank]) for rank in range(4)}
    assert written == FIGURE


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 2, 3), (3, 1, 1)])
def test_bubble_of_gpipe_and_1f1b(pp: int, microbatches: int, times: tuple[int, int, int]) -> None:
    f, b, w = times
    for make in (gpipe, one_f_one_b):
        timeline = simulate(make(pp, microbatches), f, b, w)
        assert timeline.makespan == (microbatches + pp - 1) * (f + b + w)
        assert timeline.bubble_fraction == Fraction(pp - 1, microbatches)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_bubble_of_interleaved_is_divided_by_the_chunks(pp: int, chunks: int, groups: int) -> None:
    microbatches = groups * pp
    timeline = simulate(interleaved(pp, microbatches, chunks))
    assert timeline.bubble_fraction == Fraction(pp - 1, microbatches * chunks)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_bubble_of_the_zero_bubble_tables(pp: int) -> None:
    microbatches = 4 * pp
    h1 = simulate(zb_h1(pp, microbatches))
    assert h1.bubble_fraction == Fraction(pp - 1, microbatches) / 3
    v = simulate(zb_v(pp, microbatches))
    assert v.bubble_fraction_from_first_start == 0
    assert v.makespan == 6 * microbatches + pp - 1  # ranks start one forward after another, then never wait


def test_zb_h1_saves_a_weight_gradient_for_each_rank() -> None:
    f, b, w = 4, 5, 3
    timeline = simulate(zb_h1(4, 16), f, b, w)
    assert timeline.makespan == 16 * (f + b + w) + 3 * (f + b - w)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 32])
def test_activations_in_flight(pp: int, microbatches: int) -> None:
    first_to_last = range(pp)
    assert in_flight_peaks(forwards(pp, microbatches)) == (0,) * pp
    assert in_flight_peaks(gpipe(pp, microbatches)) == (microbatches,) * pp
    assert in_flight_peaks(one_f_one_b(pp, microbatches)) == tuple(
        min(microbatches, pp - rank) for rank in first_to_last
    )
    assert max(in_flight_peaks(zb_h1(pp, microbatches))) == min(microbatches, pp)
    if microbatches >= 2 * pp:  # half-size chunks: 2 pp of them are 1F1B's pp micro-batches
        assert in_flight_peaks(zb_v(pp, microbatches)) == (2 * pp,) * pp


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_holds_one_pth_more_than_1f1b_on_the_first_rank(chunks: int) -> None:
    pp = 4
    peak = in_flight_peaks(interleaved(pp, 8 * pp, chunks))[0]
    assert Fraction(peak, chunks) == pp * (1 + Fraction(pp - 1, pp * chunks))


@pytest.mark.parametrize("make", [*SCHEDULES, lambda pp, m: interleaved(pp, m, 2, pp + 2)])
@pytest.mark.parametrize("times", [(1, 1, 1, 0), (2, 3, 1, 0), (10, 12, 8, 1)])
def test_bounding_the_sends_costs_no_time(
    make: Callable[[int, int], Schedule], times: tuple[int, int, int, int]
) -> None:
    for pp in (1, 2, 3, 5):
        for microbatches in (1, 2, 5, 9, 16):
            schedule = make(pp, microbatches)
            unbounded = simulate(schedule, *times, sends_in_flight=10**6)
            assert simulate(schedule, *times).makespan == unbounded.makespan


def test_a_group_larger_than_pp_needs_its_room_on_the_ring() -> None:
    schedule = interleaved(4, 18, 2, group=9)
    with pytest.raises(ScheduleError, match="deadlock"):
        check(replace(schedule, sends_in_flight=2))
    narrow = simulate(schedule, sends_in_flight=schedule.sends_in_flight - 1)
    assert narrow.makespan > simulate(schedule).makespan


def edited(rank: int, edit: Callable[[list[Action]], object]) -> Schedule:
    """1F1B for pp 2 and 3 micro-batches, with the list of one rank changed."""
    schedule = one_f_one_b(2, 3)
    actions = list(schedule[rank])
    edit(actions)
    return replace(schedule, actions=tuple(tuple(actions) if r == rank else schedule[r] for r in range(2)))


@pytest.mark.parametrize(
    ("rank", "edit", "message"),
    [
        (0, lambda actions: actions.pop(), r"rank 0 has for micro-batch 2, chunk 0: 1 F, 0 B"),
        (1, lambda actions: actions.append(Action(Kind.F, 2)), r"rank 1 has for micro-batch 2, chunk 0: 2 F"),
        (0, lambda actions: actions.append(Action(Kind.W, 2)), r"1 B, 0 I, 1 W"),
        (0, lambda actions: actions.append(Action(Kind.F, 3)), r"F of micro-batch 3, chunk 0, outside its 3"),
        (
            0,
            lambda actions: actions.append(Action(Kind.F, 0, 1)),
            r"chunk 1, outside its 3 micro-batches and 1",
        ),
        (1, lambda actions: actions.sort(key=lambda a: a.kind is Kind.F), r"deadlock.*rank 1 at B of"),
        (1, lambda actions: actions.reverse(), r"deadlock"),
        (
            0,
            lambda actions: actions.sort(key=lambda a: a.kind.value, reverse=True),
            r"rank 0 holds 3 activations at once, bound 2",
        ),
    ],
)
def test_broken_tables_are_refused(rank: int, edit: Callable[[list[Action]], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(edited(rank, edit))


def test_a_wrong_order_on_a_link_is_refused() -> None:
    """Gradients 0 and 1 change places on the last rank only: data flows, but to the wrong place."""
    schedule = gpipe(2, 2)
    last = tuple(Action(kind, m) for kind, m in [(Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.B, 0)])
    with pytest.raises(ScheduleError, match=r"rank 1 sends rank 0 the B result of stage 1, micro-batch 1"):
        check(replace(schedule, actions=(schedule[0], last)))


def test_two_ranks_with_one_stage_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"stages are \[0, 0\]"):
        check(replace(one_f_one_b(2, 2), stages=((0,), (0,))))


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 1)])
@pytest.mark.parametrize("make", SCHEDULES)
def test_sizes_below_one_are_refused(make: Callable[[int, int], Schedule], sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make(*sizes)


def test_a_group_smaller_than_pp_is_refused() -> None:
    with pytest.raises(ValueError, match="group of 3 micro-batches is smaller than pp 4"):
        interleaved(4, 8, 2, group=3)
