"""Joins datasets end to end in constant memory; the bytes are those that one run over all the inputs would
have written.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megalite import __version__
from megalite.data.dataset_files import DatasetFiles
from megalite.data.dataset_info import (
    DatasetInfo,
    check_described,
    listed_sources,
    read_info,
    write_info,
)
from megalite.data.errors import DataError, check_replaceable
from megalite.data.indexed_dataset import DatasetWriter, WriterState, open_dataset

HOW_MADE = (("key", "key"), ("options", "tokenizer options"))
MERGED = ("uint8", "uint16", "int32", "int64")  # what a writer takes


def merge(
    prefixes: Sequence[str],
    output_prefix: str,
    read: Callable[[int, int], None] = lambda *_: None,
    warn: Callable[[str], None] = lambda _: None,
) -> WriterState:
    """Write the datasets `prefixes`, in this order, as one.

    `read` is called with the bytes of each piece of the tokens and of all, `warn` with what the whole can no
    longer say of its parts. Raises DataError, before anything is written, when one is malformed, or when
    dtypes or tokenizers differ; and for one that is not what its description says, whose checksum is known
    when all of it is read.
    """
    if not prefixes:
        raise DataError("nothing to merge: no dataset was found")
    written = _files(output_prefix)
    for path in written:
        check_replaceable(path)
    for prefix in prefixes:
        if written & _files(prefix):
            raise DataError(f"{output_prefix}: the output is one of the inputs, {prefix}")
    read_info(output_prefix)  # a file of its name that is no description is not written over
    infos = {prefix: _description(prefix) for prefix in prefixes}
    info = _common_info(infos, prefixes, warn)
    dtype = _common_dtype(infos)
    writer = DatasetWriter(output_prefix, dtype)
    total = sum(os.path.getsize(f"{prefix}.bin") for prefix in prefixes)
    for prefix in prefixes:
        with DatasetFiles(prefix) as files:
            checksum = _append(writer, files, lambda size: read(size, total))
            if (described := infos[prefix]) is not None:
                check_described(files.dataset, described, checksum)
    state = writer.complete()
    if info is None:
        writer.publish()
    else:
        whole = replace(
            info,
            tokens=state.tokens,
            sequences=state.sequences,
            documents=state.documents,
            crc32=state.checksum,
        )
        write_info(output_prefix, whole)
        writer.publish(described=True)
    Path(f"{output_prefix}.skipped.jsonl").unlink(missing_ok=True)  # of the dataset that was replaced
    return state


def _description(prefix: str) -> DatasetInfo | None:
    """None of a dataset that has none, as Megatron-LM's. Raises DataError where there is no dataset."""
    info = read_info(prefix)
    if info is None:
        open_dataset(prefix)
    return info


def _files(prefix: str) -> set[str]:
    """Where the files of a dataset really lie."""
    return {os.path.realpath(f"{prefix}.{suffix}") for suffix in ("bin", "idx", "json")}


def _append(writer: DatasetWriter, files: DatasetFiles, read: Callable[[int], None]) -> int:
    """Documents in pieces: first all tokens, then all lengths, then all boundaries; the three go to files
    of their own. Returns the CRC-32 of the tokens.
    """
    checksum = 0
    for tokens in files.tokens():
        checksum = zlib.crc32(tokens.view(np.uint8).data, checksum)
        writer.add_tokens(tokens)
        read(tokens.nbytes)
    for lengths in files.lengths():
        writer.add_sequences(lengths)
    for sequences in files.sequences_of_documents():
        writer.add_documents(sequences)
    return checksum


def _common_dtype(infos: Mapping[str, DatasetInfo | None]) -> str:
    """That of all datasets, each of which is what its description says, but for the checksum."""
    dtypes = {}
    for prefix, info in infos.items():
        dataset = open_dataset(prefix)
        dtypes[prefix] = dataset.dtype
        if info is not None:
            check_described(dataset, info)
    first = next(iter(dtypes))
    if dtypes[first] not in MERGED:
        raise DataError(f"{first}: holds {dtypes[first]}; what can be merged is {', '.join(MERGED)}")
    for prefix, dtype in dtypes.items():
        if dtype != dtypes[first]:
            raise DataError(
                f"{prefix}: holds {dtype}, but {first} holds {dtypes[first]}; they cannot be one dataset"
            )
    return dtypes[first]


