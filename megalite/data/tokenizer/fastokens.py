"""fastokens: a faster engine for tokenizers of the Hugging Face library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from megalite.data.errors import DataError
from megalite.data.tokenizer.base import Tokenizer
from megalite.data.tokenizer.engine import Engine, library_of, refusing_tokenizer
from megalite.data.tokenizer.engine_splits import patterns_of, unlike_split

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

LONG_S = "\u017f"
VOWEL_SEPARATOR = "\u180e"  # of Mongolian


class FastokensEngine(Engine):
    """Version 0.3.5 gave the ids of tokenizers 0.23 for every text that was tried (docs/data_benchmark.md),
    with these exceptions. It finds some added tokens otherwise, and means something else by parts of
    patterns: tokenizers with such are refused. Where a pattern ignores case, the library takes the long s for
    an s (`'s` as in "it's"), and it takes Mongolian's vowel separator for a space: text with one, or with a
    long s behind an apostrophe, goes to the reference.
    """

    packages = ("fastokens", "tokenizers")
    memory_per_byte = 50  # of spaces; 8 of English, 13 of Chinese

    def __init__(self, reference: Tokenizer) -> None:
        library, known = library_of("fastokens", reference)
        super().__init__(known)
        if reason := other_added_tokens(known.library) or unlike_split(patterns_of(known.library)):
            raise DataError(
                f"--engine fastokens: {reason}, which is not known to be equal; leave --engine out"
            )
        with refusing_tokenizer("fastokens"):
            self._engine = library.Tokenizer.from_json_str(known.library.to_str())
        # A normalizer may put the apostrophe before it.
        self._long_s = f"'{LONG_S}" if known.library.normalizer is None else LONG_S

    def _is_sure(self, text: str) -> bool:
        return self._long_s not in text and VOWEL_SEPARATOR not in text

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, ends = self._engine.encode_batch_flat(
            texts,
            add_special_tokens=self._reference.adds_special_tokens,
            split_special_tokens=self._reference.library.encode_special_tokens,
        )
        lengths = np.diff(np.frombuffer(ends, dtype="<u8")).astype(np.int32)
        return np.frombuffer(ids, dtype="<i4"), lengths  # ids beyond 2^31 there are not


def other_added_tokens(library: Library) -> str | None:
    """What of the added tokens the engine finds in another way; None if nothing is known.

    The library looks for those that are not `normalized` first, and for no special ones where their text is
    text; the engine looks for all at once.
    """
    found: dict[tuple[bool, bool], set[str]] = {}  # by kind
    for token in library.get_added_tokens_decoder().values():
        dormant = token.special and library.encode_special_tokens
        if not dormant and (token.single_word or token.lstrip or token.rstrip):
            return f"the added token {token.content!r} is a whole word or takes the spaces beside it"
        found.setdefault((token.normalized, dormant), set()).add(token.content)
    for (_, dormant), tokens in found.items():
        others = [each for kind, each in found.items() if each is not tokens and not (dormant and kind[1])]
        if pair := _overlap(tokens, set().union(*others)):
            return "the added tokens {!r} and {!r} overlap, but are of two kinds".format(*pair)
    return None


def _overlap(tokens: Iterable[str], others: Iterable[str]) -> tuple[str, str] | None:
    """The first of `tokens` of which the end is the beginning of one of `others`, or which has one inside."""
    whole = {token: token for token in others}
    begins = {token[:size]: token for token in others for size in range(1, len(token))} | whole
    for token in tokens:
        ends = (token[start:] for start in range(len(token)))
        inside = (token[i:j] for i in range(len(token)) for j in range(i + 1, len(token) + 1))
        other = next((begins[end] for end in ends if end in begins), None)
        if other or (other := next((part for part in inside if part in whole), None)):
            return token, other
    return None
