"""The tokenizer_config.json beside a tokenizer.json, which transformers follows as well."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from megalite.data.errors import DataError
from megalite.listing import listing

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

CONFIG = "tokenizer_config.json"
SPACES = "\u0120\u2581 "  # as byte-level tokenizers and those of SentencePiece write one


def config_of(folder: Path) -> dict[str, Any]:
    """A model's tokenizer_config.json; nothing where there is none."""
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        config = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise DataError(f"{path}: cannot be read: expected an object of JSON")
    return config


def configured_eod(path: Path, config: Mapping[str, Any]) -> str | None:
    """The end-of-sequence token that the `config` in `path` names."""
    token = _content(config.get("eos_token"))
    if not isinstance(token, str | None):
        raise DataError(f"{path}: eos_token: expected a string, found {token!r}")
    return token


def _content(token: Any) -> Any:
    """Of a token that may be written as an object."""
    return token.get("content") if isinstance(token, dict) else token


def not_followed(config: Mapping[str, Any], library: Library, add_special_tokens: bool) -> list[str]:
    """What `config` asks for and `library`, a tokenizer.json, does not do; transformers, and with it
    Megatron-LM, may.
    """
    encoded = library.encode("a", add_special_tokens=add_special_tokens).ids
    plain = library.encode("a", add_special_tokens=False).tokens
    found = []
    for end, there in (("bos", encoded[:1]), ("eos", encoded[-1:])):
        token = _content(config.get(f"{end}_token"))
        number = library.token_to_id(token) if isinstance(token, str) else None
        asked = config.get(f"add_{end}_token") is True and add_special_tokens
        if asked and number is not None and number not in there:
            found.append(f"add_{end}_token")
    if config.get("add_prefix_space") is True and plain and plain[0][0] not in SPACES:
        found.append("add_prefix_space")
    tokens = [_content(token) for name, token in config.items() if name.endswith("_token")]
    more = config.get("additional_special_tokens")
    tokens += [_content(token) for token in more] if isinstance(more, list) else []
    decoder = config.get("added_tokens_decoder")
    tokens += [_content(token) for token in decoder.values()] if isinstance(decoder, dict) else []
    named = dict.fromkeys(token for token in tokens if isinstance(token, str))
    if missing := [token for token in named if library.token_to_id(token) is None]:
        found.append(f"the tokens {listing(missing)}")
    return found
