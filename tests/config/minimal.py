"""The smallest command line that a run can be started with, and how tests change it."""

from __future__ import annotations

import pytest

from megalite.config import Config, ConfigErrors, parse

MINIMAL = (
    "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


def minimal(flags: str = "", without: str = "") -> list[str]:
    """`MINIMAL` without the named flags, and with more behind it, split at spaces."""
    words = MINIMAL.split()
    for flag in without.split():
        at = words.index(flag)
        has_value = at + 1 < len(words) and not words[at + 1].startswith("--")
        del words[at : at + 1 + has_value]
    return words + flags.split()


def parsed(flags: str = "", world_size: int = 1, without: str = "") -> Config:
    return parse(minimal(flags, without), world_size)


def errors_of(argv: list[str], world_size: int = 1) -> list[str]:
    """The messages that `argv` gives."""
    with pytest.raises(ConfigErrors) as found:
        parse(argv, world_size)
    return [str(error) for error in found.value.errors]
