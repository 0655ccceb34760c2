"""Several datasets in one: what follows `--data-path`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config.paths import open_regular


@dataclass(frozen=True)
class Blend:
    """Dataset prefixes, with a weight each or, when `weights` is None, weighted by their sizes."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(items: Sequence[str]) -> Blend:
    """Read `prefix ...` or `weight prefix weight prefix ...`.

    As in Megatron-LM: an odd number of items are prefixes; an even number are pairs when every first of two
    is a number, and prefixes when none is. Raises ValueError for a mixture, for weights that are negative,
    not finite, or all zero, and for those that are the names of datasets too, as `2021`.
    """
    firsts = [_number(item) for item in items[0::2]]
    if len(items) % 2 or all(number is None for number in firsts):
        return Blend(tuple(items), None)
    weights = [number for number in firsts if number is not None]
    if len(weights) != len(firsts):
        odd = items[2 * firsts.index(None)]
        raise ValueError(f"{odd!r} stands where a weight is expected")
    for item in dict.fromkeys(items[0::2]):
        if os.path.isfile(f"{item}.idx"):
            raise ValueError(
                f"{item} would be a weight, but {item}.idx is there: write ./{item} for the dataset, "
                f"+{item} for the weight"
            )
    if any(not math.isfinite(weight) or weight < 0 for weight in weights):
        raise ValueError(f"weights must be finite and >= 0, not {' '.join(items[0::2])}")
    if not math.isfinite(sum(weights)):
        raise ValueError(f"the sum of the weights {' '.join(items[0::2])} is not finite")
    if sum(weights) == 0:
        raise ValueError("at least one weight must be > 0")
    return Blend(tuple(items[1::2]), tuple(weights))


DATA_ARGS_BYTES = 64 << 20  # a hundred thousand datasets and more


def read_data_args(path: str) -> tuple[str, ...]:
    """The items of a `--data-args-path` file: what would follow `--data-path`, over any number of lines.

    Raises OSError, and ValueError for a file that is no such list.
    """
    with open_regular(path) as file:
        content = file.read(DATA_ARGS_BYTES + 1)
    if len(content) > DATA_ARGS_BYTES:
        raise ValueError(f"more than {DATA_ARGS_BYTES >> 20} MiB: expected weights and prefixes of datasets")
    return tuple(content.decode("utf-8-sig").split())


def parse_split(text: str) -> tuple[float, float, float]:
    """`969, 30, 1` -> shares of training, validation and test that add up to 1. Raises ValueError."""
    shares = [float(part) for part in text.replace("/", ",").split(",")]
    if len(shares) > 3:
        raise ValueError(f"{len(shares)} shares")
    train, valid, test = (*shares, 0.0, 0.0)[:3]
    total = train + valid + test
    if min(shares) < 0 or not 0 < total < math.inf:
        raise ValueError("shares must be finite, also their sum, >= 0 and not all 0")
    return train / total, valid / total, test / total


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
