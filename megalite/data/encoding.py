"""Batches of text to token ids, on several threads, in the order of the input and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

from megalite import _C
from megalite.data.errors import DataError
from megalite.data.shortage import Room
from megalite.data.text_batches import TextBatch, up_to
from megalite.data.tokenizer import Tokenizer
from megalite.data.tokenizer.base import CHARACTERS_AT_ONCE, check_works, library_errors

IN_FLIGHT_BYTES = 64 << 20
BATCH_MEMORY = 4 << 10  # beside its text; 3.1 KiB measured, of empty text files, each of which is one
RECORD_MEMORY = 256  # 60 to 220 measured, 330 of one that is skipped


class Encoded(NamedTuple):
    """One key of consecutive documents."""

    tokens: np.ndarray
    """(tokens,) of the dataset's dtype."""
    lengths: np.ndarray
    """int32 (sequences,)."""
    sequences: np.ndarray
    """int64 (documents,)."""


def encode_in_order(
    batches: Iterator[TextBatch],
    encode: Callable[[TextBatch], list[Encoded]],
    pool: ThreadPoolExecutor,
    ahead: int,
) -> Iterator[tuple[TextBatch, list[Encoded]]]:
    """Batches in their order with their encodings, by key.

    While `ahead` wait for a thread nothing more is read, so that caches still hold what is encoded; behind a
    slow one IN_FLIGHT_BYTES of text and what goes with it are held beside one batch.
    """
    waiting: deque[tuple[TextBatch, int, Future[list[Encoded]]]] = deque()
    busy: set[Future[list[Encoded]]] = set()
    held = 0
    try:
        for batch in batches:
            records = len(batch.numbers) + len(batch.skipped)
            size = batch.text_bytes + BATCH_MEMORY + RECORD_MEMORY * records
            future = pool.submit(encode, batch)
            waiting.append((batch, size, future))
            busy.add(future)
            held += size
            if len(busy) >= ahead:
                busy = wait(busy, return_when=FIRST_COMPLETED).not_done
            while waiting and (held > IN_FLIGHT_BYTES or waiting[0][2].done()):
                done, size, encoded = waiting.popleft()
                held -= size
                yield done, encoded.result()
        while waiting:
            done, _, encoded = waiting.popleft()
            yield done, encoded.result()
    finally:
        for _, _, encoded in waiting:
            encoded.cancel()


def encode_batch(
    batch: TextBatch, tokenizer: Tokenizer, eod: int | None, dtype: str, skip_errors: bool, room: Room
) -> list[Encoded]:
    """`batch` by key. What cannot be encoded raises DataError with its place, or moves to
    `batch.skipped`.
    """
    place, size = up_to(batch.part, batch.place), batch.text_bytes * tokenizer.memory_per_byte
    if batch.text_bytes > CHARACTERS_AT_ONCE:
        size = min(size, max(map(tokenizer.memory_for, batch.texts)))
    with room.taken(size, place, tokenizer.longer_texts):
        while True:
            try:
                with library_errors(f"{place}: cannot be encoded"):
                    return [
                        encode_documents(texts, counts, tokenizer, eod, dtype)
                        for texts, counts in zip(batch.texts, batch.counts, strict=True)
                    ]
            except DataError:
                if not _leave_out(batch, tokenizer, skip_errors):
                    raise


def _leave_out(batch: TextBatch, tokenizer: Tokenizer, skip_errors: bool) -> bool:
    """Leave out the documents of `batch` that cannot be encoded by themselves; whether there are any."""
    starts = [np.cumsum([0, *counts]).tolist() for counts in batch.counts]
    good = []
    for i, number in enumerate(batch.numbers):
        error = _error_of(
            [texts[start[i] : start[i + 1]] for texts, start in zip(batch.texts, starts, strict=True)],
            tokenizer,
        )
        if error is None:
            good.append(i)
        else:
            batch.refuse(number, error, skip_errors)
    if len(good) == len(batch.numbers):
        return False
    batch.numbers = [batch.numbers[i] for i in good]
    batch.texts = [
        [text for i in good for text in texts[start[i] : start[i + 1]]]
        for texts, start in zip(batch.texts, starts, strict=True)
    ]
    batch.counts = [[counts[i] for i in good] for counts in batch.counts]
    return True


def _error_of(document: list[list[str]], tokenizer: Tokenizer) -> DataError | None:
    """Why the texts of `document`, by key, cannot be encoded; None when they can.

    The second of two errors counts, and only if the library encodes an empty text behind each. Raises
    DataError if it does not: then it lacks threads or memory, and the text is not at fault.
    """
    found = None
    for _ in range(2):
        try:
            with library_errors("cannot be encoded"):
                for texts in document:
                    tokenizer.encode_flat(texts)
            return None
        except DataError as error:
            found = error
        check_works(tokenizer)
    return found


def encode_documents(
    texts: Sequence[str], counts: Sequence[int], tokenizer: Tokenizer, eod: int | None, dtype: str
) -> Encoded:
    """Tokens of documents of which each has the next `counts` of `texts` as its sequences; an empty sequence
    is dropped. Raises DataError for an id that `dtype` does not hold.

    `eod` goes behind the last sequence of each document that has any, as in Megatron-LM: a document
    without text is a document of no sequences.
    """
    tokens, lengths = tokenizer.encode_flat(texts)
    owner = np.repeat(np.arange(len(counts)), np.asarray(counts, dtype=np.int64))[lengths > 0]
    lengths = lengths[lengths > 0]
    sequences = np.bincount(owner, minlength=len(counts)).astype(np.int64)
    if eod is None:
        return Encoded(_C.pack_tokens(tokens, [], 0, dtype), lengths, sequences)
    last = np.cumsum(sequences)[sequences > 0] - 1
    ends = np.cumsum(lengths, dtype=np.int64)[last]
    lengths[last] += 1
    return Encoded(_C.pack_tokens(tokens, ends, eod, dtype), lengths, sequences)
