"""Where a preprocessing run stands, written down so that the same command can continue after a kill."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import orjson


class Place(NamedTuple):
    """A place between two documents of the inputs."""

    input: int = 0
    """Which of the inputs."""
    line: int = 0
    """Lines of it that are done."""
    documents: int = 0
    """Documents done in all inputs."""
    input_bytes: int = 0
    """Uncompressed bytes done in all inputs."""


class Checkpoint(NamedTuple):
    """What has reached the files."""

    place: Place
    written: Sequence[tuple[int, int, int] | None]
    """(tokens, sequences, documents) of each dataset; None before the first."""
    skipped: tuple[int, int]
    """Documents that were skipped, and bytes of the list of them."""

    @staticmethod
    def nothing(datasets: int) -> Checkpoint:
        return Checkpoint(Place(), [None] * datasets, (0, 0))


class RunState:
    """The small file that an unfinished run leaves beside its partial output."""

    def __init__(self, output_prefix: str, inputs: Sequence[str], recipe: dict[str, object]) -> None:
        """``recipe``: everything but the inputs that decides the output."""
        self.path = Path(f"{output_prefix}.progress.json")
        self._resumable = "-" not in inputs
        files = [] if not self._resumable else [_stamp(path) for path in inputs]
        text = orjson.dumps({"recipe": recipe, "inputs": files}, option=orjson.OPT_SORT_KEYS)
        self.run = hashlib.blake2b(text, digest_size=16).hexdigest()

    def load(self) -> Checkpoint | None:
        """How far an earlier run of the same work came; None when there was none, or it was other work."""
        try:
            content = orjson.loads(self.path.read_bytes())
            if not self._resumable or content["run"] != self.run:
                return None
            written: list[tuple[int, int, int] | None]
            written = [(tokens, sequences, documents) for tokens, sequences, documents in content["written"]]
            count, size = content["skipped"]
            return Checkpoint(Place(*content["place"]), written, (count, size))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the file by ``checkpoint``, whose output must have reached the files before."""
        content = orjson.dumps(
            {
                "run": self.run,
                "place": list(checkpoint.place),
                "written": checkpoint.written,
                "skipped": checkpoint.skipped,
            }
        )
        temporary = self.path.with_name(f"{self.path.name}.partial")
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _stamp(path: str) -> list[object]:
    status = os.stat(path)
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns]
