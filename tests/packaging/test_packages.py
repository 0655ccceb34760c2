"""What users install: a wheel made from a source distribution, and the editable install the tests run in."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("csrc", "examples", "kernels", "megalite", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE")


def run(command: list[str], folder: Path, **variables: str) -> str:
    environment = os.environ | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built, without a network, from an unpacked source distribution of this checkout's files."""
    work = tmp_path_factory.mktemp("wheel")
    checkout = work / "checkout"
    checkout.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
            )
        else:
            shutil.copy(ROOT / name, checkout)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", build, str(work)], checkout)
    (archive,) = work.glob("megalite-*.tar.gz")
    shutil.unpack_archive(archive, work, filter="data")
    source = work / archive.name.removesuffix(".tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    # What is built is imported and never runs, so it is not optimised: the last -O counts.
    compiler = work / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {sysconfig.get_config_var("CXX") or "c++"} "$@" -O0 -g0\n')
    compiler.chmod(0o755)
    quick = {"CC": str(compiler), "CXX": str(compiler), "MEGALITE_BUILD_JOBS": str(os.cpu_count() or 1)}
    run([*pip, "--wheel-dir", str(work / "dist"), str(source)], work, **quick)
    (made,) = (work / "dist").glob("megalite-*.whl")
    return made


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_module(contents: set[str]) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megalite").rglob("*.py")}
    kernels = {f"megalite/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "kernels").rglob("*.py")}
    assert modules | kernels == {name for name in contents if name.endswith(".py")}
    assert "megalite/py.typed" in contents


def test_the_source_distribution_holds_the_examples(wheel: Path) -> None:
    """The sample corpus among them, which `make pretrain` starts from."""
    (source,) = (path for path in wheel.parents[1].glob("megalite-*") if path.is_dir())
    for suffix in ("*.sh", "*.py", "*.yaml", "*.jsonl"):
        expected = {path.relative_to(ROOT) for path in (ROOT / "examples").rglob(suffix)}
        assert expected
        assert expected <= {path.relative_to(source) for path in (source / "examples").rglob(suffix)}


def test_the_wheel_holds_the_extension_and_the_licence(contents: set[str]) -> None:
    assert [name for name in contents if name.startswith("megalite/_C.") and name.endswith(".so")]
    assert [name for name in contents if name.endswith("/LICENSE")]


def test_the_wheel_installs_one_top_level_name(contents: set[str]) -> None:
    assert {name.split("/")[0] for name in contents if ".dist-info/" not in name} == {"megalite"}


def test_the_wheel_imports_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import megalite._C, megalite.kernels;"
        "print(megalite._C.__file__, megalite.kernels.__file__, sep='\\n')"
    )
    extension, kernels = run([sys.executable, "-c", script, str(tmp_path)], tmp_path).splitlines()
    assert Path(extension).parent == tmp_path / "megalite"
    assert Path(kernels) == tmp_path / "megalite" / "kernels" / "__init__.py"


def test_kernels_import_in_the_editable_install(tmp_path: Path) -> None:
    script = "import megalite.kernels; print(megalite.kernels.__file__)"
    assert Path(run([sys.executable, "-c", script], tmp_path).strip()) == ROOT / "kernels" / "__init__.py"


def test_kernels_is_no_top_level_module_of_ours(tmp_path: Path) -> None:
    script = "import importlib.util as util; found = util.find_spec('kernels'); print(found and found.origin)"
    assert not run([sys.executable, "-c", script], tmp_path).startswith(str(ROOT / "kernels"))


def test_one_version_everywhere() -> None:
    from importlib.metadata import version

    import megalite

    assert version("megalite") == megalite.__version__
    assert importlib.util.find_spec("megalite._C") is not None
