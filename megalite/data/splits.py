"""Which documents of a dataset belong to training, validation and test."""

from __future__ import annotations

from itertools import accumulate

from megalite.config.blend import parse_split
from megalite.data.errors import DataError

SPLIT_NAMES = ("train", "valid", "test")
Share = tuple[float, float]  # [low, high) of the documents, as fractions

WHOLE: Share = (0.0, 1.0)


def split_shares(text: str) -> list[Share | None]:
    """`"969, 30, 1"` -> the interval of each split; None where the width is zero. Raises DataError."""
    try:
        widths = parse_split(text)
    except ValueError as error:
        raise DataError(f'--split {text}: {error}; expected one to three shares, as in "969,30,1"') from None
    ends = list(accumulate(widths))
    starts = [0.0, *ends[:-1]]
    return [
        (start, end) if width > 0 else None for start, end, width in zip(starts, ends, widths, strict=True)
    ]


def document_range(share: Share, documents: int) -> tuple[int, int]:
    """First and one-past-last document of `share`; halves round to even, as in Megatron-LM."""
    return round(share[0] * float(documents)), min(documents, round(share[1] * float(documents)))
