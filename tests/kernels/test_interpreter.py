"""Every Triton kernel against fp64 in Triton's interpreter.

In processes of their own: the interpreter must be chosen before import. Two share the work.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = "tests/kernels/triton_cases"
HALF = f"{CASES}/test_cross_entropy.py"  # takes as long as all others
SHARES = {"cross-entropy": [HALF], "others": [CASES, f"--ignore={HALF}"]}


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "pytest", *share, "-p", "no:cacheprovider"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, share in SHARES.items()
    }
    yield started
    for run in started.values():
        if run.poll() is None:  # its test was not chosen, or was interrupted
            run.kill()
            run.communicate()


@pytest.mark.parametrize("share", SHARES)
def test_triton_kernels_in_the_interpreter(share: str, runs: dict[str, subprocess.Popen[str]]) -> None:
    output, _ = runs[share].communicate()
    assert runs[share].returncode == 0, output[-8000:]
    assert re.search(r"\[100%\]", output), output[-2000:]
