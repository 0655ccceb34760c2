"""Importing the kernels costs nothing that a machine without Triton, a driver or apex does not have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megalite.kernels.apex import has_apex


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


def test_the_other_package_named_apex_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyPI's apex is an authentication toolkit; without amp_C beside it it is not even looked at."""
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the wrong apex was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not has_apex()
