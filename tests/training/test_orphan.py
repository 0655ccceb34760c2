"""A rank whose torchrun has died ends, whatever it does with a request to end."""

from __future__ import annotations

import os
import subprocess
import sys

RANK = """
import signal, time
from megalite.training import orphan

signal.signal(signal.SIGTERM, lambda *_: None)
orphan.LOOK_SECONDS = orphan.GRACE_SECONDS = 0.05
orphan.end_with_torchrun()
print("ready", flush=True)
time.sleep(60)
"""
TORCHRUN = """
import subprocess, sys

rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
print(rank.stdout.readline().decode(), end="", flush=True)
"""


def test_a_rank_that_only_notes_the_request_to_end_is_killed() -> None:
    """Its end is seen by that of standard error, which it holds open."""
    done = subprocess.run(
        [sys.executable, "-c", TORCHRUN, RANK],
        env={**os.environ, "TORCHELASTIC_RUN_ID": "1"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == "ready\n"
    assert "has died: its ranks end" in done.stderr
