"""Every command in `tools/` and `examples/data/` explains each of its flags."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from megalite.config.command_line import parser as training_parser

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted([*ROOT.glob("tools/*.py"), *ROOT.glob("examples/data/*.py")])


class Made(Exception):
    """Carries the parser that a command was about to use."""


def parser_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser of the command in `path`, whose `main` is stopped where it would parse."""

    def stop(parser: argparse.ArgumentParser, *arguments: object) -> NoReturn:
        raise Made(parser)

    for method in ("parse_args", "parse_known_args"):
        monkeypatch.setattr(argparse.ArgumentParser, method, stop)
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    with pytest.raises(Made) as made:
        module.main()
    parser = made.value.args[0]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def without_help(parser: argparse.ArgumentParser, command: str = "") -> Iterator[str]:
    """The flags and subcommands that have no help text."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            explained = {choice.dest for choice in action._choices_actions if choice.help}
            yield from (name for name in action.choices if name not in explained)
            for name, subparser in action.choices.items():
                yield from without_help(subparser, f"{name} ")
        elif not action.help:
            yield command + "/".join(action.option_strings or [action.dest])


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_every_flag_of_a_tool_has_help(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(without_help(parser_of(path, monkeypatch))) == []


def test_every_flag_of_training_has_help() -> None:
    assert list(without_help(training_parser())) == []


def test_a_flag_without_help_is_found() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    commands.add_parser("run", help="does it").add_argument("--fast")
    commands.add_parser("walk")
    assert list(without_help(parser)) == ["walk", "run --fast"]
