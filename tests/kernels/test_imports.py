"""Importing the kernels costs nothing that a machine without Triton, a driver or apex does not have."""

from __future__ import annotations

import subprocess
import sys


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_leaves_triton_alone() -> None:
    assert (
        python("import sys, megalite.kernels; print('triton' in sys.modules, 'apex' in sys.modules)")
        == "False False"
    )


def test_works_where_triton_is_missing() -> None:
    hide = "import sys; sys.modules['triton'] = None; import torch, megalite.kernels as k\n"
    assert python(hide + "print(k.rms_norm(torch.ones(2, 8), torch.ones(8)).shape)") == "torch.Size([2, 8])"
