"""A document that cannot be read or encoded: the run stops, or goes on and lists it."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megalite.data import preprocess as module
from megalite.data import records, take_over
from megalite.data import skipped as skipped_module
from megalite.data.dataset_info import DatasetInfo
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import open_dataset
from megalite.data.inputs import find_inputs, take_partition
from megalite.data.preprocess import PreprocessPlan, preprocess
from megalite.data.resume import Place, RunState
from megalite.data.shortage import Room
from megalite.data.skipped import Skip, SkippedList
from megalite.data.text_batches import BATCH_DOCUMENTS, read_text_batches
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from tests.data.corpora import every_batch_is_kept, lines, plan, published, run


def test_skipped_records_fill_a_batch(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\n" * (3 * BATCH_DOCUMENTS))
    plan = PreprocessPlan(find_inputs([str(tmp_path / "in.jsonl")]), str(tmp_path / "o"), skip_errors=True)
    state = RunState(plan.stem, plan.inputs, {})
    batches = read_text_batches(plan.inputs, plan.json_keys, Place(), state, Room(), skip_errors=True)
    assert [len(batch.skipped) for batch in batches] == [BATCH_DOCUMENTS] * 3


def test_skipped_documents_are_listed_in_their_order(tmp_path: Path) -> None:
    class Choosy(ByteLevelTokenizer):
        def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
            if "bad" in texts:
                raise ValueError("bad")
            return super().encode_flat(texts)

    (tmp_path / "in.jsonl").write_text('{"text": "bad"}\n{}\n{"text": "bad"}\n{}\n')
    inputs = find_inputs([str(tmp_path / "in.jsonl")])
    preprocess(PreprocessPlan(inputs, str(tmp_path / "out"), skip_errors=True), Choosy())
    listed = (tmp_path / "out_text_document.skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in listed] == [1, 2, 3, 4]


def test_far_behind_the_start_of_a_file_lines_are_counted_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "COUNTED_BYTES", 21)
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\nbroken\n' * 10)
    whole = find_inputs([str(path)])
    for share, behind in ((1, 0), (5, 105)):
        inputs = take_partition(whole, share, 10)
        where = f"{path}: line 2 behind byte 105" if behind else f"{path}:4"
        with pytest.raises(DataError, match=f"{where}: not valid JSON"):
            run(inputs, tmp_path / f"stop{share}")
        run(inputs, tmp_path / "skip", skip_errors=True)
        (listed,) = map(json.loads, (tmp_path / "skip_text_document.skipped.jsonl").read_text().splitlines())
        assert listed.get("behind_byte", 0) == behind
        assert path.read_bytes()[behind:].splitlines()[listed["line"] - 1] == b"broken"


def test_the_list_of_a_run_that_just_ended_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SkippedList(str(tmp_path / "out_text_document"))
    first.go_on((0, 0))
    first.add([Skip("in.jsonl", 1, "bad")])
    first.flush()
    lock = skipped_module.fcntl.flock
    calls: list[object] = []

    def while_the_first_ends(file: object, how: int) -> None:
        if not calls:
            first.publish()
        calls.append(file)
        lock(file, how)  # type: ignore[arg-type]  # as the caller of flock gave them

    monkeypatch.setattr(skipped_module.fcntl, "flock", while_the_first_ends)
    second = SkippedList(str(tmp_path / "out_text_document"))
    second.go_on((0, 0))
    assert len(calls) == 2
    assert json.loads((tmp_path / "out_text_document.skipped.jsonl").read_text())["line"] == 1


def test_a_panic_of_a_tokenizer_is_an_error_of_its_document(tmp_path: Path) -> None:
    class Panic(BaseException):
        """As Rust's is to Python: no Exception."""

    class Panicking(ByteLevelTokenizer):
        def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
            if "bad" in texts:
                raise Panic("index out of bounds")
            return super().encode_flat(texts)

    path = lines(tmp_path / "in.jsonl", ["a", "bad", "c"])
    with pytest.raises(DataError, match=r"in\.jsonl:2: cannot be encoded: index out of bounds"):
        preprocess(plan(path, tmp_path / "stop"), Panicking())
    preprocess(plan(path, tmp_path / "skip", skip_errors=True), Panicking())
    assert open_dataset(str(tmp_path / "skip_text_document")).documents == 2


