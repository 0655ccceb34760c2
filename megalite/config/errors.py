"""Configuration errors: what was given, what is wrong, what would be right; all of them at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from megalite.leave import leave

EXIT_CODE = 2  # the one that argparse and the shell use for a wrong command line


@dataclass(frozen=True)
class ConfigError:
    """One broken rule.

    flag: as typed, `--num-layers`. value: what was given, None when nothing was. rule: what is wrong.
    suggestion: what would be right, or "".
    """

    flag: str
    value: object
    rule: str
    suggestion: str = ""

    def __str__(self) -> str:
        given = "" if self.value is None else f" {shown(self.value)}"
        advice = f"; {self.suggestion}" if self.suggestion else ""
        return f"{self.flag}{given}: {self.rule}{advice}"


class ConfigErrors(ValueError):
    """Everything that is wrong with a configuration."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(numbered(self.errors)))


def numbered(errors: Sequence[ConfigError]) -> list[str]:
    """The lines that a user reads."""
    title = f"{len(errors)} configuration error{'s' if len(errors) != 1 else ''}:"
    return [title, *(f"  {number}. {error}" for number, error in enumerate(errors, start=1))]


def exit_with_errors(errors: ConfigErrors | Sequence[ConfigError], rank: int) -> NoReturn:
    """Print the errors once, from rank 0, on stderr, and leave with exit code 2 on every rank."""
    found = errors.errors if isinstance(errors, ConfigErrors) else errors
    leave("\n".join(numbered(found)), rank, EXIT_CODE)


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean ...` for a misspelt name, or "" when nothing is close."""
    names = list(known)
    dashed = name.replace("_", "-")
    dashed = dashed if dashed.startswith("--") or not name.startswith("-") else f"-{dashed}"
    if dashed != name and dashed in names:
        return f"did you mean {dashed}?"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def shown(value: object) -> str:
    """A value as it would be typed."""
    if isinstance(value, (list, tuple)):
        return " ".join(str(item) for item in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value or '""'
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e15 else str(value)
