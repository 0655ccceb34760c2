"""The files of a model beside its tokenizer.json, which transformers follows as well."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from megalite.data.errors import DataError, is_file, reading
from megalite.data.tokenizer.base import library_errors
from megalite.listing import listing

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
FILES = (CONFIG, SPECIAL_TOKENS)
SPACES = "\u0120\u2581 "  # as byte-level tokenizers and those of SentencePiece write one


class ModelConfig:
    """The tokenizer_config.json of a folder, and its special_tokens_map.json, which counts where the first
    does not list the added tokens, as older ones do not.
    """

    def __init__(self, folder: Path) -> None:
        """Raises DataError for files that cannot be read."""
        config = _read(folder / CONFIG)
        special = {} if "added_tokens_decoder" in config else _read(folder / SPECIAL_TOKENS)
        special = {name: value for name, value in special.items() if value is not None}
        self._values = config | special
        self.eos_place = f"{folder / (SPECIAL_TOKENS if 'eos_token' in special else CONFIG)}: eos_token"
        """Which file and field name the end of a sequence."""

    def eos_token(self) -> str | None:
        """The token that ends a sequence. Raises DataError where it is no text."""
        token = _content(self._values.get("eos_token"))
        if not isinstance(token, str | None):
            raise DataError(f"{self.eos_place}: expected a string, found {token!r}")
        return token

    def not_followed(self, library: Library, add_special_tokens: bool) -> str | None:
        """What is asked for and `library`, a tokenizer.json, does not do, in words; transformers, and with it
        Megatron-LM, may.
        """
        config = self._values
        encoded = library.encode("", add_special_tokens=add_special_tokens).ids
        found = []
        for end, there in (("bos", encoded[:1]), ("eos", encoded[-1:])):
            token = _content(config.get(f"{end}_token"))
            number = library.token_to_id(token) if isinstance(token, str) else None
            asked = config.get(f"add_{end}_token") is True and add_special_tokens
            if asked and number is not None and number not in there:
                found.append(f"add_{end}_token")
        if config.get("add_prefix_space") is True and not _adds_space(library):
            found.append("add_prefix_space")
        if missing := [token for token in self._tokens() if library.token_to_id(token) is None]:
            found.append(f"the tokens {listing(missing)}")
        if not found:
            return None
        return (
            f"{', '.join(found)}: tokenizer.json does not do so, and of what stands beside it only eos_token "
            "counts; where it should, save the tokenizer again with save_pretrained of transformers"
        )

    def _tokens(self) -> list[str]:
        """All that are named, each once."""
        tokens = [token for name, token in self._values.items() if name.endswith("_token")]
        for name in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
            more = self._values.get(name)
            tokens += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
        texts = (_content(token) for token in tokens)
        return list(dict.fromkeys(text for text in texts if isinstance(text, str) and text))


def _adds_space(library: Library) -> bool:
    """Whether a text begins with a space that it has not, as far as can be seen."""
    try:
        with library_errors("the letter a"):
            tokens = library.encode("a", add_special_tokens=False).tokens
    except DataError:  # a vocabulary of numbers
        return True
    return not tokens or tokens[0][0] in SPACES


def _read(path: Path) -> dict[str, Any]:
    """An object of JSON; nothing where there is no file."""
    if not is_file(path):
        return {}
    try:
        with reading(path):
            content = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: cannot be read: expected an object of JSON")
    return content


def _content(token: Any) -> Any:
    """Of a token that may be written as an object."""
    return token.get("content") if isinstance(token, dict) else token
