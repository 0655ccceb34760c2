"""Standard input, output and error as callers leave them: closed, or shared and not blocking."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

STANDARD = (0, 1, 2)


def occupy_closed() -> None:
    """Give what is closed of them to the null device, for this process and its children.

    Otherwise the next file that is opened has its number, and is written to by every library that prints a
    message by itself. To be called before any file is opened to be written.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) in STANDARD:  # the lowest that is free
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


class WaitingInput(io.FileIO):
    """A descriptor that is read to its end, waiting where another process that has it made it non-blocking,
    as ssh, node and asyncio do; otherwise a moment without data would be taken for the end.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "r", closefd=False)

    def readinto(self, buffer: Buffer, /) -> int:
        while (count := super().readinto(buffer)) is None:
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN)
            poll.poll()
        return count


class LastingOutput(io.FileIO):
    """A descriptor that takes everything, waiting where it must."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.error: OSError | None = None
        self.on_error: Callable[[OSError], None] = lambda _: None
        """Called with the first error."""

    def write(self, data: Buffer, /) -> int:
        try:
            while (written := super().write(data)) is None:  # non-blocking, and full
                select.select([], [self.fileno()], [])
            return written
        except OSError as error:
            if self.error is None:
                self.error = error
                self.on_error(error)
            return memoryview(data).nbytes


def take_everything() -> LastingOutput | None:
    """From now on nothing that standard output and error meet raises: a pipe whose reader has gone, as `head`
    does, or a full disk takes the rest, and what the encoding lacks is replaced. Returns standard output;
    None where there is none.
    """
    output = LastingOutput(1) if sys.stdout is not None else None
    if output is not None:
        sys.stdout = text_of(output, sys.stdout, "replace")
    if sys.stderr is not None:
        sys.stderr = text_of(LastingOutput(2), sys.stderr, "backslashreplace")
    return output


def text_of(raw: LastingOutput, before: TextIO, errors: str) -> TextIO:
    """A stream of text into `raw`, in the encoding of `before`."""
    return io.TextIOWrapper(io.BufferedWriter(raw), before.encoding, errors, line_buffering=True)
