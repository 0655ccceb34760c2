"""`--optimizer-impl apex`: which package it is, and where it works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.config.rules.apex import has_fused_adam
from tests.config.minimal import minimal


def test_the_other_package_named_apex_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyPI's apex is an authentication toolkit; even with an amp_C beside it none of it is run."""
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the wrong apex was imported')")
    (tmp_path / "amp_C.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not has_fused_adam()


def test_without_a_gpu_the_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    """Also where the package is there; only a rank knows its device."""
    (tmp_path / "amp_C.py").touch()
    (tmp_path / "apex" / "multi_tensor_apply").mkdir(parents=True)
    for folder in (tmp_path / "apex", tmp_path / "apex" / "multi_tensor_apply"):
        (folder / "__init__.py").touch()
    code = "import sys; from megalite.training.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *minimal("--optimizer-impl apex")],
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "CUDA_VISIBLE_DEVICES": "",
            "RANK": "",
            "WORLD_SIZE": "",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    message = "--optimizer-impl apex: works on NVIDIA GPUs only, and this machine has none; auto"
    assert done.stderr.splitlines() == ["1 configuration error:", f"  1. {message}"]
