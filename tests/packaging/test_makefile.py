"""`make install`: what it makes of any `.venv` it finds; `make pretrain`: what it repeats."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Stands for Python: notes what it is asked for, makes a .venv with itself inside, and installs nothing.
PYTHON = """#!/bin/sh
echo "$@" >>calls
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip") test ! -e interrupted ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a Makefile, what it looks at, and an interpreter."""
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "megalite").mkdir()
    (tmp_path / "megalite" / "_C.so").touch()
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def install(folder: Path) -> list[str]:
    """The modules that `make install` ran by `python -m`, each with its first argument."""
    (folder / "calls").write_text("")
    subprocess.run(["make", "install", "PYTHON=./python"], cwd=folder, capture_output=True, timeout=60)
    calls = (folder / "calls").read_text().splitlines()
    return [" ".join(call.split()[1:3]) for call in calls if call.startswith("-m")]


MADE = ["venv .venv", "pip install", "pip install"]
UPDATED = ["pip install", "pip install"]


def test_once_is_enough(checkout: Path) -> None:
    assert install(checkout) == MADE
    assert install(checkout) == []


def test_changed_sources_are_built_into_the_same_environment(checkout: Path) -> None:
    install(checkout)
    (checkout / "csrc").mkdir()
    source = checkout / "csrc" / "new.cpp"
    source.touch()
    later = (checkout / ".venv" / ".installed").stat().st_mtime + 1  # a file system's clock may tick slowly
    os.utime(source, (later, later))
    assert install(checkout) == UPDATED


def test_an_interrupted_installation_is_made_afresh(checkout: Path) -> None:
    (checkout / "interrupted").touch()
    assert install(checkout) == MADE[:2]
    (checkout / ".venv" / "rest").touch()
    (checkout / "interrupted").unlink()
    assert install(checkout) == MADE
    assert not (checkout / ".venv" / "rest").exists()
    assert install(checkout) == []


def test_an_environment_made_by_hand_is_used(checkout: Path) -> None:
    subprocess.run(["./python", "-m", "venv", ".venv"], cwd=checkout, check=True)
    (checkout / ".venv" / "torch").touch()
    assert install(checkout) == UPDATED
    assert (checkout / ".venv" / "torch").exists()


def test_an_environment_whose_python_is_gone_is_made_afresh(checkout: Path) -> None:
    install(checkout)
    (checkout / ".venv" / "bin" / "python").unlink()
    assert install(checkout) == MADE


def test_a_moved_checkout_installs_itself_again(checkout: Path) -> None:
    install(checkout)
    moved = checkout.rename(checkout.with_name("moved"))
    assert install(moved) == UPDATED
    assert install(moved) == []


@pytest.mark.parametrize("source", ["tools/prepare_sample.py", "examples/data/sample.jsonl"])
def test_the_sample_is_prepared_again_when_its_source_changes(checkout: Path, source: str) -> None:
    install(checkout)
    prepared = "runs/sample/tokenizer.json"
    for path in ("tools/prepare_sample.py", "examples/data/sample.jsonl", prepared):
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).touch()
        os.utime(checkout / path, (1, 1))
    up_to_date = ["make", "-q", prepared]
    assert subprocess.run(up_to_date, cwd=checkout, timeout=60).returncode == 0
    os.utime(checkout / source, (2, 2))
    assert subprocess.run(up_to_date, cwd=checkout, timeout=60).returncode == 1
