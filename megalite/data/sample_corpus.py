"""The sample corpus that ships with the repository, and a small tokenizer trained on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from megalite.data.documents import parse_document
from megalite.data.errors import DataError, check_replaceable, replacing
from megalite.data.inputs import Part
from megalite.data.records import read_records

EOD_TOKEN = "<|endoftext|>"
CORPUS = "corpus.jsonl"
TOKENIZER = "tokenizer.json"
MADE = "prepare_sample.json"  # hashes of what was made, and of what the tokenizer was made of
MADE_OF = "made_of"
LARGEST_VOCABULARY = 10_000_000  # the library takes memory for it before it trains


def prepare_sample(source: Path, folder: Path, vocab_size: int) -> list[str]:
    """Fill `folder` with the corpus, uncompressed, and its tokenizer where they are missing; returns what was
    made.

    The tokenizer depends on the corpus and `vocab_size` only. Raises DataError for a file of their names that
    was not made here, as the hashes in MADE tell, and would be replaced.
    """
    if not source.is_file():
        raise DataError(f"{source}: no such file")
    folder.mkdir(parents=True, exist_ok=True)
    corpus, tokenizer, made = folder / CORPUS, folder / TOKENIZER, folder / MADE
    before = _read_made(made)
    found = {}
    for path in (corpus, tokenizer):
        if path.exists():
            check_replaceable(path)
            found[path.name] = _hash(path)
    content = _hash(source)
    keep_corpus = found.get(CORPUS) == content
    asked = {MADE_OF: content, "vocab_size": vocab_size}
    if TOKENIZER in found and found[TOKENIZER] == before.get(TOKENIZER):
        complete = all(before.get(name) == value for name, value in asked.items())
    else:
        complete = _size(tokenizer) == vocab_size
    if keep_corpus and complete:
        return []
    for name in (TOKENIZER,) if keep_corpus else (CORPUS, TOKENIZER):
        if name in found and found[name] != before.get(name):
            if _read_made(made) != before:  # another process has just made it
                return prepare_sample(source, folder, vocab_size)
            raise DataError(
                f"{folder / name}: was not made by this tool, or has changed since, and would be replaced; "
                "move it away, or give another --output"
            )
    with replacing(tokenizer) as new:
        ids = train_tokenizer(source, new, vocab_size)
        if not keep_corpus:
            with replacing(corpus) as copy, copy.open("wb") as file:
                file.writelines(_lines(source))
        tokenizer.unlink(missing_ok=True)  # or a kill before the end would leave one that MADE does not know
        with replacing(made) as description:
            # A corpus that was there before this tool came is not its own.
            own = {} if keep_corpus and before.get(CORPUS) != content else {CORPUS: content}
            description.write_text(json.dumps({**own, **asked, TOKENIZER: _hash(new)}))
    few = "" if ids == vocab_size else f" with only {ids} ids (the corpus has no pairs for {vocab_size})"
    return [*([] if keep_corpus else [CORPUS]), TOKENIZER + few]


def _read_made(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _lines(path: Path) -> Iterator[bytes]:
    """Of the uncompressed file."""
    for records in read_records(Part(str(path), "json"), []):
        yield from records.contents


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for line in _lines(path):
        digest.update(line)
    return digest.hexdigest()


def train_tokenizer(corpus: Path, path: Path, vocab_size: int) -> int:
    """Train a byte-level BPE of `vocab_size` ids, the last of them end of document, and save it as `path`;
    returns how many it has, fewer for a small corpus.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if not smallest <= vocab_size <= LARGEST_VOCABULARY:
        raise DataError(
            f"--vocab-size {vocab_size}: expected at least {smallest}, one id for each byte and the end of "
            f"document, and at most {LARGEST_VOCABULARY}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_texts(corpus), trainer)
    tokenizer.add_special_tokens([AddedToken(EOD_TOKEN, special=True, normalized=False)])
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    return int(tokenizer.get_vocab_size())


def _texts(corpus: Path) -> Iterator[str]:
    for number, line in enumerate(_lines(corpus), 1):
        try:
            (texts,) = parse_document(line, "json", ["text"])
        except DataError as error:
            raise DataError(f"{corpus}:{number}: {error}") from None
        yield from texts


def _size(path: Path) -> int | None:
    """Ids of a tokenizer; None for what is none."""
    from tokenizers import Tokenizer

    try:
        return int(Tokenizer.from_file(str(path)).get_vocab_size())
    except Exception:  # the library raises bare Exception, for a missing file too
        return None
