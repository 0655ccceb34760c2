"""What every tokenizer offers."""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from megalite import _C
from megalite.data.errors import DataError

LARGEST_ENCODING = 16 << 30  # bytes of memory that may be needed for one text
# A vocabulary that has the first has bytes; the others have each byte of UTF-8, one of which may be missing.
UNKNOWN = (
    "\ue000 \ua66e\U00013000",
    *map(chr, range(0xC0)),
    *(chr((lead - 0xC0) << 6) for lead in range(0xC3, 0xE0)),
    *(chr(max((lead - 0xE0) << 12, 0x800)) for lead in range(0xE0, 0xF0)),
    *(chr(max((lead - 0xF0) << 18, 0x10000)) for lead in range(0xF0, 0xF5)),
)
TEXTS_AT_ONCE = 8192  # a library may need 600 bytes of memory for each, even for an empty one
CHARACTERS_AT_ONCE = 4 << 20  # or one text, if it has more


class Tokenizer(ABC):
    """Text to token ids and back."""

    vocab_size: int
    """Highest id + 1."""
    identity: str | None
    """Hash of the vocabulary: equal hashes, equal meaning of an id. None: ids mean what the data says."""
    options: str = ""
    """What else decides how text becomes ids."""
    eod_token: str | None = None
    added_tokens: Sequence[str] = ()
    """Strings that are looked for before anything else, special ones included."""
    spells_special_tokens: bool = False
    """Whether text that spells a special token becomes that token."""
    memory_per_byte: int
    """Bound on the bytes of memory that encoding takes for each byte of UTF-8, see docs/data_benchmark.md."""
    longer_texts: str = "cut long texts"
    """What to do where they need too many."""
    packages: tuple[str, ...] = ()
    """Whose code encodes."""
    warning: str | None = None
    """What a user should know of its files."""

    @property
    def versions(self) -> list[str]:
        """Of `packages`: another one may give other ids."""
        return [f"{name} {installed_version(name)}" for name in self.packages]

    def check_encodes(self) -> None:  # noqa: B027 - most have nothing to check
        """Raises DataError for a tokenizer that loses text, though it may decode what others have made."""

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
        """Ids of all texts in a row and the number of each: int32 (tokens,), int32 (texts,).

        Raises DataError for a text that needs more than LARGEST_ENCODING, or that cannot be encoded.
        """
        most = LARGEST_ENCODING // self.memory_per_byte
        for size in _long_sizes(texts):
            if size > most:
                raise DataError(
                    f"a text of {size:,} bytes: this tokenizer takes up to {most:,}, as each may need "
                    f"{self.memory_per_byte} bytes of memory; {self.longer_texts}"
                )
        parts = [self._encode_part(part) for part in _parts(texts)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([lengths for _, lengths in parts])

    def _encode_part(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """As `encode_flat`, of texts that are not too many."""
        return _C.flatten_ids(self.encode_batch(texts))

    def memory_for(self, texts: Sequence[str]) -> int:
        """Bound on the bytes of memory that `encode_flat` takes, none for a text that it refuses."""
        short = sum(len(text) for text in texts if len(text) <= CHARACTERS_AT_ONCE)
        sizes = [4 * min(short, CHARACTERS_AT_ONCE), *_long_sizes(texts)]
        return max(bound for size in sizes if (bound := size * self.memory_per_byte) <= LARGEST_ENCODING)

    def check_eod(self) -> int:
        """The end-of-document id. Raises DataError if it is none of the vocabulary, or if text can spell it
        although that is not allowed for special tokens.
        """
        if not 0 <= self.eod < self.vocab_size:
            raise DataError(f"end-of-document id {self.eod}: outside the vocabulary of {self.vocab_size} ids")
        if not self.spells_special_tokens and self._text_has_eod():
            raise DataError(
                f"end-of-document token {self.eod_token or self.eod}: text can have its id, so that data "
                "could forge the end of a document; name a special token that no text spells (the .model of "
                "SentencePiece knows such), or give --allow-special-tokens"
            )
        return self.eod

    def _text_has_eod(self) -> bool:
        """Whether text becomes the end-of-document token: where it is spelled, or for what is unknown."""
        spelled = {self.eod_token or "", self.decode([self.eod])}
        # Behind some characters a tokenizer begins anew, or leaves out what it puts before a text.
        inside = [f"{side}{text}{side}" for text in spelled for side in ("", "a", " ", "x\n", "\n")]
        texts = [*inside, *UNKNOWN]
        try:
            return self._any_becomes_eod(texts)
        except DataError:  # of one that becomes no token: each by itself
            pass
        for text in texts:
            with contextlib.suppress(DataError):
                if self._any_becomes_eod([text]):
                    return True
        return False

    def _any_becomes_eod(self, texts: Sequence[str]) -> bool:
        """Whether a token of one of `texts` is the end of a document. Raises DataError where one cannot be
        encoded.
        """
        with library_errors("cannot be encoded"):
            nothing, *found = self.encode_batch(["", *texts])  # to each the tokenizer itself may add one
        return any(ids.count(self.eod) > nothing.count(self.eod) for ids in found)


def installed_version(package: str) -> str:
    """Of a Python package."""
    try:
        return version(package)
    except PackageNotFoundError:  # put somewhere by hand
        return "unknown"


def _long_sizes(texts: Sequence[str]) -> list[int]:
    """Bytes of UTF-8 of each text that is encoded alone."""
    return [len(text.encode()) for text in texts if len(text) > CHARACTERS_AT_ONCE]


def _parts(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """`texts` in their order, TEXTS_AT_ONCE of CHARACTERS_AT_ONCE or one longer one at a time."""
    if len(texts) <= TEXTS_AT_ONCE and sum(map(len, texts)) <= CHARACTERS_AT_ONCE:
        yield texts
        return
    first = characters = 0
    for i, text in enumerate(texts):
        characters += len(text)
        if i > first and (i == first + TEXTS_AT_ONCE or characters > CHARACTERS_AT_ONCE):
            yield texts[first:i]
            first, characters = i, len(text)
    yield texts[first:]


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


def check_works(tokenizer: Tokenizer) -> None:
    """Raises DataError when `tokenizer` encodes nothing at all: then it lacks threads or memory, and no text
    is at fault.
    """
    with library_errors("the tokenizer's library does not encode even an empty text now"):
        tokenizer.encode_flat([""])
