"""tools/plan.py schedule: what it tells, writes and refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def plan(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "plan.py"), "schedule", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_it_draws_and_tells_the_textbook_bubble(tmp_path: Path) -> None:
    done = plan("--schedule", "1f1b", "--pp", "4", "--microbatches", "8", "--png", str(tmp_path / "a.png"))
    assert done.returncode == 0, done.stderr
    assert "F forward, B backward, with the number of the micro-batch\n" in done.stdout
    assert "time: 33, of which the busiest rank works 24\n" in done.stdout  # 8 + 4 - 1 of 3 each
    assert "bubble: 37.5% of the work" in done.stdout  # (pp - 1) / micro-batches
    assert "micro-batches of a chunk: 4, 3, 2, 1" in done.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_that_was_written_is_read_back(tmp_path: Path) -> None:
    table = str(tmp_path / "table.csv")
    written = plan("--schedule", "zb-h1", "--pp", "3", "--microbatches", "5", "--write-csv", table)
    again = plan("--csv", table)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[:3] == written.stdout.splitlines()[:3]


def test_a_table_that_would_deadlock_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n")
    done = plan("--csv", str(table))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
