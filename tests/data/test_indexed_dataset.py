"""A dataset is opened only when its two files agree; what is wrong with them is named."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import math
import os
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite import _C
from megalite.data.dataset_info import read_info
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import DatasetWriter, open_dataset, token_dtype, unigram_entropy
from megalite.data.source_builder import SourceBuilder
from megalite.data.temporary_names import process_space
from megalite.data.verify import verify
from tests.data.corpora import write_dataset

LENGTHS = [3, 5, 0, 2]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "data", LENGTHS)
    return tmp_path / "data"


def test_offsets_are_an_exclusive_sum(tmp_path: Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "d", [3, 5, 2]))
    assert dataset.offsets.tolist() == [0, 6, 16]
    assert dataset.boundaries.tolist() == [0, 1, 2, 3]
    assert dataset.tokens_between(1, 3) == 7


@pytest.mark.parametrize("ends", [(0, 5), (-1, 3), (3, 1), (0, 10**12), (-(10**12), 0)])
def test_a_range_that_there_is_not(prefix: Path, ends: tuple[int, int]) -> None:
    dataset = open_dataset(str(prefix))
    for read in (dataset.tokens_between, dataset.lengths_hash):
        with pytest.raises(
            DataError, match=rf"data: sequences \[{ends[0]}, {ends[1]}\) asked for, but it has 4"
        ):
            read(*ends)


def edit(prefix: Path, suffix: str, offset: int, data: bytes) -> None:
    path = prefix.with_suffix(suffix)
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


S = len(LENGTHS)
LENGTHS_AT, OFFSETS_AT, BOUNDARIES_AT = 34, 34 + 4 * S, 34 + 12 * S


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"X", "MMIDIDX"),
        (9, struct.pack("<Q", 2), "expected version 1, found 2"),
        (17, b"\x09", "dtype code from 1 to 8, found 9"),
        (17, b"\x04", r"data.bin: expected 12 bytes|sequence 1: expected the byte offset"),
        (18, struct.pack("<Q", S + 1), "expected"),
        (18, struct.pack("<Q", 2**61), "more than a file of"),
        (26, struct.pack("<Q", 0), "expected at least 1 document boundary"),
        (26, struct.pack("<Q", 2**64 - 1), "more than a file of"),
        (LENGTHS_AT, struct.pack("<i", -3), "sequence 0: expected a length of 0 or more, found -3"),
        (LENGTHS_AT + 4, struct.pack("<i", 6), r"sequence 2: expected the byte offset 6 \+ 6 \* 2"),
        (LENGTHS_AT + 12, struct.pack("<i", 3), "data.bin: expected 22 bytes .* found 20"),
        (OFFSETS_AT, struct.pack("<q", 6), "sequence 0: expected byte offset 0, found 6"),
        (OFFSETS_AT + 8, struct.pack("<q", 2**62), "sequence 1: expected the byte offset"),
        (OFFSETS_AT + 8, struct.pack("<q", -2), "sequence 1"),
        (BOUNDARIES_AT, struct.pack("<q", 1), "document boundary 0: expected 0"),
        (BOUNDARIES_AT + 16, struct.pack("<q", 0), "document boundary 2: expected"),
        (BOUNDARIES_AT + 16, struct.pack("<q", 99), "document boundary 2: expected"),
        (BOUNDARIES_AT + 8 * S, struct.pack("<q", S - 1), "last document to end at sequence 4, found 3"),
    ],
)
def test_damaged_index(prefix: Path, offset: int, data: bytes, message: str) -> None:
    edit(prefix, ".idx", offset, data)
    with pytest.raises(DataError, match=message) as error:
        open_dataset(str(prefix))
    assert str(prefix) in str(error.value)


MANY = (2 << 20) + 3  # sequences, of which threads check 2^20 at a time
OPENED_AGAIN = """
import os, sys
from megalite.data.indexed_dataset import open_dataset

assert open_dataset(sys.argv[1]).sequences == int(sys.argv[2])
child = os.fork()
if child == 0:
    os._exit(open_dataset(sys.argv[1]).sequences != int(sys.argv[2]))
