"""How a tool runs as a command: nothing that its output meets ends the work."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megalite.interruption import end_on_interrupt, show_cursor_on_terminate
from megalite.standard_streams import occupy_closed, take_everything


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
    output = take_everything()
    try:
        os.getcwd()
    except FileNotFoundError:
        print(f"{name}: error: the working folder was deleted", file=sys.stderr)
        sys.exit(1)
    try:
        code = main()
    except Exception:  # told here, as what follows may end the process
        traceback.print_exc()
        code = 1
    if output is not None:
        sys.stdout.flush()
        if code == 0 and output.error is not None and not isinstance(output.error, BrokenPipeError):
            reason = output.error.strerror
            print(f"{name}: error: all is done, but standard output takes nothing: {reason}", file=sys.stderr)
            code = 1
    if code != 0 and _has_busy_workers():
        if sys.stderr is not None:
            sys.stderr.flush()
        os._exit(code)  # Python would wait for them: they may be in a long text that nobody wants any more
    sys.exit(code)


def _has_busy_workers() -> bool:
    from megalite.data.shortage import WORKER

    return any(thread.name.startswith(WORKER) for thread in threading.enumerate())
