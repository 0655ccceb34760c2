"""The draw of a token: what can be drawn, how often, and by which number."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megalite.generation.sampling import Sampling, draw, uniform

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0, 0.0])
DRAWS = 4000


def frequencies(sampling: Sampling) -> dict[int, float]:
    counts = Counter(draw(LOGITS, sampling, 0, position) for position in range(DRAWS))
    return {token: count / DRAWS for token, count in counts.items()}


def test_temperature_0_takes_the_first_of_the_likeliest() -> None:
    assert {
        draw(LOGITS, Sampling(temperature=0), text, place) for text in range(3) for place in range(3)
    } == {1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, 0)
    found = frequencies(Sampling(temperature, top_k=0))
    for token, probability in enumerate(expected.tolist()):
        # five standard deviations of a share; the draws are fixed by the seed, so this cannot flicker
        spread = 5 * (probability * (1 - probability) / DRAWS) ** 0.5
        assert found.get(token, 0.0) == pytest.approx(probability, abs=spread)


@pytest.mark.parametrize(
    ("top_k", "top_p", "possible"),
    [
        (1, 1.0, {1}),
        (3, 1.0, {1, 3, 2}),
        (0, 1.0, {0, 1, 2, 3, 4, 5}),
        (99, 1.0, {0, 1, 2, 3, 4, 5}),
        (0, 0.3, {1}),  # the two likeliest have 0.38 each
        (0, 0.5, {1, 3}),
        (0, 0.8, {1, 3, 2}),
        (2, 0.9, {1, 3}),
    ],
)
def test_only_the_likeliest_are_drawn(top_k: int, top_p: float, possible: set[int]) -> None:
    found = frequencies(Sampling(1.0, top_k, top_p))
    assert found.keys() == possible
    weights = {token: float(LOGITS[token].exp()) for token in possible}
    for token in possible:
        probability = weights[token] / sum(weights.values())
        spread = 5 * (probability * (1 - probability) / DRAWS) ** 0.5
        assert found[token] == pytest.approx(probability, abs=spread)


def test_the_numbers_are_spread_and_depend_on_each_argument() -> None:
    numbers = [uniform(seed, text, place) for seed in (1, 2) for text in range(20) for place in range(50)]
    assert len(set(numbers)) == len(numbers)
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert uniform(1, 11, 1) != uniform(1, 1, 11)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top-k"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.5}, "top-p"),
    ],
)
def test_values_outside_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**values)  # type: ignore[arg-type]
