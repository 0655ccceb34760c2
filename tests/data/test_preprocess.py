"""Text becomes the right bytes, whatever the number of workers and however often the run was killed."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import zstandard

from megalite.data import encoding, text_batches
from megalite.data import preprocess as module
from megalite.data.dataset_info import read_info
from megalite.data.documents import Lines
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import open_dataset
from megalite.data.inputs import find_inputs
from megalite.data.preprocess import PreprocessPlan, preprocess
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from megalite.data.tokenizer.null import NullTokenizer

EOD = 99


def numbers() -> NullTokenizer:
    return NullTokenizer(100, EOD)


def jsonl(path: Path, records: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def documents_of(prefix: str) -> list[list[list[int]]]:
    dataset = open_dataset(prefix)
    return [
        [dataset.sequence(i).tolist() for i in range(dataset.boundaries[d], dataset.boundaries[d + 1])]
        for d in range(dataset.documents)
    ]


def run(tmp_path: Path, inputs: Sequence[str], name: str = "out", **fields: object) -> str:
    plan = PreprocessPlan(find_inputs(inputs), str(tmp_path / name), **fields)  # type: ignore[arg-type]
    preprocess(plan, numbers())
    return str(tmp_path / f"{name}_text_document")


def test_documents_and_their_ends(tmp_path: Path) -> None:
    lines = [{"text": "1 2"}, {"text": ""}, {"text": ["3", "", "4 5"]}, {"text": []}, {"text": ["", ""]}]
    prefix = run(tmp_path, [jsonl(tmp_path / "in.jsonl", lines)], append_eod=True)
    assert documents_of(prefix) == [[[1, 2, EOD]], [], [[3], [4, 5, EOD]], [], []]
    assert open_dataset(prefix).lengths.tolist() == [3, 1, 3]  # the lengths count the eod
    without = run(tmp_path, [str(tmp_path / "in.jsonl")], "without")
    assert documents_of(without) == [[[1, 2]], [], [[3], [4, 5]], [], []]


def test_a_dataset_for_each_key(tmp_path: Path) -> None:
    lines = [{"text": "1", "meta": {"note": "2 3"}}, {"text": "4", "meta": {"note": "5"}}]
    plan = PreprocessPlan(
        find_inputs([jsonl(tmp_path / "in.jsonl", lines)]), str(tmp_path / "out"), ["text", "meta.note"]
    )
    preprocess(plan, numbers())
    assert documents_of(str(tmp_path / "out_text_document")) == [[[1]], [[4]]]
    assert documents_of(str(tmp_path / "out_meta.note_document")) == [[[2, 3]], [[5]]]


def test_description_beside_the_dataset(tmp_path: Path) -> None:
    prefix = run(tmp_path, [jsonl(tmp_path / "in.jsonl", [{"text": "1 2"}])], append_eod=True)
    info = read_info(prefix)
    assert info is not None
    assert (info.tokens, info.sequences, info.documents, info.eod, info.vocab_size) == (3, 1, 1, EOD, 100)
    assert sorted(path.name for path in tmp_path.glob("out*")) == [
        f"out_text_document.{s}" for s in ("bin", "idx", "json")
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_compressed_inputs_give_the_same(tmp_path: Path, suffix: str) -> None:
    content = b'{"text": "1 2"}\n{"text": "3"}'  # the last line without its end
    packed = content
    if suffix == "jsonl.gz":
        packed = gzip.compress(content[:7]) + gzip.compress(content[7:])  # two members
    elif suffix == "jsonl.zst":
        packed = zstandard.compress(content[:7]) + zstandard.compress(content[7:])  # two frames
    (tmp_path / f"in.{suffix}").write_bytes(packed)
    assert documents_of(run(tmp_path, [str(tmp_path / f"in.{suffix}")])) == [[[1, 2]], [[3]]]


def test_zstd_with_the_largest_window(tmp_path: Path) -> None:
    content = b'{"text": "1 2"}\n'
    header = b"\x28\xb5\x2f\xfd\x00" + bytes([(31 - 10) << 3])  # RFC 8878: magic, no sizes, 2 GiB of window
    block = (len(content) << 3 | 1).to_bytes(3, "little")  # the last, not compressed
    (tmp_path / "in.jsonl.zst").write_bytes(header + block + content)
    assert documents_of(run(tmp_path, [str(tmp_path / "in.jsonl.zst")])) == [[[1, 2]]]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_cut_compressed_input_is_named(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    content = b"".join(b'{"text": "%d"}\n' % n for n in rng.integers(0, 99, 50000))
    packed = gzip.compress(content) if suffix == "gz" else zstandard.compress(content)
    (tmp_path / f"in.{suffix}").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(
        DataError, match=rf"in\.{suffix}: after record \d+: |in\.{suffix}:\d+: not valid JSON"
    ):
        run(tmp_path, [str(tmp_path / f"in.{suffix}")])


def test_inputs_in_the_order_given_and_sorted_inside(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        jsonl(tmp_path / f"{name}.jsonl", [])
    folder = tmp_path / "folder"
    folder.mkdir()
    jsonl(folder / "x.jsonl", [])
    found = find_inputs([str(tmp_path / "c.jsonl"), str(tmp_path / "[ab].jsonl"), str(folder)])
    assert [Path(part.path).name for part in found] == ["c.jsonl", "a.jsonl", "b.jsonl", "x.jsonl"]
    with pytest.raises(DataError, match=r"--input .*nowhere"):
        find_inputs([str(tmp_path / "nowhere*")])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "1"', "not valid JSON"),
        (b"", "blank line"),
        (b"  ", "blank line"),
        (b"[1]", "expected a JSON object .*, found a list; one object a line is read: jq"),
        (b" [", "not valid JSON: .*; one object a line is read: jq"),
        (b"{", "not valid JSON: .*; one object a line is read: jq"),
        (b'"text"', "found a string"),
        (b'{"body": "1"}', r"no key 'text'; the keys are 'body'"),
        (b'{"text": 5}', "key 'text': expected a string or a list of strings, found a number"),
        (b'{"text": null}', "found null"),
        (b'{"text": ["1", 2]}', "found a list"),
        (b'{"text": "\xff"}', "not valid JSON"),
        (b'{"text": "1", "score": Nan}', r"not valid JSON: .*\(char 23\)"),
        (b'{"text": "1\\ud800"}', r"key 'text': holds '\\ud800', half of a surrogate pair"),
        (b'{"text": "1 x"}', "'x': expected an id from 0 to 99"),
        (b'{"text": "100"}', "'100': expected an id"),
    ],
)
def test_bad_lines_are_named_by_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "1"}\n' + line + b'\n{"text": "2"}\n')
    with pytest.raises(DataError, match=message) as error:
        run(tmp_path, [str(tmp_path / "in.jsonl")])
    assert "in.jsonl:2: " in str(error.value)
    assert not list(tmp_path.glob("*.idx"))
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (gzip.compress(b"{}"), r"gzip: let its name end in \.gz"),
        (zstandard.compress(b"{}"), r"zstd: let its name end in \.zst"),
        (b"PAR1\x15\x04\xff", r"Parquet: let its name end in \.parquet"),
        (b"ARROW1\0\0\xff\xff\xff\xff", "Arrow: "),
        ('{"text": "1"}'.encode("utf-16"), "UTF-16: iconv"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n", "a pointer of Git LFS"),
    ],
    ids=["gzip", "zstd", "Parquet", "Arrow", "UTF-16", "Git LFS"],  # gzip's bytes have the time in them
)
def test_another_format_is_named(tmp_path: Path, content: bytes, what: str) -> None:
    for name in ("in.jsonl", "in.txt"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}:1: no.*; it is {what}") as error:
            run(tmp_path, [str(tmp_path / name)])
        assert "--on-error skip" not in str(error.value), "nothing of the file would be left"


def test_text_that_shows_a_pointer_of_git_lfs_is_text(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
    (tmp_path / "in.txt").write_text(f"A pointer:\n\n{pointer}\nIt ends.\n")
    (tmp_path / "long.txt").write_text(pointer + "Such is a pointer. " * 100)
    for path, kind, documents in (("in.txt", "paragraphs", 3), ("long.txt", "text", 1)):
        prefix = f"{tmp_path}/{path}.out"
        parts = find_inputs([str(tmp_path / path)], text_format=kind)
        preprocess(PreprocessPlan(parts, prefix), ByteLevelTokenizer())
        assert open_dataset(f"{prefix}_text_document").documents == documents
    (tmp_path / "in.txt").write_text(pointer)
    for kind in ("text", "paragraphs"):
        parts = find_inputs([str(tmp_path / "in.txt")], text_format=kind)
        with pytest.raises(DataError, match=r"in\.txt:1: no text; it is a pointer of Git LFS"):
            preprocess(PreprocessPlan(parts, str(tmp_path / "out")), ByteLevelTokenizer())


def test_what_only_pythons_json_takes_is_taken(tmp_path: Path) -> None:
    others = ("NaN", "-Infinity", "1e999", '"\\ud800"')
    lines = [f'{{"text": "{i}", "score": {other}}}' for i, other in enumerate(others)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert documents_of(run(tmp_path, [str(tmp_path / "in.jsonl")])) == [[[0]], [[1]], [[2]], [[3]]]


def test_skipping_goes_on_and_lists_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_batches(monkeypatch)
    bad = {2: "oops", 5: '{"text": "100"}', 6: "[]", 7: "", 8: '{"text": "x"}'}
    lines = [bad.get(i, json.dumps({"text": str(i)})) for i in range(12)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    prefix = run(tmp_path, [str(tmp_path / "in.jsonl")], skip_errors=True)
    assert documents_of(prefix) == [[[i]] for i in range(12) if i not in bad]
    listed = [
        json.loads(line) for line in (tmp_path / "out_text_document.skipped.jsonl").read_text().splitlines()
    ]
    assert sorted(entry["line"] - 1 for entry in listed) == sorted(bad)
    assert all(entry["file"].endswith("in.jsonl") and entry["error"] for entry in listed)


class Waiting(NullTokenizer):
    """Takes its time over the first text it sees, until others have been encoded."""

    def __init__(self) -> None:
        super().__init__(100, EOD)
        self.others = threading.Semaphore(0)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if texts[0].startswith("7 7"):
            for _ in range(3):
                assert self.others.acquire(timeout=30)
        else:
            self.others.release()
        return super().encode_batch(texts)


def small_batches(monkeypatch: pytest.MonkeyPatch, documents: int = 3) -> None:
    monkeypatch.setattr(text_batches, "BATCH_DOCUMENTS", documents)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_output_order_is_input_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    small_batches(monkeypatch)
    lines = [{"text": "7 7"}] + [{"text": str(i % 90)} for i in range(200)]
    path = jsonl(tmp_path / "in.jsonl", lines)
    preprocess(PreprocessPlan(find_inputs([path]), str(tmp_path / "out"), workers=workers), Waiting())
    found = documents_of(str(tmp_path / "out_text_document"))
    assert found == [[[7, 7]]] + [[[i % 90]] for i in range(200)]


def test_memory_in_flight_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_batches(monkeypatch, 1)
    # Beside which the texts themselves, 15 bytes each, are next to nothing.
    monkeypatch.setattr(encoding, "IN_FLIGHT_BYTES", 20 * (encoding.BATCH_MEMORY + encoding.RECORD_MEMORY))
    reached = []

    class Stuck(NullTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            reached.append(texts[0])
            if texts[0] == "1":
                release.wait(timeout=30)
            return super().encode_batch(texts)

    release = threading.Event()
    read: list[bytes] = []
    original = text_batches.parse_strings

    def counted(lines: Lines, keys: Sequence[str]) -> list[list[str]] | None:
        read.extend(lines)
        if len(read) > 60:
            raise AssertionError("read too far ahead")
        return original(lines, keys)

    monkeypatch.setattr(text_batches, "parse_strings", counted)
    monkeypatch.setattr(module, "look_at_first", lambda *_: None)
    path = jsonl(tmp_path / "in.jsonl", [{"text": str(1 + i % 50)} for i in range(500)])

    def expect_failure() -> None:
        with pytest.raises(AssertionError, match="too far"):
            preprocess(PreprocessPlan(find_inputs([path]), str(tmp_path / "out")), Stuck(100, EOD))

    thread = threading.Thread(target=expect_failure)
    thread.start()
    thread.join(timeout=1)
    assert thread.is_alive()
    assert len(read) <= 20
    release.set()
    thread.join(timeout=30)
    assert not thread.is_alive()


def killed_after(batches: int) -> Callable[[module.Progress], None]:
    seen = []

    def report(progress: module.Progress) -> None:
        seen.append(progress.documents)
        if len(seen) == batches:
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_killed_run_continues_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    small_batches(monkeypatch)
    monkeypatch.setattr(module, "CHECKPOINT_SECONDS", 0.0)
    lines = [{"text": [str(j % 99) for j in range(i % 5)]} for i in range(60)]
    inputs = [jsonl(tmp_path / f"in{n}.jsonl", lines[n * 20 : (n + 1) * 20]) for n in range(3)]
    whole = run(tmp_path, inputs, "whole", append_eod=True)
    if suffix == "jsonl.gz":
        for path in inputs:
            Path(f"{path}.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
        inputs = [f"{path}.gz" for path in inputs]
    plan = PreprocessPlan(find_inputs(inputs), str(tmp_path / "out"), append_eod=True)
    starts = []
    for batches in (3, 5, 4):
        with pytest.raises(KeyboardInterrupt):
            preprocess(plan, numbers(), killed_after(batches))
        assert not [path for path in tmp_path.glob("out*") if path.suffix in (".bin", ".idx")]

    def first(progress: module.Progress) -> None:
        starts.append(progress.documents)

    preprocess(plan, numbers(), first)
    assert starts[0] > 20  # it went on, not again from the start
    for extension in (".bin", ".idx"):
        assert (tmp_path / f"out_text_document{extension}").read_bytes() == Path(
            f"{whole}{extension}"
        ).read_bytes()
    assert not list(tmp_path.glob("out*.partial")) + list(tmp_path.glob("out*progress*"))


def test_other_inputs_or_flags_do_not_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_batches(monkeypatch)
    monkeypatch.setattr(module, "CHECKPOINT_SECONDS", 0.0)
    path = jsonl(tmp_path / "in.jsonl", [{"text": "1"}] * 20)
    with pytest.raises(KeyboardInterrupt):
        preprocess(PreprocessPlan(find_inputs([path]), str(tmp_path / "out")), numbers(), killed_after(3))
    jsonl(tmp_path / "in.jsonl", [{"text": "2 3"}] * 20)
    assert documents_of(run(tmp_path, [path], append_eod=True)) == [[[2, 3, EOD]]] * 20


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "in.jsonl", [{"text": "1"}] * 5)
    plan = PreprocessPlan(find_inputs([path]), str(tmp_path / "out"))

    def second_run(_: module.Progress) -> None:
        with pytest.raises(DataError, match="out_text_document: another run is writing this output"):
            preprocess(plan, numbers())

    preprocess(plan, numbers(), second_run)
    assert documents_of(str(tmp_path / "out_text_document")) == [[[1]]] * 5
