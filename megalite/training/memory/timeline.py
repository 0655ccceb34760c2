"""What one rank holds while it works through a schedule, from what a micro-batch costs in each chunk."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.model.live_bytes import COMMUNICATION
from megalite.pipeline.schedule import Action, Kind, Schedule
from megalite.pipeline.simulation import Product, input_of, product_of
from megalite.training.memory.cost import Bytes, ChunkCost, SplitCost


@dataclass(frozen=True)
class Moment:
    """One action of a rank. `action`: None for the reduction that ends a step.

    `in_flight`: micro-batches of a chunk that wait for their backward, the action's own with them. Bytes by
    label: `held` for backward when the action starts, and the `most` that exist while it lasts.
    """

    action: Action | None
    in_flight: int
    held: Bytes
    most: Bytes


def moments(
    schedule: Schedule, rank: int, costs: Sequence[ChunkCost], message: int, reduction: Bytes
) -> list[Moment]:
    """One for each action of `rank`, in order, and one for the `reduction` that ends the step, which takes so
    much beside what is left to reduce; `costs` by chunk, `message`: bytes between two stages.

    Follows the executor: one receive is posted ahead, and a sent tensor is kept until `sends_in_flight` later
    ones have left on its link, between two chunks of a rank also until it is taken.
    """
    actions = schedule.actions[rank]
    receiving = [index for index, action in enumerate(actions) if _source(schedule, rank, action) != rank]
    last_receive = receiving[-1] if receiving else -1
    held: Bytes = Counter()
    in_held: set[Product | None] = set()  # messages whose memory `held` includes
    in_flight = 0
    sent: dict[tuple[int, Kind], deque[Product]] = defaultdict(lambda: deque(maxlen=schedule.sends_in_flight))
    not_taken: set[Product | None] = set()
    reducing: dict[int, Bytes] = {}  # by chunk, gradients that its last backward has left to be reduced
    saved: dict[tuple[int, int], Bytes] = {}  # by chunk and micro-batch
    begun: dict[tuple[int, int], SplitCost] = {}  # split backwards, by chunk and micro-batch
    found = []
    for index, action in enumerate(actions):
        cost, stage = costs[action.chunk], schedule.stages[rank][action.chunk]
        taken, made = input_of(action, stage, schedule.num_stages), product_of(action, stage)
        not_taken.discard(taken)
        kept = {product for queue in sent.values() for product in queue} | not_taken
        most = Counter(held)
        most[COMMUNICATION] += ((index < last_receive) + len(kept - in_held - {taken})) * message
        split = begun.pop((action.chunk, action.microbatch), None)
        if split is None:
            split = cost.later_split if action.chunk in reducing else cost.split
        most.update(_within(action, cost, split, action.chunk in reducing))
        in_flight += action.kind is Kind.F
        found.append(Moment(action, in_flight, Counter(held), most))
        in_flight -= action.kind in (Kind.B, Kind.W)
        if action.kind is Kind.F:
            kept_for_backward = cost.later_saved if action.chunk in reducing else cost.saved
            saved[action.chunk, action.microbatch] = kept_for_backward
            held.update(kept_for_backward)
            in_held |= {taken} | ({made} if cost.output_is_saved else set())
        elif action.kind is Kind.W:
            held.subtract(split.put_off)
            in_held -= {(Kind.B, stage, action.microbatch), (Kind.B, stage + 1, action.microbatch)}
        else:
            held.subtract(saved.pop((action.chunk, action.microbatch)))
            in_held -= {(Kind.F, stage, action.microbatch), (Kind.F, stage - 1, action.microbatch)}
            if action.kind is Kind.I:
                begun[action.chunk, action.microbatch] = split
                held.update(split.put_off)
                in_held |= {made} if cost.gradient_is_put_off else set()
                in_held |= {taken} if split.put_off[COMMUNICATION] else set()
        if action.kind in (Kind.B, Kind.W):
            held.subtract(reducing.get(action.chunk, {}))
            reducing[action.chunk] = cost.left if action.kind is Kind.B else split.left
            held.update(reducing[action.chunk])
        if (target := _target(schedule, action, stage)) is not None:
            sent[target, made[0]].append(made)
            if target == rank:
                not_taken.add(made)
    left = sum(reducing.values(), Counter[str]())
    return [*found, Moment(None, 0, left, left + reduction)]


def _within(action: Action, cost: ChunkCost, split: SplitCost, is_reducing: bool) -> Bytes:
    return {
        Kind.F: cost.later_forward if is_reducing else cost.forward,
        Kind.B: cost.later_backward if is_reducing else cost.backward,
        Kind.I: split.input_gradient,
        Kind.W: split.weight_gradient,
    }[action.kind]


def _source(schedule: Schedule, rank: int, action: Action) -> int:
    """The rank that sends what `action` starts from; its own when nobody does."""
    taken = input_of(action, schedule.stages[rank][action.chunk], schedule.num_stages)
    source = rank if taken is None else schedule.rank_of(taken[1])
    assert source is not None  # every stage has a rank
    return source


def _target(schedule: Schedule, action: Action, stage: int) -> int | None:
    """The rank that gets the result of `action`, None at the ends of the chain."""
    step = {Kind.F: 1, Kind.B: -1, Kind.I: -1}.get(action.kind)
    return None if step is None else schedule.rank_of(stage + step)
