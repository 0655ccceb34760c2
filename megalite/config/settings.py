"""Every setting of every group in one table, from which command line, YAML and `Config` are made."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from megalite.config.schema import Config
from megalite.config.schema.fields import Setting, settings_of

GROUPS: dict[str, type] = typing.get_type_hints(Config)
SETTINGS: dict[str, Setting] = {
    setting.name: setting for group, record in GROUPS.items() for setting in settings_of(group, record)
}


def switches(setting: Setting) -> dict[str, bool]:
    """Spellings of a boolean on the command line, with the value that each sets.

    `--x` and `--no-x` always, so that a flag can override a YAML file either way; for what is on by default
    also Megatron's `--disable-x` and its own spelling of it.
    """
    spellings = {setting.flag: True}
    if setting.metadata["negatable"]:
        spellings["--no-" + setting.flag[2:]] = False
    if setting.default:
        spellings["--disable-" + setting.flag[2:]] = False
    return spellings | dict.fromkeys(setting.metadata["off_flags"], False)


def build(values: Mapping[str, Any]) -> Config:
    """A `Config` from values by name; names that are missing take their default."""
    groups = {
        group: record(**{s.name: values[s.name] for s in settings_of(group, record) if s.name in values})
        for group, record in GROUPS.items()
    }
    return Config(**groups)


def to_dict(config: Config) -> dict[str, Any]:
    """The values by name, flat. Names are unique across the groups."""
    return {name: value for group in GROUPS for name, value in vars(getattr(config, group)).items()}


def replace(config: Config, **changes: Any) -> Config:
    """`config` with some values changed by name. Derived sizes stay unless they are changed too."""
    groups = {}
    for group in GROUPS:
        record = getattr(config, group)
        mine = {name: value for name, value in changes.items() if SETTINGS[name].group == group}
        groups[group] = dataclasses.replace(record, **mine)
    return Config(**groups)
