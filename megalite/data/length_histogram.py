"""How long the documents of a dataset are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megalite.data.errors import DataError, check_replaceable, lacks_package, replacing

BAR_WIDTH = 50
PICTURES = (".png", ".pdf", ".svg", ".svgz", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps", ".ps", ".pgf")
SHOWN = 12  # datasets in a picture; of more their bars are too thin, and their names cover it
PNG = b"\x89PNG"


class Bin(NamedTuple):
    """Sequences of `low` to `high` tokens."""

    low: int
    high: int
    sequences: int
    tokens: int


def length_histogram(lengths: Iterable[np.ndarray]) -> list[Bin]:
    """Of lengths in pieces. Powers of two: 0, 1, 2 to 3, 4 to 7, ..."""
    counts, sums = np.zeros(33, dtype=np.int64), np.zeros(33, dtype=np.int64)
    for part in lengths:
        bins = np.frexp(part.astype(np.float64))[1]  # bits of the length
        counts += np.bincount(bins, minlength=33)
        sums += np.bincount(bins, weights=part, minlength=33).astype(np.int64)
    ends = [0] + [(1 << bits) - 1 for bits in range(1, 33)]
    starts = [0] + [1 << (bits - 1) for bits in range(1, 33)]
    rows = [Bin(*row) for row in zip(starts, ends, counts.tolist(), sums.tolist(), strict=True)]
    used = [i for i, row in enumerate(rows) if row.sequences]
    return rows[used[0] : used[-1] + 1] if used else []


def draw_text(bins: list[Bin]) -> str:
    """One line a bin with a bar of its share of the sequences."""
    total = sum(row.sequences for row in bins) or 1
    most = max((row.sequences for row in bins), default=1)
    lines = []
    for row in bins:
        bar = "█" * round(BAR_WIDTH * row.sequences / most)
        label = f"{row.low}" if row.low == row.high else f"{row.low} to {row.high}"
        lines.append(f"{label:>24} {row.sequences:>14,} {100 * row.sequences / total:5.1f} % {bar}")
    return "\n".join(lines)


def check_picture(path: Path) -> None:
    """Raises DataError for what is no picture, by its name or its content, and would be replaced by one."""
    check_replaceable(path)
    if not path.is_file() or path.suffix.lower() in PICTURES:
        return
    with path.open("rb") as file:
        if file.read(len(PNG)) != PNG:
            raise DataError(f"--histogram-png {path}: is no picture that may be replaced; give another name")


def draw_png(histograms: Mapping[str, Sequence[Bin]], path: Path) -> None:
    """The histograms of datasets, by name, in one picture: shares of the sequences and of the tokens. Raises
    DataError.
    """
    os.environ["MPLBACKEND"] = "agg"  # that of a notebook, around this process, may not be installed for it
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise lacks_package("--histogram-png", "matplotlib", error) from None
    histograms = _largest(histograms)
    figure = Figure(figsize=(9, 6), layout="constrained")
    width = 0.8 / len(histograms)
    lows = sorted({row.low for bins in histograms.values() for row in bins})
    for axes, what in zip(figure.subplots(2, 1, sharex=True), ("sequences", "tokens"), strict=True):
        bars = []
        for number, bins in enumerate(histograms.values()):
            values = np.array([getattr(row, what) for row in bins], dtype=np.float64)
            places = [row.low.bit_length() + width * (number - (len(histograms) - 1) / 2) for row in bins]
            bars.append(axes.bar(places, 100 * values / max(values.sum(), 1), width))
        axes.set_ylabel(f"share of the {what}, %")
        axes.set_xticks([low.bit_length() for low in lows], [*map(str, lows)], rotation=45)
    axes.set_xlabel("tokens in a sequence, at least")
    legend = figure.legend(bars, [*map(str, range(len(bars)))], loc="outside upper center")
    for text, name in zip(legend.get_texts(), histograms, strict=True):
        text.set_text(name)  # as a label, one that begins with _ would be left out before matplotlib 3.10
        text.set_parse_math(False)  # a $ in a path is no formula
    with replacing(path) as temporary:
        try:
            figure.savefig(temporary, dpi=120, format=path.suffix[1:] or "png")
        except (ValueError, RuntimeError) as error:  # no kind of picture, or one that needs TeX
            raise DataError(f"--histogram-png {path}: {error}") from None


def _largest(histograms: Mapping[str, Sequence[Bin]]) -> dict[str, list[Bin]]:
    """Those of at most SHOWN datasets, in their order: where there are more, the last is of the smallest
    together.
    """
    if len(histograms) <= SHOWN:
        return {name: [*bins] for name, bins in histograms.items()}
    by_tokens = sorted(histograms, key=lambda name: -sum(row.tokens for row in histograms[name]))
    alone = {*by_tokens[: SHOWN - 1]}
    shown = {name: [*bins] for name, bins in histograms.items() if name in alone}
    together: dict[int, Bin] = {}
    for row in (row for name in by_tokens[SHOWN - 1 :] for row in histograms[name]):
        before = together.get(row.low, Bin(row.low, row.high, 0, 0))
        together[row.low] = Bin(
            row.low, row.high, before.sequences + row.sequences, before.tokens + row.tokens
        )
    return {**shown, f"{len(histograms) - len(shown)} others": [*together.values()]}
