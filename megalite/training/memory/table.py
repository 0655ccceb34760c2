"""A memory plan to be read: a table with a row for equal ranks, and the same as JSON."""

from __future__ import annotations

from dataclasses import asdict, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megalite.training.memory.account import Account
from megalite.training.memory.plan import MemoryPlan, RankPlan

if TYPE_CHECKING:
    from rich.table import Table

PURPOSES = {field.name: field.name.replace("_", " ") for field in fields(Account)}
IN_TWO_LINES = {"logits_and_loss": "logits\nand loss", "communication": "commu-\nnication"}
UNITS = {"GiB": 2**30, "MiB": 2**20}


def shown(count: float) -> str:
    """Bytes as MiB or GiB, in binary units."""
    unit = _unit_of(count)
    return f"{count / UNITS[unit]:.2f} {unit}"


def table(plan: MemoryPlan, most_rows: int | None = None) -> Table:
    """One row for neighbouring pipeline ranks with equal accounts, one column a purpose that any rank has.

    Of more than `most_rows` different ranks that many are shown, see `chosen_ranks`. At most 110 characters
    wide; all in one unit, that of the largest total.
    """
    from rich import box
    from rich.table import Table

    config, world = plan.config, plan.world_size
    groups = _groups(plan)
    chosen = groups if most_rows is None else _chosen(groups, most_rows)
    unit = _unit_of(plan.largest.account.total)
    title = (
        f"Memory of a rank at the peak of a step, in {unit}: {world} ranks, "
        f"tp {config.parallel.tensor_model_parallel_size} x pp {len(plan.ranks)} x dp "
        f"{config.data_parallel_size(world)},\n{plan.schedule.microbatches} micro-batches of "
        f"{config.batch.micro_batch_size}, {plan.schedule.name}"
    )
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    purposes = [name for name in PURPOSES if any(getattr(rank.account, name) for rank in plan.ranks)]
    headings = [IN_TWO_LINES.get(name, PURPOSES[name]) for name in purposes]
    for heading in ("pp\nrank", "layers", "in\nflight", *headings, "total"):
        made.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    if len(chosen) < len(groups):
        made.caption = f"{len(chosen)} of {len(groups)} kinds of ranks; tools/plan.py memory shows all"
    for equal in chosen:
        account = equal[0].account
        bytes_ = [*(getattr(account, name) for name in purposes), account.total]
        made.add_row(
            _span([str(rank.rank) for rank in equal]),
            " + ".join(str(len(chunk)) for chunk in equal[0].layers),
            str(equal[0].in_flight),
            *(f"{count / UNITS[unit]:.2f}" if count else "0" for count in bytes_),
        )
    return made


def chosen_ranks(plan: MemoryPlan, most_rows: int) -> list[RankPlan]:
    """One of each row of a table of `most_rows`: of more kinds the largest and evenly spread ones."""
    return [equal[0] for equal in _chosen(_groups(plan), most_rows)]


def as_text(plan: MemoryPlan, most_rows: int | None = None) -> str:
    """The table, wide enough for every column."""
    from rich.console import Console

    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        console.print(table(plan, most_rows))
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def as_json(plan: MemoryPlan) -> dict[str, Any]:
    """Bytes by purpose for each pipeline rank."""
    return {
        "world_size": plan.world_size,
        "schedule": plan.schedule.name,
        "micro_batches": plan.schedule.microbatches,
        "ranks": [
            {
                "pipeline_rank": rank.rank,
                "layers": [[chunk.start, chunk.stop] for chunk in rank.layers],
                "in_flight": rank.in_flight,
                "bytes": {**asdict(rank.account), "total": rank.account.total},
            }
            for rank in plan.ranks
        ],
    }


def _unit_of(count: float) -> str:
    return next((unit for unit, size in UNITS.items() if abs(count) >= size), "MiB")


def _groups(plan: MemoryPlan) -> list[list[RankPlan]]:
    return [list(group) for _, group in groupby(plan.ranks, key=_what_is_told)]


def _chosen(groups: list[list[RankPlan]], most: int) -> list[list[RankPlan]]:
    if len(groups) <= most:
        return groups
    largest = max(range(len(groups)), key=lambda place: groups[place][0].account.total)
    spread = {number * (len(groups) - 1) // (most - 2) for number in range(most - 1)}
    return [groups[place] for place in sorted({largest, *spread})]


def _what_is_told(rank: RankPlan) -> tuple[Account, int, tuple[int, ...]]:
    return rank.account, rank.in_flight, tuple(len(chunk) for chunk in rank.layers)


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
