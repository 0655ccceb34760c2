"""The command line, made from the settings; it collects what was typed and judges nothing but spelling."""

from __future__ import annotations

import argparse
import functools
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megalite.config import megatron
from megalite.config.errors import ConfigError, ConfigErrors, nearest, shown
from megalite.config.schema.fields import Setting, flag_name
from megalite.config.settings import GROUPS, SETTINGS, switches
from megalite.config.values import MISSING, range_text
from megalite.flags import Once

METAVARS = {int: "N", float: "X", str: "TEXT"}
FOREIGN_PREFIX = "foreign "
NEGATIVE_NUMBER = re.compile(r"-(\.?\d|inf$|nan$)")


@dataclass(frozen=True)
class CommandLine:
    """What was typed: raw values by name, Megatron's other flags with theirs, the command's own flags."""

    values: dict[str, Any] = field(default_factory=dict)
    foreign: dict[str, list[str]] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    help: bool = False
    print_config: bool = False
    errors: tuple[ConfigError, ...] = ()


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Split `argv` into settings and the rest. Unknown flags become errors with the nearest known one.

    Raises `ConfigErrors` only for what argparse cannot go past, such as `--swiglu=true`.
    """
    try:
        known, extra = parser().parse_known_args(_with_joined_negatives(argv))
    except _UsageError as error:
        raise ConfigErrors([ConfigError("command line", None, str(error))]) from None
    typed = vars(known)
    foreign = {n.removeprefix(FOREIGN_PREFIX): v for n, v in typed.items() if n.startswith(FOREIGN_PREFIX)}
    files = tuple(typed.get("config", ()))
    errors = list(_unknown(extra))
    if MISSING in files:
        errors.append(ConfigError("--config", None, "needs a value", "give the path of a YAML file"))
    return CommandLine(
        values={
            n: MISSING if v == [] else v
            for n, v in typed.items()
            if n in SETTINGS or n in megatron.SHORTHANDS
        },
        foreign=foreign,
        files=tuple(name for name in files if name != MISSING),
        help="help" in typed,
        print_config="print_config" in typed,
        errors=tuple(errors),
    )


def known_flags() -> list[str]:
    """Every spelling that the command line takes."""
    known = [
        "--help",
        "--config",
        "--print-config",
        *map(flag_name, megatron.SHORTHANDS),
        *megatron.FOREIGN_FLAGS,
    ]
    for setting in SETTINGS.values():
        known += switches(setting) if setting.kind is bool else [setting.flag]
    return known


@functools.cache
def parser() -> argparse.ArgumentParser:
    """The argparse parser. Values stay text: conversion collects errors, argparse stops at the first."""
    made = _Parser(
        prog="pretrain_gpt",
        usage="pretrain_gpt [--config FILE.yaml] [flags]",
        description="Pretrain a GPT. Flags have Megatron-LM's names; a YAML file may give any of them.",
        epilog=_epilog(),
        formatter_class=_Formatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    general = made.add_argument_group("general")
    general.add_argument("-h", "--help", action="store_true", help="Print this text and stop.")
    general.add_argument(
        "--config",
        action="append",
        nargs="?",
        const=MISSING,
        metavar="FILE",
        help="A YAML file with settings by the names of the flags, flat. May be given several times: a later "
        "file overrides an earlier one, and flags override files wherever they stand.",
    )
    general.add_argument(
        "--print-config",
        action="store_true",
        help="Print the resolved settings as YAML, unset ones left out, and stop.",
    )
    for group, record in GROUPS.items():
        section = made.add_argument_group(group, (record.__doc__ or "").split("\n\n")[0])
        for setting in (s for s in SETTINGS.values() if s.group == group):
            _add(section, setting)
        for name, short in megatron.SHORTHANDS.items():
            if SETTINGS[short.name].group == group:
                section.add_argument(flag_name(name), action="store_true", help=_escaped(short.help))
    for flag in megatron.FOREIGN_FLAGS:
        made.add_argument(flag, dest=FOREIGN_PREFIX + flag, nargs="*", help=argparse.SUPPRESS)
    return made


def _add(section: argparse._ArgumentGroup, setting: Setting) -> None:
    text = f"{_escaped(setting.metadata['help'])}{_range_text(setting)}"
    if setting.kind is bool:
        section.add_argument(*switches(setting), dest=setting.name, action=_Switch, help=text)
        return
    choices = setting.metadata["choices"]
    section.add_argument(
        setting.flag,
        dest=setting.name,
        # Others may be overridden, as by the flags that a memory plan advises; data is not left out silently.
        action=Once if setting.name.endswith("data_path") else "store",
        nargs="*" if setting.many else "?",  # both take a missing value: an error among the others
        const=None if setting.many else MISSING,
        metavar=f"{{{','.join(choices)}}}" if choices else METAVARS[setting.kind],
        help=text,
    )


def _range_text(setting: Setting) -> str:
    parts = ["required"] if setting.required else []
    if setting.default not in (None, ()):
        parts.append(f"default: {shown(setting.default)}")
    if range_text(setting):
        parts.append(range_text(setting))
    return f" ({'; '.join(parts)})" if parts else ""


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _epilog() -> str:
    without_effect = ", ".join((*megatron.ALWAYS, *megatron.WITHOUT_EFFECT_BY_FLAG))
    one_value = ", ".join(f"{flag} {' or '.join(values)}" for flag, (values, _) in megatron.ONLY_AT.items())
    lines = (
        f"Flags of Megatron-LM that are accepted and change nothing: {without_effect}.",
        f"Accepted at one value: {one_value}.",
        f"Refused, not available in this version: {', '.join(megatron.NOT_YET_BY_FLAG)}.",
        f"Refused, with a message that names megalite's way: {', '.join(megatron.ABSENT_BY_FLAG)}.",
    )
    return "\n\n".join(textwrap.fill(line, 100, break_on_hyphens=False) for line in lines)


def _unknown(extra: Sequence[str]) -> list[ConfigError]:
    """One error a flag that nobody knows, its values with it; values that belong to no flag likewise."""
    errors = []
    known = known_flags()
    previous_flag = False
    for token in extra:
        if token.startswith("-") and not NEGATIVE_NUMBER.match(token):
            name = token.split("=")[0]
            errors.append(ConfigError(name, None, "unknown flag", nearest(name, known) or "see --help"))
            previous_flag = True
        elif not previous_flag:
            errors.append(ConfigError("command line", token, "belongs to no flag", "flags start with --"))
    return errors


def _with_joined_negatives(argv: Sequence[str]) -> list[str]:
    """`--lr -1e-4` -> `--lr=-1e-4`: argparse would take it for a flag."""
    joined: list[str] = []
    for token in argv:
        flag_before = bool(joined) and joined[-1].startswith("--") and "=" not in joined[-1]
        if NEGATIVE_NUMBER.match(token) and flag_before:
            joined[-1] += f"={token}"
        else:
            joined.append(token)
    return joined


class _UsageError(ValueError):
    """What argparse would have printed before leaving."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(message)


class _Switch(argparse.Action):
    """A boolean with several spellings, some of which set it to False."""

    def __init__(self, option_strings: Sequence[str], dest: str, **rest: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **rest)

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, switches(SETTINGS[self.dest])[option_string or self.option_strings[0]])


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows a value as `N`, not as the optional `[N]` that error collection makes of it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == "?":
            return self._metavar_formatter(action, default_metavar)(1)[0]
        return super()._format_args(action, default_metavar)
