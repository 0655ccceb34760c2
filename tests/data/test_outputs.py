"""What is written, replaced, described, published and left behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megalite.data import dataset_info
from megalite.data.dataset_info import read_info
from megalite.data.errors import DataError, replacing
from megalite.data.indexed_dataset import DatasetWriter, open_dataset
from megalite.data.inputs import find_inputs
from megalite.data.inspect_samples import dump
from megalite.data.merge import merge
from megalite.data.preprocess import PreprocessPlan, Progress, preprocess
from megalite.data.temporary_names import left_behind, process_space, temporary_name
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from megalite.data.tokenizer.null import NullTokenizer
from megalite.data.verify import verify
from tests.data.corpora import TOOLS, command, every_batch_is_kept, lines, plan, published, run, write_dataset


def test_an_input_is_not_written_over(tmp_path: Path) -> None:
    source = lines(tmp_path / "x_text_document.json")
    before = Path(source).read_bytes()
    with pytest.raises(DataError, match=r"x_text_document\.json: an input, but also an output"):
        run(find_inputs([source]), tmp_path / "x")
    assert Path(source).read_bytes() == before
    run(find_inputs([source]), tmp_path / "y")
    with pytest.raises(DataError, match="an input, but also an output"):
        run(find_inputs([str(tmp_path)]), tmp_path / "y")  # a folder that holds its own output
    with pytest.raises(DataError, match="--json-keys text text: each key once"):
        run(find_inputs([source]), tmp_path / "z", json_keys=["text", "text"])
    assert not list(tmp_path.glob("z*"))


@pytest.mark.parametrize(
    "name", ["a_document.skipped.jsonl", "a_document.progress.json", "a_document.idx", "b_document.json"]
)
def test_output_whose_name_a_folder_has(tmp_path: Path, name: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"a": "x", "b": "y"}\n')
    (tmp_path / f"out_{name}").mkdir()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(DataError, match=f"{name}: is no file that could be replaced; give another name"):
        preprocess(
            plan(str(tmp_path / "in.jsonl"), tmp_path / "out", json_keys=["a", "b"]), ByteLevelTokenizer()
        )
    assert sorted(os.listdir(tmp_path)) == before


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: is no file that could be replaced"):
        dump(tmp_path / "pipe", {})
    assert (tmp_path / "pipe").is_fifo()


def test_the_file_of_another_user_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = lines(tmp_path / "in.jsonl"), tmp_path / "shared"
    folder.mkdir()
    preprocess(plan(source, folder / "out"), ByteLevelTokenizer())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    preprocess(plan(source, folder / "out"), ByteLevelTokenizer())
    folder.chmod(0o1777)  # as /tmp: every user makes files, and replaces their own
    with pytest.raises(DataError, match=r"document\.bin: is another user's, who alone may replace it"):
        preprocess(plan(source, folder / "out"), ByteLevelTokenizer())
    preprocess(plan(source, folder / "other"), ByteLevelTokenizer())


def test_two_processes_do_not_write_one_dataset(tmp_path: Path) -> None:
    prefix = str(tmp_path / "out")
    writer = DatasetWriter(prefix, "uint16", sync=False)
    source = write_dataset(tmp_path / "a", [3, 4])
    other = command("merge_datasets", "--input", source, "--output-prefix", prefix)
    assert (other.returncode, "another process is writing this output" in other.stderr) == (1, True)
    writer.add(np.array([1, 2]), np.array([2], dtype=np.int32))
    writer.publish()
    assert open_dataset(prefix).stream().tolist() == [1, 2]
    assert command("merge_datasets", "--input", source, "--output-prefix", prefix).returncode == 0
    assert open_dataset(prefix).tokens == 7


def test_a_run_that_publishes_keeps_what_it_has_no_lock_for_any_more(tmp_path: Path) -> None:
    """It closes tokens and index before it gives them their names."""
    files = [tmp_path / f"out.{suffix}.partial" for suffix in ("boundaries", "bin", "idx")]
    for file in files:
        file.write_bytes(b"complete")
    with files[0].open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"boundaries\.partial: another process is writing this output"):
            DatasetWriter(str(tmp_path / "out"), "uint16")
    assert [file.read_bytes() for file in files] == [b"complete"] * 3


def test_files_that_several_write_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, node = tmp_path / "[a]", process_space()
    ended = subprocess.Popen(["true"])
    ended.wait()
    for left in (f"{node}.{ended.pid}.1", "othernode.1.1"):
        (tmp_path / f"[a].{left}.partial").touch()
    with replacing(path) as first:
        first.write_text("first")
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with replacing(path) as other:
            other.write_text("other")
        assert path.read_text() == "other"
    assert path.read_text() == "first"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["[a]", "[a].othernode.1.1.partial"]


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="containers are of Linux")
def test_what_another_container_writes_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes have numbers that nobody has here, and it may have the name of this node."""
    there = SimpleNamespace(st_ino=os.stat("/proc/self/ns/pid").st_ino + 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: 2**30)
        mine = temporary_name(tmp_path / "a")
        patched.setattr(os, "stat", lambda _: there)
        others = temporary_name(tmp_path / "a")
    others.touch()
    assert left_behind(tmp_path / "a") == []
    mine.touch()
    assert left_behind(tmp_path / "a") == [mine]


