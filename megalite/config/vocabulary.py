"""How many tokens the tokenizer knows, read from its files without loading it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson

from megalite.config.errors import ConfigError
from megalite.config.paths import NOT_THERE, why_no_file

BYTE_LEVEL = 257
# Ranks of a tiktoken rank file: ids of the vocabulary with its special tokens.
TIKTOKEN_RANKS = {50256: 50257, 50280: 50281, 100256: 100277, 199998: 200019}
TIKTOKEN_JSON = 131072


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
    elif tokenizer_type == "ByteLevelTokenizer":
        known = BYTE_LEVEL
    elif tokenizer_type == "HuggingFaceTokenizer":
        path = _require_tokenizer_json(tokenizer_model, errors)
        known = _read("--tokenizer-model", path, _ids_of_tokenizer_json, errors) if path else None
    else:
        path = _require_model(tokenizer_type, tokenizer_model, errors)
        if path is None:
            known = None
        elif tokenizer_type != "TikTokenizer":
            known = _sentencepiece(path, errors)
        elif path.suffix == ".json":
            known = vocab_size or TIKTOKEN_JSON  # the vocabulary is cut to what is wanted
        else:
            known = _tiktoken_ranks(path, errors)
    if known is not None and vocab_size is not None and vocab_size < known:
        rule = f"smaller than the tokenizer's {known} tokens"
        errors.append(ConfigError("--vocab-size", vocab_size, rule, f"leave it out, or give {known} or more"))
    return vocab_size or known, errors


def _require_model(tokenizer_type: str, given: str | None, errors: list[ConfigError]) -> Path | None:
    flag = "--tokenizer-model"
    advice = (
        "give a rank file or JSON vocabulary" if tokenizer_type == "TikTokenizer" else "give a .model file"
    )
    if given is None:
        errors.append(ConfigError(flag, None, f"is required with {tokenizer_type}", advice))
    elif reason := why_no_file(given):
        errors.append(ConfigError(flag, given, reason, f"{advice}; nothing is downloaded"))
    else:
        return Path(given)
    return None


def _sentencepiece(path: Path, errors: list[ConfigError]) -> int | None:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        rule = "needs the package sentencepiece"
        errors.append(ConfigError("--tokenizer-type", None, rule, "pip install sentencepiece"))
        return None
    try:
        return int(SentencePieceProcessor(model_proto=path.read_bytes()).get_piece_size())
    except Exception:  # the library raises RuntimeError and others
        errors.append(_damaged("--tokenizer-model", path))
        return None


def _tiktoken_ranks(path: Path, errors: list[ConfigError]) -> int | None:
    """A rank file does not hold its special tokens: they are known by the number of ranks."""
    try:
        ranks = sum(1 for line in path.read_bytes().splitlines() if line)
    except OSError:
        errors.append(_damaged("--tokenizer-model", path))
        return None
    if ranks not in TIKTOKEN_RANKS:
        known = ", ".join(f"{size:,}" for size in TIKTOKEN_RANKS)
        rule = f"{ranks:,} ranks, but the known vocabularies have {known}"
        errors.append(ConfigError("--tokenizer-model", str(path), rule, "use a tokenizer.json instead"))
        return None
    return TIKTOKEN_RANKS[ranks]


def _require_file(flag: str, given: str | None, name: str, errors: list[ConfigError]) -> Path | None:
    if given is None:
        errors.append(
            ConfigError(flag, None, "is required with GPT2BPETokenizer", f"give the path of {name}")
        )
    elif reason := why_no_file(given):
        errors.append(ConfigError(flag, given, reason, f"give the path of {name}"))
    else:
        return Path(given)
    return None


def _require_tokenizer_json(given: str | None, errors: list[ConfigError]) -> Path | None:
    flag, advice = "--tokenizer-model", "give a tokenizer.json or the folder that holds one"
    if given is None:
        errors.append(ConfigError(flag, None, "is required with HuggingFaceTokenizer", advice))
        return None
    path = Path(given)
    if os.path.isdir(path):
        path = path / "tokenizer.json"
    if reason := why_no_file(path):
        nothing = "the folder has no tokenizer.json" if os.path.isdir(given) else "no such file or folder"
        rule = nothing if reason == NOT_THERE else reason
        errors.append(ConfigError(flag, given, rule, f"{advice}; nothing is downloaded"))
        return None
    return path


def _read(flag: str, path: Path, ids: Any, errors: list[ConfigError]) -> int | None:
    try:
        found = ids(orjson.loads(path.read_bytes()))
        return max(found) + 1
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        errors.append(_damaged(flag, path))
        return None


def _damaged(flag: str, path: Path) -> ConfigError:
    return ConfigError(flag, str(path), "is not a tokenizer's vocabulary", "the file may be damaged")


def _ids_of_vocab_json(content: dict[str, int]) -> list[int]:
    return list(content.values())


def _ids_of_tokenizer_json(content: dict[str, Any]) -> list[int]:
    """Ids of the model's vocabulary (a mapping, or a list for Unigram) and of the tokens added to it."""
    vocabulary = content["model"]["vocab"]
    ids = list(range(len(vocabulary))) if isinstance(vocabulary, list) else list(vocabulary.values())
    return ids + [token["id"] for token in content.get("added_tokens") or ()]