def _common_info(
    infos: Mapping[str, DatasetInfo | None], prefixes: Sequence[str], warn: Callable[[str], None]
) -> DatasetInfo | None:
    """The description of the whole, but for the counts; None when some part has none, as Megatron-LM's have
    not.
    """
    known = {prefix: info for prefix, info in infos.items() if info is not None}
    _check_partitions(known, prefixes)
    if not known:
        return None
    first, model = next(iter(known.items()))
    for prefix, info in known.items():
        for field, what in (
            ("tokenizer", "tokenizer"),
            ("eod", "end-of-document id"),
            ("vocab_size", "vocabulary size"),
        ):
            if getattr(info, field) != getattr(model, field):
                raise DataError(
                    f"{prefix}: its {what} is {getattr(info, field)}, but that of {first} is "
                    f"{getattr(model, field)}; "
                    f"ids would mean different things (as {prefix}.json and {first}.json say)"
                )
    if len(known) < len(infos):
        return None
    differs: dict[str, Any] = {}
    for field, what in HOW_MADE:
        values = {prefix: getattr(info, field) for prefix, info in known.items()}
        other = next((prefix for prefix, value in values.items() if value != values[first]), None)
        if other is not None:
            warn(
                f"{other}: its {what} is {values[other]!r}, but that of {first} is {values[first]!r}: the "
                "description of the whole has none"
            )
            differs[field] = None
    sources = listed_sources(source for info in known.values() for source in info.sources)
    if len({info.library for info in known.values()}) > 1:
        differs["library"] = None
    of_shares: dict[str, Any] = dict.fromkeys(("partition", "corpus", "begins_in", "ends_in", "work"))
    return replace(model, megalite=__version__, sources=sources, **of_shares, **differs)


def _check_partitions(infos: Mapping[str, DatasetInfo], prefixes: Sequence[str]) -> None:
    """Shares of one corpus must be complete, in order and by themselves: a missing one would be lost without
    a word, and their whole, which may lie beside them, would double them.
    """
    shares = {prefix: info.partition for prefix, info in infos.items() if info.partition is not None}
    if not shares:
        return
    if other := next((prefix for prefix in prefixes if prefix not in shares), None):
        raise DataError(
            f"{other}: is no share of a corpus, as {next(iter(shares))} is; merge the shares by themselves "
            "first"
        )
    first = next(iter(shares))
    partitions = shares[first][1]
    if other := next((prefix for prefix, (_, all_) in shares.items() if all_ != partitions), None):
        raise DataError(
            f"{other}: a share of {shares[other][1]}, but {first} is one of {partitions}; give the shares of "
            "one run: those of an earlier one with another number of partitions may be deleted"
        )
    found = [shares[prefix] for prefix in prefixes]
    if len(found) != partitions or found != [(index, partitions) for index in range(partitions)]:
        there = {index for index, _ in found}
        missing = list(islice((index for index in range(partitions) if index not in there), 20))
        text = f"missing: {', '.join(map(str, missing))}" if missing else "in another order, or some twice"
        raise DataError(
            f"{first}: one of {partitions} partitions of a corpus, which must all be given in order; {text}"
        )
    known = next((prefix for prefix in shares if infos[prefix].library is not None), first)
    for prefix in shares:
        if infos[prefix].corpus != infos[first].corpus:
            raise DataError(
                f"{prefix}: its inputs had other names, sizes, formats or another order than those of "
                f"{first}; shares of two corpora do not make one: do one of them again"
            )
        for field, what in HOW_MADE:
            one, other = getattr(infos[prefix], field), getattr(infos[first], field)
            if one != other:
                raise DataError(
                    f"{prefix}: its {what} is {one!r}, but that of {first} is {other!r}; shares of two runs "
                    "do not make one: do one of them again"
                )
        if infos[prefix].library not in (None, infos[known].library):
            raise DataError(
                f"{prefix}: made by {infos[prefix].library}, but {known} by {infos[known].library}, which "
                "may give other ids: do one of them again"
            )
    for before, after in pairwise(prefixes):
        ended, begun = infos[before].ends_in, infos[after].begins_in
        if None not in (ended, begun) and ended != begun:
            raise DataError(
                f"{after}: {infos[before].sources[-1]}, inside which it begins, is not what it was when "
                f"{before} ended there, as a file that was shuffled: do all shares of that file again"
            )
