"""What command lines of several modules have in common."""

from __future__ import annotations

import argparse
import re
from typing import Any


class Once(argparse.Action):
    """A list behind its flag, refused a second time: whether one or both are meant would be a guess."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, self.default) is not self.default:
            raise argparse.ArgumentError(self, "given twice; give all its values behind one")
        setattr(namespace, self.dest, values)


def is_address(text: str) -> bool:
    """Whether `text`, where a path is expected, is an address: of s3://... a folder s3: would be made."""
    return re.match(r"[a-z][a-z0-9+.-]*://", text) is not None
