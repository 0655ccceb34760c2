"""Small corpora, datasets and configurations, and runs on them, for the tests of this room."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megalite.config.schema import DataConfig
from megalite.data import preprocess as module
from megalite.data import text_batches
from megalite.data.indexed_dataset import DatasetWriter
from megalite.data.inputs import Part, find_inputs
from megalite.data.preprocess import PreprocessPlan, preprocess
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer

GOLDENS = Path(__file__).parent / "goldens"
TOOLS = Path(__file__).parents[2] / "tools"
NAMES = ("*.bin", "*.idx", "*_document.json", "*.skipped.jsonl")
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--append-eod", "--workers", "2"]


def write_dataset(
    prefix: Path, lengths: Sequence[int], vocab_size: int = 1000, seed: int = 0, dtype: str = "uint16"
) -> str:
    """Documents of random tokens with the given lengths; returns the prefix."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, sum(lengths))
    with DatasetWriter(str(prefix), dtype, sync=False) as writer:
        writer.add(tokens, np.array(lengths, dtype=np.int32))
    return str(prefix)


def numbered_dataset(prefix: Path, documents: int, length: int, first: int = 0) -> str:
    """Token t of document d is first + d * length + t: each token occurs once."""
    with DatasetWriter(str(prefix), "int32", sync=False) as writer:
        writer.add(first + np.arange(documents * length), np.full(documents, length, dtype=np.int32))
    return str(prefix)


def data_config(cache: Path, *data_path: str, split: str = "1,0,0", **fields: object) -> DataConfig:
    # Any of its fields.
    return DataConfig(data_path=data_path, split=split, data_cache_path=str(cache), **fields)  # type: ignore[arg-type]


class Words:
    """The vocabulary of a dataset without text."""

    def __init__(self, vocab_size: int, eod: int, identity: str | None = None) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.identity = identity


def lines(path: Path, texts: Sequence[object] = ("0", "1", "2")) -> str:
    """A corpus of these texts; returns its path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def plan(path: str, prefix: Path, **fields: object) -> PreprocessPlan:
    return PreprocessPlan(find_inputs([path]), str(prefix), **fields)  # type: ignore[arg-type]  # any of its fields


def run(inputs: Sequence[Part], prefix: Path, **fields: object) -> None:
    work = PreprocessPlan(inputs, str(prefix), **fields)  # type: ignore[arg-type]  # any of its fields
    preprocess(work, ByteLevelTokenizer())


def command(tool: str, *args: object, shell: str = "") -> subprocess.CompletedProcess[str]:
    """A tool with `shell` behind its arguments."""
    line = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, str(TOOLS / f"{tool}.py")]
    return subprocess.run(
        [*line, *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )


def every_batch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_batches, "BATCH_DOCUMENTS", 2)
    monkeypatch.setattr(module, "CHECKPOINT_SECONDS", 0.0)


def published(folder: Path) -> list[str]:
    return [path.name for name in NAMES for path in folder.glob(name)]


def tool(name: str) -> Callable[[list[str]], int]:
    return importlib.import_module(f"tools.{name}").main


def write_lines(path: Path, count: int, offset: int = 0) -> str:
    rng = np.random.default_rng(offset)
    with path.open("w") as file:
        for i in range(count):
            text = " ".join(map(str, rng.integers(0, 90, rng.integers(0, 30))))
            file.write(json.dumps({"text": text, "id": i}) + "\n")
    return str(path)


def text_flags(folder: Path) -> list[str]:
    model = ["--tokenizer-model", str(folder / "tokenizer.json"), "--append-eod", "--workers", "2"]
    return ["--input", str(folder / "corpus.jsonl"), *model]
