"""The memory of a run: its plan before training, and what the first step measured beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megalite.accelerator import peak_memory_bytes, restart_peak_memory
from megalite.data.batch import Batch
from megalite.model.live_bytes import LiveBytes, device_bytes
from megalite.parallel.everywhere import gather_objects
from megalite.training.memory.account import buffer_bytes, buffers_on_device
from megalite.training.memory.plan import MemoryPlan
from megalite.training.memory.table import as_text, chosen_ranks, shown
from megalite.training.step import StepOutcome, Trainer

MOST_ROWS = 8  # of a table at the start of a run; tools/plan.py memory shows all


def plan_lines(plan: MemoryPlan, free: int | None) -> list[str]:
    """The table, and a warning when what is still to be allocated is more than the `free` bytes, if known."""
    largest = plan.largest.account
    beside = largest.total - largest.parameters - largest.gradients - largest.optimizer  # these are there
    lines = [as_text(plan, MOST_ROWS)]
    if free is not None and beside > free:
        lines.append(
            f"warning: a step needs {shown(beside)} beside weights, gradients and optimizer, and "
            f"{shown(free)} are free: see tools/plan.py memory --device-memory for what would help"
        )
    return lines


def measured_step(
    trainer: Trainer,
    microbatches: Sequence[Batch],
    rate: float,
    plan: MemoryPlan | None,
    say: Callable[[str], None],
) -> StepOutcome:
    """A training step whose memory is measured and told beside `plan`, which the rank that tells has.

    On a CPU every tensor is counted as it is made, which slows the step down; on a GPU its allocator's peak
    is read. A collective.
    """
    device = trainer.topology.device
    if device.type == "cpu":
        with LiveBytes(trainer.activation_bytes_on_host) as live:
            outcome = trainer.train_step(microbatches, rate)
        measured = buffers_on_device(buffer_bytes(trainer)) + device_bytes(live.peak)
    else:
        restart_peak_memory(device)  # device only
        outcome = trainer.train_step(microbatches, rate)
        measured = peak_memory_bytes(device)  # device only
    mine = trainer.topology.pp.rank, measured, peak_memory_bytes(device)
    everyone = gather_objects(mine)
    for rank in chosen_ranks(plan, MOST_ROWS) if plan is not None else ():
        most, resident = (max(one[place] for one in everyone if one[0] == rank.rank) for place in (1, 2))
        planned = rank.account.total
        line = f"memory of pp rank {rank.rank}: planned {shown(planned)}, measured {shown(most)}"
        line += f" ({most / planned - 1:+.2%})"
        say(line if device.type != "cpu" else f"{line}, resident {shown(resident)}")
    return outcome
