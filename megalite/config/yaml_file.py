"""A YAML file of settings: flat, by the names of the flags."""

from __future__ import annotations

import io
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import yaml

from megalite.config import megatron
from megalite.config.errors import ConfigError, nearest
from megalite.config.paths import open_regular
from megalite.config.schema import Config
from megalite.config.schema.fields import flag_name
from megalite.config.settings import GROUPS, SETTINGS, switches
from megalite.config.values import boolean

SWITCHED_OFF = {
    spelling[2:].replace("-", "_"): setting.name
    for setting in SETTINGS.values()
    if setting.kind is bool
    for spelling, value in switches(setting).items()
    if not value
}


@dataclass(frozen=True)
class YamlFile:
    """Raw values by name, Megatron's other flags, and what was wrong with the file."""

    values: dict[str, Any]
    foreign: dict[str, list[Any]]
    errors: tuple[ConfigError, ...]


def read_yaml_file(path: str) -> YamlFile:
    """Read one `--config` file. A file that cannot be read gives its error and no values."""
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as stream:
            content = yaml.load(stream, Loader=_UniqueKeys)  # a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        return _unreadable(path, f"cannot be read: {reason}")
    except yaml.YAMLError as error:
        return _unreadable(path, _problem(error))
    if content is None:
        content = {}
    if not isinstance(content, dict):
        return _unreadable(path, "must hold lines of `name: value`")
    return _sorted_out(path, content)


def _unreadable(path: str, rule: str) -> YamlFile:
    return YamlFile({}, {}, (ConfigError("--config", path, rule),))


def _problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "is not valid YAML"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)


def _sorted_out(path: str, content: dict[Any, Any]) -> YamlFile:
    values: dict[str, Any] = {}
    foreign: dict[str, list[Any]] = {}
    errors: list[ConfigError] = []
    for key, value in content.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name in SETTINGS:
            values[name] = value
        elif name in megatron.SHORTHANDS or name in SWITCHED_OFF:
            try:
                on = boolean(False if value is None else value)
            except ValueError:
                errors.append(ConfigError(f"{path}: {key}", value, "not true or false", "give true or false"))
            else:
                if name in megatron.SHORTHANDS:
                    values[name] = on
                elif value is not None:
                    values[SWITCHED_OFF[name]] = not on
        elif flag_name(name) in megatron.FOREIGN_FLAGS:
            if value not in (None, False):
                foreign[flag_name(name)] = [] if value is True else _listed(value)
        else:
            errors.append(_unknown_key(path, str(key), name))
    return YamlFile(values, foreign, tuple(errors))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _unknown_key(path: str, key: str, name: str) -> ConfigError:
    if name in GROUPS:
        advice = "settings are not nested: put its lines at the top level"
    else:
        advice = nearest(name, [*SETTINGS, *megatron.SHORTHANDS]) or "see --help"
    return ConfigError(f"{path}: {key}", None, "unknown setting", advice)


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a name that stands twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def to_yaml(config: Config) -> str:
    """The settings by name, group by group, but for those that have no value.

    `--config` reads it back to the same configuration.
    """
    parts = []
    for group in GROUPS:
        given = {n: v for n, v in vars(getattr(config, group)).items() if v not in (None, ())}
        values = {n: list(v) if isinstance(v, tuple) else v for n, v in given.items()}
        parts.append(f"# {group}\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000))
    return "\n".join(parts)
