"""From the command line to a resolved, validated `Config`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalite.config.batch_schedule import last_size
from megalite.config.command_line import CommandLine, parser, read_command_line
from megalite.config.errors import ConfigError, ConfigErrors, exit_with_errors, nearest
from megalite.config.layers import Layer, make_layer, merge
from megalite.config.megatron import WITHOUT_EFFECT_BY_FLAG, refusal
from megalite.config.rules import Candidate, broken_rules, warnings
from megalite.config.schema import Config
from megalite.config.schema.fields import Setting, flag_name
from megalite.config.settings import SETTINGS, build, to_dict
from megalite.config.values import BadValue, convert
from megalite.config.vocabulary import vocabulary_size
from megalite.config.yaml_file import read_yaml_file, to_yaml

VOCABULARY_SETTINGS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size")


@dataclass(frozen=True)
class Parsed:
    """A configuration that a run can be started with, and what its first rank should say before."""

    config: Config
    warnings: tuple[str, ...]


def parse(argv: Sequence[str], world_size: int) -> Config:
    """The resolved and validated configuration. Raises `ConfigErrors` with everything that is wrong."""
    return _resolve(read_command_line(argv), world_size).config


def parse_or_exit(argv: Sequence[str], world_size: int, rank: int, *, run_follows: bool = False) -> Config:
    """`parse_command`, which prints errors too, from rank 0, and then leaves with exit code 2."""
    try:
        return parse_command(argv, world_size, rank, run_follows=run_follows)
    except ConfigErrors as errors:
        exit_with_errors(errors, rank)


def parse_command(argv: Sequence[str], world_size: int, rank: int, *, run_follows: bool = False) -> Config:
    """`parse` for a command: prints warnings, --help and --print-config once, from rank 0.

    Leaves with exit code 0 after --help or --print-config. `run_follows`: this is a check before a run that
    will print the same warnings, so they are left to it. Raises `ConfigErrors` as `parse` does.
    """
    typed = read_command_line(argv)
    if typed.help:
        if rank == 0:
            parser().print_help()
        sys.exit(0)
    parsed = _resolve(typed, world_size)
    if rank == 0:
        for line in parsed.warnings if typed.print_config or not run_follows else ():
            print(f"warning: {line}", file=sys.stderr)
        if typed.print_config:
            print(to_yaml(parsed.config), end="")
    if typed.print_config:
        sys.exit(0)
    return parsed.config


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """A `Config` from values by name, as `to_dict` or a YAML file gives them; types and ranges are checked.

    Rules between settings are not (`validate` does). Raises `ConfigErrors`.
    """
    errors = [
        ConfigError(name, None, "unknown setting", nearest(name, SETTINGS))
        for name in values
        if name not in SETTINGS
    ]
    layer = make_layer({name: value for name, value in values.items() if name in SETTINGS}, typed=False)
    errors += layer.errors
    errors += [
        _missing(s)
        for s in SETTINGS.values()
        if s.required and layer.values.get(s.name) is None and s.name not in layer.bad
    ]
    if errors:
        raise ConfigErrors(errors)
    return build(layer.values)


def validate(config: Config, world_size: int) -> list[ConfigError]:
    """Every broken rule of a configuration that was made in code."""
    errors, unusable = [], set()
    for name, value in to_dict(config).items():
        try:
            convert(SETTINGS[name], value)
        except BadValue as found:
            errors.append(found.error)
            unusable.add(name)
    return errors + broken_rules(Candidate(config, world_size), unusable)


def _resolve(typed: CommandLine, world_size: int) -> Parsed:
    """Lay files and command line over each other, derive what was left open, and judge the whole."""
    files = [read_yaml_file(path) for path in typed.files]
    file_layers = [make_layer(file.values, typed=False) for file in files]
    layers = [*file_layers, make_layer(typed.values, typed=True)]
    foreign: dict[str, list[Any]] = {}
    for file in files:
        foreign |= file.foreign
    foreign |= typed.foreign

    errors = [*typed.errors, *(error for file in files for error in file.errors)]
    errors += [error for flag, values in foreign.items() if (error := refusal(flag, values))]
    for path, layer in zip(typed.files, file_layers, strict=True):
        errors += [_named_as_in_file(error, path) for error in layer.errors]
    errors += layers[-1].errors
    values, unusable = merge(layers), _still_bad(layers)
    if world_size < 1:
        errors.append(ConfigError("--world-size", world_size, "must be >= 1"))
        unusable.add("world_size")
    unreadable_file = any(error.flag == "--config" for error in errors)
    for setting in (s for s in SETTINGS.values() if s.required and values.get(s.name) is None):
        misspelt = any(error.suggestion == f"did you mean {setting.flag}?" for error in typed.errors)
        if setting.name not in unusable and not unreadable_file and not misspelt:
            errors.append(_missing(setting))
        unusable.add(setting.name)
        values[setting.name] = 1  # only rules that do not read it will run
    given = frozenset(name for name, value in values.items() if value != SETTINGS[name].default)
    errors += _fill_in(values, unusable, world_size, unreadable_file)

    candidate = Candidate(build(values), world_size, given - unusable, frozenset(typed.values))
    if not unreadable_file:
        errors += broken_rules(candidate, unusable)
    if errors:
        raise ConfigErrors(errors)
    return Parsed(candidate.config, (*_layer_warnings(layers, foreign), *warnings(candidate)))


def _fill_in(values: dict[str, Any], unusable: set[str], world_size: int, quiet: bool) -> list[ConfigError]:
    """Derive what depends on more than one group: the global batch and the vocabulary."""
    batch_reads = {
        "micro_batch_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "world_size",
    }
    steps = None if "step_batch_size_schedule" in unusable else values.get("step_batch_size_schedule")
    if values.get("global_batch_size") is None and steps is not None:
        values["global_batch_size"] = last_size(steps)
    if values.get("global_batch_size") is None and not batch_reads & unusable:
        ranks = values.get("tensor_model_parallel_size", 1) * values.get("pipeline_model_parallel_size", 1)
        values["global_batch_size"] = values["micro_batch_size"] * max(world_size // ranks, 1)
    if unusable & set(VOCABULARY_SETTINGS) or quiet:
        unusable.add("vocab_size")
        return []
    found, errors = vocabulary_size(
        **{name: values.get(name, SETTINGS[name].default) for name in VOCABULARY_SETTINGS}
    )
    values["vocab_size"] = found
    if found is None:
        unusable.add("vocab_size")
    return errors


def _still_bad(layers: Sequence[Layer]) -> set[str]:
    """Settings whose last word was unusable."""
    bad: set[str] = set()
    for layer in layers:
        bad = (bad - set(layer.values)) | layer.bad
    return bad


def _layer_warnings(layers: Sequence[Layer], foreign: Mapping[str, Sequence[Any]]) -> list[str]:
    reasons = WITHOUT_EFFECT_BY_FLAG
    idle = [f"{flag} ({reasons[flag]})" for flag in foreign if flag in reasons]
    lines = [line for layer in layers for line in layer.warnings]
    if idle:
        lines.append(f"flags without effect in megalite: {', '.join(idle)}")
    return lines


def _named_as_in_file(error: ConfigError, path: str) -> ConfigError:
    """`--lr fast: ...` -> `run.yaml: lr fast: ...`."""
    return replace(error, flag=f"{path}: {error.flag.removeprefix('--').replace('-', '_')}")


def _missing(setting: Setting) -> ConfigError:
    advice = setting.metadata["help"].split(". ")[0].rstrip(".")
    return ConfigError(flag_name(setting.name), None, "is required", advice[0].lower() + advice[1:])
