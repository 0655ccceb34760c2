"""Tokenizers of the Hugging Face `tokenizers` library: a `tokenizer.json`, or GPT-2's vocabulary and
merges.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from megalite import _C
from megalite.data.errors import DataError
from megalite.data.tokenizer.base import Tokenizer, identity_of, library_errors
from megalite.data.tokenizer.model_config import FILES, ModelConfig
from megalite.data.tokenizer.vocabulary_checks import check_unique, lost_symbols

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Library

# Tried in this order when neither the caller nor tokenizer_config.json names the end-of-document token.
USUAL_EOD = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek, with full-width bars
)
IN_A_ROW = (
    "; added tokens are numbered from the count of the model's vocabulary on, so that must leave no id out"
)


class HuggingFaceTokenizer(Tokenizer):
    """A pipeline of the `tokenizers` library; padding and truncation, if the file asks for them, are
    switched off.
    """

    packages = ("tokenizers",)
    memory_per_byte = 256  # with tokenizers 0.23: 124 of English, 194 of Chinese, 233 of random letters
    longer_texts = "cut long texts, or use --engine fastokens"

    def __init__(
        self,
        library: Library,
        identity: str,
        eod_token: str | None,
        add_special_tokens: bool,
        allow_special_tokens: bool,
        eod_given_by: str = "--eod-token",
        more_options: str = "",
    ) -> None:
        """`more_options`: as from `_option_of_eod`. Raises DataError for a vocabulary in which ids mean two
        things.
        """
        from tokenizers import AddedToken

        vocabulary = library.get_vocab(with_added_tokens=True)
        added = library.get_added_tokens_decoder().values()
        if any(token.content == eod_token and not token.special for token in added):
            # Text that spells it must not become it, whatever kind of added token the file makes it.
            library.add_special_tokens([AddedToken(eod_token, special=True, normalized=False)])
        check_unique(vocabulary, IN_A_ROW)
        library.no_padding()
        library.no_truncation()
        # Without this a document that spells out "<|endoftext|>" would forge a document boundary.
        library.encode_special_tokens = not allow_special_tokens
        self.library = library
        self.identity = identity
        self.options = f"add_special_tokens={add_special_tokens} allow_special_tokens={allow_special_tokens}"
        self.options += more_options
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eod_token = eod_token
        self.added_tokens = [token.content for token in library.get_added_tokens_decoder().values()]
        self._eod_given_by = eod_given_by
        self.spells_special_tokens = allow_special_tokens
        self.adds_special_tokens = add_special_tokens
        ids = library.encode("", add_special_tokens=add_special_tokens).ids
        if max(ids, default=-1) >= self.vocab_size:
            raise DataError(
                f"post_processor adds the id {max(ids)}: outside the vocabulary of {self.vocab_size}"
            )

    @property
    def eod(self) -> int:
        if self.eod_token is None:
            raise DataError(
                "the tokenizer does not say which token ends a document; name it: --eod-token TOKEN "
                f"(known special tokens: {', '.join(self.added_tokens[:20]) or 'none'})"
            )
        found = self.library.token_to_id(self.eod_token)
        if found is None:
            raise DataError(
                f"{self._eod_given_by} {self.eod_token}: not in the vocabulary of {self.vocab_size} tokens "
                f"(special tokens: {', '.join(self.added_tokens[:20]) or 'none'})"
            )
        return found

    def check_encodes(self) -> None:
        _ = self._lost

    @cached_property
    def _lost(self) -> set[str]:
        return lost_symbols(self.library)

    def check_texts(self, texts: Sequence[str]) -> None:
        """Raises DataError for text of which the vocabulary would lose bytes without a word."""
        if not self._lost:
            return
        normalizer, split = self.library.normalizer, self.library.pre_tokenizer
        for text in texts:
            normal = text if normalizer is None else normalizer.normalize_str(text)
            pieces = [normal] if split is None else [piece for piece, _ in split.pre_tokenize_str(normal)]
            if lost := self._lost.intersection("".join(pieces)):
                raise DataError(
                    f"the vocabulary lacks {min(lost)!r}, the symbol of a byte that would be lost"
                )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encodings(texts)]

    def _encode_part(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        # One list after another: all at once would be as many Python ints as the batch has tokens.
        return _C.flatten_ids(encoding.ids for encoding in self._encodings(texts))

    def _encodings(self, texts: Sequence[str]) -> list[Encoding]:
        self.check_texts(texts)
        return self.library.encode_batch_fast(list(texts), add_special_tokens=self.adds_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        return self.library.decode(list(ids), skip_special_tokens=False)


def load_tokenizer_json(
    model: str, eod_token: str | None, add_special_tokens: bool, allow_special_tokens: bool
) -> HuggingFaceTokenizer:
    """`model`: a tokenizer.json or the folder that holds it; never downloaded."""
    from tokenizers import Tokenizer as Library

    path = Path(model)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(
            f"--tokenizer-model {model}: expected a tokenizer.json or a folder that holds one; nothing is "
            f"downloaded"
        )
    content = path.read_bytes()
    with library_errors(f"{path}: cannot be read as a tokenizer.json"):
        library = Library.from_buffer(content)
        parsed = orjson.loads(content)
        # With other spaces, another order of its keys, or what is switched off it is the same tokenizer.
        switched_off = {name: None for name in ("padding", "truncation") if name in parsed}
        canonical = orjson.dumps({**parsed, **switched_off}, option=orjson.OPT_SORT_KEYS)
    config = ModelConfig(path.parent)
    configured = config.eos_token()
    given_by = config.eos_place if configured and not eod_token else "--eod-token"
    own_eod = configured or _usual_eod(library)
    plain = {token.content for token in library.get_added_tokens_decoder().values() if not token.special}
    identity = identity_of("tokenizer.json", [canonical])
    with library_errors(str(path)):
        tokenizer = HuggingFaceTokenizer(
            library,
            identity,
            eod_token or own_eod,
            add_special_tokens,
            allow_special_tokens,
            given_by,
            _option_of_eod(eod_token or own_eod, own_eod, plain),
        )
        warnings = []
        if renumbered := _renumbered(parsed.get("added_tokens") or [], library):
            warnings.append(f"{path}: {renumbered}")
        if found := config.not_followed(library, add_special_tokens):
            warnings.append(f"{path.parent}: {' or '.join(FILES)} asks for {found}")
        tokenizer.warning = "; ".join(warnings) or None
    return tokenizer


def _renumbered(added_tokens: Sequence[Mapping[str, Any]], library: Library) -> str | None:
    """A warning of the first of a file's `added_tokens` that has another id in the library."""
    for token in added_tokens:
        given, found = token["id"], library.token_to_id(token["content"])
        if given != found:
            return (
                f"the added token {token['content']!r} has the id {given} there, but {found} in the library, "
                "which numbers added tokens in their order from the count of the model's vocabulary on; "
                "other programs may go by the file"
            )
    return None


