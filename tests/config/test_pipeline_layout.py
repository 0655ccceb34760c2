"""Megatron-LM's layout string, unrolled."""

from __future__ import annotations

import pytest

from megalite.config.pipeline_layout import layers_of_stages


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ("EtttL", [3]),
        ("Et*3|(tt|)*29,L", [3, *[2] * 29, 0]),  # the example of Megatron-LM's guide, without its m
        ("Et*6|t*6|t*6|t*5|t*5|t*5|t*5|t*5L", [6, 6, 6, 5, 5, 5, 5, 5]),
        ("E||t|L", [0, 0, 1, 0]),
        ("E|(t|)*3,L", [0, 1, 1, 1, 0]),
        ("E t, t |tL", [2, 1]),
        ("E((t*2|)*2t|)*2L", [2, 2, 1, 2, 2, 1, 0]),
        ("Et|*3tL", [1, 0, 0, 1]),
    ],
)
def test_stages_are_counted(layout: str, layers: list[int]) -> None:
    assert layers_of_stages(layout) == layers


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ett|x|tL", "x is unknown"),
        ("Ett|t", "L, head and loss, must stand there once, to end the last stage"),
        ("Ett|tLt", "to end the last stage"),
        ("|Ett|tL", "E, the embedding, must stand there once, to begin the first stage"),
        ("Ett|EtL", "to begin the first stage"),
        ("tE|tL", "to begin the first stage"),
        ("Et|mL", "m, a multi-token-prediction layer, does not exist"),
        ("E(t|L", "a parenthesis is not closed"),
        ("Et)|L", "closes no parenthesis"),
        ("E*|L", r"\* needs a symbol or a group before it, and a number after it"),
        ("*2EL", r"\* needs a symbol"),
        ("E((t*99999)*99999)*99999L", "unrolled it has more than 131072 symbols"),
        ("E" + "t*60000" * 3 + "L", "unrolled it has more than"),
        ("Et*00000000000000000009L", r"\* needs"),
        ("", "E, the embedding, must stand there once"),
    ],
)
def test_what_is_no_pipeline_is_refused(layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers_of_stages(layout)
