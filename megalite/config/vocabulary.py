"""How many tokens the tokenizer knows, read from its files without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from .errors import ConfigError


def vocabulary_size(
    tokenizer_type: str,
    tokenizer_model: str | None,
    vocab_file: str | None,
    merge_file: str | None,
    vocab_size: int | None,
) -> tuple[int | None, list[ConfigError]]:
    """The model's true vocabulary (no padding), or None with the errors that stand in the way.

    NullTokenizer: `vocab_size` as given, the end of document inside it (recent Megatron-LM: its last id;
    older releases added one row for it). Others: the highest id + 1, unless a larger `vocab_size` is given.
    """
    errors: list[ConfigError] = []
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            errors.append(
                ConfigError("--vocab-size", None, "is required with NullTokenizer", "give a number")
            )
        return vocab_size, errors
    if tokenizer_type == "GPT2BPETokenizer":
        _require_file("--merge-file", merge_file, "merges.txt", errors)
        path = _require_file("--vocab-file", vocab_file, "vocab.json", errors)
        known = _read("--vocab-file", path, _ids_of_vocab_json, errors) if path else None
    else:
        path = _require_tokenizer_json(tokenizer_model, errors)
        known = _read("--tokenizer-model", path, _ids_of_tokenizer_json, errors) if path else None
    if known is not None and vocab_size is not None and vocab_size < known:
        rule = f"smaller than the tokenizer's {known} tokens"
        errors.append(ConfigError("--vocab-size", vocab_size, rule, f"leave it out, or give {known} or more"))
    return vocab_size or known, errors


def _require_file(flag: str, given: str | None, name: str, errors: list[ConfigError]) -> Path | None:
    if given is None:
        errors.append(
            ConfigError(flag, None, "is required with GPT2BPETokenizer", f"give the path of {name}")
        )
    elif not Path(given).is_file():
        errors.append(ConfigError(flag, given, "no such file", f"give the path of {name}"))
    else:
        return Path(given)
    return None


def _require_tokenizer_json(given: str | None, errors: list[ConfigError]) -> Path | None:
    flag, advice = "--tokenizer-model", "give a tokenizer.json or the folder that holds one"
    if given is None:
        errors.append(ConfigError(flag, None, "is required with HuggingFaceTokenizer", advice))
        return None
    path = Path(given)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        rule = "the folder has no tokenizer.json" if Path(given).is_dir() else "no such file or folder"
        errors.append(ConfigError(flag, given, rule, f"{advice}; nothing is downloaded"))
        return None
    return path


def _read(flag: str, path: Path, ids: Any, errors: list[ConfigError]) -> int | None:
    try:
        found = ids(orjson.loads(path.read_bytes()))
        return max(found) + 1
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        errors.append(
            ConfigError(flag, str(path), "is not a tokenizer's vocabulary", "the file may be damaged")
        )
        return None


def _ids_of_vocab_json(content: dict[str, int]) -> list[int]:
    return list(content.values())


def _ids_of_tokenizer_json(content: dict[str, Any]) -> list[int]:
    """Ids of the model's vocabulary (a mapping, or a list for Unigram) and of the tokens added to it."""
    vocabulary = content["model"]["vocab"]
    ids = list(range(len(vocabulary))) if isinstance(vocabulary, list) else list(vocabulary.values())
    return ids + [token["id"] for token in content.get("added_tokens") or ()]
