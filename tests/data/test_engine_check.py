"""A faster engine with other ids is found before it writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from megalite.data import engine_check
from megalite.data.engine_check import (
    CHECKED_DOCUMENTS,
    check_engine,
    choose_engine,
    compare,
    encoded,
    hard_texts,
)
from megalite.data.errors import DataError
from megalite.data.inputs import Part, find_inputs
from megalite.data.tokenizer import Tokenizer
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer


class Bytes(ByteLevelTokenizer):
    """All of whose ids are those of `encode_batch`."""

    _encode_part = Tokenizer._encode_part


class Slip(Bytes):
    """Right but for one word."""

    def __init__(self, word: str) -> None:
        self.word = word

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return super().encode_batch([text.replace(self.word, self.word.upper()) for text in texts])


class Broken(Bytes):
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        raise RuntimeError("thread panicked")


def corpus(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def check(engine: ByteLevelTokenizer, path: Path) -> None:
    check_engine(engine, ByteLevelTokenizer(), find_inputs([str(path)], "text", None), ["text"])


def test_the_same_ids_pass(tmp_path: Path) -> None:
    check(ByteLevelTokenizer(), corpus(tmp_path / "c.jsonl", ["one", "two"]))


def test_other_ids_for_a_document_are_told_by_text_and_place(tmp_path: Path) -> None:
    path = corpus(tmp_path / "c.jsonl", ["fine", "a hamster"])
    with pytest.raises(
        DataError, match=r"for 'a hamster' from token 2 on: \[72, 65, 77, .*\], not \[104, 97,"
    ):
        check(Slip("hamster"), path)


def test_a_document_that_cannot_be_read_is_left_to_the_run(tmp_path: Path) -> None:
    path = corpus(tmp_path / "c.jsonl", ["fine"])
    path.write_text("no json\n" + path.read_text() + json.dumps({"text": "a hamster"}) + "\n")
    with pytest.raises(DataError, match="for 'a hamster'"):
        check(Slip("hamster"), path)


def test_only_the_first_documents_are_read(tmp_path: Path) -> None:
    check(Slip("hamster"), corpus(tmp_path / "c.jsonl", ["fine"] * CHECKED_DOCUMENTS + ["a hamster"]))


@pytest.mark.parametrize("word", ["\u00a0", "\u0130", "<|endoftext|>", "<eod>", "'s", "\U0001f468\u200d"])
def test_hard_text_is_checked_whatever_the_corpus_holds(word: str) -> None:
    class Missing(Bytes):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return super().encode_batch([text.replace(word, "") for text in texts])

    reference = ByteLevelTokenizer()
    with pytest.raises(DataError, match="other ids"):
        compare(Missing(), reference, hard_texts(reference))


def test_added_tokens_are_checked() -> None:
    reference = ByteLevelTokenizer()
    reference.added_tokens = ["hamster", "<x>"]
    with pytest.raises(DataError, match=r"other ids than the library for .*hamster"):
        compare(Slip("hamster"), reference, hard_texts(reference))


@pytest.mark.parametrize("count", [1, 3, 500])
def test_hard_text_has_few_added_tokens_as_often_as_many(count: int) -> None:
    reference = ByteLevelTokenizer()
    reference.added_tokens = [f"<tool {i}>" for i in range(count)]
    beside_a_letter = re.compile(r"[aZ]<tool \d+>|<tool \d+>[aZ]")
    assert sum(beside_a_letter.search(text) is not None for text in hard_texts(reference)) > 20


def test_the_order_of_marks_is_checked() -> None:
    """Also of one that fastokens 0.3.3 did not know."""
    assert any("\u0315\u1abf\u0323" in text for text in hard_texts(ByteLevelTokenizer()))


def test_an_engine_must_have_the_ends_of_texts_too() -> None:
    class Shifted(Bytes):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return [list(b"on"), list(b"etwo")]

    with pytest.raises(DataError, match=r"for 'one' from token 2 on: \[\], not \[101\]"):
        compare(Shifted(), ByteLevelTokenizer(), ["one", "two"])


def test_an_engine_that_fails_is_refused() -> None:
    with pytest.raises(DataError, match="it fails on text that the library encodes: thread panicked"):
        compare(Broken(), ByteLevelTokenizer(), ["a"])


class Lossy(Bytes):
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if any("\x1c" in text or "hamster" in text for text in texts):
            raise DataError("the vocabulary lacks a byte")
        return super().encode_batch(texts)


def test_what_the_library_refuses_is_not_held_against_an_engine(tmp_path: Path) -> None:
    texts = ["fine", "a hamster", "fine too"]
    path = corpus(tmp_path / "c.jsonl", texts)  # whose hamster the run will name
    inputs = find_inputs([str(path)])
    check_engine(Lossy(), Lossy(), inputs, ["text"])
    with pytest.raises(DataError, match="other ids than the library for 'fine too' from token 5 on"):
        check_engine(Slip("too"), Lossy(), inputs, ["text"])
    assert [text for part, *_ in encoded(Lossy(), texts) for text in part] == ["fine", "fine too"]


def test_a_library_that_does_not_work_is_no_check(tmp_path: Path) -> None:
    inputs = find_inputs([str(corpus(tmp_path / "c.jsonl", ["fine"]))])
    with pytest.raises(DataError, match="does not encode even an empty text now: thread panicked"):
        check_engine(ByteLevelTokenizer(), Broken(), inputs, ["text"])


def test_standard_input_cannot_be_checked() -> None:
    with pytest.raises(DataError, match="standard input"):
        check_engine(ByteLevelTokenizer(), ByteLevelTokenizer(), find_inputs(["-"], "text", None), ["text"])


class Exact(Bytes):
    def __init__(self, reference: object) -> None:
        pass


class Other(Exact):
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[0] for _ in texts]


@pytest.mark.parametrize(
    ("engine", "least", "chosen"), [(Exact, 0, "fastokens"), (Other, 0, "library"), (Exact, 10**9, "library")]
)
def test_auto_takes_the_fast_engine_where_it_is_exact_and_worth_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: type[Exact], least: int, chosen: str
) -> None:
    monkeypatch.setattr(engine_check, "FastokensEngine", engine)
    monkeypatch.setattr(engine_check, "AUTO_BYTES", least)
    inputs = find_inputs([str(corpus(tmp_path / "c.jsonl", ["one"]))], "text", None)
    reference = ByteLevelTokenizer()
    encoder, name = engine_check.choose_engine("auto", reference, inputs, ["text"])
    assert name == chosen
    assert (encoder is reference) == (chosen == "library")


def test_auto_leaves_standard_input_and_other_tokenizers_to_the_library(tmp_path: Path) -> None:
    reference = ByteLevelTokenizer()
    for inputs in (find_inputs(["-"], "text", None), find_inputs([str(corpus(tmp_path / "c", ["x"]))])):
        assert engine_check.choose_engine("auto", reference, inputs, ["text"]) == (reference, "library")


def test_nothing_of_a_pipe_is_read_before_the_run(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    part = Part(str(pipe), "json")
    with pytest.raises(DataError, match="cannot be checked before"):
        check_engine(ByteLevelTokenizer(), ByteLevelTokenizer(), [part], ["text"])
    (tmp_path / "large.txt").touch()
    os.truncate(tmp_path / "large.txt", 1 << 30)
    inputs = [part, Part(str(tmp_path / "large.txt"), "text")]
    assert choose_engine("auto", ByteLevelTokenizer(), inputs, ["text"])[1] == "library"


def test_the_check_of_an_engine_does_not_read_on_for_a_key_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n' * 1000)
    monkeypatch.setattr(engine_check, "CHECKED_DOCUMENTS", 10)
    original, seen = engine_check.parse_document, []

    def counted(*of: object) -> list[list[str]]:
        seen.append(of)
        return original(*of)  # type: ignore[arg-type]  # whatever it was called with

    monkeypatch.setattr(engine_check, "parse_document", counted)
    assert list(engine_check.first_texts(find_inputs([str(tmp_path / "a.jsonl")]), ["text"])) == []
    assert len(seen) == 10
