"""The sample corpus that ships with the repository, and a small tokenizer trained on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from megalite.data.documents import parse_document
from megalite.data.errors import DataError
from megalite.data.inputs import Part
from megalite.data.records import read_records

EOD_TOKEN = "<|endoftext|>"
CORPUS = "corpus.jsonl"
TOKENIZER = "tokenizer.json"
LARGEST_VOCABULARY = 10_000_000  # the library takes memory for it before it trains


def prepare_sample(source: Path, folder: Path, vocab_size: int) -> list[str]:
    """Fill `folder` with the corpus and its tokenizer where they are missing; returns the names of what
    was made.

    The tokenizer depends on the corpus and `vocab_size` only.
    """
    if not source.is_file():
        raise DataError(f"{source}: no such file")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    corpus, tokenizer = folder / CORPUS, folder / TOKENIZER
    if not corpus.is_file() or corpus.read_bytes() != source.read_bytes():
        _publish(corpus, lambda path: shutil.copyfile(source, path))
        tokenizer.unlink(missing_ok=True)
        made.append(CORPUS)
    if not _has_vocabulary(tokenizer, vocab_size):
        _publish(tokenizer, lambda path: train_tokenizer(source, path, vocab_size))
        made.append(TOKENIZER)
    return made


def train_tokenizer(corpus: Path, path: Path, vocab_size: int) -> None:
    """Train a byte-level BPE of `vocab_size` ids, the last of them end of document, and save it as
    `path`.
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
    tokenizer.save(str(path))


def _texts(corpus: Path) -> Iterator[str]:
    for records in read_records(Part(str(corpus), "json"), ["text"]):
        for content in records.contents:
            (texts,) = parse_document(content, "json", ["text"])
            yield from texts


def _has_vocabulary(path: Path, vocab_size: int) -> bool:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path)).get_vocab_size() == vocab_size
    except Exception:  # the library raises bare Exception, for a missing file too
        return False


def _publish(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f"{path.name}.partial")
    write(temporary)
    temporary.rename(path)
