"""What several files of tests read, and what they run without."""

from __future__ import annotations

import errno
import fcntl
import json
from pathlib import Path

import pytest

from megalite.data.sample_corpus import train_tokenizer


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with two keys and a tokenizer."""
    folder = tmp_path_factory.mktemp("sample")
    texts = [f"the cat sat on\u00a0mat {i}<|endoftext|> na\u00efve\u088f's" for i in range(30)]
    lines = [json.dumps({"text": text, "more": ["", text * 2, "\r\n x"]}) for text in texts]
    (folder / "corpus.jsonl").write_text("".join(line + "\n" for line in lines))
    train_tokenizer(folder / "corpus.jsonl", folder / "tokenizer.json", 300)
    return folder


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that cannot lock files."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture
def locks_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another node has locked what is locked here, on Lustre with `localflock`, say."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
