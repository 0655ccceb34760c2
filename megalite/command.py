"""How a tool runs as a command: nothing that its output meets ends the work."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from megalite.interruption import end_on_interrupt, show_cursor_on_terminate
from megalite.standard_streams import occupy_closed

if TYPE_CHECKING:
    from typing_extensions import Buffer


def run_data_command(main: Callable[[], int], interrupted: str) -> NoReturn:
    """`run_command` for a tool that shows a progress bar and multiplies no matrices.

    To be called before numpy is imported: its OpenBLAS sends itself a SIGINT when it gets no threads, so it
    is told to want none.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    show_cursor_on_terminate()
    run_command(main, interrupted)


def run_command(main: Callable[[], int], interrupted: str) -> NoReturn:
    """Call `main` and exit with its code, or 1 where what it printed could not be written; `interrupted` is
    said after Ctrl-C.

    A pipe whose reader has gone, as `head` does, takes the rest; what the encoding lacks is replaced.
    """
    occupy_closed()
    name = Path(sys.argv[0]).stem
    end_on_interrupt(f"{name}: {interrupted}")
    output = _Lasting(1) if sys.stdout is not None else None
    if output is not None:
        sys.stdout = _text(output, sys.stdout, "replace")
    if sys.stderr is not None:
        sys.stderr = _text(_Lasting(2), sys.stderr, "backslashreplace")
    try:
        os.getcwd()
    except FileNotFoundError:
        print(f"{name}: error: the working folder was deleted", file=sys.stderr)
        sys.exit(1)
    code = main()
    if output is not None:
        sys.stdout.flush()
        if code == 0 and output.error is not None and not isinstance(output.error, BrokenPipeError):
            reason = output.error.strerror
            print(f"{name}: error: all is done, but standard output takes nothing: {reason}", file=sys.stderr)
            code = 1
    sys.exit(code)


class _Lasting(io.FileIO):
    """A descriptor that takes everything, waiting where it must, and keeps the first error."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.error: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        try:
            while (written := super().write(data)) is None:  # non-blocking, and full
                select.select([], [self.fileno()], [])
            return written
        except OSError as error:
            self.error = self.error or error
            return memoryview(data).nbytes


def _text(raw: _Lasting, before: TextIO, errors: str) -> TextIO:
    return io.TextIOWrapper(io.BufferedWriter(raw), before.encoding, errors, line_buffering=True)
