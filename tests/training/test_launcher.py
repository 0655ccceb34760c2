"""What a launcher must have written into the environment, and what a process says when it has not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.config import ConfigErrors
from megalite.training.launcher import Place, place_of

ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_without_a_launcher_there_is_one_process() -> None:
    assert place_of({"HOME": "/"}) == place_of({"RANK": "", "WORLD_SIZE": "1"}) == Place(0, 0, 1)


def test_torchruns_variables_tell_the_place() -> None:
    given = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", **ADDRESS}
    assert place_of(given) == Place(rank=5, local_rank=1, world_size=8)


HOW = "start with torchrun, which sets it"


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({"RANK": "abc"}, ["RANK abc: not a whole number; a launcher gives one >= 0"]),
        ({"RANK": "-1", "WORLD_SIZE": "0"}, ["RANK -1: not a whole", "WORLD_SIZE 0: not a whole number"]),
        ({"LOCAL_RANK": "1.5"}, ["LOCAL_RANK 1.5: not a whole number"]),
        ({"RANK": "0"}, [f"WORLD_SIZE: is missing beside RANK 0; {HOW}"]),
        ({"WORLD_SIZE": "2", **ADDRESS}, [f"RANK: is missing beside WORLD_SIZE 2; {HOW}"]),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            ["MASTER_ADDR: is missing beside WORLD_SIZE 2", "MASTER_PORT: is missing"],
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", **ADDRESS, "MASTER_PORT": "tcp://10.0.0.1:29500"},
            ["MASTER_PORT tcp://10.0.0.1:29500: not a port; a launcher gives one from 1 to 65535"],
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2", **ADDRESS},
            ["RANK 2: ranks of WORLD_SIZE 2 are 0 to 1; give every process a rank of its own"],
        ),
    ],
)
def test_what_would_hang_or_crash_is_a_message(given: dict[str, str], messages: list[str]) -> None:
    with pytest.raises(ConfigErrors) as found:
        place_of(given)
    errors = [str(error) for error in found.value.errors]
    assert [error[: len(message)] for error, message in zip(errors, messages, strict=True)] == messages


def test_a_process_that_no_launcher_placed_leaves_with_2() -> None:
    code = "import sys; from megalite.training.main import main; sys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RANK": "3", "WORLD_SIZE": "2", **ADDRESS},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "1 configuration error:"
    assert done.stderr.splitlines()[1].startswith("  1. RANK 3: ranks of WORLD_SIZE 2")


def test_closed_standard_streams_are_no_place_for_files(tmp_path: Path) -> None:
    """As those of a checkpoint, into which a library's messages would be written."""
    code = """if True:
        import os, sys
        from megalite.training.main import main
        try:
            main([])
        except SystemExit:
            null = os.stat(os.devnull).st_rdev
            closed = [i for i in range(3) if os.fstat(i).st_rdev != null]
            open(sys.argv[1], "w").write(f"{closed}")
    """
    line = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code, str(tmp_path / "found")]
    environment = {**os.environ, "RANK": "3", "WORLD_SIZE": "2", **ADDRESS}
    subprocess.run(line, env=environment, timeout=60, check=False)
    assert (tmp_path / "found").read_text() == "[]"
