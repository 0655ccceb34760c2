"""Before a faster engine tokenises a corpus: its ids are compared with the library's own."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from unicodedata import combining

import numpy as np

from megalite.data.documents import parse_document
from megalite.data.errors import DataError
from megalite.data.inputs import Part, read_once
from megalite.data.records import read_records
from megalite.data.tokenizer import Tokenizer
from megalite.data.tokenizer.base import check_works, library_errors
from megalite.data.tokenizer.engine import Engine
from megalite.data.tokenizer.fastokens import FastokensEngine
from megalite.data.tokenizer.gigatoken import GigatokenEngine

CHECKED_DOCUMENTS = 1000
CHECKED_BYTES = 1 << 20
CHECKED_SHARE = 1024  # of smaller corpora
AUTO_BYTES = 64 << 20  # of input from which on the check, some seconds, is worth while
CHECKED_NAMES = 1000  # added tokens, tried with each other
MARKS = (  # where Unicode has them
    *(range(0x300, 0x3100), range(0xA600, 0xAC00), range(0xFB00, 0xFE30), range(0x10000, 0x12000)),
    *(range(0x16A00, 0x17000), range(0x1BC00, 0x1C000), range(0x1D100, 0x1EA00)),
)
# Where splits of text differ between implementations: spaces of all kinds, digits, marks, joined emoji, case
# that changes the length, contractions, a letter of Unicode 17.
FRAGMENTS = (
    *("", " ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x85", "\xa0", "\u1680", "\u180e", "\u2003"),
    *("\u2028", "\u3000", "\ufeff", "\u200d", "\0", "a", "Z", "the", " cat", "'s", "'LL", "\u2019t"),
    *("1", "234", "\u00b2", "\u2167", "\u0663", "\uff11", "\u00e9", "e\u0301", "\u0130", "\u017f"),
    *("\ufb01", "\u65e5\u672c", "\u0928\u093f", "\u093f", "\ufe0f\u20e3", "\u0645", "\U0001d7ce"),
    *("\U0001f468\u200d\U0001f469", "\U0010ffff", "\ue000", ".", "...", "_", "\u2581", "\u088f"),
    *("</s>", "<s>", "<|endoftext|>", "[UNK]", "'\u017f", "'\u212a"),
)


def choose_engine(
    name: str, reference: Tokenizer, inputs: Sequence[Part], keys: Sequence[str]
) -> tuple[Tokenizer, str]:
    """What encodes `inputs`, and its name: the engine `name` after its check, or for "auto" fastokens where
    it is installed, exact, and the text long enough to be worth the check. Raises DataError.
    """
    if name == "library":
        return reference, name
    if name != "auto":
        engine: Tokenizer = GigatokenEngine(reference) if name == "gigatoken" else FastokensEngine(reference)
        check_engine(engine, reference, inputs, keys)
        return engine, name
    if any(read_once(part.path) for part in inputs) or total_bytes(inputs) < AUTO_BYTES:
        return reference, "library"
    try:
        engine = FastokensEngine(reference)
        check_engine(engine, reference, inputs, keys)
    except DataError:
        return reference, "library"
    return engine, "fastokens"


def total_bytes(inputs: Sequence[Part]) -> int:
    """Of the files that `inputs` are in."""
    return sum(os.path.getsize(path) for path in {part.path for part in inputs})


def check_engine(
    engine: Tokenizer, reference: Tokenizer, inputs: Sequence[Part], keys: Sequence[str]
) -> None:
    """Raises DataError when `engine` gives other ids than `reference` for hard text, made up, or for the
    first documents of `inputs`.
    """
    if any(read_once(part.path) for part in inputs):
        raise DataError(
            "--engine: what standard input or a pipe brings cannot be checked before; give a file"
        )
    compare(engine, reference, [*hard_texts(reference), *first_texts(inputs, keys)])


def compare(engine: Tokenizer, reference: Tokenizer, texts: Sequence[str]) -> None:
    """Raises DataError for the first of `texts` with other ids; those that `reference` refuses do not count:
    of the corpus the run will name them.
    """
    parts = list(encoded(reference, texts))
    known = [text for part, _, _ in parts for text in part]
    theirs, their_lengths = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    fails = "--engine: it fails on text that the library encodes"
    with library_errors(fails):
        ours, our_lengths = engine.encode_flat(known)
    if isinstance(engine, Engine) and engine.failure is not None:
        raise DataError(f"{fails}: {engine.failure}")
    if np.array_equal(ours, theirs) and np.array_equal(our_lengths, their_lengths):
        return
    for text, one, other in zip(known, _split(ours, our_lengths), _split(theirs, their_lengths), strict=True):
        if one == other:
            continue
        place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        place = min(len(one), len(other)) if place is None else place
        raise DataError(
            f"--engine: it gives other ids than the library for {text[:80]!r} from token {place} on: "
            f"{one[place : place + 5]}, not {other[place : place + 5]}; leave --engine out"
        )


def _split(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def encoded(
    tokenizer: Tokenizer, texts: Sequence[str]
) -> Iterator[tuple[Sequence[str], np.ndarray, np.ndarray]]:
    """`texts` in parts, each with its ids and lengths as `encode_flat` gives them, but for those that
    `tokenizer` refuses, as with a byte that its vocabulary lacks. Raises DataError when the fault is not the
    text's.
    """
    try:
        with library_errors("cannot be encoded"):
            ids, lengths = tokenizer.encode_flat(texts)
    except DataError:
        middle = len(texts) // 2
        if middle == 0:
            check_works(tokenizer)
        for part in (texts[:middle], texts[middle:]) if middle else ():
            yield from encoded(tokenizer, part)
    else:
        yield texts, ids, lengths


def hard_texts(tokenizer: Tokenizer) -> list[str]:
    """The same each time: the fragments, 2,000 mixtures of them, 500 or more that are half of added tokens,
    long runs, and the marks that Python knows, of which a normalizer must know the order.
    """
    generator = random.Random(0)

    def mixtures(fragments: Sequence[str], count: int) -> list[str]:
        sizes = (generator.randint(0, 12) for _ in range(count))
        return ["".join(generator.choices(fragments, k=size)) for size in sizes]

    fragments = [*FRAGMENTS, tokenizer.eod_token or ""]
    names = list(tokenizer.added_tokens)[:CHECKED_NAMES]
    half = max(len(names), len(fragments))
    halves = [*islice(cycle(names), half), *islice(cycle(fragments), half)]
    with_names = mixtures(halves, min(max(500, 8 * len(names)), 2000)) if names else []
    marks = [f"a\u0315{mark}\u0323" for mark in map(chr, chain(*MARKS)) if combining(mark)]
    runs = ["".join(marks), "x" * 5000, " " * 5000, "\n" * 5000, "a\u0300" * 500, "ab1 " * 2000]
    return [*fragments, *mixtures(fragments, 2000), *names, *with_names, *runs]


def first_texts(inputs: Sequence[Part], keys: Sequence[str]) -> Iterator[str]:
    """The beginnings of the texts of the first documents, of those that can be used; fewer of a small corpus,
    which they would hold up.
    """
    enough = min(max(total_bytes(inputs) // CHECKED_SHARE, CHECKED_BYTES // 8), CHECKED_BYTES)
    size = documents = 0
    for part in inputs:
        for records in read_records(part, keys, most_records=16):
            for content in records.contents:
                try:
                    texts = [text for each in parse_document(content, part.format, keys) for text in each]
                except DataError:
                    texts = []  # told when the run comes to it
                yield from (text[:CHECKED_BYTES] for text in texts)
                documents, size = documents + 1, size + sum(map(len, texts))
                if documents == CHECKED_DOCUMENTS or size >= enough:
                    return
