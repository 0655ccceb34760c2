"""Makes the tokenizer that the flags name."""

from __future__ import annotations

from typing import Protocol

from megalite.data.errors import DataError
from megalite.data.tokenizer.base import Tokenizer
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from megalite.data.tokenizer.huggingface import load_gpt2_bpe, load_tokenizer_json
from megalite.data.tokenizer.null import NullTokenizer
from megalite.data.tokenizer.sentencepiece import SentencePieceTokenizer
from megalite.data.tokenizer.tiktoken import DEFAULT_SPECIAL_TOKENS, TikTokenizer


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
    @property
    def eod_token(self) -> str | None: ...


TYPES = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
)
# Other names under which Megatron-LM knows them.
ALIASES = {"GPTSentencePieceTokenizer": "SentencePieceTokenizer", "Llama2Tokenizer": "SentencePieceTokenizer"}


def build_tokenizer(
    settings: TokenizerSettings,
    vocab_size: int | None = None,
    *,
    add_special_tokens: bool = True,
    allow_special_tokens: bool = False,
) -> Tokenizer:
    """The tokenizer of `settings`.

    `vocab_size`: of NullTokenizer and of TikTokenizer's JSON vocabularies. `add_special_tokens`: what a
    Hugging Face tokenizer itself adds to each text, such as a beginning-of-sequence token.
    `allow_special_tokens`: text that spells a special token becomes that token. Raises DataError.
    """
    eod_token = settings.eod_token
    kind = ALIASES.get(settings.tokenizer_type, settings.tokenizer_type)
    if kind not in TYPES:
        raise DataError(f"--tokenizer-type {kind}: expected one of {', '.join(TYPES)}")
    if kind == "NullTokenizer":
        return NullTokenizer(vocab_size, settings.null_tokenizer_eod_id)
    if kind == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if kind == "GPT2BPETokenizer":
        return load_gpt2_bpe(settings.vocab_file, settings.merge_file, eod_token, allow_special_tokens)
    model = settings.tokenizer_model
    if model is None and settings.vocab_file is not None:
        raise DataError("--vocab-file and --merge-file are of --tokenizer-type GPT2BPETokenizer")
    if model is None:
        raise DataError(f"{kind} needs --tokenizer-model")
    if kind == "HuggingFaceTokenizer":
        return load_tokenizer_json(model, eod_token, add_special_tokens, allow_special_tokens)
    if kind == "SentencePieceTokenizer":
        return SentencePieceTokenizer(model, eod_token, allow_special_tokens)
    pattern = getattr(settings, "tiktoken_pattern", None)
    special_tokens = getattr(settings, "tiktoken_num_special_tokens", DEFAULT_SPECIAL_TOKENS)
    return TikTokenizer(model, pattern, special_tokens, vocab_size, eod_token, allow_special_tokens)
