"""Where a preprocessing run stands, written down so that the same command can continue after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from megalite.data.errors import DataError, WriteError, writing
from megalite.data.indexed_dataset import WriterState
from megalite.data.inputs import Part, printable, read_once


class Place(NamedTuple):
    """A place between two documents of the inputs."""

    input: int = 0
    """Which of the inputs."""
    records: int = 0
    """Records of it that are done."""
    offset: int = 0
    """Where in it they end."""
    documents: int = 0
    """Documents done in all inputs."""
    input_bytes: int = 0
    """Uncompressed bytes done in all inputs."""


class Checkpoint(NamedTuple):
    """What has reached the files."""

    place: Place
    written: Sequence[WriterState | None]
    """Of each dataset; None before the first."""
    skipped: tuple[int, int]
    """Documents that were skipped, and bytes of the list of them."""

    @staticmethod
    def nothing(datasets: int) -> Checkpoint:
        return Checkpoint(Place(), [None] * datasets, (0, 0))


class NotContinued(Exception):
    """Why an earlier run cannot be continued."""


class RunState:
    """The small file that an unfinished run leaves beside its partial output."""

    def __init__(self, output_prefix: str, inputs: Sequence[Part], recipe: dict[str, object]) -> None:
        """`recipe`: everything but the inputs that decides the output."""
        self.path = Path(f"{output_prefix}.progress.json")
        self._partial = self.path.with_name(f"{self.path.name}.partial")
        self._inputs = inputs
        self._stamps = [None if read_once(part.path) else _stamp(part.path) for part in inputs]
        self._resumable = None not in self._stamps
        files = [
            [printable(os.path.abspath(part.path)), *part[1:], *map(str, stamp or ())]  # times beyond 64 bits
            for part, stamp in zip(inputs, self._stamps, strict=True)
        ]
        self.run = {"recipe": _hash(recipe), "inputs": _hash(files)}

    @property
    def work(self) -> str:
        """Hash of all that decides the output."""
        return _hash(self.run)

    def check_unchanged(self, number: int) -> None:
        """Raises DataError when input `number` is not what it was when the run began: what was read of it
        may be of either.
        """
        path, stamp = self._inputs[number].path, self._stamps[number]
        try:
            unchanged = stamp is None or _stamp(path) == stamp
        except OSError:
            unchanged = False
        if not unchanged:
            raise DataError(f"{path}: changed while it was read; the same command starts anew")

    def load(self) -> Checkpoint | None:
        """How far an earlier run of the same work came; None when there was none.

        Raises NotContinued when it was other work, and DataError when what it left cannot be read now.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}; without it the same command starts anew"
            raise DataError(f"{self.path}: {what}") from None
        if not self._resumable:
            raise NotContinued("standard input and pipes give nothing again")
        try:
            content = orjson.loads(text)
            if content["hash"] != _hash([content[name] for name in ("place", "written", "skipped")]):
                raise ValueError("was changed")
            recipe, inputs = content["run"]["recipe"], content["run"]["inputs"]
            written = [WriterState(*state) for state in content["written"]]
            count, size = content["skipped"]
            checkpoint = Checkpoint(Place(*content["place"]), written, (count, size))
        except (ValueError, KeyError, TypeError):
            raise NotContinued("this file of it is damaged, or of another version") from None
        if recipe != self.run["recipe"]:
            raise NotContinued(
                "its options, its tokenizer or the version of the tokenizer's library were others"
            )
        if inputs != self.run["inputs"]:
            raise NotContinued("its inputs were others, or have changed since")
        return checkpoint

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the file by `checkpoint`, whose output must have reached the files before."""
        place, written = list(checkpoint.place), [list(state or ()) for state in checkpoint.written]
        content = {
            "run": self.run,
            "place": place,
            "written": written,
            "skipped": checkpoint.skipped,
            "hash": _hash([place, written, checkpoint.skipped]),
        }
        with writing(self._partial), self._partial.open("wb") as file:
            file.write(orjson.dumps(content))
            file.flush()
            os.fsync(file.fileno())
        self._partial.rename(self.path)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Around the run: a full disk or too little memory becomes a DataError that says what the same
        command will do.
        """
        try:
            yield
        except (WriteError, MemoryError) as error:
            what = str(error) or "out of memory"
            then = "continues" if self._resumable and self.path.is_file() else "starts anew"
            raise DataError(f"{what}; the same command {then}") from error

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)  # of a run that was killed in `save`


def _hash(content: object) -> str:
    return hashlib.blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
