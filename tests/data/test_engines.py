"""Faster engines: the bytes that the library gives, or a message."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import numpy as np
import pytest
from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE, WordLevel
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from megalite.data.engine_check import compare, hard_texts
from megalite.data.errors import DataError
from megalite.data.tokenizer import base, gigatoken
from megalite.data.tokenizer.fastokens import FastokensEngine
from megalite.data.tokenizer.huggingface import HuggingFaceTokenizer, load_tokenizer_json
from tests.data.corpora import (
    text_flags,
    tool,
)


@pytest.mark.parametrize("fast", ["gigatoken", "fastokens"])
@pytest.mark.parametrize("spelled", [[], ["--allow-special-tokens"]])
def test_an_engine_gives_the_librarys_bytes(
    sample: Path, tmp_path: Path, fast: str, spelled: list[str]
) -> None:
    pytest.importorskip(fast)
    for engine in ("library", fast):
        out = ["--engine", engine, "--output-prefix", str(tmp_path / engine), "--json-keys", "text", "more"]
        assert tool("preprocess_data")([*text_flags(sample), *out, *spelled]) == 0
    for key in ("text", "more"):
        for suffix in (".bin", ".idx"):
            ours, theirs = (tmp_path / f"{engine}_{key}_document{suffix}" for engine in (fast, "library"))
            assert ours.read_bytes() == theirs.read_bytes()


def test_gigatoken_does_not_remember_all_words(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gigatoken")
    monkeypatch.setattr(gigatoken, "RENEWED_AFTER", 20)
    reference = load_tokenizer_json(str(sample / "tokenizer.json"), None, False, False)
    engine = gigatoken.GigatokenEngine(reference)
    made, texts = [], ["the cat sat", "on the mat", "with a hat"]
    for text in texts:
        assert engine.encode_batch([text]) == reference.encode_batch([text])
        made.append(engine._engine)
    assert made[0] is not made[1] is made[2]


def test_one_thread_renews_gigatoken_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Encoder:
        def encode_batch(self, texts: list[str]) -> SimpleNamespace:
            lengths = np.cumsum([0, *map(len, texts)])
            layout = {"offsets": lengths, "content": np.zeros(lengths[-1], dtype=np.int32)}
            return SimpleNamespace(
                layout=SimpleNamespace(**{k: SimpleNamespace(data=v) for k, v in layout.items()})
            )

    def from_json(_: bytes) -> Encoder:
        made.append(0)
        time.sleep(0.1 * (len(made) - 1))  # until the other thread has come to it
        return Encoder()

    library = SimpleNamespace(Tokenizer=SimpleNamespace(from_json=from_json))
    monkeypatch.setitem(sys.modules, "gigatoken", cast("ModuleType", library))
    monkeypatch.setattr("megalite.data.tokenizer.engine.installed_version", lambda _: "0.10.0")
    monkeypatch.setattr(gigatoken, "RENEWED_AFTER", 20)
    words = Library(WordLevel({"a": 0, "?": 1}, "?"))
    engine = gigatoken.GigatokenEngine(HuggingFaceTokenizer(words, "", None, False, False))
    engine.encode_flat(["a" * 15])
    with ThreadPoolExecutor(2) as pool:
        assert [len(ids) for ids, _ in pool.map(engine.encode_flat, [["a" * 15]] * 2)] == [15, 15]
    assert len(made) == 2


def test_gigatoken_is_refused_where_it_is_not_known_to_be_equal(
    sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gigatoken")
    content = json.loads((sample / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    out = ["--output-prefix", str(tmp_path / "p"), "--engine", "gigatoken"]
    model = ["--tokenizer-model", str(tmp_path)]
    assert tool("preprocess_data")([*text_flags(sample), *model, *out]) == 1
    assert "normalizer Lowercase is not known to be equal; leave --engine out" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["gigatoken", "fastokens"])
def test_an_engine_that_is_missing_says_so(
    sample: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: str,
) -> None:
    monkeypatch.setitem(sys.modules, engine, None)
    out = ["--output-prefix", str(tmp_path / "p"), "--engine", engine]
    assert tool("preprocess_data")([*text_flags(sample), *out]) == 1
    assert f"needs the package {engine}: pip install {engine}" in capsys.readouterr().err


def test_a_package_that_is_there_and_cannot_be_imported_says_why(
    sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fastokens.py").write_text("raise ImportError('it needs NumPy 3')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "fastokens", raising=False)
    reference = HuggingFaceTokenizer(
        Library.from_file(str(sample / "tokenizer.json")), "", None, False, False
    )
    with pytest.raises(
        DataError, match="needs the package fastokens, which cannot be imported: it needs NumPy 3"
    ):
        FastokensEngine(reference)


@pytest.mark.parametrize(("version", "taken"), [("0.3.4", False), ("0.3.5", True), ("0.10.0rc1", True)])
def test_an_engine_older_than_the_one_that_was_compared_is_refused(
    sample: Path, monkeypatch: pytest.MonkeyPatch, version: str, taken: bool
) -> None:
    pytest.importorskip("fastokens")
    monkeypatch.setattr("megalite.data.tokenizer.engine.installed_version", lambda _: version)
    library = Library.from_file(str(sample / "tokenizer.json"))
    reference = HuggingFaceTokenizer(library, "", None, False, False)
    if taken:
        FastokensEngine(reference)
        return
    with pytest.raises(DataError, match=r"version 0\.3\.4 is older than 0\.3\.5, whose ids were compared"):
        FastokensEngine(reference)


PLAIN: dict[str, bool] = {"normalized": False}
NORMAL: dict[str, bool] = {"normalized": True}
SPECIAL: dict[str, bool] = {"normalized": False, "special": True}


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ({"<sql>": PLAIN, "<sql>SELECT": NORMAL}, "'<sql>' and '<sql>SELECT' overlap"),
        ({"abc": PLAIN, "cat": NORMAL}, "'abc' and 'cat' overlap"),
        ({"cat": PLAIN, "abc": NORMAL}, "'abc' and 'cat' overlap"),
        ({"xabcx": SPECIAL, "abc": PLAIN}, "'xabcx' and 'abc' overlap"),
        ({"the": PLAIN | {"single_word": True}}, "'the' is a whole word or"),
        ({"the": NORMAL | {"lstrip": True}}, "'the' is a whole word or"),
        ({"the": PLAIN | {"rstrip": True}}, "'the' is a whole word or"),
        # as most have
        ({"<sql>": PLAIN, "<sql>SELECT": PLAIN}, None),
        ({"  ": NORMAL, "    ": NORMAL, "<a>": SPECIAL, "<b>": PLAIN}, None),
        ({"<mask>": SPECIAL | {"lstrip": True}, "<mask>s": SPECIAL | {"normalized": True}}, None),
    ],
)
@pytest.mark.parametrize("name", ["fastokens", "gigatoken"])
def test_engines_are_refused_for_added_tokens_that_they_find_otherwise(
    sample: Path, name: str, tokens: dict[str, dict[str, bool]], reason: str | None
) -> None:
    pytest.importorskip(name)
    engine = FastokensEngine if name == "fastokens" else gigatoken.GigatokenEngine
    library = Library.from_file(str(sample / "tokenizer.json"))
    for content, kind in tokens.items():
        token = AddedToken(content, **{"special": False, **kind})
        (library.add_special_tokens if token.special else library.add_tokens)([token])
    reference = HuggingFaceTokenizer(library, "", None, False, False)
    if reason is None:
        compare(engine(reference), reference, hard_texts(reference))
        return
    with pytest.raises(DataError, match=f"{name}: the added tokens? {reason}.*; leave --engine out"):
        engine(reference)


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("normalizer", [None, NFC()])
def test_the_long_s_is_left_to_the_library(normalizer: NFC | None) -> None:
    """Which takes it for an s where a pattern ignores case, as Llama 3's does."""
    pytest.importorskip("fastokens")
    library = Library(BPE())
    split = [Split(Regex(LLAMA_3), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    library.pre_tokenizer = Sequence(split)
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    library.train_from_iterator(["\u017fhall", "\u017fhe"] * 9, trainer)
    if normalizer is not None:
        library.normalizer = normalizer
    reference = HuggingFaceTokenizer(library, "", None, False, False)
    engine = FastokensEngine(reference)
    texts = ["it's", "I'\u017fhall", "\u017fhe \u00e9", "I'\u1e9bhall", "\u4e00", ""]
    assert engine.encode_batch(texts) == reference.encode_batch(texts)
    assert engine.encode_batch([]) == []
    assert engine._encode(texts[1:2])[0].tolist() != reference.encode_batch(texts[1:2])[0]


def test_text_too_long_for_the_library_is_not_advised_to_take_the_engine(
    sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastokens")
    library = Library.from_file(str(sample / "tokenizer.json"))
    reference = HuggingFaceTokenizer(library, "", None, False, False)
    engine = FastokensEngine(reference)
    text = "a\u180e" * 2000
    assert engine.encode_batch([text]) == reference.encode_batch([text])
    monkeypatch.setattr(base, "CHARACTERS_AT_ONCE", 1000)
    monkeypatch.setattr(base, "LARGEST_ENCODING", engine.memory_per_byte * 9000)
    with pytest.raises(DataError, match=r"a text of 8,000 bytes: .* of memory; cut long texts$"):
        engine.encode_batch([text])
    with pytest.raises(DataError, match="cut long texts, or use --engine fastokens"):
        reference.encode_flat([text])


def test_text_that_the_engine_fails_on_is_left_to_the_library() -> None:
    """A pattern that looks ahead over many characters, of white space or of digits."""
    pytest.importorskip("fastokens")
    library = Library(BPE())
    groups = Split(Regex(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\P{N}+"), "isolated")
    library.pre_tokenizer = Sequence([groups, ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    library.train_from_iterator(["one 123"], trainer)
    reference = HuggingFaceTokenizer(library, "", None, False, False)
    engine = FastokensEngine(reference)
    compare(engine, reference, hard_texts(reference))
    assert engine.versions == reference.versions  # by the two shares make one corpus, and a run goes on
    texts = ["one", "pi = 3." + "14159" * 3400, "two"]
    with pytest.raises(ValueError, match="limit"):
        engine._encode(texts)
    assert engine.encode_batch(texts) == reference.encode_batch(texts)
    with pytest.raises(DataError, match=r"it fails on text that the library encodes: the engine: .* limit"):
        compare(engine, reference, texts)
