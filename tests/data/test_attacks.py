"""What once lost, doubled or overwrote data, took memory without bound, or ended in a traceback."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import zstandard

from megalite.config.blend import parse_blend
from megalite.data import records as records_module
from megalite.data.blended_dataset import cached_blend_index
from megalite.data.build import build_datasets
from megalite.data.command import _Lasting, _text
from megalite.data.dataset_info import read_info
from megalite.data.engine_check import check_engine, choose_engine
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import DatasetWriter, open_dataset
from megalite.data.inputs import Part, find_inputs, take_partition
from megalite.data.inspect_samples import dump
from megalite.data.merge import merge
from megalite.data.preprocess import BATCH_DOCUMENTS, PreprocessPlan, _read_batches, preprocess
from megalite.data.records import line_number, read_records
from megalite.data.resume import Place, RunState
from megalite.data.shortage import Room
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from megalite.data.zstd_stream import ZstdStream
from tests.data.corpora import Words, data_config, write_dataset

TOOLS = Path(__file__).parents[2] / "tools"


def lines(path: Path, count: int = 3) -> str:
    path.write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(count)))
    return str(path)


def run(inputs: Sequence[Part], prefix: Path, **fields: object) -> None:
    preprocess(PreprocessPlan(inputs, str(prefix), **fields), ByteLevelTokenizer())  # type: ignore[arg-type]


def command(tool: str, *args: object, shell: str = "") -> subprocess.CompletedProcess[str]:
    """A tool with `shell` behind its arguments."""
    line = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, str(TOOLS / f"{tool}.py")]
    return subprocess.run(
        [*line, *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )


def test_nothing_of_a_pipe_is_read_before_the_run(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    part = Part(str(pipe), "json")
    with pytest.raises(DataError, match="cannot be checked before"):
        check_engine(ByteLevelTokenizer(), ByteLevelTokenizer(), [part], ["text"])
    (tmp_path / "large.txt").touch()
    os.truncate(tmp_path / "large.txt", 1 << 30)
    inputs = [part, Part(str(tmp_path / "large.txt"), "text")]
    assert choose_engine("auto", ByteLevelTokenizer(), inputs, ["text"])[1] == "library"


def test_a_pipe_is_not_read_in_parts_and_not_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools import preprocess_data

    flags = ["--output-prefix", str(tmp_path / "x"), "--tokenizer-type", "ByteLevelTokenizer"]
    flags += ["--partitions", "2", "--partition-index", "0"]
    assert preprocess_data.main(["--input", "-", *flags]) == 1
    assert "standard input and pipes cannot be read in parts: -" in capsys.readouterr().err
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match=f"cannot be read in parts: {pipe}"):
        take_partition([Part(str(pipe), "json")], 0, 2)
    state = RunState(str(tmp_path / "out"), [Part(str(pipe), "json")], {})
    state.path.write_text(
        json.dumps({"run": state.run, "place": list(Place()), "written": [[]], "skipped": [0, 0]})
    )
    assert state.load() is None  # what a killed run took from it is gone
    writer = threading.Thread(target=pipe.write_text, args=('{"text": "ab"}\n',))
    writer.start()
    run([Part(str(pipe), "json")], tmp_path / "out")
    writer.join()
    assert open_dataset(str(tmp_path / "out_text_document")).tokens == 2


def test_empty_files_at_the_end_belong_to_the_last_partition(tmp_path: Path) -> None:
    for name, text in (("a", ""), ("b", "hello"), ("c", ""), ("d", "")):
        (tmp_path / f"{name}.txt").write_text(text)
    whole = find_inputs([str(tmp_path)])
    for partitions in (1, 2, 3, 9):
        assert [part for i in range(partitions) for part in take_partition(whole, i, partitions)] == whole
    empty = whole[2:]
    assert [part for i in range(2) for part in take_partition(empty, i, 2)] == empty


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


def test_standard_streams_that_are_closed(tmp_path: Path) -> None:
    flags = ["--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]
    closed = command(
        "preprocess_data", "--input", "-", "--output-prefix", tmp_path / "a", *flags, shell="<&-"
    )
    assert (closed.returncode, "standard input is closed" in closed.stderr) == (1, True)
    assert "Traceback" not in closed.stderr
    source = lines(tmp_path / "in.jsonl")
    silent = command(
        "preprocess_data", "--input", source, "--output-prefix", tmp_path / "b", *flags, shell="2>&-"
    )
    assert silent.returncode == 0
    assert open_dataset(str(tmp_path / "b_text_document")).documents == 3
    with pytest.raises(DataError, match="standard input can be read only once"):
        find_inputs(["-", "-"])


def test_skipped_records_fill_a_batch(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\n" * (3 * BATCH_DOCUMENTS))
    plan = PreprocessPlan(find_inputs([str(tmp_path / "in.jsonl")]), str(tmp_path / "o"), skip_errors=True)
    batches = _read_batches(plan, Place(), RunState(plan.stem, plan.inputs, {}), Room())
    assert [len(batch.skipped) for batch in batches] == [BATCH_DOCUMENTS] * 3


def test_the_lines_before_a_part_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(lines(tmp_path / "in.jsonl", 100), "json", start=400)
    first = line_number(part, 1)
    monkeypatch.setattr(records_module, "_first_line_start", None)  # reading again would call it
    assert line_number(part, 5) == first + 4


def test_text_of_a_column_that_is_none(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    offsets, values = np.array([0, 1, 3, 4], dtype=np.int32), b"a\xff\xfeb"
    buffers = [None, pyarrow.py_buffer(offsets.tobytes()), pyarrow.py_buffer(values)]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, buffers)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "in.parquet")
    inputs = find_inputs([str(tmp_path / "in.parquet")])
    with pytest.raises(DataError, match=r"in\.parquet:2: not valid UTF-8"):
        run(inputs, tmp_path / "stop")
    run(inputs, tmp_path / "skip", skip_errors=True)
    dataset = open_dataset(str(tmp_path / "skip_text_document"))
    assert dataset.stream().tolist() == list(b"ab")
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"x"]}), tmp_path / "in.parquet")
    with pytest.raises(DataError, match="found a value of type bytes"):
        run(inputs, tmp_path / "bytes")
    assert [record.number for record in read_records(inputs[0], ["text"])] == [1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["body", "id"], r"in\.parquet:1: no key 'text'; the keys are 'body', 'id'"),
        (["text", "text"], r"in\.parquet: has several columns 'text', of which one only would be read"),
    ],
)
def test_columns_that_do_not_fit(tmp_path: Path, columns: Sequence[str], message: str) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=columns)
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(DataError, match=message):
        run(find_inputs([str(tmp_path / "in.parquet")]), tmp_path / "out")


def test_skipped_documents_are_listed_in_their_order(tmp_path: Path) -> None:
    class Choosy(ByteLevelTokenizer):
        def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
            if "bad" in texts:
                raise ValueError("bad")
            return super().encode_flat(texts)

    (tmp_path / "in.jsonl").write_text('{"text": "bad"}\n{}\n{"text": "bad"}\n{}\n')
    inputs = find_inputs([str(tmp_path / "in.jsonl")])
    preprocess(PreprocessPlan(inputs, str(tmp_path / "out"), skip_errors=True), Choosy())
    listed = (tmp_path / "out.skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in listed] == [1, 2, 3, 4]


def test_a_run_that_fails_leaves_nothing_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = find_inputs([lines(tmp_path / "in.jsonl")])
    with pytest.raises(DataError, match=r"boundaries\.partial: cannot be written: File name too long"):
        run(inputs, tmp_path / ("x" * 225))  # as long as others can be, as .skipped.jsonl.partial
    monkeypatch.setattr(np, "savez", lambda file: os.ftruncate(file.fileno(), -1))
    with pytest.raises(DataError, match=r"out\.npz\.partial: cannot be written"):
        dump(tmp_path / "out.npz", {})
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


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


def test_a_merge_does_not_eat_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset(Path("a"), [3, 4])
    before = Path("a.bin").read_bytes()
    for name in ("./a", str(tmp_path / "a")):
        with pytest.raises(DataError, match="the output is one of the inputs"):
            merge(["a"], name)
    for suffix in ("bin", "idx"):
        Path("other").mkdir(exist_ok=True)
        Path(f"other/link.{suffix}").symlink_to(f"../a.{suffix}")
    Path("folder").symlink_to(".")
    for inputs, name in ((["other/link"], "a"), (["a"], "other/link"), (["a"], "folder/a")):
        with pytest.raises(DataError, match=f"{name}: the output is one of the inputs, {inputs[0]}"):
            merge(inputs, name)
    assert Path("a.bin").read_bytes() == before
    lines(Path("corpus.json"))
    with pytest.raises(DataError, match=r"corpus\.json: cannot be read as a dataset's description"):
        merge(["a"], "corpus")
    assert not Path("corpus.idx").exists()


def both_keys(path: Path) -> list[Part]:
    path.write_text('{"a": "x", "b": "y"}\n' * 8)
    return find_inputs([str(path)])


def test_a_folder_is_merged_whole_or_not_at_all(tmp_path: Path) -> None:
    from tools.merge_datasets import find_datasets

    inputs, folder = both_keys(tmp_path / "in.jsonl"), tmp_path / "parts"
    run(inputs, folder / "x", json_keys=["a"])
    run(inputs, folder / "y", json_keys=["a"])
    before = [f"{folder}/x_a_document", f"{folder}/y_a_document"]
    assert find_datasets([str(folder)]) == before
    for name in ("z.bin", "z.bin.partial", "z.idx.partial"):  # of a copy or a run that has not ended
        (folder / name).touch()
        with pytest.raises(DataError, match=r"parts/z\.idx does not exist; a dataset is a pair of files"):
            merge(find_datasets([str(folder)]), str(tmp_path / "whole"))
        (folder / name).unlink()
    run(inputs, folder / "x", json_keys=["b"])
    with pytest.raises(DataError, match="parts: holds datasets of the keys a, b"):
        find_datasets([str(folder)])
    assert find_datasets([*before, f"{folder}/x_b_document"])[2] == f"{folder}/x_b_document"


@pytest.mark.parametrize("described", [True, False])
def test_shares_are_not_merged_with_their_whole(tmp_path: Path, described: bool) -> None:
    inputs = both_keys(tmp_path / "in.jsonl")
    prefixes = [str(tmp_path / f"x_part0000{i}of00002_a_document") for i in range(2)]
    for i in range(2):
        run(take_partition(inputs, i, 2), tmp_path / "x", json_keys=["a"], partition=(i, 2), corpus="c")
    merge(prefixes, str(tmp_path / "whole"))
    if not described:  # as by a program that is not ours
        (tmp_path / "whole.json").unlink()
    with pytest.raises(DataError, match=r"whole: is no share of a corpus, as .* is; merge the shares by"):
        merge([*prefixes, str(tmp_path / "whole")], str(tmp_path / "other"))
    assert not (tmp_path / "other.idx").exists()


def test_a_file_that_is_read_again_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is read again: in Megatron-LM too that is how a file is given more weight."""
    monkeypatch.chdir(tmp_path)
    lines(Path("x.jsonl"))
    Path("link.jsonl").symlink_to("x.jsonl")
    flags = ["--tokenizer-type", "ByteLevelTokenizer", "--workers", "1", "--output-prefix", "out"]
    done = command("preprocess_data", "--input", "x.jsonl", "./x.jsonl", "*.jsonl", *flags)
    assert "warning: read again, so that documents come several times: ./x.jsonl (the same as x.jsonl), " in (
        done.stderr
    )
    assert "link.jsonl (the same as x.jsonl), x.jsonl (the same as x.jsonl)\n" in done.stderr
    assert open_dataset("out_text_document").documents == 4 * 3
    write_dataset(Path("a"), [3, 4])
    done = command("merge_datasets", "--input", "a", "./a", "--output-prefix", "whole")
    assert (done.returncode, open_dataset("whole").tokens) == (0, 14)
    assert "warning: read again, so that documents come several times: ./a.bin (the same as a.bin)" in (
        done.stderr
    )
    assert command("merge_datasets", "--input", "a", "whole", "--output-prefix", "b").stderr == ""
    done = command("merge_datasets", "--input", ".", "--output-prefix", "all")  # the next would read it again
    assert done.returncode == 1
    assert "folder ., all of which is read; give another, or the prefixes in it" in done.stderr


