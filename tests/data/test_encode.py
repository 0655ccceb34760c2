"""How much text a tokenizer is given at once, and how long one may be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from tokenizers import Encoding
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel

from megalite.data.inputs import find_inputs
from megalite.data.preprocess import PreprocessPlan, preprocess
from megalite.data.tokenizer import Tokenizer, base, huggingface
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from megalite.data.tokenizer.null import NullTokenizer


class Letters(Tokenizer):
    """The smallest subclass."""

    vocab_size = 128
    identity = None
    memory_per_byte = 8

    @property
    def eod(self) -> int:
        return 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(map(ord, text)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def words() -> huggingface.HuggingFaceTokenizer:
    library = Library(WordLevel({"1": 0, "?": 1}, "?"))
    return huggingface.HuggingFaceTokenizer(library, "", None, False, False)


def test_one_document_of_very_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "TEXTS_AT_ONCE", 3)
    most = []

    class Counting(NullTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            most.append(len(texts))
            return super().encode_batch(texts)

    tokens, lengths = Counting(100, 99).encode_flat(["1 2", "", "3", "", "4", "", "5 6"])
    assert (tokens.tolist(), lengths.tolist()) == ([1, 2, 3, 4, 5, 6], [2, 0, 1, 0, 1, 0, 2])
    assert most == [3, 3, 1]


def test_the_library_is_given_a_part_of_very_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "TEXTS_AT_ONCE", 3)
    library = Library(WordLevel({"a": 0, "?": 1}, "?"))
    tokenizer = huggingface.HuggingFaceTokenizer(library, "", None, False, False)
    most = []

    class Counting:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Encoding]:
            most.append(len(texts))
            return library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    tokenizer.check_encodes()  # asks the library about its model
    tokenizer.library = cast("Library", Counting())
    tokens, lengths = tokenizer.encode_flat(["a", "b", "a", "", "a", "b", "a"])
    assert (tokens.tolist(), lengths.tolist()) == ([0, 1, 0, 0, 1, 0], [1, 1, 1, 0, 1, 1, 1])
    assert most == [3, 3, 1]


def test_sequences_are_encoded_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CHARACTERS_AT_ONCE", 10)
    most = []

    class Counting(Letters):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            most.append(list(map(len, texts)))
            return super().encode_batch(texts)

    texts = ["a" * n for n in (5, 5, 1, 30, 0, 9, 1, 2)]
    tokens, lengths = Counting().encode_flat(texts)
    assert (bytes(tokens.astype(np.uint8)).decode(), lengths.tolist()) == ("".join(texts), [*map(len, texts)])
    assert most == [[5, 5], [1], [30], [0, 9, 1], [2]]


@pytest.mark.parametrize("make", [words, Letters, ByteLevelTokenizer, lambda: NullTokenizer(9, 8)])
def test_a_text_too_long_for_the_memory_that_its_ids_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Tokenizer]
) -> None:
    tokenizer = make()
    monkeypatch.setattr(base, "CHARACTERS_AT_ONCE", 10)
    monkeypatch.setattr(base, "LARGEST_ENCODING", 100 * tokenizer.memory_per_byte)
    texts = ["1" * n for n in (1, 101, 100)] if tokenizer.identity is None else ["é" * n for n in (1, 51, 50)]
    if isinstance(tokenizer, NullTokenizer):
        texts = [text.replace("11", "1 ") for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plan = PreprocessPlan(find_inputs([str(tmp_path / "a.jsonl")]), str(tmp_path / "out"), skip_errors=True)
    (info,) = preprocess(plan, tokenizer)
    assert info.documents == 2
    listed = json.loads((tmp_path / "out_text_document.skipped.jsonl").read_text())
    assert listed["line"] == 2
    assert re.search(r"a text of 10[12] bytes: this tokenizer takes up to 100, as each may", listed["error"])
