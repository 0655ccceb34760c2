"""Whatever ends a run, or changes under it: no wrong bytes, nothing half done under a final name, a short
message.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megalite.data import preprocess as module
from megalite.data import skipped as skipped_module
from megalite.data.dataset_files import DatasetFiles
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import open_dataset
from megalite.data.inputs import corpus_hash, find_inputs, take_partition
from megalite.data.merge import merge
from megalite.data.preprocess import PreprocessPlan, Progress, preprocess
from megalite.data.skipped import Skip, SkippedList
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from megalite.data.verify import verify
from tests.data.corpora import write_dataset

TOOLS = Path(__file__).parents[2] / "tools"
NAMES = ("*.bin", "*.idx", "*_document.json", "*.skipped.jsonl")


def lines(path: Path, texts: Sequence[object]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def plan(path: str, prefix: Path, **fields: object) -> PreprocessPlan:
    return PreprocessPlan(find_inputs([path]), str(prefix), **fields)  # type: ignore[arg-type]  # of any field


def published(folder: Path) -> list[str]:
    return [path.name for name in NAMES for path in folder.glob(name)]


def interrupted(after: int) -> Callable[[Progress], None]:
    seen = []

    def report(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == after:
            raise KeyboardInterrupt

    return report


def every_batch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 2)
    monkeypatch.setattr(module, "CHECKPOINT_SECONDS", 0.0)


def test_a_run_does_not_go_on_in_the_files_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_batch_is_kept(monkeypatch)
    first = plan(lines(tmp_path / "a.jsonl", ["a"] * 20), tmp_path / "out")
    other = plan(lines(tmp_path / "b.jsonl", ["b"] * 20), tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        preprocess(first, ByteLevelTokenizer(), interrupted(3))
    with monkeypatch.context() as before_its_first_checkpoint:
        before_its_first_checkpoint.setattr(module.RunState, "save", lambda self, checkpoint: None)
        with pytest.raises(KeyboardInterrupt):
            preprocess(other, ByteLevelTokenizer(), interrupted(8))
    preprocess(first, ByteLevelTokenizer())
    assert bytes(open_dataset(str(tmp_path / "out_text_document")).stream().astype(np.uint8)) == b"a" * 20


@pytest.mark.parametrize("change", ["grows", "shrinks", "is replaced", "is removed"])
def test_an_input_that_changes_under_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    every_batch_is_kept(monkeypatch)
    monkeypatch.setattr(module, "IN_FLIGHT_BYTES", 0)  # or all may be read before the first report
    path = Path(lines(tmp_path / "in.jsonl", ["a"] * 200))
    os.utime(path, (1, 1))

    def report(progress: Progress) -> None:
        if progress.documents != 2:
            return
        if change == "grows":
            path.write_text(path.read_text() + '{"text": "b"}\n')
        elif change == "shrinks":
            os.truncate(path, path.stat().st_size // 2)
        elif change == "is replaced":
            lines(tmp_path / "new", ["b"] * 200)
            (tmp_path / "new").rename(path)
        else:
            path.unlink()

    with pytest.raises(DataError, match=r"in\.jsonl"):
        preprocess(plan(str(path), tmp_path / "out"), ByteLevelTokenizer(), report)
    assert not published(tmp_path)
    lines(path, ["c"] * 3)
    preprocess(plan(str(path), tmp_path / "out"), ByteLevelTokenizer())
    assert bytes(open_dataset(str(tmp_path / "out_text_document")).stream().astype(np.uint8)) == b"ccc"


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


def test_no_key_is_published_when_another_does_not_fit_the_disk(tmp_path: Path) -> None:
    records = ({"a": "x", "b": ["x", "y", "z"]} for _ in range(1000))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [sys.executable, str(TOOLS / "preprocess_data.py"), "--input", str(tmp_path / "in.jsonl")]
    command += ["--output-prefix", str(tmp_path / "out"), "--json-keys", "a", "b"]
    command += ["--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]
    # The first key's index has 20,042 bytes, the second's 44,042; without what completes it, 12,034.
    limited = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000)); "
    limited += "os.execv(sys.executable, sys.argv[1:])"
    found = subprocess.run(
        [sys.executable, "-c", limited, *command], capture_output=True, text=True, check=False
    )
    assert found.returncode == 1
    message = "out_b_document.idx.partial: cannot be written: File too large; the same command starts anew"
    assert message in found.stderr
    assert not published(tmp_path)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    for key, sequences in (("a", 1000), ("b", 3000)):
        assert verify(str(tmp_path / f"out_{key}_document")).sequences == sequences


def test_no_dataset_is_published_without_its_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_batch_is_kept(monkeypatch)
    (tmp_path / "in.jsonl").write_text('{"a": "x", "b": "y"}\n')
    work = plan(str(tmp_path / "in.jsonl"), tmp_path / "out", json_keys=["a", "b"])
    (tmp_path / "out_b_document.json.partial").mkdir()  # cannot be written, as on a full disk
    message = r"out_b_document\.json\.partial: cannot be written: Is a directory; the same command continues"
    with pytest.raises(DataError, match=message):
        preprocess(work, ByteLevelTokenizer())
    assert not published(tmp_path)


@pytest.mark.parametrize("how", ["removed", "replaced"])
@pytest.mark.parametrize("file", ["out.skipped.jsonl", "out_a_document.bin", "out_b_document.idx"])
def test_partial_output_that_something_takes_away(tmp_path: Path, file: str, how: str) -> None:
    """Whoever takes it for a leftover and starts anew writes files of the same names."""
    (tmp_path / "in.jsonl").write_text('{"a": "x", "b": "y"}\n{}\n{"a": "z", "b": "z"}\n')
    work = plan(str(tmp_path / "in.jsonl"), tmp_path / "out", json_keys=["a", "b"], skip_errors=True)
    partial = tmp_path / f"{file}.partial"

    def report(_: Progress) -> None:
        partial.unlink()
        if how == "replaced":
            partial.write_text("")

    with pytest.raises(DataError, match=f"{file}.partial: was removed or replaced"):
        preprocess(work, ByteLevelTokenizer(), report)
    assert not published(tmp_path)
    assert not (tmp_path / "out.skipped.jsonl").exists()
    preprocess(work, ByteLevelTokenizer())
    written = [open_dataset(str(tmp_path / f"out_{key}_document")).stream().tolist() for key in "ab"]
    assert written == [list(b"xz"), list(b"yz")]


def test_partial_output_that_cannot_be_seen_any_more_says_why(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"a": "x"}\n')
    partial = tmp_path / "out_a_document.bin.partial"

    def report(_: Progress) -> None:
        partial.unlink()
        partial.symlink_to(partial)

    work = plan(str(tmp_path / "in.jsonl"), tmp_path / "out", json_keys=["a"])
    with pytest.raises(DataError, match=r"\(Too many levels of symbolic links\); give the same"):
        preprocess(work, ByteLevelTokenizer(), report)


@pytest.mark.parametrize("name", ["skipped.jsonl", "progress.json", "a_document.idx", "b_document.json"])
def test_output_whose_name_a_folder_has(tmp_path: Path, name: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"a": "x", "b": "y"}\n')
    (tmp_path / ("out_" + name if "_" in name else "out." + name)).mkdir()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(DataError, match=f"{name}: is no file that could be replaced; give another name"):
        preprocess(
            plan(str(tmp_path / "in.jsonl"), tmp_path / "out", json_keys=["a", "b"]), ByteLevelTokenizer()
        )
    assert sorted(os.listdir(tmp_path)) == before


def test_the_list_of_a_run_that_just_ended_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SkippedList(str(tmp_path / "out"))
    first.go_on((0, 0))
    first.add([Skip("in.jsonl", 1, "bad")])
    first.flush()
    lock = skipped_module.fcntl.flock
    calls: list[object] = []

    def while_the_first_ends(file: object, how: int) -> None:
        if not calls:
            first.publish()
        calls.append(file)
        lock(file, how)  # type: ignore[arg-type]  # whatever it was called with

    monkeypatch.setattr(skipped_module.fcntl, "flock", while_the_first_ends)
    second = SkippedList(str(tmp_path / "out"))
    second.go_on((0, 0))
    assert len(calls) == 2
    assert json.loads((tmp_path / "out.skipped.jsonl").read_text())["line"] == 1


def test_a_lost_list_of_skipped_lines_is_not_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every_batch_is_kept(monkeypatch)
    path = lines(tmp_path / "in.jsonl", ["a", 1, "b", 2, "c", 3])
    work = plan(path, tmp_path / "out", skip_errors=True)
    with pytest.raises(KeyboardInterrupt):
        preprocess(work, ByteLevelTokenizer(), interrupted(3))
    (tmp_path / "out.skipped.jsonl.partial").unlink()
    preprocess(work, ByteLevelTokenizer())
    listed = (tmp_path / "out.skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in listed] == [2, 4, 6]


def test_shares_of_inputs_that_changed_are_not_merged(tmp_path: Path) -> None:
    path = lines(tmp_path / "in.jsonl", ["a"] * 100)
    for index in range(2):
        whole = find_inputs([path])
        work = PreprocessPlan(
            take_partition(whole, index, 2),
            str(tmp_path / "out"),
            partition=(index, 2),
            corpus=corpus_hash(whole),
        )
        preprocess(work, ByteLevelTokenizer())
        lines(Path(path), ["a"] * 140)  # the second share begins 20 documents later than the first has ended
    shares = [str(tmp_path / f"out_part0000{index}of00002_text_document") for index in range(2)]
    with pytest.raises(DataError, match="shares of two corpora do not make one"):
        merge(shares, str(tmp_path / "whole"))
    assert not list(tmp_path.glob("whole*"))


class WithOptions(ByteLevelTokenizer):
    options = "special tokens allowed"


def share(path: str, folder: Path, index: int, tokenizer: ByteLevelTokenizer, key: str = "text") -> str:
    whole = find_inputs([path])
    work = PreprocessPlan(
        take_partition(whole, index, 2),
        str(folder / "out"),
        json_keys=(key,),
        partition=(index, 2),
        corpus=corpus_hash(whole),
    )
    preprocess(work, tokenizer)
    return work.prefix(key)


@pytest.mark.parametrize("what", ["key", "tokenizer options"])
def test_shares_of_different_runs_are_not_merged(tmp_path: Path, what: str) -> None:
    path = str(tmp_path / "in.jsonl")
    Path(path).write_text('{"text": "a", "title": "b"}\n' * 10)
    first = share(path, tmp_path, 0, ByteLevelTokenizer())
    key = "title" if what == "key" else "text"
    second = share(path, tmp_path, 1, WithOptions() if key == "text" else ByteLevelTokenizer(), key)
    with pytest.raises(DataError, match=f"its {what} is .*; shares of two runs do not make one"):
        merge([first, second], str(tmp_path / "whole"))
    assert not list(tmp_path.glob("whole*"))


def test_the_order_of_files_of_one_name_is_told_apart(tmp_path: Path) -> None:
    for folder in ("here/x", "here/y", "there/x", "there/y"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "in.jsonl").write_text('{"text": "a"}\n')
    here, back, there = (
        corpus_hash(find_inputs([str(tmp_path / place / name / "in.jsonl") for name in order]))
        for place, order in (("here", "xy"), ("here", "yx"), ("there", "xy"))
    )
    assert here != back
    assert here == there


def test_a_dataset_that_changes_while_it_is_read(tmp_path: Path) -> None:
    def read(prefix: str, change: Callable[[], object]) -> None:
        with DatasetFiles(prefix) as files:
            change()
            list(files.tokens())
            list(files.lengths())

    prefix = write_dataset(tmp_path / "a", [5000] * 20)
    with pytest.raises(DataError, match=r"a\.bin: expected at least 200000 bytes, found 3000"):
        read(prefix, lambda: os.truncate(f"{prefix}.bin", 3000))
    write_dataset(tmp_path / "a", [5] * 1000)
    with pytest.raises(DataError, match=r"a\.idx: expected at least 4034 bytes, found 100"):
        read(prefix, lambda: os.truncate(f"{prefix}.idx", 100))
    write_dataset(tmp_path / "a", [5] * 1000)
    with pytest.raises(DataError, match=r"a\.bin: changed while it was read"):
        read(prefix, lambda: write_dataset(tmp_path / "a", [5] * 1000, seed=1))


@pytest.mark.parametrize("size", [0, 20000])
def test_a_cut_during_verify_and_merge_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    prefix = write_dataset(tmp_path / "a", [5000] * 20)
    original = DatasetFiles.tokens

    def cut_first(self: DatasetFiles) -> object:
        os.truncate(f"{prefix}.bin", size)
        return original(self)

    monkeypatch.setattr(DatasetFiles, "tokens", cut_first)
    with pytest.raises(DataError, match=r"a\.bin: expected at least 200000 bytes, found"):
        verify(prefix)
    write_dataset(tmp_path / "a", [5000] * 20)
    with pytest.raises(DataError, match=r"a\.bin: expected at least 200000 bytes, found"):
        merge([prefix], str(tmp_path / "whole"))
    assert not (tmp_path / "whole.idx").exists()


def opened_once_it_is_read(pipe: Path, reader: subprocess.Popen[str]) -> int:
    """A descriptor to write to `pipe`, which `reader` is about to read."""
    deadline = time.monotonic() + 60
    while reader.poll() is None and time.monotonic() < deadline:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads it yet
            time.sleep(0.02)
    reader.kill()
    raise AssertionError(f"it never read the pipe: {reader.communicate()[1]}")


def test_control_c_on_a_run_that_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, str(TOOLS / "preprocess_data.py"), "--input", str(tmp_path / "pipe")]
    command += ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "ByteLevelTokenizer"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        pipe = opened_once_it_is_read(tmp_path / "pipe", process)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=60)
        os.close(pipe)
    finally:
        process.kill()
    assert process.returncode == 130
    assert message == "preprocess_data: interrupted; the same command continues\n"


@pytest.mark.parametrize(
    ("tool", "function", "flags", "message"),
    [
        ("preprocess_data", "settings.add_tokenizer_flags", ["--input", "x"], "; the same command continues"),
        ("merge_datasets", "merge.merge", ["--input", "x"], "; the same command starts anew"),
        ("inspect_data", "settings.add_data_flags", ["x"], ""),
    ],
)
def test_control_c_anywhere(
    tmp_path: Path, tool: str, function: str, flags: Sequence[str], message: str
) -> None:
    place, name = function.split(".")
    program = f"""
import runpy, signal, sys
import megalite.data.{place} as module
def interrupted(*_):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("as numpy makes of it") from None
module.{name} = interrupted
sys.argv[1:] = {[*flags, "--output-prefix", str(tmp_path / "out")]!r}
runpy.run_path({str(TOOLS / f"{tool}.py")!r}, run_name="__main__")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (130, f"{tool}: interrupted{message}\n")