def test_a_description_does_not_outlive_its_dataset(tmp_path: Path) -> None:
    run(find_inputs([lines(tmp_path / "in.jsonl")]), tmp_path / "x")
    with_info = str(tmp_path / "x_text_document")
    without = write_dataset(tmp_path / "y", [3, 4])
    out = str(tmp_path / "out")
    merge([with_info], out)
    assert read_info(out) is not None
    merge([without], out)
    assert read_info(out) is None


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


def test_an_index_never_stands_beside_tokens_of_another_run(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "out", [3, 4], seed=1)

    Path(f"{prefix}.bin").unlink()
    Path(f"{prefix}.bin").mkdir()  # the first rename fails, as if the run were killed there
    with pytest.raises(DataError, match="cannot be given its final name"):
        write_dataset(tmp_path / "out", [3, 4], seed=2)

    assert not Path(f"{prefix}.idx").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split", "1e308,1e308,1e308"], "1e308: shares must be finite, also their sum"),
        (["--dump", "/nowhere/x.npz"], "/nowhere/x.npz.partial: cannot be written: No such file"),
    ],
)
def test_inspect_data_says_what_is_wrong(tmp_path: Path, flags: Sequence[str], message: str) -> None:
    prefix = write_dataset(tmp_path / "a", [30, 40])
    found = command("inspect_data", "--data-path", prefix, "--split", "1", "--seq-length", "8", *flags)
    assert found.returncode != 0
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def test_an_empty_path_is_not_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools import inspect_data, merge_datasets, prepare_sample, preprocess_data

    monkeypatch.chdir(tmp_path)
    write_dataset(Path("a"), [3])
    before = sorted(os.listdir())
    merge_flags = {"--input": "a", "--output-prefix": "b"}
    tokenizer = {"--tokenizer-model": "t", "--vocab-file": "v", "--merge-file": "m"}
    work = {**merge_flags, **tokenizer}
    runs = {
        "--data-path": "a",
        "--data-cache-path": "c",
        "--load": "d",
        "--histogram-png": "e",
        "--dump": "f",
    }
    for main, flags in (
        (merge_datasets.main, merge_flags),
        (preprocess_data.main, work),
        (inspect_data.main, runs),
        (prepare_sample.main, {"--output": "b", "--input": "a.bin"}),
        (prepare_sample.main, {"--entropy": "a"}),
    ):
        for empty in flags:
            with pytest.raises(SystemExit):
                main([word for flag in flags for word in (flag, "" if flag == empty else flags[flag])])
            assert f'{empty}: "": expected a path' in capsys.readouterr().err
    for prefix in ("", "folder/"):
        with pytest.raises(DataError, match="a dataset's path must end in its name"):
            merge(["a"], prefix)
    assert sorted(os.listdir()) == before


