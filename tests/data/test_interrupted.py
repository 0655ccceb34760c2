"""Runs that are interrupted and resumed, and what they read changing meanwhile: no wrong bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megalite.data import encoding, resume
from megalite.data import preprocess as module
from megalite.data.dataset_files import DatasetFiles
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import DatasetWriter, open_dataset
from megalite.data.inputs import corpus_hash, find_inputs, take_partition
from megalite.data.merge import merge
from megalite.data.preprocess import PreprocessPlan, Progress, preprocess
from megalite.data.resume import RunState
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from megalite.data.tokenizer.null import NullTokenizer
from megalite.data.verify import verify
from tests.data.corpora import TOOLS, every_batch_is_kept, lines, plan, published, write_dataset

CONTINUES = "; the same command continues, or starts anew where it reads a pipe"


def interrupted(after: int) -> Callable[[Progress], None]:
    seen = []

    def report(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == after:
            raise KeyboardInterrupt

    return report


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


def test_a_run_does_not_go_on_behind_the_tokens_of_a_killed_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which wrote as much under the same names."""
    every_batch_is_kept(monkeypatch)
    work = plan(lines(tmp_path / "in.jsonl", ["a"] * 20), tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        preprocess(work, ByteLevelTokenizer(), interrupted(8))
    merged = DatasetWriter(str(tmp_path / "out_text_document"), "uint16", sync=False)
    merged.add(np.full(20, ord("b")), np.ones(20, dtype=np.int32))
    merged.flush()
    del merged
    preprocess(work, ByteLevelTokenizer())
    assert bytes(open_dataset(str(tmp_path / "out_text_document")).stream().astype(np.uint8)) == b"a" * 20


def test_a_lost_list_of_skipped_lines_is_not_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every_batch_is_kept(monkeypatch)
    path = lines(tmp_path / "in.jsonl", ["a", 1, "b", 2, "c", 3])
    work = plan(path, tmp_path / "out", skip_errors=True)
    with pytest.raises(KeyboardInterrupt):
        preprocess(work, ByteLevelTokenizer(), interrupted(3))
    (tmp_path / "out_text_document.skipped.jsonl.partial").unlink()
    preprocess(work, ByteLevelTokenizer())
    listed = (tmp_path / "out_text_document.skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in listed] == [2, 4, 6]


class Versioned(NullTokenizer):
    """Of another version of its library."""

    packages = ("another",)


@pytest.mark.parametrize(
    ("tokenizer", "fields", "reason"),
    [
        (NullTokenizer(1000, 9), {}, "its options, its tokenizer or the version"),
        (Versioned(100, 9), {}, "its options, its tokenizer or the version"),
        (NullTokenizer(100, 9), {"append_eod": True}, "its options, its tokenizer or the version"),
        (NullTokenizer(100, 9), {"changed": True}, "its inputs were others, or have changed since"),
        (NullTokenizer(100, 9), {"damaged": True}, "this file of it is damaged"),
        (NullTokenizer(100, 9), {"altered": True}, "this file of it is damaged"),
    ],
)
def test_a_run_that_is_not_continued_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: NullTokenizer,
    fields: dict[str, bool],
    reason: str,
) -> None:
    every_batch_is_kept(monkeypatch)
    path = lines(tmp_path / "in.jsonl", ["5", "500"] * 20)
    with pytest.raises(KeyboardInterrupt):
        preprocess(plan(path, tmp_path / "out", skip_errors=True), NullTokenizer(100, 9), interrupted(8))
    state, fields = tmp_path / "out_text_document.progress.json", dict(fields)
    told: list[str] = []
    if fields.pop("changed", False):
        lines(Path(path), ["5", "600"] * 20)
        os.utime(path, (1, 1))
    if fields.pop("damaged", False):
        state.write_bytes(state.read_bytes()[:40])
    if fields.pop("altered", False):
        content = json.loads(state.read_text())
        content["place"][1] -= 2
        state.write_text(json.dumps(content))
    (info,) = preprocess(
        plan(path, tmp_path / "out", skip_errors=True, **fields), tokenizer, warn=told.append
    )
    assert len(told) == 1
    assert told[0].startswith(f"{state}: an interrupted run is not continued, as {reason}")
    assert told[0].endswith("; this one starts anew")
    assert info.documents == (40 if tokenizer.vocab_size == 1000 else 20)


def test_a_run_that_ended_at_a_bad_line_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_batch_is_kept(monkeypatch)
    monkeypatch.setattr(encoding, "IN_FLIGHT_BYTES", 0)  # or the bad line is met before the first is written
    path = lines(tmp_path / "in.jsonl", [*["1"] * 20, 5, *["1"] * 20])
    work, told = plan(path, tmp_path / "out"), list[str]()
    with pytest.raises(DataError, match=r"in\.jsonl:21: .*; --on-error skip leaves such documents out"):
        preprocess(work, NullTokenizer(100, 99))
    skipping = plan(path, tmp_path / "out", skip_errors=True)
    read = []
    with pytest.raises(KeyboardInterrupt):
        preprocess(
            skipping, NullTokenizer(100, 99), interrupted(3), lambda *sizes: read.append(sizes), told.append
        )
    assert (told, bool(read)) == ([], True)
    (info,) = preprocess(skipping, NullTokenizer(100, 99), warn=told.append)
    assert (told, info.documents) == ([], 40)


def test_what_was_left_out_is_not_gone_on_from_without_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_batch_is_kept(monkeypatch)
    path, told = lines(tmp_path / "in.jsonl", ["1", 5, *["1"] * 20]), list[str]()
    with pytest.raises(KeyboardInterrupt):
        preprocess(plan(path, tmp_path / "out", skip_errors=True), NullTokenizer(100, 99), interrupted(8))
    with pytest.raises(DataError, match=r"in\.jsonl:2: "):
        preprocess(plan(path, tmp_path / "out"), NullTokenizer(100, 99), warn=told.append)
    assert "is not continued, as it left out 1 documents, as --on-error skip does" in told[0]


def test_a_kill_while_progress_is_written_leaves_nothing_for_good(tmp_path: Path) -> None:
    (tmp_path / "out_text_document.progress.json.partial").write_text("{")
    preprocess(plan(lines(tmp_path / "in.jsonl"), tmp_path / "out"), ByteLevelTokenizer())
    assert [*tmp_path.glob("out*")] != []
    assert [*tmp_path.glob("out*.partial")] == []


def test_a_run_with_a_long_name_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as names can be; who continues it puts more behind them for a moment."""
    every_batch_is_kept(monkeypatch)
    path, told = lines(tmp_path / "in.jsonl"), list[str]()
    work = plan(path, tmp_path / ("\u00e9" * 100 + "x" * 18))
    with pytest.raises(KeyboardInterrupt):
        preprocess(work, NullTokenizer(100, 99), interrupted(2))
    preprocess(work, NullTokenizer(100, 99), warn=told.append)
    assert told == []
    assert len(published(tmp_path)) == 3


def test_progress_that_cannot_be_read_now_is_an_error(tmp_path: Path) -> None:
    state = tmp_path / "out_text_document.progress.json"
    state.symlink_to(state)
    with pytest.raises(
        DataError, match=r"progress\.json: cannot be read: Too many levels of symbolic links; w"
    ):
        preprocess(plan(lines(tmp_path / "in.jsonl"), tmp_path / "out"), ByteLevelTokenizer())
    assert state.is_symlink()


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("idx", lambda content: content[:-1]),
        ("idx", lambda content: content[:34] + bytes(len(content) - 34)),
        ("boundaries", lambda content: bytes(len(content))),
        ("boundaries", lambda content: content[:16] + bytes(16) + content[32:]),
        ("bin", lambda content: bytes(len(content))),
    ],
)
def test_a_run_does_not_go_on_behind_what_a_disk_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, damage: Callable[[bytes], bytes]
) -> None:
    every_batch_is_kept(monkeypatch)
    work = plan(lines(tmp_path / "in.jsonl", ["abc"] * 20), tmp_path / "out")
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        preprocess(work, ByteLevelTokenizer(), interrupted(8))
    partial = tmp_path / f"out_text_document.{file}.partial"
    partial.write_bytes(damage(partial.read_bytes()))
    preprocess(work, ByteLevelTokenizer(), warn=told.append)
    dataset = open_dataset(str(tmp_path / "out_text_document"))
    assert (dataset.lengths.tolist(), dataset.boundaries.tolist()) == ([3] * 20, [*range(21)])
    assert ["_document.*.partial are not what it wrote; this one" in line for line in told] == [True]


def test_a_run_of_another_key_leaves_progress_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every_batch_is_kept(monkeypatch)
    path = tmp_path / "in.jsonl"
    path.write_text('{"a": "x", "b": "y"}\n' * 20)
    works = {key: plan(str(path), tmp_path / "out", json_keys=[key]) for key in "ab"}
    for key in "ab":
        with pytest.raises(KeyboardInterrupt):
            preprocess(works[key], ByteLevelTokenizer(), interrupted(8))
    starts: list[int] = []
    preprocess(works["a"], ByteLevelTokenizer(), lambda progress: starts.append(progress.documents))
    assert starts[0] > 8


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_the_cursor_of_a_terminal_is_shown_again(tmp_path: Path, stop: signal.Signals) -> None:
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, str(TOOLS / "preprocess_data.py"), "--input", str(tmp_path / "pipe")]
    command += ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "ByteLevelTokenizer"]
    shown, terminal = os.openpty()
    process = subprocess.Popen(command, stderr=terminal, text=True)
    try:
        pipe = opened_once_it_is_read(tmp_path / "pipe", process)
        process.send_signal(stop)
        process.wait(timeout=60)
        os.close(pipe)
    finally:
        process.kill()
        os.close(terminal)
    with os.fdopen(shown, "rb", buffering=0) as screen:
        assert b"\x1b[?25h" in screen.read(1000)
    assert process.returncode == (-stop if stop == signal.SIGTERM else 130)


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


@pytest.mark.parametrize("year", [1, 2600])
def test_times_beyond_64_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, year: int) -> None:
    """As an input of tmpfs or NFS may have them, in nanoseconds."""
    inputs, prefix = find_inputs([lines(tmp_path / "in.jsonl")]), str(tmp_path / "out")
    before = RunState(prefix, inputs, {}).run
    monkeypatch.setattr(resume, "_stamp", lambda path: (42, (year - 1970) * 31_556_952 * 10**9))
    assert RunState(prefix, inputs, {}).run != before


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
    assert message == f"preprocess_data: interrupted{CONTINUES}\n"


@pytest.mark.parametrize(
    ("tool", "function", "flags", "message"),
    [
        ("preprocess_data", "settings.add_tokenizer_flags", ["--input", "x"], CONTINUES),
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


@pytest.mark.parametrize(
    "change",
    ["none", "an input", "another input", "an option", "no description", "a description", "the bytes"],
)
def test_a_share_that_is_complete_is_not_made_again(tmp_path: Path, change: str) -> None:
    """As when all of a cluster are given again because one has ended with an error."""
    lines(tmp_path / "in.jsonl", ["a", "b", "c", "d"])
    lines(tmp_path / "other.jsonl", ["e", "f", "g", "h"])
    description = tmp_path / "out_part00000of00002_text_document.json"

    def share(append_eod: bool = False, skip_errors: bool = False) -> list[str]:
        told: list[str] = []
        whole = find_inputs([str(tmp_path / "*.jsonl")], output_prefix=str(tmp_path / "out"))
        preprocess(
            PreprocessPlan(
                take_partition(whole, 0, 2),
                str(tmp_path / "out"),
                partition=(0, 2),
                corpus=corpus_hash(whole),
                whole=whole,
                append_eod=append_eod,
                skip_errors=skip_errors,
            ),
            ByteLevelTokenizer(),
            warn=told.append,
        )
        return told

    assert share() == []
    made = description.stat().st_mtime_ns
    if change == "an input":
        os.utime(tmp_path / "in.jsonl", (7, 7))
    elif change == "another input":
        (tmp_path / "other.jsonl").rename(tmp_path / "others.jsonl")
    elif change == "no description":
        description.unlink()
    elif change == "a description":
        description.write_text(description.read_text().replace('"documents": 4', '"documents": 5'))
    elif change == "the bytes":
        os.truncate(description.with_suffix(".bin"), 2)
    told = share(append_eod=True) if change == "an option" else share()
    if change == "none":
        (line,) = told
        assert line.endswith(
            "out_part00000of00002: is complete, of the same inputs and options; to make it "
            "again remove its .json"
        )
        assert description.stat().st_mtime_ns == made
        assert len(share(skip_errors=True)) == 1, "what is bad would have ended the run that made it"
        skipped = tmp_path / "out_part00000of00002_text_document.skipped.jsonl"
        skipped.touch()
        assert share() == [], "what was left out then may end this one"
        assert len(share()) == 1
        (skipped.with_name(f"{skipped.name}.partial")).touch()
        assert share(skip_errors=True) == [], "it was killed before its list had its name"
        return
    assert told == []
    assert description.stat().st_mtime_ns != made
    assert share(append_eod=change == "an option"), "complete again"


BUSY = """
import sys, time
from megalite.command import run_data_command
from megalite.data.tokenizer.null import NullTokenizer
encode = NullTokenizer.encode_flat
NullTokenizer.encode_flat = lambda self, texts: time.sleep(3600) if "1" in texts else encode(self, texts)
sys.path.insert(0, sys.argv.pop(1))
import preprocess_data
run_data_command(preprocess_data.main, "interrupted")
"""


def test_an_error_does_not_wait_for_a_text_that_takes_long(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "1"}\n' + '{"text": "2"}\n' * 9999 + "broken\n")
    flags = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), "--workers", "2"]
    done = subprocess.run(
        [sys.executable, "-c", BUSY, str(TOOLS), *flags, "--tokenizer-type=NullTokenizer", "--vocab-size=9"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "in.jsonl:10001: not valid JSON" in done.stderr


@pytest.mark.parametrize("change", ["grows", "shrinks", "is replaced", "is removed"])
def test_an_input_that_changes_under_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    every_batch_is_kept(monkeypatch)
    monkeypatch.setattr(encoding, "IN_FLIGHT_BYTES", 0)  # or all may be read before the first report
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
