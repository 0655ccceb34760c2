"""gigatoken: a faster engine for tokenizers of the Hugging Face library."""

from __future__ import annotations

import sys
import threading
import unicodedata
from functools import partial
from typing import Any

import numpy as np
import orjson

from megalite.data.errors import DataError
from megalite.data.tokenizer.base import Tokenizer
from megalite.data.tokenizer.engine import Engine, library_of, refusing_tokenizer
from megalite.data.tokenizer.engine_added_tokens import other_added_tokens

COMPARED = (0, 10, 0)
# NFC is not: the two libraries order marks of Unicode 14 differently (0.10 and tokenizers 0.23 at U+1AC1).
EQUAL_NORMALIZERS = {"Prepend", "Replace"}
# Characters. The engine remembers each word that it meets: 0.10 takes 6 bytes a byte of random words.
RENEWED_AFTER = 1 << 30


class GigatokenEngine(Engine):
    """The two libraries may know different versions of Unicode, and so split text differently at the newest
    letters (0.10 and tokenizers 0.23 do, at 4,657 of them). Text with a character that Python does not know
    goes to the reference.
    """

    memory_per_byte = 32  # of one letter or spaces; 3 of English, 10 of Chinese

    def __init__(self, reference: Tokenizer) -> None:
        library, known = library_of("gigatoken", COMPARED, reference)
        super().__init__(known)
        if reason := other_added_tokens(known.library):
            raise DataError(
                f"--engine gigatoken: {reason}, which is not known to be equal; leave --engine out"
            )
        content = orjson.loads(known.library.to_str())
        if known.library.encode_special_tokens:  # their text is text: the engine must not know them
            content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
        if unlike := sorted(_normalizers(content["normalizer"]) - EQUAL_NORMALIZERS):
            raise DataError(
                f"--engine gigatoken: the tokenizer's normalizer {', '.join(unlike)} is not known to be "
                "equal; leave --engine out"
            )
        self._make = partial(library.Tokenizer.from_json, orjson.dumps(content))
        with refusing_tokenizer("gigatoken"):
            self._engine = self._make()
        self._encoded, self._renewing = 0, threading.Lock()
        self._unassigned = unassigned()

    def _is_sure(self, text: str) -> bool:
        if text.isascii():
            return True
        return not self._unassigned[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)].any()

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        with self._renewing:  # by one of the threads; those that encode keep the engine that they have
            self._encoded += sum(map(len, texts))
            if self._encoded > RENEWED_AFTER:
                self._engine, self._encoded = self._make(), 0
            engine = self._engine
        layout = engine.encode_batch(texts).layout
        ends = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[ends[0] : ends[-1]]
        return ids.astype(np.int32), np.diff(ends).astype(np.int32)


def unassigned() -> np.ndarray:
    """bool (code points,): where Python's version of Unicode has no character."""
    codes = range(sys.maxunicode + 1)
    return np.fromiter((unicodedata.category(chr(code)) == "Cn" for code in codes), bool, len(codes))


def _normalizers(content: dict[str, Any] | None) -> set[str]:
    """The types in a tokenizer.json's normalizer."""
    if content is None:
        return set()
    if content["type"] == "Sequence":
        return {name for each in content["normalizers"] for name in _normalizers(each)}
    return {content["type"]}