def test_a_number_beyond_its_range_is_told_for_each_flag(capsys: pytest.CaptureFixture[str]) -> None:
    from tools.inspect_data import arguments

    flags = ["seq-length", "seed", "train-samples", "valid-samples", "test-samples", "iteration", "document"]
    flags += ["global-batch-size", "micro-batch-size", "data-parallel-size"]
    for given in ("-1", "9223372036854775808", "1e3", "nan", "9" * 5000):
        shown = given if len(given) < 40 else f"{given[:37]}..."
        for flag in flags:
            with pytest.raises(SystemExit):
                arguments(["prefix", f"--{flag}", given])
            assert f"--{flag}: {shown}: expected a whole number from " in capsys.readouterr().err
        with pytest.raises(SystemExit):
            arguments(["prefix", "--rampup-batch-size", "1", "1", given])
        assert f"{shown}: expected a whole number from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [("x.foo", "Format 'foo' is not supported"), ("", "is no file that could be replaced")],
)
def test_a_picture_that_cannot_be_made(tmp_path: Path, name: str, message: str) -> None:
    prefix, target = write_dataset(tmp_path / "a", [3]), tmp_path / "pictures" / name
    (tmp_path / "pictures").mkdir()
    found = command("inspect_data", prefix, "--histogram-png", target)
    assert (found.returncode, "Traceback" in found.stderr) == (1, False)
    assert message in found.stderr
    assert not (tmp_path / "pictures.png").exists()


