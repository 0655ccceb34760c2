"""Text to indexed datasets: read, tokenise on all threads, write in the order of the input, in bounded
memory.

One thread reads and writes; `workers` threads of the tokenizer's library encode batches between. What is
in flight is bounded by IN_FLIGHT_BYTES or the largest document, whatever the size of the corpus. A
slow document holds up the batches behind it only when that bound is reached.

Progress is written down every CHECKPOINT_SECONDS, so that the same command continues after a kill, and ends
in the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megalite import _C
from megalite.data.dataset_info import DatasetInfo, publish_with_info, read_info
from megalite.data.documents import Lines, parse_document, parse_strings
from megalite.data.errors import DataError, check_replaceable
from megalite.data.indexed_dataset import DatasetWriter, token_dtype
from megalite.data.inputs import Part, corpus_hash, printable
from megalite.data.records import Records, line_number, read_records
from megalite.data.resume import Checkpoint, NotContinued, Place, RunState
from megalite.data.shortage import Room, started_pool
from megalite.data.skipped import Skip, SkippedList
from megalite.data.tokenizer import Tokenizer
from megalite.data.tokenizer.base import CHARACTERS_AT_ONCE, check_works, library_errors

BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 2048
PARSED_BYTES = 16  # of memory for each byte of a line: orjson 3.11 takes 12, and 4 for a string with an emoji
IN_FLIGHT_BYTES = 64 << 20
BATCH_MEMORY = 4 << 10  # beside its text; 3.1 KiB measured, of empty text files, each of which is one
RECORD_MEMORY = 256  # 60 to 220 measured, 330 of one that is skipped
CHECKPOINT_SECONDS = 20.0
OUTPUT_SUFFIXES = ("bin", "idx", "boundaries", "json")


@dataclass(frozen=True)
class PreprocessPlan:
    """What is to be done."""

    inputs: Sequence[Part]
    output_prefix: str
    json_keys: Sequence[str] = ("text",)
    append_eod: bool = False
    workers: int = 1
    dtype: str | None = None
    """None: by the vocabulary's size."""
    skip_errors: bool = False
    """Leave out documents that cannot be used and list them, instead of stopping at the first."""
    partition: tuple[int, int] | None = None
    """(index, partitions) when the inputs are one share of several."""
    corpus: str | None = None
    """`corpus_hash` of `whole` then, from before it was cut into shares."""
    whole: Sequence[Part] = ()
    """All the inputs."""

    def prefix(self, key: str) -> str:
        """Where the dataset of one key goes, as in Megatron-LM."""
        return f"{self.stem}_{key}_document"

    @property
    def first_prefix(self) -> str:
        """What the files of the run that are of no key are named after: runs of other keys have their own."""
        return self.prefix(self.json_keys[0])

    @property
    def stem(self) -> str:
        """What the names of all files of the run begin with."""
        if self.partition is None:
            return self.output_prefix
        return f"{self.output_prefix}_part{self.partition[0]:05}of{self.partition[1]:05}"


@dataclass
class Progress:
    """Totals so far, for whoever watches."""

    documents: int = 0
    tokens: int = 0
    input_bytes: int = 0
    """Bytes of uncompressed input whose documents are written."""
    skipped: int = 0


class Encoded(NamedTuple):
    """One key of consecutive documents."""

    tokens: np.ndarray
    """(tokens,) of the dataset's dtype."""
    lengths: np.ndarray
    """int32 (sequences,)."""
    sequences: np.ndarray
    """int64 (documents,)."""


@dataclass
class _Batch:
    """Consecutive documents of one input."""

    part: Part
    place: Place  # behind the batch
    text_bytes: int
    numbers: list[int]  # of the record of each document
    texts: list[list[str]]  # by key, the sequences of all documents
    counts: list[list[int]]  # by key, the sequences of each document
    skipped: list[Skip]

    def refuse(self, number: int, error: DataError, skip: bool) -> None:
        """Record `number` cannot be used: raise DataError that says so, or note it."""
        line, behind = line_number(self.part, number)
        path = printable(self.part.path)
        place = f"{path}: line {line} behind byte {behind}" if behind else f"{path}:{line}"
        message = f"{place}: {error}"
        if not skip:
            raise DataError(message) from None
        self.skipped.append(Skip(path, line, message, behind))


