"""Megatron-LM's string for what each pipeline stage holds: `Ettt|(tt|)*2t|L`.

E is the embedding, t a layer, L head and loss; `|` ends a stage, `x*3` repeats a symbol, `(...)*3` a group,
and commas mean nothing. Stages are in the order of the forward pass; one may be empty.
"""

from __future__ import annotations

import re

from megalite.config.schema.model import MOST_LAYERS

SYMBOL = re.compile(r"\*(?P<times>\d*)|(?P<symbol>.)")
COSMETIC = re.compile(r"[,\s]")
MOST_SYMBOLS = 2 * MOST_LAYERS  # unrolled: each layer may end a stage


def layers_of_stages(layout: str) -> list[int]:
    """Number of layers of each stage. Raises ValueError for what no pipeline can be built from."""
    stages = _unroll(layout).split("|")
    if layout.count("m"):
        raise ValueError("m, a multi-token-prediction layer, does not exist in megalite")
    for symbol, what, stage, place in (
        ("E", "the embedding", stages[0], 0),
        ("L", "head and loss", stages[-1], -1),
    ):
        if sum(held.count(symbol) for held in stages) != 1 or stage[place : place + 1 or None] != symbol:
            where = "begin the first" if symbol == "E" else "end the last"
            raise ValueError(f"{symbol}, {what}, must stand there once, to {where} stage")
    return [held.count("t") for held in stages]


def _unroll(layout: str) -> str:
    """`(t|)*2t*3` -> `t|t|ttt`."""
    written: list[list[str]] = [[]]  # what stands so far: outside, then in each parenthesis that is open
    length = 0
    for match in SYMBOL.finditer(COSMETIC.sub("", layout)):
        symbol, times = match["symbol"], match["times"]
        if times is not None:
            if not times or len(times) > 9 or not written[-1]:
                raise ValueError("* needs a symbol or a group before it, and a number after it")
            repeated = written[-1].pop()
            length += len(repeated) * (int(times) - 1)
            _check_length(length)
            written[-1].append(repeated * int(times))
        elif symbol == "(":
            written.append([])
        elif symbol == ")" and len(written) > 1:
            written[-2].append("".join(written.pop()))
        elif symbol in "EtLm|":
            written[-1].append(symbol)
            length += 1
            _check_length(length)
        else:
            known = "E, t, L, |, *, parentheses and commas"
            raise ValueError(
                ") closes no parenthesis" if symbol == ")" else f"{symbol} is unknown; there are {known}"
            )
    if len(written) > 1:
        raise ValueError("a parenthesis is not closed")
    return "".join(written[0])


def _check_length(length: int) -> None:
    if length > MOST_SYMBOLS:
        raise ValueError(f"unrolled it has more than {MOST_SYMBOLS} symbols")
