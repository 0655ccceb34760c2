"""What every tokenizer offers."""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from megalite import _C
from megalite.data.errors import DataError

TEXTS_AT_ONCE = 8192  # a library may need 600 bytes of memory for each, even for an empty one


class Tokenizer(ABC):
    """Text to token ids and back."""

    vocab_size: int
    """Highest id + 1."""
    identity: str | None
    """Hash of the vocabulary: equal hashes, equal meaning of an id. None: ids mean what the data says."""
    options: str = ""
    """What else decides how text becomes ids."""
    eod_token: str | None = None

    @property
    @abstractmethod
    def eod(self) -> int:
        """Id of the end-of-document token. Raises DataError when the tokenizer has none."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without end-of-document tokens. Raises DataError for text that cannot be
        encoded.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts in a row and the number of each: int32 (tokens,), int32 (texts,)."""
        return _C.flatten_ids(
            ids
            for first in range(0, len(texts), TEXTS_AT_ONCE)
            for ids in self.encode_batch(texts[first : first + TEXTS_AT_ONCE])
        )

    def check_eod(self) -> int:
        """The end-of-document id, if it is one of the vocabulary."""
        if not 0 <= self.eod < self.vocab_size:
            raise DataError(f"end-of-document id {self.eod}: outside the vocabulary of {self.vocab_size} ids")
        return self.eod


def identity_of(kind: str, parts: Iterable[bytes]) -> str:
    """Hash of a tokenizer's kind and of its files or settings."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Whatever a tokenizer's library raises becomes a DataError that begins with `what`; a panic in Rust is
    no Exception. A MemoryError stays one: it says nothing about the text.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise DataError(f"{what}: {error}") from error
