"""Makes the tokenizer that the flags name."""

from __future__ import annotations

from typing import Protocol

from ..errors import DataError
from .base import Tokenizer
from .huggingface import load_gpt2_bpe, load_tokenizer_json
from .null import NullTokenizer


class TokenizerSettings(Protocol):
    """The fields of the data configuration that name a tokenizer."""

    @property
    def tokenizer_type(self) -> str: ...
    @property
    def tokenizer_model(self) -> str | None: ...
    @property
    def vocab_file(self) -> str | None: ...
    @property
    def merge_file(self) -> str | None: ...
    @property
    def null_tokenizer_eod_id(self) -> int | None: ...


def build_tokenizer(
    settings: TokenizerSettings,
    vocab_size: int | None = None,
    *,
    eod_token: str | None = None,
    add_special_tokens: bool = True,
    allow_special_tokens: bool = False,
) -> Tokenizer:
    """The tokenizer of ``settings``.

    ``vocab_size``: for NullTokenizer only. ``eod_token``: the end-of-document token's text where the
    tokenizer does not say.
    ``add_special_tokens``: what the tokenizer itself adds to each text, such as a beginning-of-sequence
    token.
    ``allow_special_tokens``: text that spells a special token becomes that token. Raises DataError.
    """
    kind = settings.tokenizer_type
    if kind == "HuggingFaceTokenizer":
        if settings.tokenizer_model is None:
            raise DataError(
                "HuggingFaceTokenizer needs --tokenizer-model: a tokenizer.json or the folder that holds it"
            )
        return load_tokenizer_json(
            settings.tokenizer_model, eod_token, add_special_tokens, allow_special_tokens
        )
    if kind == "GPT2BPETokenizer":
        return load_gpt2_bpe(settings.vocab_file, settings.merge_file, eod_token, allow_special_tokens)
    if kind == "NullTokenizer":
        return NullTokenizer(vocab_size, settings.null_tokenizer_eod_id)
    raise DataError(
        f"--tokenizer-type {kind}: expected HuggingFaceTokenizer, GPT2BPETokenizer or NullTokenizer"
    )
