"""Whole combinations drawn at random: a layout, a model variant, and a value for each field of `Options`.

A field's values are those that `cases.options` hands out, or both of a bool, so that a new option joins here
by itself. What the configuration's rules refuse is drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache, cached_property
from typing import Any

from megalite.config import Config, validate
from tests.matrix import cases
from tests.matrix.cases import LAYOUTS, MODELS, Layout, Options

MOST_DRAWS = 2000  # for one combination: far more than any pair of options that exclude each other costs


@dataclass(frozen=True)
class Combination:
    """One training."""

    variant: str
    layout: Layout
    options: Options

    @cached_property
    def config(self) -> Config:
        model = cases.model_for(self.variant, self.layout, self.options)
        return cases.make_config(model, self.layout, self.options)

    @property
    def is_allowed(self) -> bool:
        return not validate(self.config, self.layout.ranks)

    def __str__(self) -> str:
        """All that is needed to train it alone; options at their default are left out."""
        chosen = [
            f"{field.name}={getattr(self.options, field.name)}"
            for field in fields(Options)
            if getattr(self.options, field.name) != field.default
        ]
        return ",".join([str(self.layout), self.variant, *chosen])


@cache
def domains() -> dict[str, list[Any]]:
    """For each field of `Options` every value that it has on any layout with any variant, and its default."""
    rotated = [one for layout in LAYOUTS for one in cases.options(layout).values()]
    found = {}
    for field in fields(Options):
        values = {getattr(one, field.name) for one in rotated}
        values |= {field.default} - {MISSING}
        found[field.name] = [False, True] if isinstance(field.default, bool) else sorted(values, key=str)
    return found


def one_for_each_layout(seed: str) -> Iterator[Combination]:
    """Every layout once, all else drawn."""
    for layout in LAYOUTS:
        dice = random.Random(f"{seed} {layout}")
        yield _draw(dice, layout, list(MODELS), domains())


def one_for_each_schedule(seed: str) -> Iterator[Combination]:
    """Every layout with every variant and, where it has a pipeline, every schedule; all else drawn.

    No schedule stands for the default one, or for a table.
    """
    for layout in LAYOUTS:
        for variant in MODELS:
            for schedule in domains()["pipeline_schedule"] if layout.pipeline > 1 else [None]:
                dice = random.Random(f"{seed} {layout} {variant} {schedule}")
                yield _draw(dice, layout, [variant], {**domains(), "pipeline_schedule": [schedule]})


def _draw(
    dice: random.Random, layout: Layout, variants: list[str], values: dict[str, list[Any]]
) -> Combination:
    """The first combination that the rules allow."""
    for _ in range(MOST_DRAWS):
        chosen = Options(**{name: dice.choice(known) for name, known in values.items()})
        drawn = Combination(dice.choice(variants), layout, chosen)
        if drawn.is_allowed:
            return drawn
    raise AssertionError(f"none of {MOST_DRAWS} combinations of options is allowed on {layout}")