NO_THREAD = RuntimeError("can't start new thread")
OUT_OF_MEMORY = r"in\.jsonl: up to record 2: out of memory; the same command starts anew$"


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([MemoryError()], OUT_OF_MEMORY),
        ([ValueError("of the batch"), MemoryError()], OUT_OF_MEMORY),  # the second of one document
        ([NO_THREAD] * 3, "does not encode even an empty text now: can't start new thread$"),
        ([NO_THREAD] * 100, "does not encode even an empty text now: can't start new thread$"),
    ],
)
def test_a_shortage_leaves_no_document_out(tmp_path: Path, errors: list[Exception], told: str) -> None:
    """Of memory, or of threads, in which case the library fails on an empty text, too."""
    left = list(errors)

    class Short(ByteLevelTokenizer):
        def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
            if left:
                raise left.pop(0)
            return super().encode_flat(texts)

    work = plan(lines(tmp_path / "in.jsonl", ["a", "b"]), tmp_path / "out", skip_errors=True)
    with pytest.raises(DataError, match=told):
        preprocess(work, Short())
    assert not published(tmp_path)


def test_a_document_that_failed_once_for_lack_of_threads_is_there(tmp_path: Path) -> None:
    class Short(ByteLevelTokenizer):
        failed = 0

        def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
            if "bad" in texts:
                raise ValueError("bad")
            if list(texts) == ["a"] and not self.failed:
                self.failed += 1
                raise RuntimeError("can't start new thread")
            return super().encode_flat(texts)

    preprocess(plan(lines(tmp_path / "in.jsonl", ["a", "bad"]), tmp_path / "out", skip_errors=True), Short())
    assert open_dataset(str(tmp_path / "out_text_document")).documents == 1


def test_an_error_does_not_wait_for_a_slow_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every_batch_is_kept(monkeypatch)
    release, finished = threading.Event(), threading.Event()

    class Slow(ByteLevelTokenizer):
        def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
            release.wait(timeout=20)
            finished.set()
            return super().encode_flat(texts)

    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": "a"}\nbroken\n')
    with pytest.raises(DataError, match=r"in\.jsonl:3: not valid JSON"):
        preprocess(plan(str(tmp_path / "in.jsonl"), tmp_path / "out"), Slow())
    assert not finished.is_set()
    release.set()


def test_a_disk_that_is_full_at_a_resume_is_told_as_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_batch_is_kept(monkeypatch)
    work = plan(lines(tmp_path / "in.jsonl", [5, *["1"] * 20]), tmp_path / "out", skip_errors=True)

    def interrupted(progress: module.Progress) -> None:
        if progress.documents > 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(work, ByteLevelTokenizer(), interrupted)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(take_over.shutil, "copyfileobj", full)
        with pytest.raises(DataError, match=r"skipped\.jsonl\.partial: cannot be written: No .* continues"):
            preprocess(work, ByteLevelTokenizer())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.usefixtures("locks_of_this_node")
def test_a_run_on_another_node_takes_the_output_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while this one waits for its disk behind the last of its work, and where both write one file."""
    described = module.write_info

    def stalled(prefix: str, info: DatasetInfo) -> None:
        described(prefix, info)
        with SkippedList(prefix):
            pass

    monkeypatch.setattr(module, "write_info", stalled)
    with pytest.raises(DataError, match=r"skipped\.jsonl\.partial: was removed or replaced during the run"):
        preprocess(plan(lines(tmp_path / "in.jsonl"), tmp_path / "out"), ByteLevelTokenizer())
    assert published(tmp_path) == []


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_later_of_two_runs_has_the_list(tmp_path: Path) -> None:
    prefix = str(tmp_path / "out")
    with SkippedList(prefix) as first:
        first.add([Skip("a", 1, "bad")])
        noted = first.flush()
        with SkippedList(prefix) as second:
            second.go_on(noted)
            with pytest.raises(DataError, match="was removed or replaced during the run"):
                first.flush()
            second.add([Skip("a", 2, "bad")])
            second.flush()
            second.publish()
    listed = Path(f"{prefix}.skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in listed] == [1, 2]