FULL = "merge_datasets: error: all is done, but standard output takes nothing: No space left on device\n"


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ('"$@" | true', ""),
        ('"$@" > /dev/full', FULL),
        ('"$@" --input "$4" "$4" 2> /dev/full', ""),  # there is a warning
        ('PYTHONIOENCODING=ascii "$@"', ""),
        ('mkdir x; cd x; rmdir ../x; "$@"', "merge_datasets: error: the working folder was deleted\n"),
    ],
)
def test_what_becomes_of_its_output_does_not_end_a_tool(tmp_path: Path, shell: str, message: str) -> None:
    prefix = write_dataset(tmp_path / "naïve", [3, 4])
    line = ["sh", "-c", shell, "sh", sys.executable, str(TOOLS / "merge_datasets.py"), "--input", prefix]
    line += ["--output-prefix", str(tmp_path / "whole")]
    found = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (found.returncode, found.stderr) == (int(message != ""), message)
    assert (tmp_path / "whole.idx").exists() == ("deleted" not in message)


def test_output_that_does_not_block_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = os.write(writer, bytes(1 << 24))
    drain = threading.Timer(0.2, os.read, (reader, filled))
    drain.start()
    with contextlib.redirect_stdout(_text(raw := _Lasting(writer), sys.stdout, "replace")):
        print("all is done")
    drain.join()
    assert (os.read(reader, filled), raw.error) == (b"all is done\n", None)
    os.close(reader)
    os.close(writer)


