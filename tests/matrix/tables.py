"""Pipeline tables that no schedule has: stages on any rank, actions in any order that can be run."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
from collections import defaultdict, deque
from pathlib import Path

from megalite.pipeline.schedule import Action, Kind, Schedule
from megalite.pipeline.simulation import Product, input_of, product_of, requirements
from megalite.pipeline.table import write_csv


def stages_of_a_table(pp: int) -> int:
    return max(2, 2 * pp - 1)


@functools.cache
def table_file(pp: int, microbatches: int) -> str:
    """The path of a table; it lives as long as this process."""
    path = _folder() / f"{pp}-{microbatches}.csv"
    write_csv(random_table(pp, stages_of_a_table(pp), microbatches), path)
    return str(path)


def random_table(pp: int, stages: int, microbatches: int, seed: int = 0) -> Schedule:
    """Ranks take turns at random and do any of what they can do next; backwards are whole or split."""
    dice = random.Random(f"{pp} {stages} {microbatches} {seed}")
    ranks = [*range(pp), *dice.choices(range(pp), k=stages - pp)]
    dice.shuffle(ranks)
    held = [tuple(stage for stage in range(stages) if ranks[stage] == rank) for rank in range(pp)]
    left = [_actions(dice, len(held[rank]), microbatches) for rank in range(pp)]
    done: list[list[Action]] = [[] for _ in range(pp)]
    made: set[Product] = set()
    arriving: dict[tuple[int, int, Kind], deque[Product]] = defaultdict(deque)  # by link, in order of sending

    def can_run(rank: int, action: Action) -> bool:
        stage = held[rank][action.chunk]
        taken = input_of(action, stage, stages)
        if taken is not None and ranks[taken[1]] != rank:
            waiting = arriving[ranks[taken[1]], rank, taken[0]]
            if not waiting or waiting[0] != taken:
                return False
        return all(needed in made for needed in requirements(action, stage, stages))

    while any(left):
        rank = dice.randrange(pp)
        ready = [action for action in left[rank] if can_run(rank, action)]
        if not ready:
            continue
        action = dice.choice(ready)
        left[rank].remove(action)
        done[rank].append(action)
        stage = held[rank][action.chunk]
        taken = input_of(action, stage, stages)
        if taken is not None and ranks[taken[1]] != rank:
            arriving[ranks[taken[1]], rank, taken[0]].popleft()
        result = product_of(action, stage)
        made.add(result)
        after = stage + 1 if action.kind is Kind.F else stage - 1
        if action.kind is not Kind.W and 0 <= after < stages and ranks[after] != rank:
            arriving[rank, ranks[after], result[0]].append(result)
    most = stages * microbatches
    return Schedule("random", microbatches, tuple(map(tuple, done)), tuple(held), (most,) * pp, most)


def _actions(dice: random.Random, chunks: int, microbatches: int) -> list[Action]:
    kinds = ((Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W))
    return [
        Action(kind, microbatch, chunk)
        for chunk in range(chunks)
        for microbatch in range(microbatches)
        for kind in dice.choice(kinds)
    ]


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="megalite-tables-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
