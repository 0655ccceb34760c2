"""Files and command line laid over each other: the later one wins, also over what contradicts it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config.errors import ConfigError, shown
from megalite.config.megatron import SHORTHANDS
from megalite.config.schema.fields import flag_name
from megalite.config.settings import SETTINGS
from megalite.config.values import BadValue, convert

# Each row: ways to say the same thing, of which one may be used. A way is one setting or several together.
ALTERNATIVES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("train_iters",), ("train_samples",)),
    (
        ("mock_data",),
        ("data_path",),
        ("data_args_path",),
        ("train_data_path", "valid_data_path", "test_data_path"),
    ),
    (("split",), ("train_data_path", "valid_data_path", "test_data_path")),
    (("lr_warmup_fraction",), ("lr_warmup_iters",), ("lr_warmup_samples",)),
    (("lr_decay_iters",), ("lr_decay_samples",)),
    (("lr_wsd_decay_iters",), ("lr_wsd_decay_samples",)),
    (("pipeline_schedule",), ("pipeline_schedule_csv",)),
    (("rampup_batch_size",), ("step_batch_size_schedule",)),
)
# What a switch that is off leaves without a meaning: switched off in a later layer, it takes these along.
ONLY_WITH = {"group_query_attention": ("num_query_groups",)}


@dataclass(frozen=True)
class Layer:
    """Converted values from one source, and what was wrong there.

    typed: it is the command line, where a default that is spelt out is meant.
    bad: settings without a usable value.
    """

    typed: bool
    values: dict[str, Any]
    bad: frozenset[str]
    errors: tuple[ConfigError, ...]
    warnings: tuple[str, ...]


def make_layer(raw: Mapping[str, Any], typed: bool) -> Layer:
    """Convert the raw values of one source, expand shorthands, and find what contradicts within it."""
    values: dict[str, Any] = {}
    bad: set[str] = set()
    errors: list[ConfigError] = []
    warnings: list[str] = []
    for name in (name for name in raw if name in SETTINGS):
        try:
            values[name] = convert(SETTINGS[name], raw[name])
        except BadValue as found:
            errors.append(found.error)
            bad.add(name)
    spelt: dict[str, str] = {name: f"{flag_name(name)} {shown(value)}" for name, value in values.items()}
    for name in (name for name in raw if name in SHORTHANDS and raw[name]):
        short = SHORTHANDS[name]
        if short.deprecated:
            warnings.append(f"{flag_name(name)} is old; use {flag_name(short.name)} {short.value}")
        if values.get(short.name, short.value) != short.value:
            errors.append(_contradiction(flag_name(name), spelt[short.name]))
            bad.add(short.name)
        values[short.name] = short.value
        spelt[short.name] = flag_name(name)
    for row in ALTERNATIVES:
        used = [
            next(name for name in way if _says_something(name, values)) for way in row if _used(way, values)
        ]
        for second in used[1:]:
            errors.append(_contradiction(flag_name(used[0]), flag_name(second)))
    return Layer(typed, values, frozenset(bad), tuple(errors), tuple(warnings))


def merge(layers: Iterable[Layer]) -> dict[str, Any]:
    """Values by name: a later layer replaces the same names, the alternatives to what it gives, and what
    means nothing without a switch that it turns off.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for row in ALTERNATIVES:
            meant = [any(_meant(name, layer) for name in way) for way in row]
            if any(meant):
                for name in (name for way, used in zip(row, meant, strict=True) if not used for name in way):
                    merged.pop(name, None)
        off = [switch for switch in ONLY_WITH if layer.values.get(switch) is False]
        for name in (name for switch in off for name in ONLY_WITH[switch]):
            merged.pop(name, None)
        merged |= layer.values
    return merged


def _used(way: tuple[str, ...], values: Mapping[str, Any]) -> bool:
    return any(_says_something(name, values) for name in way)


def _says_something(name: str, values: Mapping[str, Any]) -> bool:
    """A resolved file gives every name; a value that is the default contradicts nothing."""
    return name in values and values[name] != SETTINGS[name].default


def _meant(name: str, layer: Layer) -> bool:
    """`--lr-warmup-iters 0` replaces a file's warm-up fraction; `--no-mock-data` replaces no data path."""
    spelt_out = layer.typed and name in layer.values and SETTINGS[name].kind is not bool
    return spelt_out or _says_something(name, layer.values)


def _contradiction(first: str, second: str) -> ConfigError:
    return ConfigError(first, None, f"contradicts {second}", "give one of the two")
