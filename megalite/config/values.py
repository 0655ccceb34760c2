"""From what was typed (text, or a YAML scalar) to a value of the right type and within its range."""

from __future__ import annotations

import math
from typing import Any

from megalite.config.errors import ConfigError, nearest, shown
from megalite.config.schema.fields import Setting
from megalite.limits import INT64_LARGEST

MISSING = "\0missing"  # what the command line stores for a flag that came without its value
TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def convert(setting: Setting, raw: Any) -> Any:
    """The value of one setting. Raises `BadValue`."""
    if raw == MISSING:
        raise BadValue(ConfigError(setting.flag, None, "needs a value", _hint(setting)))
    if raw is None:
        return setting.default
    if setting.many:
        items = raw if isinstance(raw, (list, tuple)) else _one(setting, raw).split()
        values = tuple(_one(setting, item) for item in items)
        for value in values:
            _check_range(setting, value)
        return values
    if setting.name == "split" and isinstance(raw, (list, tuple)):
        raw = ", ".join(shown(part) for part in raw)
    value = _one(setting, raw)
    _check_choice(setting, value)
    _check_range(setting, value)
    return value


class BadValue(ValueError):
    """A value that its setting cannot take; holds the `ConfigError`."""

    def __init__(self, error: ConfigError) -> None:
        super().__init__(str(error))
        self.error = error


def _one(setting: Setting, raw: Any) -> Any:
    if raw == "":  # as of a variable of the shell that is not set: a path would be the working folder
        raise BadValue(ConfigError(setting.flag, raw, "is empty", f"{_hint(setting)}, or leave it out"))
    try:
        return CONVERTERS[setting.kind](raw)
    except (ValueError, TypeError, OverflowError):
        rule = f"not {WORDS[setting.kind]}"
        raise BadValue(ConfigError(setting.flag, raw, rule, _hint(setting))) from None


def _integer(raw: Any) -> int:
    """12, "12", 1e6 and "1e6", but neither true nor 12.5."""
    if isinstance(raw, bool):
        raise TypeError
    if isinstance(raw, int):
        return raw
    try:
        return int(raw) if isinstance(raw, str) else _whole(raw)
    except ValueError:
        return _whole(float(raw))


def _whole(number: float) -> int:
    if not float(number).is_integer():
        raise ValueError
    return int(number)


def _number(raw: Any) -> float:
    """YAML 1.1 reads 3e-4 as text, so text is taken too."""
    if isinstance(raw, bool):
        raise TypeError
    return float(raw)


def boolean(raw: Any) -> bool:
    """`true`, `yes`, `on` and 1, and their opposites. Raises ValueError for anything else."""
    word = str(raw).lower()
    if word not in TRUE + FALSE:
        raise ValueError
    return word in TRUE


def _text(raw: Any) -> str:
    if isinstance(raw, (list, dict, bool)):
        raise TypeError
    return str(raw)


CONVERTERS = {int: _integer, float: _number, bool: boolean, str: _text}


def _check_choice(setting: Setting, value: Any) -> None:
    choices = setting.metadata["choices"]
    if choices and value not in choices:
        advice = setting.metadata["elsewhere"].get(value) or nearest(value, choices)
        known = f"choose from {', '.join(choices)}"
        raise BadValue(
            ConfigError(setting.flag, value, "no such choice", f"{advice} {known}" if advice else known)
        )


def _check_range(setting: Setting, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise BadValue(ConfigError(setting.flag, value, "not a finite number", _hint(setting)))
    allowed = setting.metadata
    outside = (
        (allowed["minimum"] is not None and value < allowed["minimum"])
        or (allowed["above"] is not None and value <= allowed["above"])
        or (allowed["maximum"] is not None and value > allowed["maximum"])
        or (allowed["below"] is not None and value >= allowed["below"])
    )
    if outside:
        raise BadValue(ConfigError(setting.flag, value, f"must be {range_text(setting)}"))
    if isinstance(value, int) and abs(value) > INT64_LARGEST:
        raise BadValue(ConfigError(setting.flag, value, "does not fit into 64 bits", "give a smaller number"))


def range_text(setting: Setting) -> str:
    """`>= 0 and < 1`, from the bounds of a setting; "" without any."""
    signs = {"minimum": ">=", "above": ">", "maximum": "<=", "below": "<"}
    bounds = ((sign, setting.metadata[name]) for name, sign in signs.items())
    return " and ".join(f"{sign} {_bound_text(bound)}" for sign, bound in bounds if bound is not None)


def _bound_text(bound: float) -> str:
    """Eight digits tell the bounds of fp32 apart from what lies outside."""
    return f"{bound:.8g}" if isinstance(bound, float) else str(bound)


def _hint(setting: Setting) -> str:
    if setting.metadata["choices"]:
        return f"choose from {', '.join(setting.metadata['choices'])}"
    if setting.kind in (int, float) and range_text(setting):
        return f"give {WORDS[setting.kind]} {range_text(setting)}"
    return f"give {WORDS[setting.kind]}"
