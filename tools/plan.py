"""What a run will do, told without running it.

    python tools/plan.py schedule --pp 4 --microbatches 8 --schedule zbv --png zbv.png

draws a pipeline schedule as text, checks it, and tells its bubble and the activations it holds; --png makes a
picture, --write-csv a table that can be edited and read back with --csv.

    python tools/plan.py memory --world-size 1024 [flags of the training run]

tells where the bytes of each rank of a training run will be, with neither GPUs nor processes: the model's own
code runs on tensors that have no memory. Only the data is not needed.

    python tools/plan.py activations [--world-size 8] [flags of the training run]

counts what a layer keeps for its backward in every mode of recompute, and what that costs: of the run that
the flags describe, or without flags of a GPT-3 and a Llama 3 layer on several layouts. Data is not needed.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.command import run_command
from megalite.pipeline.checker import check
from megalite.pipeline.picture import draw_png
from megalite.pipeline.schedule import MAKERS, Kind, Schedule, make_schedule
from megalite.pipeline.simulation import ScheduleError, in_flight_peaks, simulate
from megalite.pipeline.table import draw, read_csv, write_csv

if TYPE_CHECKING:
    from megalite.config import Config
    from megalite.model.recompute_budget import Measured
    from megalite.training.memory.plan import MemoryPlan


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    schedule = commands.add_parser("schedule", help="draw, check and time a pipeline schedule")
    schedule.add_argument(
        "--schedule", default="1f1b", choices=[*MAKERS, "interleaved"], help="default: 1f1b"
    )
    schedule.add_argument("--pp", type=int, default=4, help="pipeline ranks (default: 4)")
    schedule.add_argument("--microbatches", type=int, default=8, help="micro-batches a step (default: 8)")
    schedule.add_argument(
        "--chunks", type=int, default=2, help="chunks a rank, interleaved only (default: 2)"
    )
    schedule.add_argument("--group", type=int, help="micro-batches a group, interleaved only (default: --pp)")
    schedule.add_argument("--csv", type=Path, help="read the schedule from a table instead")
    schedule.add_argument(
        "--times",
        type=int,
        nargs=3,
        default=(1, 1, 1),
        metavar=("F", "B", "W"),
        help="time of a chunk's forward, input gradient and weight gradient, whole numbers (default: 1 1 1)",
    )
    schedule.add_argument("--png", type=Path, help="write a picture (needs matplotlib)")
    schedule.add_argument("--write-csv", type=Path, help="write the table")
    memory = commands.add_parser(
        "memory",
        help="the bytes of each rank of a training run",
        description="All flags but these are those of the training run; see examples/pretrain_gpt.sh --help.",
        allow_abbrev=False,
    )
    memory.add_argument("--world-size", type=int, default=1, help="ranks of the run (default: 1)")
    memory.add_argument(
        "--device-memory",
        type=_bytes,
        metavar="SIZE",
        help="say whether the run fits, and if not what would help: 80GB, 141GB, 64GiB",
    )
    memory.add_argument(
        "--png", type=Path, help="write a picture of the bytes over a step (needs matplotlib)"
    )
    memory.add_argument("--json", action="store_true", help="print JSON")
    activations = commands.add_parser(
        "activations",
        help="bytes that a layer keeps in every mode of recompute",
        description="All flags but this are those of the training run; see examples/pretrain_gpt.sh --help.",
        allow_abbrev=False,
    )
    activations.add_argument("--world-size", type=int, default=1, help="ranks of the run (default: 1)")
    flags, others = parser.parse_known_args()
    if flags.command == "memory":
        return _memory(flags, others)
    if flags.command == "activations":
        return _activations(flags, others)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        chosen = read_csv(flags.csv) if flags.csv is not None else _make(flags)
        check(chosen)
        _report(chosen, flags)
    except (ScheduleError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _activations(flags: argparse.Namespace, training: Sequence[str]) -> int:
    from rich.console import Console

    from megalite.config import parse_or_exit

    config = parse_or_exit([*training, "--mock-data"], flags.world_size, rank=0) if training else None
    from megalite.model.activation_table import reference_table, table_of

    Console(width=120).print(reference_table() if config is None else table_of(config))
    return 0


def _make(flags: argparse.Namespace) -> Schedule:
    return make_schedule(flags.schedule, flags.pp, flags.microbatches, flags.chunks, flags.group)


def _report(schedule: Schedule, flags: argparse.Namespace) -> None:
    forward, inputs, weights = flags.times
    timeline = simulate(schedule, forward, inputs, weights)
    unit = math.gcd(*flags.times) or 1
    print(draw(simulate(schedule, forward // unit, inputs // unit, weights // unit)))
    print(_key(schedule))
    busiest = max(map(timeline.busy, range(len(schedule))))
    print(f"time: {timeline.makespan}, of which the busiest rank works {busiest}")
    print(f"bubble: {float(timeline.bubble_fraction):.1%} of the work of the busiest rank")
    staggered = float(timeline.bubble_fraction_from_first_start)
    print(f"        {staggered:.1%} counted from each rank's first action")
    held = ", ".join(str(peak) for peak in in_flight_peaks(schedule))
    print(f"activations held at most, rank by rank, in micro-batches of a chunk: {held}")
    if flags.png is not None:
        draw_png(timeline, flags.png)
        print(f"wrote {flags.png}")
    if flags.write_csv is not None:
        write_csv(schedule, flags.write_csv)
        print(f"wrote {flags.write_csv}")


def _key(schedule: Schedule) -> str:
    """What the cells of the drawing mean, of those that are in it."""
    names = {
        Kind.F: "forward",
        Kind.B: "backward",
        Kind.I: "input gradient",
        Kind.W: "weight gradient",
    }
    actions = [action for rank in schedule.actions for action in rank]
    used = {action.kind for action in actions}
    kinds = ", ".join(f"{kind.value} {name}" for kind, name in names.items() if kind in used)
    primes = "; one ' a chunk after a rank's first" if any(action.chunk for action in actions) else ""
    return f"{kinds}, with the number of the micro-batch{primes}"


def _memory(flags: argparse.Namespace, training: Sequence[str]) -> int:
    from megalite.config import ConfigErrors, exit_with_errors
    from megalite.training.preflight import configured

    try:
        config = configured([*training, "--mock-data"], flags.world_size, rank=0)
        from megalite.model.recompute_budget import Measured, within_budget

        measured = Measured()
        chosen, choice = within_budget(config, measured)
    except ConfigErrors as errors:
        exit_with_errors(errors, rank=0)
    import orjson

    from megalite.training.memory.plan import plan_memory
    from megalite.training.memory.table import as_json, as_text

    if choice is not None:
        print(choice, file=sys.stderr)
    plan = plan_memory(chosen, flags.world_size, host_is_device=False)
    if flags.json:
        print(orjson.dumps(as_json(plan), option=orjson.OPT_INDENT_2).decode())
    else:
        print(as_text(plan))
    if flags.png is not None:
        from megalite.training.memory.picture import draw_png

        draw_png(plan, flags.png)
        print(f"wrote {flags.png}", file=sys.stderr)
    return 0 if flags.device_memory is None else _verdict(config, plan, measured, flags.device_memory)


def _verdict(config: Config, plan: MemoryPlan, measured: Measured, device_memory: int) -> int:
    """0 when it fits, 1 when not."""
    from megalite.training.memory.advice import advise
    from megalite.training.memory.out_of_memory import USABLE
    from megalite.training.memory.table import shown

    available, need = int(USABLE * device_memory), plan.largest.account.total
    room = f"{shown(available)}, {USABLE:.0%} of {shown(device_memory)}"
    if need <= available:
        print(f"fits: {shown(need)} of {room}", file=sys.stderr)
        return 0
    print(f"does not fit: {shown(need)} of {room}; what would help, the cheapest first:", file=sys.stderr)
    for number, advice in enumerate(advise(config, plan.world_size, available, False, measured), 1):
        print(f"  {number}. {advice.line(available)}", file=sys.stderr)
    return 1


def _bytes(text: str) -> int:
    """`80GB` is 80e9, `80GiB` is 80 * 2^30."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give e.g. 80GB or 64GiB")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper()))


if __name__ == "__main__":
    run_command(main, "interrupted")
