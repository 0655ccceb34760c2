"""Inputs cut into batches: the texts of consecutive documents of one input."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megalite.data.documents import Lines, OtherFormatError, parse_document, parse_strings
from megalite.data.errors import DataError
from megalite.data.inputs import Part, printable, read_once, says_format
from megalite.data.records import Records, line_number, read_records
from megalite.data.resume import Place, RunState
from megalite.data.shortage import Room
from megalite.data.skipped import Skip

BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 2048
LOOKING_SECONDS = 3.0  # some thousand files; of Parquet with very large row groups twenty
LOOKED_AT_BYTES = 1 << 16
STRINGS_BYTES = 16  # of memory for each byte of lines that hold the strings which are asked for
PARSED_BYTES = 48  # for each byte of any JSON: orjson 3.13 takes 44 for nested lists and objects


@dataclass
class TextBatch:
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
            if not isinstance(error, OtherFormatError):
                message += "; --on-error skip leaves such documents out, and goes on"
            raise DataError(message) from None
        self.skipped.append(Skip(path, line, message, behind))


def read_text_batches(
    inputs: Sequence[Part], keys: Sequence[str], start: Place, state: RunState, room: Room, skip_errors: bool
) -> Iterator[TextBatch]:
    """The texts under `keys` in `inputs` from `start` on, in batches that never span two files. Raises
    DataError for a document that cannot be used, unless `skip_errors`, and behind an input that has changed
    since the run began, and MemoryError.
    """
    documents, input_bytes = start.documents, start.input_bytes
    for number in range(start.input, len(inputs)):
        part = inputs[number]
        skip, offset = (start.records, start.offset) if number == start.input else (0, 0)
        for records in read_records(part, keys, BATCH_BYTES, BATCH_DOCUMENTS, skip, offset):
            documents += len(records.contents)
            input_bytes += records.size
            place = Place(number, records.number, records.offset, documents, input_bytes)
            yield _parse(records, part, place, keys, skip_errors, room)
        state.check_unchanged(number)


def look_at_first(inputs: Sequence[Part], keys: Sequence[str], room: Room) -> None:
    """Raises DataError where the first document of an input cannot be used, hours before its turn. Looks at
    as many as LOOKING_SECONDS allow, first those whose names do not say what they hold, a README say. Raises
    MemoryError.
    """
    end = time.monotonic() + LOOKING_SECONDS
    seen = [part for part in inputs if part.format in ("json", "parquet") and not read_once(part.path)]
    for part in sorted(seen, key=lambda part: says_format(part.path)):
        for records in read_records(part, keys, LOOKED_AT_BYTES, most_records=1):
            _parse(records, part, Place(), keys, False, room)
            break
        if time.monotonic() > end:
            return


def _parse(
    records: Records, part: Part, place: Place, keys: Sequence[str], skip_errors: bool, room: Room
) -> TextBatch:
    """The documents of `records`. Raises MemoryError."""
    numbers = range(records.number - len(records.contents) + 1, records.number + 1)
    ones = [1] * len(numbers)
    if isinstance(records.contents, Lines):
        with room.taken(STRINGS_BYTES * records.size, up_to(part, place), "cut long lines"):
            strings = parse_strings(records.contents, keys)
        if strings is not None:
            return TextBatch(part, place, records.size, list(numbers), strings, [ones] * len(keys), [])
    batch = TextBatch(part, place, records.size, [], [[] for _ in keys], [[] for _ in keys], [])
    with room.taken(PARSED_BYTES * records.size, up_to(part, place), "cut long lines"):
        for number, content in zip(numbers, records.contents, strict=True):
            try:
                document = parse_document(content, part.format, keys, first=number == 1)
            except DataError as error:
                batch.refuse(number, error, skip_errors)
                continue
            batch.numbers.append(number)
            for texts, counts, found in zip(batch.texts, batch.counts, document, strict=True):
                texts.extend(found)
                counts.append(len(found))
    return batch


def up_to(part: Part, place: Place) -> str:
    """Which documents, for messages."""
    return f"{printable(part.path)}: up to record {place.records}"
