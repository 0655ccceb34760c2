"""Ctrl-C ends a command with one line, as soon as the C++ call that the main thread is in returns; behind it
and SIGTERM the terminal shows its cursor again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

EXIT_CODE = 130  # 128 + SIGINT, as shells have it


def end_on_interrupt(message: str) -> None:
    """From now on SIGINT, unless it is ignored, writes `message` to standard error, of several ranks on the
    first alone, and ends the process; what is on the disk must be fit for that.

    A KeyboardInterrupt is no way out of an import: numpy takes it for a broken installation, orjson ends in
    a SIGSEGV. Nor would it end the process, as Python waits for threads, which may be in a long text.

    Where the system gives no threads, OpenBLAS sends itself a SIGINT when numpy is imported: that ends the
    process, too.
    """

    def end(number: int, frame: FrameType | None) -> None:
        _show_cursor()
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):  # nobody reads it any more
                os.write(2, f"{message}\n".encode())
        os._exit(EXIT_CODE)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def raise_on_interrupt() -> None:
    """After `end_on_interrupt`: from now on the first SIGINT raises KeyboardInterrupt, the next one kills."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, interrupt)


def show_cursor_on_terminate() -> None:
    """From now on the terminal shows its cursor again behind SIGTERM, when the C++ call that the main thread
    is in returns.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        _show_cursor()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    if os.isatty(2) and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)


def _show_cursor() -> None:
    """Which a progress bar hides."""
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\x1b[?25h\n")
