"""Text to indexed datasets: read, tokenise on all threads, write in the order of the input, in bounded
memory.

One thread reads and writes; `workers` threads of the tokenizer's library encode batches between. What is
in flight is bounded by `encoding.IN_FLIGHT_BYTES` or the largest document, whatever the size of the corpus.
A slow document holds up the batches behind it only when that bound is reached.

Progress is written down every CHECKPOINT_SECONDS, so that the same command continues after a kill, and ends
in the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from megalite.data.dataset_info import DatasetInfo, info_of, read_info, write_info
from megalite.data.encoding import encode_batch, encode_in_order
from megalite.data.errors import DataError, check_replaceable
from megalite.data.indexed_dataset import DatasetWriter, open_dataset, token_dtype
from megalite.data.inputs import Part, corpus_hash
from megalite.data.resume import Checkpoint, NotContinued, RunState
from megalite.data.share_cuts import cut_hashes
from megalite.data.shortage import Room, started_pool
from megalite.data.skipped import SkippedList
from megalite.data.text_batches import look_at_first, read_text_batches
from megalite.data.tokenizer import Tokenizer

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


def preprocess(
    plan: PreprocessPlan,
    tokenizer: Tokenizer,
    report: Callable[[Progress], None] = lambda _: None,
    read_back: Callable[[int, int], None] = lambda *_: None,
    warn: Callable[[str], None] = lambda _: None,
) -> list[DatasetInfo]:
    """Write the datasets of `plan`, one a key, and a small JSON beside each; returns what was written.

    Continues an interrupted run of the same plan over the same inputs: while what that wrote is read,
    `read_back` is called with the bytes of each piece and of all; `warn` is told why one is not continued,
    and of a share that is complete, which is not made again. Raises DataError naming file and line for input
    that cannot be used; what was done until then stays for the next run.
    """
    _check_outputs(plan)
    tokenizer.check_encodes()
    eod = tokenizer.check_eod() if plan.append_eod else None
    dtype = plan.dtype or token_dtype(tokenizer.vocab_size)
    _check_dtype(dtype, tokenizer)
    state = RunState(plan.first_prefix, plan.inputs, _recipe(plan, tokenizer, dtype))
    if plan.whole and corpus_hash(plan.whole) != plan.corpus:
        raise DataError("inputs changed while they were cut into shares; the same command starts anew")
    cuts = cut_hashes(plan.inputs)
    work = state.work if plan.partition is not None else None
    if work is not None and (complete := _complete(plan, work, cuts)):
        warn(f"{plan.stem}: is complete, of the same inputs and options; to make it again remove its .json")
        return complete
    room = Room()
    if not plan.skip_errors:
        with state.explaining():
            look_at_first(plan.inputs, plan.json_keys, room)
    progress = Progress()
    encode = partial(
        encode_batch, tokenizer=tokenizer, eod=eod, dtype=dtype, skip_errors=plan.skip_errors, room=room
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
        batches = read_text_batches(plan.inputs, plan.json_keys, start.place, state, room, plan.skip_errors)
        for batch, encodings in encode_in_order(batches, encode, pool, plan.workers + 2):
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
        infos = [
            DatasetInfo.of(
                writer, dtype, tokenizer, eod, plan.inputs, key, plan.partition, plan.corpus, cuts, work
            )
            for key, writer in zip(plan.json_keys, writers, strict=True)
        ]
        for writer, info in zip(writers, infos, strict=True):
            write_info(writer.prefix, info)
        skipped.flush()  # the last look whether another run has taken the output over
        for writer in writers:
            writer.publish(described=True)
        state.remove()
        skipped.publish()
        for key in plan.json_keys[1:]:  # what another run listed is of the dataset that was there before
            Path(f"{plan.prefix(key)}.skipped.jsonl").unlink(missing_ok=True)
    return infos


def _complete(
    plan: PreprocessPlan, work: str, cuts: tuple[str | None, str | None]
) -> list[DatasetInfo] | None:
    """The descriptions of a share that has been made, of each key; None where one has not, or by other
    `work`, of another corpus, or is not what its description says, but for the bytes of the tokens.
    """
    skipped = f"{plan.first_prefix}.skipped.jsonl"
    if os.path.lexists(f"{skipped}.partial") or (not plan.skip_errors and os.path.lexists(skipped)):
        return None  # killed before its list had its name; left out what may end this run
    found = []
    for key in plan.json_keys:
        try:
            info = info_of(open_dataset(plan.prefix(key)))
        except DataError:
            return None
        wanted = (work, plan.corpus, *cuts)
        if info is None or (info.work, info.corpus, info.begins_in, info.ends_in) != wanted:
            return None
        found.append(info)
    return found


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
            if start.skipped[0] and not plan.skip_errors:
                raise NotContinued(f"it left out {start.skipped[0]:,} documents, as --on-error skip does")
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
    """Everything but the inputs that decides the bytes of what is not skipped."""
    return {
        "keys": list(plan.json_keys),
        "append_eod": plan.append_eod,
        "eod": tokenizer.eod if plan.append_eod else None,
        "tokenizer": [tokenizer.identity, tokenizer.options, tokenizer.vocab_size, tokenizer.eod_token],
        "libraries": tokenizer.versions,
        "dtype": dtype,
    }