def preprocess(
    plan: PreprocessPlan,
    tokenizer: Tokenizer,
    report: Callable[[Progress], None] = lambda _: None,
    read_back: Callable[[int, int], None] = lambda *_: None,
    warn: Callable[[str], None] = lambda _: None,
) -> list[DatasetInfo]:
    """Write the datasets of `plan`, one a key, and a small JSON beside each; returns what was written.

    Continues an interrupted run of the same plan over the same inputs: while what that wrote is read,
    `read_back` is called with the bytes of each piece and of all; `warn` is told why one is not continued.
    Raises DataError naming file and line for input that cannot be used; what was done until then stays for
    the next run.
    """
    _check_outputs(plan)
    tokenizer.check_encodes()
    eod = tokenizer.check_eod() if plan.append_eod else None
    dtype = plan.dtype or token_dtype(tokenizer.vocab_size)
    _check_dtype(dtype, tokenizer)
    state = RunState(plan.first_prefix, plan.inputs, _recipe(plan, tokenizer, dtype))
    if plan.whole and corpus_hash(plan.whole) != plan.corpus:
        raise DataError("inputs changed while they were cut into shares; the same command starts anew")
    progress = Progress()
    room = Room()
    encode = partial(
        _encode, tokenizer=tokenizer, eod=eod, dtype=dtype, skip_errors=plan.skip_errors, room=room
    )
    last_checkpoint = time.monotonic()
    with state.explaining(), SkippedList(plan.first_prefix) as skipped, _threads(plan.workers + 1) as pool:
        start = _start(plan, state, skipped, dtype, read_back, warn)
        skipped.go_on(start.skipped)
        writers = [
            DatasetWriter(plan.prefix(key), dtype, resume)
            for key, resume in zip(plan.json_keys, start.written, strict=True)
        ]
        progress.tokens = sum(writer.state.tokens for writer in writers)
        for batch, encodings in _encode_in_order(
            _read_batches(plan, start.place, state, room), encode, pool, plan.workers + 2
        ):
            for writer, encoded in zip(writers, encodings, strict=True):
                writer.add(encoded.tokens, encoded.lengths, encoded.sequences)
                progress.tokens += len(encoded.tokens)
            skipped.add(sorted(batch.skipped, key=lambda skip: skip.line))  # encoded after all are parsed
            progress.documents, progress.input_bytes = batch.place.documents, batch.place.input_bytes
            progress.skipped = skipped.count
            report(progress)
            if time.monotonic() - last_checkpoint > CHECKPOINT_SECONDS:
                state.save(Checkpoint(batch.place, [writer.flush() for writer in writers], skipped.flush()))
                last_checkpoint = time.monotonic()
        for writer in writers:  # first all that takes time and room, then the names
            writer.complete()
        skipped.flush()
        infos = [
            DatasetInfo.of(writer, dtype, tokenizer, eod, plan.inputs, key, plan.partition, plan.corpus)
            for key, writer in zip(plan.json_keys, writers, strict=True)
        ]
        publish_with_info(list(zip(writers, infos, strict=True)))
        state.remove()
        skipped.publish()
        for key in plan.json_keys[1:]:  # what another run listed is of the dataset that was there before
            Path(f"{plan.prefix(key)}.skipped.jsonl").unlink(missing_ok=True)
    return infos


