"""Each byte of the UTF-8 text is a token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megalite.data.tokenizer.base import Tokenizer, identity_of


class ByteLevelTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, 256 is the end of document: no text can spell it."""

    memory_per_byte = 8
    vocab_size = 257
    identity = identity_of("bytes", [])
    eod_token = "<eod>"

    @property
    def eod(self) -> int:
        return 256

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def _encode_part(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encoded = [text.encode("utf-8") for text in texts]
        lengths = np.array([len(text) for text in encoded], dtype=np.int32)
        return np.frombuffer(b"".join(encoded), dtype=np.uint8).astype(np.int32), lengths

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")