def load_gpt2_bpe(
    vocab_file: str | None, merge_file: str | None, eod_token: str | None, allow_special_tokens: bool
) -> HuggingFaceTokenizer:
    """GPT-2's byte-level BPE from its vocab.json and merges.txt."""
    from tokenizers import AddedToken, decoders, pre_tokenizers
    from tokenizers import Tokenizer as Library
    from tokenizers.models import BPE

    if vocab_file is None or merge_file is None:
        raise DataError("GPT2BPETokenizer needs --vocab-file vocab.json and --merge-file merges.txt")
    for flag, given in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        if not Path(given).is_file():
            raise DataError(f"{flag} {given}: no such file")
    with library_errors(f"{vocab_file}, {merge_file}: cannot be read as a GPT-2 BPE"):
        library = Library(BPE.from_file(vocab_file, merge_file))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    own_eod = _usual_eod(library)
    eod_token = eod_token or own_eod
    option = _option_of_eod(eod_token, own_eod, library.get_vocab() if allow_special_tokens else ())
    if eod_token is not None and library.token_to_id(eod_token) is not None:
        library.add_special_tokens([AddedToken(eod_token, special=True, normalized=False)])
    identity = identity_of("gpt2-bpe", [Path(vocab_file).read_bytes(), Path(merge_file).read_bytes()])
    with library_errors(f"--vocab-file {vocab_file}"):
        return HuggingFaceTokenizer(
            library, identity, eod_token, False, allow_special_tokens, more_options=option
        )


def _option_of_eod(eod_token: str | None, own: str | None, made_special: Container[str | None]) -> str:
    """What `options` say of an end-of-document token that is not the files' `own`: nothing unless text that
    spells one of the two becomes other ids, as what is `made_special` does.
    """
    differs = eod_token != own and (eod_token in made_special or own in made_special)
    return f" eod_token={eod_token}" if differs else ""


def _usual_eod(library: Library) -> str | None:
    return next((token for token in USUAL_EOD if library.token_to_id(token) is not None), None)