def test_a_run_that_fails_leaves_nothing_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = find_inputs([lines(tmp_path / "in.jsonl")])
    with pytest.raises(DataError, match=r"boundaries\.partial: cannot be written: File name too long"):
        run(inputs, tmp_path / ("x" * 225))  # as long as others can be, as .skipped.jsonl.partial
    monkeypatch.setattr(np, "savez", lambda file: os.ftruncate(file.fileno(), -1))
    with pytest.raises(DataError, match=r"out\.npz: cannot be written"):
        dump(tmp_path / "out.npz", {})
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


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
@pytest.mark.parametrize("file", ["out_a_document.skipped.jsonl", "out_a_document.bin", "out_b_document.idx"])
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
    assert not (tmp_path / "out_a_document.skipped.jsonl").exists()
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


def test_a_description_does_not_outlive_its_dataset(tmp_path: Path) -> None:
    run(find_inputs([lines(tmp_path / "in.jsonl")]), tmp_path / "x")
    with_info = str(tmp_path / "x_text_document")
    without = write_dataset(tmp_path / "y", [3, 4])
    out = str(tmp_path / "out")
    merge([with_info], out)
    assert read_info(out) is not None
    merge([without], out)
    assert read_info(out) is None


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("vocab_size", "an integer"),
        ("format", "an integer"),
        ("crc32", "an integer"),
        ("dtype", "a string"),
        ("sources", "a list of strings"),
        ("partition", "two integers or null"),
        ("eod", "an integer or null"),
        ("tokenizer", "a string or null"),
    ],
)
def test_a_description_of_wrong_types(tmp_path: Path, field: str, expected: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    plan = PreprocessPlan(find_inputs([str(tmp_path / "in.jsonl")]), str(tmp_path / "a"))
    preprocess(plan, ByteLevelTokenizer())
    prefix = str(tmp_path / "a_text_document")
    content = json.loads(Path(f"{prefix}.json").read_text())
    for wrong in ("1.5", "[[]]"):
        Path(f"{prefix}.json").write_text(json.dumps({**content, field: json.loads(wrong)}))
        message = f"_document.json: cannot be read as a dataset's description: {field}: "
        message += f"expected {expected}, found {wrong};"
        with pytest.raises(DataError, match=re.escape(message)):
            read_info(prefix)
    Path(f"{prefix}.json").write_text(json.dumps({**content, "format": 2, "of_later": "x"}))
    with pytest.raises(DataError, match="its format is 2, and this version knows 1; move it away to go on"):
        read_info(prefix)
    Path(f"{prefix}.json").write_text("[1]")
    with pytest.raises(DataError, match="description: expected an object"):
        read_info(prefix)


def test_a_list_of_skipped_documents_belongs_to_its_dataset(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"a": "x", "b": "y"}\n{"b": "y"}\n')
    inputs = find_inputs([str(tmp_path / "in.jsonl")])
    lists = [tmp_path / f"out_{key}_document.skipped.jsonl" for key in "ab"]
    run(inputs, tmp_path / "out", json_keys=["a"], skip_errors=True)
    run(inputs, tmp_path / "out", json_keys=["b"], skip_errors=True)
    assert [path.exists() for path in lists] == [True, False]
    run(inputs, tmp_path / "out", json_keys=["b", "a"], skip_errors=True)
    assert [path.exists() for path in lists] == [False, True]


def test_very_many_sources_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        for number in range(10):
            lines(folder / f"{number}.jsonl")
    monkeypatch.setattr(dataset_info, "LISTED_BYTES", 4 * (len(str(folders[0] / "0.jsonl")) + 8))
    for folder in folders:
        run(find_inputs([str(folder)]), tmp_path / folder.name)
    merge([f"{folder}_text_document" for folder in folders], str(tmp_path / "whole"))
    for name, more in (("one_text_document", 6), ("whole", 16)):
        info = read_info(str(tmp_path / name))
        assert info is not None
        first = [str(folders[0] / f"{number}.jsonl") for number in range(4)]
        assert info.sources == (*first, f"... and {more} more")


@pytest.mark.parametrize(("vocab_size", "fits"), [(65536, True), (65537, False)])
def test_a_type_that_does_not_hold_the_vocabulary(tmp_path: Path, vocab_size: int, fits: bool) -> None:
    work = plan(lines(tmp_path / "in.jsonl"), tmp_path / "out", dtype="uint16", skip_errors=True)
    tokenizer = NullTokenizer(vocab_size, None)
    if fits:
        assert preprocess(work, tokenizer)[0].dtype == "uint16"
        return
    with pytest.raises(
        DataError, match=r"--dtype uint16: holds ids up to 65,535, .* up to 65,536; give int32"
    ):
        preprocess(work, tokenizer)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_a_foreign_file_in_place_of_a_description_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    os.truncate(tmp_path / "a.json", 1 << 40)
    with pytest.raises(DataError, match=r"a\.json: cannot be read .*: it has more than 256 MiB"):
        read_info(str(tmp_path / "a"))
