"""fastokens: a faster engine for tokenizers of the Hugging Face library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megalite.data.tokenizer.base import Tokenizer
from megalite.data.tokenizer.engine import Engine, library_of, refusing_tokenizer


class FastokensEngine(Engine):
    """Version 0.3.5 gave the ids of tokenizers 0.23 for every text that was tried: docs/data_benchmark.md."""

    packages = ("fastokens", "tokenizers")
    memory_per_byte = 50  # of spaces; 8 of English, 13 of Chinese

    def __init__(self, reference: Tokenizer) -> None:
        library, known = library_of("fastokens", reference)
        super().__init__(known)
        with refusing_tokenizer("fastokens"):
            self._engine = library.Tokenizer.from_json_str(known.library.to_str())

    def _encode_part(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        self._reference.check_texts(texts)
        ids, ends = self._engine.encode_batch_flat(
            list(texts),
            add_special_tokens=self._reference.adds_special_tokens,
            split_special_tokens=self._reference.library.encode_special_tokens,
        )
        lengths = np.diff(np.frombuffer(ends, dtype="<u8")).astype(np.int32)
        return np.frombuffer(ids, dtype="<i4"), lengths  # ids beyond 2^31 there are not
