"""Every rule between settings. They run together, so that a user sees all errors at once."""

from __future__ import annotations

from collections.abc import Collection

from megalite.config.errors import ConfigError
from megalite.config.rules import (
    activations,
    apex,
    files,
    layout,
    model,
    optimizer,
    pipeline,
    schedule,
    sharding,
)
from megalite.config.rules.advice import warnings
from megalite.config.rules.rule import Candidate
from megalite.config.schema.fields import flag_name

__all__ = ["ALL_RULES", "Candidate", "broken_rules", "warnings"]

ALL_RULES = (
    *model.RULES,
    *layout.RULES,
    *pipeline.RULES,
    *schedule.RULES,
    *sharding.RULES,
    *activations.RULES,
    *optimizer.RULES,
    *apex.RULES,
    *files.RULES,
)


def broken_rules(candidate: Candidate, unusable: Collection[str] = ()) -> list[ConfigError]:
    """The errors of every rule, leaving out rules that read a setting in `unusable`."""
    return [
        ConfigError(flag_name(name), value, what, advice)
        for rule in ALL_RULES
        if not set(rule.reads) & set(unusable)
        for name, value, what, advice in rule.check(candidate)
    ]