@contextlib.contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose end waits for nothing: after an error nobody wants what its threads are busy with."""
    pool = started_pool(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _start(
    plan: PreprocessPlan,
    state: RunState,
    skipped: SkippedList,
    dtype: str,
    read_back: Callable[[int, int], None],
    warn: Callable[[str], None],
) -> Checkpoint:
    """Where an interrupted run of the same work stands, or the beginning."""
    try:
        if (start := state.load()) is not None:
            if not skipped.holds(start.skipped[1]):
                raise NotContinued("its list of skipped documents is not what it wrote")
            written = {key: each for key, each in zip(plan.json_keys, start.written, strict=True) if each}
            total = np.dtype(dtype).itemsize * sum(each.tokens for each in written.values())
            for key, each in written.items():
                prefix = plan.prefix(key)
                if not DatasetWriter.can_resume(prefix, dtype, each, lambda size: read_back(size, total)):
                    raise NotContinued(f"{prefix}.*.partial are not what it wrote")
            return start
    except NotContinued as reason:
        warn(f"{state.path}: an interrupted run is not continued, as {reason}; this one starts anew")
    state.remove()  # or it would be taken for the state of the files that are written from now on
    return Checkpoint.nothing(len(plan.json_keys))


def _check_outputs(plan: PreprocessPlan) -> None:
    """Raises DataError when two keys would be one dataset, an input is a file that will be written, or that
    would take the place of something else.
    """
    if len(set(plan.json_keys)) < len(plan.json_keys):
        raise DataError(f"--json-keys {' '.join(plan.json_keys)}: each key once, as each is a dataset")
    names = [f"{plan.prefix(key)}.{suffix}" for key in plan.json_keys for suffix in OUTPUT_SUFFIXES]
    names += [f"{plan.first_prefix}.{suffix}" for suffix in ("skipped.jsonl", "progress.json")]
    for name in names:
        check_replaceable(name)
    written = {os.path.realpath(f"{name}{end}") for name in names for end in ("", ".partial")}
    for part in plan.inputs:
        if os.path.realpath(part.path) in written:
            raise DataError(
                f"{part.path}: an input, but also an output of this command; give an --output-prefix that "
                "lies in none of the folders that are read"
            )
    for key in plan.json_keys:
        read_info(plan.prefix(key))  # a file of its name that is no description is not written over


def _check_dtype(dtype: str, tokenizer: Tokenizer) -> None:
    largest, fits = tokenizer.vocab_size - 1, np.iinfo(dtype).max
    if largest > fits:
        raise DataError(
            f"--dtype {dtype}: holds ids up to {fits:,}, but the vocabulary has them up to {largest:,}; give "
            "int32, or leave it out"
        )


def _recipe(plan: PreprocessPlan, tokenizer: Tokenizer, dtype: str) -> dict[str, object]:
    """Everything but the inputs that decides the bytes."""
    return {
        "keys": list(plan.json_keys),
        "append_eod": plan.append_eod,
        "eod": tokenizer.eod if plan.append_eod else None,
        "tokenizer": [tokenizer.identity, tokenizer.options, tokenizer.vocab_size, tokenizer.eod_token],
        "libraries": tokenizer.versions,
        "dtype": dtype,
        "skip_errors": plan.skip_errors,
    }


def _read_batches(plan: PreprocessPlan, start: Place, state: RunState, room: Room) -> Iterator[_Batch]:
    """The inputs from `start` on, cut into batches that never span two files. Raises DataError behind an
    input that has changed since the run began.
    """
    documents, input_bytes = start.documents, start.input_bytes
    for number in range(start.input, len(plan.inputs)):
        part = plan.inputs[number]
        skip, offset = (start.records, start.offset) if number == start.input else (0, 0)
        for records in read_records(part, plan.json_keys, BATCH_BYTES, BATCH_DOCUMENTS, skip, offset):
            documents += len(records.contents)
            input_bytes += records.size
            place = Place(number, records.number, records.offset, documents, input_bytes)
            with room.taken(PARSED_BYTES * records.size, _up_to(part, place), "cut long lines"):
                batch = _parse(records, part, place, plan)
            yield batch
        state.check_unchanged(number)


def _parse(records: Records, part: Part, place: Place, plan: PreprocessPlan) -> _Batch:
    """The documents of `records`."""
    numbers = range(records.number - len(records.contents) + 1, records.number + 1)
    keys, ones = plan.json_keys, [1] * len(numbers)
    strings = parse_strings(records.contents, keys) if isinstance(records.contents, Lines) else None
    if strings is not None:
        return _Batch(part, place, records.size, list(numbers), strings, [ones] * len(keys), [])
    batch = _Batch(part, place, records.size, [], [[] for _ in keys], [[] for _ in keys], [])
    for number, content in zip(numbers, records.contents, strict=True):
        try:
            document = parse_document(content, part.format, keys)
        except DataError as error:
            batch.refuse(number, error, plan.skip_errors)
            continue
        batch.numbers.append(number)
        for texts, counts, found in zip(batch.texts, batch.counts, document, strict=True):
            texts.extend(found)
            counts.append(len(found))
    return batch


def _encode_in_order(
    batches: Iterator[_Batch], encode: Callable[[_Batch], list[Encoded]], pool: ThreadPoolExecutor, ahead: int
) -> Iterator[tuple[_Batch, list[Encoded]]]:
    """Batches in their order with their encodings, by key.

    While `ahead` wait for a thread nothing more is read, so that caches still hold what is encoded; behind a
    slow one IN_FLIGHT_BYTES of text and what goes with it are held beside one batch.
    """
    waiting: deque[tuple[_Batch, int, Future[list[Encoded]]]] = deque()
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


def _up_to(part: Part, place: Place) -> str:
    return f"{printable(part.path)}: up to record {place.records}"


def _encode(
    batch: _Batch, tokenizer: Tokenizer, eod: int | None, dtype: str, skip_errors: bool, room: Room
) -> list[Encoded]:
    """`batch` by key. What cannot be encoded raises DataError with its place, or moves to
    `batch.skipped`.
    """
    place, size = _up_to(batch.part, batch.place), batch.text_bytes * tokenizer.memory_per_byte
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


def _leave_out(batch: _Batch, tokenizer: Tokenizer, skip_errors: bool) -> bool:
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
