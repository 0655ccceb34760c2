"""What a vocabulary must have: an id for whatever text may hold, and for each token one of its own."""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from megalite.data.errors import DataError
from megalite.limits import INT32_LARGEST
from megalite.listing import listing

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

BYTES = [byte for byte in range(256) if byte < 0xF5 and byte not in (0xC0, 0xC1)]  # UTF-8 has no others


def check_unique(vocabulary: Mapping[str, int] | Mapping[bytes, int], hint: str = "") -> None:
    """Raises DataError for two tokens of one id, with `hint` behind it, and for an id beyond int32."""
    if len(set(vocabulary.values())) < len(vocabulary):
        pairs = pairwise(sorted((number, token) for token, number in vocabulary.items()))
        number, first, second = next((a, b, c) for (a, b), (also, c) in pairs if a == also)
        raise DataError(f"the tokens {first!r} and {second!r} have one id, {number}{hint}")
    largest, token = max(((number, token) for token, number in vocabulary.items()), default=(0, ""))
    if largest > INT32_LARGEST:
        raise DataError(
            f"the token {token!r} has the id {largest}: a dataset holds ids up to {INT32_LARGEST}"
        )


def check_every_byte(tokens: Container[bytes]) -> None:
    """Raises DataError where a token of one byte is missing, of those that text can have."""
    if missing := [f"{byte:#04x}" for byte in BYTES if bytes([byte]) not in tokens]:
        raise DataError(f"lacks bytes that text is made of, which could not be encoded: {listing(missing)}")


def lost_symbols(library: Library) -> set[str]:
    """The symbols of bytes that a byte-level BPE drops without a word, as its vocabulary lacks them: none of
    most, control characters of some. Other models have a token for the unknown, or say that they lack it.

    Raises DataError for a BPE that drops whatever it lacks, bytes or not, or draws ids at random.
    """
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    model = library.model
    if not isinstance(model, BPE):
        return set()
    if model.dropout:
        raise DataError(f"model.dropout is {model.dropout}: ids would be drawn at random; set it to null")
    if model.unk_token is not None:
        return set()
    if model.byte_fallback and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in BYTES):
        return set()
    steps = [step.__getstate__() for step in (library.normalizer, library.pre_tokenizer) if step is not None]
    if not any(b'"type":"ByteLevel"' in step for step in steps):
        raise DataError(
            "a BPE without model.unk_token has neither bytes as symbols nor a byte_fallback with all: "
            "text with what its vocabulary does not have would be lost silently"
        )
    prefixes = {"", model.continuing_subword_prefix or ""}
    suffixes = {"", model.end_of_word_suffix or ""}
    never = {chr(byte) for byte in {*range(256)}.difference(BYTES)}
    return {
        symbol
        for symbol in {*ByteLevel.alphabet()} - never
        if any(model.token_to_id(p + symbol + s) is None for p in prefixes for s in suffixes)
    }
