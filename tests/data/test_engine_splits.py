"""Engines split text where the library does, or are refused."""

from __future__ import annotations

import random
import sys
import unicodedata
from itertools import product

import numpy as np
import pytest
from tokenizers import Regex
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from megalite.data.errors import DataError
from megalite.data.tokenizer.engine_splits import EQUAL_CLASSES, patterns_of, unlike_split
from megalite.data.tokenizer.fastokens import FastokensEngine
from megalite.data.tokenizer.huggingface import HuggingFaceTokenizer

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def reference_of(split: PreTokenizer) -> HuggingFaceTokenizer:
    """One whose ids show the ends of pieces: most pairs of bytes within one become a token."""
    symbols = ByteLevel.alphabet()
    pairs = list(product(symbols, symbols))
    random.Random(0).shuffle(pairs)
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    merges = pairs[:50_000]
    vocabulary |= {first + second: len(symbols) + i for i, (first, second) in enumerate(merges)}
    library = Library(BPE(vocabulary, merges))
    library.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    return HuggingFaceTokenizer(library, "", None, False, False)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (r"\w+|[^\w\s]+|\s+", r"\w"),
        (r"\bthe\b|.", r"\b"),
        (r"[[:alpha:]]+|.", "[:alpha:]"),
        (r"[[:^alpha:]]+|.", "[:^alpha:]"),
        (r"\p{Han}+|\P{Han}+", r"\p{Han}"),
        (r"[^\P{Arabic}]+|.", r"\P{Arabic}"),
        (r"\p{^L}+|.", r"\p"),
        (r"\pL+|.", r"\p"),
        (r"(.)\1", r"\1"),
        (r"\v", r"\v"),
        (r"\p{N}{1,3}+|.", "{1,3}+"),
        (r"a{2}?|.", "{2}?"),
        (r"a{,3}|.", "{,"),
        (r"\s++$|.", "$"),
        (r"^a|.", "^"),
        (r"[a[bS]]+|.", "["),
        (r"[\p{L}&&[^a]]+|.", "["),
        (r"[\p{L}&&\P{Lu}]+|.", "["),
        (r"(?m:.+)", "(?m"),
        (r"(?i:sir)|.", "(?i"),
        (r"(?<name>a)|.", "(?<"),
        (LLAMA_3, None),
        (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}]++[\r\n]*+", None),
        (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[一-龥]+", None),
        (r"(?<=[a-z])(?=[A-Z])|(?<!a)(?:b){2}(?>c)(d)[\]\[^$]\$\^", None),
        (r"\p{Lu}\p{Ll}+|[\x{3041}-\x{30ff}]+|\P{N}|\d\D\S[\[\]\\w:]", None),
    ],
)
def test_what_may_mean_other_characters(pattern: str, found: str | None) -> None:
    reason = None if found is None else f"the pattern of the tokenizer has {found}"
    assert unlike_split(["a", pattern]) == reason


def test_patterns_are_found_wherever_they_are() -> None:
    library = Library(BPE({"a": 0}, []))
    assert patterns_of(library) == []
    library.normalizer = Replace(Regex("b+"), "b")
    library.pre_tokenizer = Sequence([Split(Regex("c"), "removed"), Split("d", "removed"), ByteLevel()])
    assert patterns_of(library) == ["b+", "c"]


def test_an_engine_is_refused() -> None:
    pytest.importorskip("fastokens")
    reference = reference_of(Split(Regex(r"\w+|\W+"), "isolated"))
    with pytest.raises(DataError, match=r"the pattern of the tokenizer has \\w, which is not known to be eq"):
        FastokensEngine(reference)


@pytest.mark.parametrize("pattern", ["categories", r"\s+|\S+", r"\d+|\D+", r"\p{L}+|\p{M}+|\p{Z}+"])
def test_every_character_is_in_the_same_class(pattern: str) -> None:
    """One behind another, in a random order, and each between two letters."""
    pytest.importorskip("fastokens")
    if pattern == "categories":
        pattern = "|".join(rf"\p{{{name}}}+" for name in sorted(EQUAL_CLASSES) if len(name) == 2)
    reference = reference_of(Split(Regex(pattern), "isolated"))
    engine = FastokensEngine(reference)
    codes = [
        code for code in range(sys.maxunicode) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")
    ]
    random.Random(0).shuffle(codes)
    characters = "".join(map(chr, codes))
    for text in (characters, "a".join(characters), "\n".join(characters)):
        parts = [text[i : i + 1000] for i in range(0, len(text), 1000)]
        for ours, theirs in zip(engine.encode_flat(parts), reference.encode_flat(parts), strict=True):
            assert np.array_equal(ours, theirs)


def test_a_space_of_one_library_alone_is_left_to_it() -> None:
    """Mongolian's vowel separator."""
    pytest.importorskip("fastokens")
    reference = reference_of(Split(Regex(r"\s+|\S+"), "isolated"))
    engine = FastokensEngine(reference)
    texts = [f"{letter}\u180e{letter}" for letter in "abcdefgh"]
    assert engine.encode_batch(texts) == reference.encode_batch(texts)
    assert engine._encode(texts)[0].tolist() != reference.encode_flat(texts)[0].tolist()