def test_a_slurm_task_that_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4294967294x")
    flags = ["--tokenizer-type", "ByteLevelTokenizer", "--partitions", "2"]
    found = command(
        "preprocess_data", "--input", lines(tmp_path / "in.jsonl"), "--output-prefix", tmp_path / "o", *flags
    )
    assert (found.returncode, "expected numbers" in found.stderr) == (1, True)


def test_a_damaged_blend_in_the_cache_is_built_again(tmp_path: Path) -> None:
    before = [array.tolist() for array in cached_blend_index(tmp_path, [0.5, 0.5], 20)]
    for path in tmp_path.glob("*/*.npy"):
        array = np.load(path)
        for wrong in (-1, 0, 12345):
            np.save(path, np.full_like(array, wrong))
            assert [array.tolist() for array in cached_blend_index(tmp_path, [0.5, 0.5], 20)] == before


def test_a_blend_that_is_cut_while_it_is_read_is_a_message(tmp_path: Path) -> None:
    prefixes = [write_dataset(tmp_path / name, [30] * 2000) for name in "ab"]
    config = data_config(tmp_path / "cache", "1", prefixes[0], "1", prefixes[1])
    dataset = build_datasets(config, Words(1000, 999), 8, 1, (5000, 0, 0)).train
    assert dataset is not None
    assert dataset.order is not None
    saved = dataset.order.record(10)
    changed = data_config(tmp_path / "cache", "1", prefixes[0], "2", prefixes[1])
    resumed = build_datasets(changed, Words(1000, 999), 8, 1, (5000, 0, 0), saved).train
    assert resumed is not None
    for path in (tmp_path / "cache").glob("*/dataset_sample_index.npy"):
        os.truncate(path, 200)
    time.sleep(0.02)  # a file that was good is not looked at for 10 ms
    for source in (dataset.samples, resumed.samples):
        with pytest.raises(DataError, match=r"dataset_sample_index\.npy: had .* bytes when it was opened"):
            source.read(np.arange(4000, 4010), np.empty((10, 9), dtype=np.int64))
        with pytest.raises(DataError, match="something cut it while it was in use"):
            source.places(4000)


def test_a_blend_that_is_too_long_is_told_before_it_is_made(tmp_path: Path) -> None:
    prefixes = [write_dataset(tmp_path / name, [30] * 20) for name in "ab"]
    config = data_config(tmp_path / "cache", "1", prefixes[0], "1", prefixes[1])
    with pytest.raises(DataError, match="a blend of 1000000000000 samples would take an index of 10000 GB"):
        build_datasets(config, Words(1000, 999), 8, 1, (10**12, 0, 0))


def test_weights_whose_sum_overflows() -> None:
    with pytest.raises(ValueError, match="the sum of the weights 1e308 1e308 is not finite"):
        parse_blend(["1e308", "a", "1e308", "b"])


def test_a_frame_that_unpacks_to_much_is_read_in_pieces(tmp_path: Path) -> None:
    size = 256 << 20
    compressor = zstandard.ZstdCompressor().compressobj()
    pieces = [compressor.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    (tmp_path / "a.zst").write_bytes(b"".join([*pieces, compressor.flush()]))
    stream = ZstdStream((tmp_path / "a.zst").open("rb"))
    buffer, found = bytearray(1 << 20), 0
    tracemalloc.start()
    while count := stream.readinto(buffer):
        found += count
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stream.close()
    assert found == size
    assert peak < size  # in pieces of 32 KiB, all of it at once
