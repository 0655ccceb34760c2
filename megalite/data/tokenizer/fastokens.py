"""fastokens: a faster engine for tokenizers of the Hugging Face library."""

from __future__ import annotations

import numpy as np

from megalite.data.errors import DataError
from megalite.data.tokenizer.base import Tokenizer
from megalite.data.tokenizer.engine import Engine, library_of, refusing_tokenizer
from megalite.data.tokenizer.engine_added_tokens import other_added_tokens
from megalite.data.tokenizer.engine_splits import patterns_of, unlike_split

COMPARED = (0, 3, 5)
LONG_S = "\u017f"
VOWEL_SEPARATOR = "\u180e"  # of Mongolian


class FastokensEngine(Engine):
    """Version 0.3.5 gave the ids of tokenizers 0.23 for every text that was tried (docs/data_benchmark.md),
    with these exceptions; 0.3.3 knew fewer marks. It finds some added tokens otherwise, and means something
    else by parts of patterns: tokenizers with such are refused. Where a pattern ignores case, the library
    takes the long s for an s (`'s` as in "it's"), and it takes Mongolian's vowel separator for a space: text
    with one, or with a long s behind an apostrophe, goes to the reference.
    """

    memory_per_byte = 50  # of spaces; 8 of English, 13 of Chinese

    def __init__(self, reference: Tokenizer) -> None:
        library, known = library_of("fastokens", COMPARED, reference)
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
