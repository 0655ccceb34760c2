"""Standard input, output and error as callers leave them: closed, or shared and not blocking."""

from __future__ import annotations

import io
import os
import select
from typing import TYPE_CHECKING

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
