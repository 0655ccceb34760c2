"""Whether a vocabulary has an id for whatever text may hold, and for each token one of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from megalite.data.errors import DataError
from megalite.data.settings import IDS

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library
    from tokenizers.models import BPE

Token = TypeVar("Token", str, bytes)

# A text that has each byte which UTF-8 can have: 13 of the 256 it cannot.
EVERY_BYTE = "".join(
    map(chr, (*range(0x801), *range(0x1000, 0x10000, 0x1000), *range(1 << 16, 17 << 16, 1 << 16)))
)
BYTES = sorted(set(EVERY_BYTE.encode()))


def check_unique(vocabulary: Mapping[Token, int]) -> None:
    """Raises DataError for two tokens of one id, and for an id beyond int32."""
    if len(set(vocabulary.values())) < len(vocabulary):
        pairs = pairwise(sorted((number, token) for token, number in vocabulary.items()))
        number, first, second = next((a, b, c) for (a, b), (also, c) in pairs if a == also)
        raise DataError(
            f"the tokens {first!r} and {second!r} have one id, {number}; added tokens are numbered from the "
            "count of the model's vocabulary on, so that must leave no id out"
        )
    if max(vocabulary.values(), default=0) >= IDS:
        raise DataError(f"an id of {max(vocabulary.values())}: a dataset holds ids below {IDS}")


def check_every_byte(has: Callable[[bytes], bool]) -> None:
    """Raises DataError where a token of one byte is missing, of those that text can have."""
    missing = [f"{byte:#04x}" for byte in BYTES if not has(bytes([byte]))]
    if missing:
        raise DataError(
            f"lacks {_listed(missing)} of the bytes that text is made of; it could not be encoded"
        )


def check_model(library: Library) -> None:
    """Raises DataError for a BPE that drops what its vocabulary lacks, or draws ids at random.

    Other models have a token for the unknown, or say that they lack it.
    """
    from tokenizers.models import BPE

    model = library.model
    if not isinstance(model, BPE):
        return
    if model.dropout:
        raise DataError(f"model.dropout is {model.dropout}: ids would be drawn at random; set it to null")
    if model.unk_token is not None:
        return
    missing: list[str] = []
    for needed in _ways(library, model):
        missing = sorted(token for token in needed if model.token_to_id(token) is None)
        if not missing:
            return
    lacks = f"lacks {_listed(missing)}" if missing else "has neither bytes as symbols nor byte_fallback"
    raise DataError(
        f"a BPE without model.unk_token {lacks}: text with what its vocabulary does not have would be lost "
        "silently"
    )


def _ways(library: Library, model: BPE) -> list[set[str]]:
    """For each way in which a BPE may have a token for every byte, those that it needs."""
    from tokenizers.pre_tokenizers import ByteLevel

    ways = []
    if model.byte_fallback:
        ways.append({f"<0x{byte:02X}>" for byte in BYTES})
    steps = [step.__getstate__() for step in (library.normalizer, library.pre_tokenizer) if step is not None]
    if any(b'"type":"ByteLevel"' in step for step in steps):
        words = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(EVERY_BYTE)
        prefixes = {"", model.continuing_subword_prefix or ""}
        suffixes = {"", model.end_of_word_suffix or ""}
        symbols = {symbol for word, _ in words for symbol in word}
        ways.append({p + symbol + s for p in prefixes for symbol in symbols for s in suffixes})
    return ways


def _listed(missing: list[str]) -> str:
    some = ", ".join(missing[:5])
    return f"{len(missing)} ({some}{', ...' if len(missing) > 5 else ''})"