print(os.waitpid(child, 0)[1])
"""


def test_a_large_index_is_checked_on_threads_also_behind_a_fork(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "many", [1] * MANY)
    done = subprocess.run(
        [sys.executable, "-c", OPENED_AGAIN, prefix, str(MANY)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "0\n"
    lengths, boundaries = 34, 34 + 12 * MANY
    index = np.memmap(f"{prefix}.idx", np.uint8, "r+")
    for first, found in ((lengths, "sequence"), (boundaries, "document boundary")):
        size = 4 if first == lengths else 8
        for number in (MANY - 1, (1 << 20) + 5, 7):  # the first that is wrong is told
            index[first + size * number + size - 1] = 0xFF
            index.flush()
            with pytest.raises(DataError, match=rf"many\.idx: {found} {number}: expected"):
                open_dataset(prefix)
        index[first : first + size * MANY].view(f"<i{size}")[:] = 1 if size == 4 else range(MANY)


@pytest.mark.parametrize("size", [0, 10, 33, 34, 80, 121])
def test_cut_index(prefix: Path, size: int) -> None:
    path = prefix.with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"data\.idx: .*(expected|more than)"):
        open_dataset(str(prefix))


@pytest.mark.parametrize("change", [-1, 1, 2])
def test_tokens_of_another_size(prefix: Path, change: int) -> None:
    path = prefix.with_suffix(".bin")
    path.write_bytes((path.read_bytes() + b"\0\0")[: 20 + change])
    with pytest.raises(DataError, match=rf"data\.bin: expected 20 bytes .*, found {20 + change}"):
        open_dataset(str(prefix))


def test_multimodal_index_is_named(prefix: Path) -> None:
    path = prefix.with_suffix(".idx")
    path.write_bytes(path.read_bytes() + bytes(S))
    with pytest.raises(DataError, match="multimodal"):
        open_dataset(str(prefix))


def test_missing_files(tmp_path: Path, prefix: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.idx does not exist"):
        open_dataset(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="named without its extension"):
        open_dataset(f"{prefix}.bin")
    with pytest.raises(DataError, match=f"a pair of files .bin and .idx; there is {prefix}$"):
        open_dataset(str(prefix)[:-1])
    with pytest.raises(DataError, match=f"{tmp_path} is a folder, which holds {prefix}$"):
        open_dataset(str(tmp_path))
    with pytest.raises(DataError, match=r"0\.3\.idx does not exist; .*; a weight stands before its dataset"):
        open_dataset("0.3")
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"data\.bin does not exist"):
        open_dataset(str(prefix))


FAILS = [(errno.EIO, "Input/output error"), (errno.ESTALE, "Stale file handle"), (errno.EACCES, "denied")]


@pytest.mark.parametrize("suffix", [".idx", ".bin", ".json"])
@pytest.mark.parametrize(("number", "reason"), FAILS)
def test_a_file_system_that_fails(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, number: int, reason: str
) -> None:
    stat = os.stat

    def failing(path: str | Path, **rest: Any) -> os.stat_result:
        if str(path).endswith(suffix):
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, **rest)

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(DataError, match=rf"data\{suffix}: cannot be read: .*{reason}$"):
        read_info(str(prefix)) if suffix == ".json" else open_dataset(str(prefix))


def test_a_name_that_leaves_no_room_for_that_of_the_description(tmp_path: Path) -> None:
    prefix = str(tmp_path / ("d" * 251))
    with pytest.raises(DataError, match=r"d\.json: cannot be read: File name too long$"):
        read_info(prefix)


def test_a_nul_in_the_name_of_a_dataset() -> None:
    with pytest.raises(DataError, match=r"'a\\x00b\.idx': cannot be read: embedded null byte"):
        open_dataset("a\0b")


def test_empty_dataset(tmp_path: Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "empty", []))
    assert (dataset.sequences, dataset.tokens, len(dataset.stream())) == (0, 0, 0)
    with pytest.raises(DataError, match="holds no tokens"):
        unigram_entropy(dataset)


def test_views_outlive_the_dataset(prefix: Path) -> None:
    expected = open_dataset(str(prefix)).sequence(1).tolist()
    view = open_dataset(str(prefix)).sequence(1)
    lengths = open_dataset(str(prefix)).lengths
    gc.collect()
    assert view.tolist() == expected
    assert lengths.tolist() == LENGTHS
    assert not view.flags.writeable


def test_pieces_of_a_sequence(prefix: Path) -> None:
    dataset = open_dataset(str(prefix))
    assert dataset.sequence(1, 1, 3).tolist() == dataset.sequence(1).tolist()[1:4]
    with pytest.raises(DataError, match="tokens 4 to 6 asked for, but it has 5"):
        dataset.sequence(1, 4, 2)
    with pytest.raises(IndexError, match="sequence 4 asked for, but it has 4"):
        dataset.sequence(4)


@pytest.mark.parametrize("token", [-1, 65536, 2**40])
def test_ids_must_fit(tmp_path: Path, token: int) -> None:
    writer = DatasetWriter(str(tmp_path / "out"), "uint16")
    with pytest.raises(DataError, match=f"token id {token} does not fit uint16, which holds 0 to 65535"):
        writer.add(np.array([1, token]), np.array([2], dtype=np.int32))
    assert writer.state == (0, 0, 0, 0)


def test_counts_must_agree(tmp_path: Path) -> None:
    writer = DatasetWriter(str(tmp_path / "out"), "uint16")
    with pytest.raises(DataError, match="lengths sum to 3 tokens, but 2 were given"):
        writer.add(np.array([1, 2]), np.array([3], dtype=np.int32))
    with pytest.raises(DataError, match="documents hold 2 sequences, but 1 lengths"):
        writer.add(np.array([1, 2]), np.array([2], dtype=np.int32), np.array([2]))


def test_nothing_under_a_final_name_before_publishing(tmp_path: Path) -> None:
    writer = DatasetWriter(str(tmp_path / "out"), "uint16")
    writer.add(np.arange(10), np.array([10], dtype=np.int32))
    writer.flush()
    assert all(path.name.endswith(".partial") for path in tmp_path.iterdir())
    writer.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.idx"]


def test_a_description_has_its_name_before_there_is_a_dataset(tmp_path: Path) -> None:
    """Or a merge could take a share for a dataset that is none."""
    writer = DatasetWriter(str(tmp_path / "out"), "uint16")
    writer.add(np.arange(10), np.array([10], dtype=np.int32))
    writer.complete()
    (tmp_path / "out.json.partial").write_text("{}")
    (tmp_path / "out.idx").mkdir()
    (tmp_path / "out.idx" / "file").touch()
    with pytest.raises(DataError, match=r"out\.idx: cannot be given its final name"):
        writer.publish(described=True)
    assert (tmp_path / "out.json").exists()


def test_nothing_is_added_to_a_complete_dataset(tmp_path: Path) -> None:
    writer = DatasetWriter(str(tmp_path / "out"), "uint16")
    writer.add(np.arange(10), np.array([10], dtype=np.int32))
    before = writer.complete()
    ones = np.ones(1, dtype=np.int64)
    for late in (
        lambda: writer.add(ones, ones.astype(np.int32)),
        lambda: writer.add_tokens(ones),
        lambda: writer.add_sequences(ones.astype(np.int32)),
        lambda: writer.add_documents(ones),
    ):
        with pytest.raises(DataError, match="out: nothing can be added to a complete dataset"):
            late()
    assert writer.state == before
    writer.publish()
    assert open_dataset(str(tmp_path / "out")).tokens == 10


def test_resumed_writer_gives_the_same_bytes(tmp_path: Path) -> None:
    parts = [(np.arange(n), np.array([n], dtype=np.int32)) for n in (5, 9, 2)]
    with DatasetWriter(str(tmp_path / "whole"), "int32") as whole:
        for part in parts:
            whole.add(*part)
    first = DatasetWriter(str(tmp_path / "resumed"), "int32")
    first.add(*parts[0])
    state = first.flush()
    first.add(np.arange(100), np.array([100], dtype=np.int32))  # lost with the process
    first.flush()
    del first
    with DatasetWriter(str(tmp_path / "resumed"), "int32", resume=state) as second:
        for part in parts[1:]:
            second.add(*part)
    assert second.state.checksum == zlib.crc32((tmp_path / "whole.bin").read_bytes())
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"resumed{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("goes_on", [False, True])
def test_without_locks_the_later_of_two_writers_has_the_files(tmp_path: Path, goes_on: bool) -> None:
    prefix, whole = str(tmp_path / "out"), np.arange(300_000)
    first = DatasetWriter(prefix, "int32")
    first.add(whole, np.array([len(whole)], dtype=np.int32))
    state = first.flush()
    (tmp_path / f"out.bin.partial.{process_space()}.{2**31}.1.partial").touch()  # left by a killed one
    second = DatasetWriter(prefix, "int32", state if goes_on else None)
    first.add(np.zeros(300_000, dtype=np.int32), np.array([300_000], dtype=np.int32))
    with pytest.raises(DataError, match=r"out\.boundaries\.partial: was removed or replaced while it was"):
        first.publish()
    with second:
        second.add(np.array([7]), np.array([1], dtype=np.int32))
    expected = [*whole, 7] if goes_on else [7]
    assert np.array_equal(open_dataset(prefix).stream(), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.idx"]


@pytest.mark.usefixtures("locks_of_this_node")
def test_a_writer_on_another_node_loses_its_names(tmp_path: Path) -> None:
    prefix = str(tmp_path / "out")
    first = DatasetWriter(prefix, "int32")
    first.add(np.arange(300_000), np.array([300_000], dtype=np.int32))
    with DatasetWriter(prefix, "int32") as second:
        first.add(np.arange(300_000), np.array([300_000], dtype=np.int32))
        second.add(np.array([7]), np.array([1], dtype=np.int32))
    with pytest.raises(DataError, match="was removed or replaced while it was written"):
        first.publish()
    assert open_dataset(prefix).stream().tolist() == [7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.idx"]


def test_the_names_of_a_dataset_are_on_the_disk_when_its_writer_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut would take them back, when what it was made from may be gone."""
    synced: list[list[str]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            synced.append(sorted(os.listdir(tmp_path)))

    monkeypatch.setattr(os, "fsync", noted)
    with DatasetWriter(str(tmp_path / "out"), "int32") as writer:
        writer.add(np.array([1, 2]), np.array([2], dtype=np.int32))
    assert synced == [["out.bin", "out.idx"]]


RENAME = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>

int rename(const char *from, const char *to) {
    using Rename = int (*)(const char *, const char *);
    const Rename system_rename = (Rename)dlsym(RTLD_NEXT, "rename");
    if (strcmp(SUFFIX, "copied") == 0) // as gcsfuse does
        return system((std::string("cp ") + from + " " + to + " && rm " + from).c_str());
    const char *boundaries = "out.boundaries.partial";
    const bool taken = std::string(to) == std::string("out") + SUFFIX; // by another node, a moment ago
    if (taken && (system_rename("its_boundaries", boundaries) != 0 || system_rename("its_own", from) != 0))
        return -1;
    return system_rename(from, to);
}
"""
PUBLISHED = """
import numpy as np
from megalite.data.indexed_dataset import DatasetWriter

with DatasetWriter("out", "int32", sync=False) as writer:
    writer.add(np.array([1, 2]), np.array([2], dtype=np.int32))
"""


def published(folder: Path, suffix: str) -> subprocess.CompletedProcess[str]:
    """Ends with a dataset, where RENAME stands before the C library's function."""
    library = folder / "rename.so"
    build = ["c++", "-x", "c++", "-shared", "-fPIC", f'-DSUFFIX="{suffix}"', "-", "-o", str(library), "-ldl"]
    subprocess.run(build, input=RENAME, text=True, check=True)
    return subprocess.run(
        [sys.executable, "-c", PUBLISHED],
        cwd=folder,
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="puts a function before that of the C library")
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_another_node_takes_in_the_last_moment_is_noticed(tmp_path: Path, suffix: str) -> None:
    """Behind the last look at its name, where locks are those of one node."""
    for name in ("its_boundaries", "its_own"):
        (tmp_path / name).touch()
    ended = published(tmp_path, suffix)
    assert "out.boundaries.partial: was removed or replaced while it was written" in ended.stderr
    assert ended.returncode != 0


@pytest.mark.skipif(sys.platform != "linux", reason="puts a function before that of the C library")
def test_a_file_system_that_renames_by_copying_has_the_dataset(tmp_path: Path) -> None:
    ended = published(tmp_path, "copied")
    assert ended.returncode == 0, ended.stderr
    assert open_dataset(str(tmp_path / "out")).stream().tolist() == [1, 2]


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_writer_that_stalled_does_not_take_the_files_of_another(tmp_path: Path) -> None:
    """Behind the last look at its names, as where a disk takes long to write the description."""
    prefix = str(tmp_path / "out")
    first = DatasetWriter(prefix, "int32", sync=False)
    first.add(np.array([1, 2]), np.array([2], dtype=np.int32))
    first.complete()
    with DatasetWriter(prefix, "int32", sync=False) as second:
        second.add(np.array([7]), np.array([1], dtype=np.int32))
    (tmp_path / "out.json").touch()
    with pytest.raises(DataError, match="was removed or replaced while it was written"):
        first.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.idx", "out.json"]
    assert open_dataset(prefix).stream().tolist() == [7]


def test_the_checksum_is_zlibs(tmp_path: Path) -> None:
    """At every length, and every place in a text where a flush may have cut it."""
    data = np.random.default_rng(0).integers(0, 256, 301).astype(np.uint8)
    one = DatasetWriter(str(tmp_path / "one"), "uint8", sync=False)
    total = np.zeros(0, dtype=np.uint8)
    for length in range(len(data)):
        writer = DatasetWriter(str(tmp_path / f"{length}"), "uint8", sync=False)
        for each, tokens in ((writer, data[:length]), (one, data[:length])):
            each.add_tokens(tokens)
        assert writer.flush().checksum == zlib.crc32(data[:length].tobytes())
        total = np.concatenate([total, data[:length]])
        assert one.flush().checksum == zlib.crc32(total.tobytes())


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64"])
def test_tokens_are_packed(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for count in range(20):
        tokens = rng.integers(0, 100, count).astype(np.int32)
        places = np.sort(rng.integers(0, count + 1, rng.integers(0, 6)))
        packed = _C.pack_tokens(tokens, places, 7, dtype)
        assert packed.dtype == dtype
        assert np.array_equal(packed, np.insert(tokens, places, 7))
    for wrong in ([4], [2, 1], [-1]):
        with pytest.raises(DataError, match=r"pack_tokens: place -?\d after \d of 3 tokens"):
            _C.pack_tokens(np.arange(3, dtype=np.int32), np.array(wrong), 0, dtype)


@pytest.mark.parametrize(
    ("dtype", "largest"), [("uint8", 255), ("int8", 127), ("int16", 32767), ("uint16", 65535)]
)
def test_packed_tokens_must_fit(dtype: str, largest: int) -> None:
    tokens = np.array([0, 1, largest], dtype=np.int32)
    assert _C.pack_tokens(tokens, [1], largest, dtype).tolist() == [0, largest, 1, largest]
    for wrong in (largest + 1, -1, 2**31 - 1):
        message = f"token id {wrong} does not fit {dtype}, which holds 0 to {largest}"
        with pytest.raises(DataError, match=message):
            _C.pack_tokens(np.array([largest, wrong, 1], dtype=np.int32), [1], 0, dtype)
        with pytest.raises(DataError, match=message):
            _C.pack_tokens(tokens, [1], wrong, dtype)
    assert _C.pack_tokens(tokens, [], 2**31 - 1, dtype).tolist() == tokens.tolist()  # it is put in nowhere


def test_a_large_piece_stands_behind_the_small_ones_before_it(tmp_path: Path) -> None:
    pieces = [np.arange(size, dtype=np.uint16) for size in (5, 300_000, 7, 60_000, 140_000)]
    with DatasetWriter(str(tmp_path / "out"), "uint16") as writer:
        for piece in pieces:
            writer.add(piece, np.array([len(piece)], dtype=np.int32))
    written = (tmp_path / "out.bin").read_bytes()
    assert written == np.concatenate(pieces).tobytes()
    assert writer.state.checksum == zlib.crc32(written)


def test_dtype_rule() -> None:
    assert [token_dtype(size) for size in (65499, 65500, 65536, 65537)] == [
        "uint16",
        "int32",
        "int32",
        "int32",
    ]


@pytest.mark.parametrize(("dtype", "wrong"), [("int32", -1), ("int64", 2**63 - 1)])
def test_the_entropy_of_what_is_no_id(tmp_path: Path, dtype: str, wrong: int) -> None:
    prefix = write_dataset(tmp_path / "d", [2], dtype=dtype)
    (tmp_path / "d.bin").write_bytes(np.array([5, wrong], dtype=dtype).tobytes())
    with pytest.raises(DataError, match=f"holds {wrong}: expected ids from 0 to 67108863"):
        unigram_entropy(open_dataset(prefix))


def test_numbers_that_are_no_ids_have_no_entropy(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", [2], dtype="int32")
    index = bytearray((tmp_path / "d.idx").read_bytes())
    index[17] = 7  # float32
    (tmp_path / "d.idx").write_bytes(index)
    with pytest.raises(DataError, match="holds float32, which are no token ids"):
        unigram_entropy(open_dataset(prefix))


def test_unigram_entropy(tmp_path: Path) -> None:
    with DatasetWriter(str(tmp_path / "d"), "uint16") as writer:
        writer.add(np.array([7, 7, 9, 3]), np.array([4], dtype=np.int32))
    expected = 0.5 * math.log(2) + 2 * 0.25 * math.log(4)
    assert unigram_entropy(open_dataset(str(tmp_path / "d"))) == pytest.approx(expected, rel=1e-12)


def test_a_dataset_that_is_replaced_while_it_is_opened(tmp_path: Path) -> None:
    """An index beside the tokens of another, where both have as many bytes."""
    for seed, (name, lengths) in enumerate((("a", [1, 3]), ("b", [3, 1]))):
        write_dataset(tmp_path / name, lengths, seed=seed)
    stop = threading.Event()

    def replace() -> None:
        for name in itertools.cycle("ab"):
            for suffix in (".bin", ".idx"):
                os.link(tmp_path / f"{name}{suffix}", tmp_path / f"new{suffix}")
            (tmp_path / "x.idx").unlink(missing_ok=True)
            for suffix in (".bin", ".idx"):
                (tmp_path / f"new{suffix}").rename(tmp_path / f"x{suffix}")
            if stop.is_set():
                return

    tokens = {(1, 3): open_dataset(f"{tmp_path}/a").stream().tolist()}
    tokens[3, 1] = open_dataset(f"{tmp_path}/b").stream().tolist()
    thread = threading.Thread(target=replace)
    thread.start()
    opened = 0
    for _ in range(5000):
        with contextlib.suppress(DataError):
            dataset = open_dataset(f"{tmp_path}/x")
            opened += 1
            if dataset.stream().tolist() != tokens[tuple(dataset.lengths.tolist())]:
                opened = -(10**9)
    stop.set()
    thread.join()
    assert opened > 0


def test_an_index_never_stands_beside_tokens_of_another_run(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "out", [3, 4], seed=1)

    Path(f"{prefix}.bin").unlink()
    Path(f"{prefix}.bin").mkdir()  # the first rename fails, as if the run were killed there
    with pytest.raises(DataError, match="cannot be given its final name"):
        write_dataset(tmp_path / "out", [3, 4], seed=2)

    assert not Path(f"{prefix}.idx").exists()


@pytest.mark.parametrize("use", [verify, SourceBuilder(8, 1, None).open])
def test_a_dataset_of_no_token_ids(tmp_path: Path, use: Callable[[str], object]) -> None:
    prefix = write_dataset(tmp_path / "a", [3], dtype="int32")
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[17] = 7  # float32
    Path(f"{prefix}.idx").write_bytes(index)
    np.full(3, np.nan, dtype=np.float32).tofile(f"{prefix}.bin")
    with pytest.raises(DataError, match="a: holds float32, which are no token ids"):
        use(prefix)


def test_a_path_that_is_no_utf8(tmp_path: Path) -> None:
    prefix = os.fsdecode(os.fsencode(tmp_path) + b"/by\xffte")
    for use in (open_dataset, lambda path: DatasetWriter(path, "uint16")):
        with pytest.raises(DataError, match=r"by\\xffte: a dataset's path must be UTF-8"):
            use(prefix)
