"""Ctrl-C ends a data tool with one line, as soon as the C++ call that the main thread is in returns. Behind
it and SIGTERM the terminal shows its cursor again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

EXIT_CODE = 130  # 128 + SIGINT, as shells have it


def end_on_interrupt(message: str) -> None:
    """From now on SIGINT, unless it is ignored, writes `message` to standard error and ends the process; what
    is on the disk must be fit for that.

    A KeyboardInterrupt is no way out of an import: numpy takes it for a broken installation, orjson ends in
    a SIGSEGV. Nor would it end the process, as Python waits for threads, which may be in a long text.

    To be called before numpy is imported: its OpenBLAS sends itself a SIGINT when it gets no threads, so it
    is told to want none; nothing here multiplies matrices.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    def show_cursor() -> None:
        with contextlib.suppress(OSError):
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # a progress bar hides it

    def terminate(number: int, frame: FrameType | None) -> None:
        show_cursor()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def end(number: int, frame: FrameType | None) -> None:
        show_cursor()
        with contextlib.suppress(OSError):  # nobody reads it any more
            os.write(2, f"{message}\n".encode())
        os._exit(EXIT_CODE)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
    if os.isatty(2) and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)
