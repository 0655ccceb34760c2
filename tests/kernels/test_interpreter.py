"""Every Triton kernel against fp64 in Triton's interpreter.

In a process of its own: the interpreter must be chosen before import.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_triton_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "tests/kernels/triton_cases", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\[100%\]", done.stdout), done.stdout[-2000:]
