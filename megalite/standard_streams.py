"""Standard input, output and error of a process whose caller has closed them."""

from __future__ import annotations

import os

STANDARD = (0, 1, 2)


def occupy_closed() -> None:
    """Give what is closed of them to the null device, for this process and its children.

    Otherwise the next file that is opened has its number, and is written to by every library that prints a
    message by itself. To be called before any file is opened to be written.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) in STANDARD:  # the lowest that is free
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
