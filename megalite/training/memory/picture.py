"""A memory plan as a picture: for each pipeline rank the bytes by purpose over the actions of a step."""

from __future__ import annotations

from pathlib import Path

from megalite.training.memory.account import Account, account
from megalite.training.memory.plan import MemoryPlan
from megalite.training.memory.table import PURPOSES

COLOURS = ("#4c78a8", "#9ecae9", "#54a24b", "#f58518", "#ffbf79", "#e45756", "#b79a20", "#bab0ac")
MOST_ROWS = 8


def draw_png(plan: MemoryPlan, path: Path) -> None:
    """Write stacked bars to `path`, a row a rank (of many ranks, evenly spread ones). Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    step = -(-len(plan.ranks) // MOST_ROWS)
    shown = [plan.ranks[place] for place in range(0, len(plan.ranks), step)]
    if plan.ranks[-1] not in shown:
        shown.append(plan.ranks[-1])
    figure = Figure(figsize=(11, 1.2 + 1.5 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, rank in zip(rows, shown, strict=True):
        accounts = [account(rank.buffers, moment, 0) for moment in rank.moments]
        bottom = [0.0] * len(accounts)
        for (name, label), colour in zip(PURPOSES.items(), COLOURS, strict=True):
            if name == "host":
                continue
            heights = [_gib(one, name) for one in accounts]
            axes.bar(range(len(accounts)), heights, 1.0, bottom=bottom, color=colour, label=label)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.set_ylabel(f"pp {rank.rank}\nGiB")
        axes.margins(x=0)
    rows[-1].set_xlabel("actions of a training step, in each rank's order; the last one is the reduction")
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.suptitle(
        f"{plan.schedule.name}, {plan.schedule.microbatches} micro-batches, {plan.world_size} ranks"
    )
    figure.savefig(path, dpi=120)


def _gib(one: Account, name: str) -> float:
    bytes_: int = getattr(one, name)
    return bytes_ / 2**30
