"""Gather what tests/gpu/run.sh left in a folder into its report.json; exit code 1 if any step failed."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path


def gather(folder: Path) -> dict[str, object]:
    """Steps with exit codes and seconds, the benchmarks' rows, the last line of the training run."""
    steps = {}
    for line in (folder / "steps.txt").read_text().splitlines():
        name, code, seconds = line.split()
        last = (folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-1:]
        steps[name] = {"exit_code": int(code), "seconds": int(seconds), "last_line": "".join(last)}
    table, training = folder / "kernels" / "kernels.csv", folder / "training.jsonl"
    rows = list(csv.DictReader(table.open())) if table.exists() else []
    lines = training.read_text().splitlines() if training.exists() else []
    optimizer = folder / "optimizer.log"
    times = [line for line in optimizer.read_text().splitlines() if "|" in line] if optimizer.exists() else []
    last_step = json.loads(lines[-1]) if lines else None
    return {"steps": steps, "kernels": rows, "optimizer": times, "training": last_step}


def main() -> int:
    folder = Path(sys.argv[1])
    report = gather(folder)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    steps = report["steps"]
    assert isinstance(steps, dict)
    failed = [name for name, step in steps.items() if step["exit_code"]]
    print(f"report: {folder / 'report.json'}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
