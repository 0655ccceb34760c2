"""tiktoken vocabularies: rank files (`base64 rank` a line, as for cl100k), or Mistral-style JSON lists of
tokens.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path

import orjson

from megalite.data.errors import DataError, lacks_package
from megalite.data.tokenizer.base import Tokenizer, identity_of, library_errors
from megalite.data.tokenizer.vocabulary_checks import check_every_byte, check_unique

# The split patterns are facts of the vocabularies that were trained with them.
_CONTRACTIONS = r"'(?:[sdmt]|ll|ve|re)"
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}++| ?\p{{N}}++| ?[^\s\p{{L}}\p{{N}}]++|\s++$|\s+(?!\S)|\s"
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K = (
    rf"{_CASED}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|{_UPPER}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
V1 = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
V2 = rf"{_CASED}|{_UPPER}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Rank files say neither their pattern nor their special tokens: both go by the number of ranks.
RANK_FILES = {
    50256: (GPT2, {"<|endoftext|>": 50256}),
    50280: (GPT2, {"<|endoftext|>": 50256}),
    100256: (CL100K, {"<|endoftext|>": 100257, "<|endofprompt|>": 100276}),
    199998: (O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}
# Special tokens of the JSON vocabularies, before the fillers; those of Megatron-LM.
JSON_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
JSON_VOCABULARY = 131072
TOO_LONG = ("StackOverflow", "Max stack size")  # of its two ways to encode
DEFAULT_SPECIAL_TOKENS = 1000


class TikTokenizer(Tokenizer):
    """A vocabulary file encoded by tiktoken."""

    packages = ("tiktoken",)
    memory_per_byte = 40  # of Chinese 37

    def __init__(
        self,
        model: str,
        pattern: str | None,
        special_tokens: int,
        vocab_size: int | None,
        eod_token: str | None,
        allow_special_tokens: bool,
    ) -> None:
        """`pattern`, `special_tokens`, `vocab_size`: of JSON vocabularies; "v2", 1000 and 131,072 as
        in Megatron-LM.
        """
        try:
            import tiktoken
        except ImportError as error:
            raise lacks_package("TikTokenizer", "tiktoken", error) from None
        if not Path(model).is_file():
            raise DataError(f"--tokenizer-model {model}: expected a tiktoken rank file or JSON vocabulary")
        content, cut = Path(model).read_bytes(), False
        try:
            if model.endswith(".json"):
                size = vocab_size or JSON_VOCABULARY
                split, special = (V1 if pattern == "v1" else V2), _json_special(special_tokens)
                ranks, entries = _json_ranks(content, size - special_tokens, special_tokens)
                cut = size - special_tokens != min(entries, JSON_VOCABULARY - special_tokens)
                eod_token = eod_token or "</s>"
            else:
                ranks = _rank_file(content)
                split, special = _by_size(len(ranks))
                eod_token = eod_token or "<|endoftext|>"
        except (ValueError, TypeError, KeyError, binascii.Error) as error:
            raise DataError(f"{model}: cannot be read as a tiktoken vocabulary: {error}") from None
        with library_errors(f"{model}: cannot be used as a tiktoken vocabulary"):
            check_every_byte(ranks)
            check_unique({**ranks, **{token.encode(): number for token, number in special.items()}})
            self._library = tiktoken.Encoding(
                Path(model).name, pat_str=split, mergeable_ranks=ranks, special_tokens=special
            )
        parts = [content, split.encode(), repr(sorted(special.items())).encode()]
        parts += [str(len(ranks)).encode()] if cut else []  # not those that the file alone would give
        self.identity = identity_of("tiktoken", parts)
        self.options = f"allow_special_tokens={allow_special_tokens}"
        self.vocab_size = int(self._library.n_vocab)
        self.eod_token = eod_token
        self._special = special
        self.spells_special_tokens = allow_special_tokens

    @property
    def eod(self) -> int:
        if self.eod_token not in self._special:
            raise DataError(
                f"--eod-token {self.eod_token}: the special tokens are {', '.join(list(self._special)[:20])}"
            )
        return self._special[self.eod_token]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            if self.spells_special_tokens:
                return [self._library.encode(text, allowed_special="all") for text in texts]
            return [self._library.encode_ordinary(text) for text in texts]
        except BaseException as error:  # the library panics, which is no Exception
            if not any(reason in str(error) for reason in TOO_LONG):
                raise
            raise DataError(
                "a run of spaces or of letters is too long for tiktoken, as such of megabytes are; shorten it"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids))


def _rank_file(content: bytes) -> dict[bytes, int]:
    ranks = {}
    for line in content.splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    return ranks


def _by_size(ranks: int) -> tuple[str, dict[str, int]]:
    if ranks not in RANK_FILES:
        known = ", ".join(f"{size:,}" for size in RANK_FILES)
        raise ValueError(
            f"{ranks:,} ranks; the known vocabularies have {known}: use a tokenizer.json instead"
        )
    return RANK_FILES[ranks]


def _json_ranks(content: bytes, size: int, first: int) -> tuple[dict[bytes, int], int]:
    """The `size` first tokens, with ids from `first` on, and how many the file has."""
    entries = orjson.loads(content)
    if not isinstance(entries, list):
        raise ValueError("expected a JSON list of tokens; of a Mistral model use the tokenizer.json")
    if size < 1:
        raise ValueError(f"--vocab-size {size + first}: no more than --tiktoken-num-special-tokens {first}")
    if len(entries) < size:
        raise ValueError(f"{len(entries)} tokens, but {size} are wanted; give a smaller --vocab-size")
    ranks = {
        base64.b64decode(entry["token_bytes"], validate=True): entry["rank"] + first
        for entry in entries[:size]
    }
    return ranks, len(entries)


def _json_special(count: int) -> dict[str, int]:
    if count < len(JSON_SPECIAL):
        raise ValueError(f"--tiktoken-num-special-tokens {count}: expected {len(JSON_SPECIAL)} or more")
    fillers = [f"<SPECIAL_{i}>" for i in range(len(JSON_SPECIAL), count)]
    return {token: i for i, token in enumerate([*JSON_SPECIAL, *fillers])}
