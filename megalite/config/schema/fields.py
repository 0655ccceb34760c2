"""`setting`: a dataclass field that carries what command line, YAML file and checks need to know."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

REQUIRED: Any = dataclasses.MISSING

# Of fp32, without its subnormal numbers.
FP32_SMALLEST, FP32_LARGEST = 2.0**-126, 2.0**127


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    elsewhere: Mapping[str, str] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    off_flags: tuple[str, ...] = (),
    negatable: bool = True,
) -> Any:
    """A dataclass field with its documentation and its range.

    default    value when nobody gives one; `REQUIRED` when it must be given; `None` when derived or off.
    help       what it does, its unit, a typical value, and the trap in Megatron's default where there is one.
    elsewhere  choices that Megatron has and megalite has not, each with the megalite way.
    minimum, maximum are inclusive bounds; above, below exclusive ones. They hold for numbers only.
    off_flags  further spellings that set a boolean to False (Megatron's own, as `--disable-bias-linear`).
    negatable  False for names that are negative already (`no_load_optim`): they get no `--no-` form.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "elsewhere": elsewhere or {},
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "below": below,
        "off_flags": off_flags,
        "negatable": negatable,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of one group, as the command line, the YAML reader and the checks see it."""

    name: str
    group: str
    kind: type
    default: Any
    required: bool
    many: bool
    metadata: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return flag_name(self.name)


def flag_name(name: str) -> str:
    """`micro_batch_size` -> `--micro-batch-size`."""
    return "--" + name.replace("_", "-")


@functools.cache
def settings_of(group: str, record: type) -> tuple[Setting, ...]:
    """The fields of one group's dataclass. `kind` is the type of one value, `many` tells a list of them."""
    hints = typing.get_type_hints(record)
    found = []
    for field in dataclasses.fields(record):
        kind, many = _element_type(hints[field.name])
        required = field.default is dataclasses.MISSING
        default = None if required else field.default
        found.append(Setting(field.name, group, kind, default, required, many, field.metadata))
    return tuple(found)


def _element_type(hint: Any) -> tuple[type, bool]:
    """`int | None` -> (int, False); `tuple[str, ...]` -> (str, True)."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False
