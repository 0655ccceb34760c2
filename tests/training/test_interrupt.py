"""Ctrl-C ends a run with one line that says how to go on; a log that takes nothing does not end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.checkpoint import latest_iteration
from megalite.interruption import EXIT_CODE
from tests.end_to_end.launch import LIMIT_SECONDS, environment
from tests.training.runs import MODEL

RUN = "import sys; from megalite.training.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("save", "until", "said"),
    [
        ("--save {0} --save-interval 2", "saved checkpoint of iteration 2", "give the same command again"),
        ("--save {0} --save-interval 1000000", "iteration        2/", "interrupted; nothing was saved in"),
        ("", "iteration        2/", "interrupted\n"),
    ],
)
def test_ctrl_c(tmp_path: Path, save: str, until: str, said: str) -> None:
    flags = f"{MODEL} --mock-data --global-batch-size 2 --train-iters 1000000 {save.format(tmp_path)}".split()
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *flags],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        try:
            assert any(until in line for line in run.stdout)
            run.send_signal(signal.SIGINT)
            error = run.communicate(timeout=60)[1]
        finally:
            run.kill()
    assert run.returncode == EXIT_CODE
    assert said in error
    assert len(error.splitlines()) == 1


FULL = Path("/dev/full")
NO_FULL = pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")


@pytest.mark.parametrize("log", [pytest.param("a full disk", marks=NO_FULL), "a closed pipe"])
def test_a_log_that_takes_nothing_does_not_end_the_run(tmp_path: Path, log: str) -> None:
    flags = f"{MODEL} --mock-data --global-batch-size 2 --train-iters 3 --save {tmp_path}".split()
    reads, writes = os.pipe()
    os.close(reads)
    if log == "a full disk":
        os.close(writes)
        writes = os.open(FULL, os.O_WRONLY)
    done = subprocess.run(
        [sys.executable, "-c", RUN, *flags],
        env=environment(),
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    os.close(writes)
    reason = {"a full disk": "No space left on device", "a closed pipe": "Broken pipe"}[log]
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"warning: standard output takes nothing: {reason}; the run goes on\n"
    assert latest_iteration(str(tmp_path)) == 3


def test_a_log_that_takes_nothing_beside_a_closed_standard_error(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    flags = f"{MODEL} --mock-data --global-batch-size 2 --train-iters 1 --save {tmp_path}".split()
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", RUN, *flags],
        env=environment(),
        stdout=writes,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    os.close(writes)
    assert done.returncode == 0
    assert latest_iteration(str(tmp_path)) == 1
