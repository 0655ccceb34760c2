"""Text that is already ids: numbers separated by spaces."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.data.errors import DataError
from megalite.data.tokenizer.base import Tokenizer


class NullTokenizer(Tokenizer):
    """Reads ids as written; nothing is tokenised."""

    spells_special_tokens = True
    memory_per_byte = 32  # a Python string and a list's place for each word, an int for each above 256

    def __init__(self, vocab_size: int | None, eod: int | None) -> None:
        """`eod`: by default the last id, as in recent Megatron-LM."""
        if vocab_size is None or vocab_size < 1:
            raise DataError(f"--vocab-size {vocab_size}: NullTokenizer needs a vocabulary size of 1 or more")
        self.vocab_size = vocab_size
        self._eod = vocab_size - 1 if eod is None else eod
        self.identity = None

    @property
    def eod(self) -> int:
        return self._eod

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            if not word.isascii() or not word.isdigit() or int(word) >= self.vocab_size:
                raise DataError(
                    f"{word[:40]!r}: expected an id from 0 to {self.vocab_size - 1}, as NullTokenizer reads "
                    f"them"
                )
            ids.append(int(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)
