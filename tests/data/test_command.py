"""The tools as commands: values of flags, standard streams, and messages in place of tracebacks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE

from megalite.data.build import build_datasets
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import open_dataset
from megalite.data.inputs import find_inputs
from megalite.data.inspect_samples import dump
from megalite.data.length_histogram import draw_png
from megalite.data.merge import merge
from megalite.standard_streams import LastingOutput, text_of
from tests.data.corpora import TOOLS, Words, command, data_config, lines, write_dataset

NUMBERS = ["workers", "partitions", "partition-index", "log-interval", "vocab-size", "null-tokenizer-eod-id"]
NUMBERS += ["tiktoken-num-special-tokens"]


@pytest.mark.parametrize(
    ("flag", "given", "expected"),
    [
        *(
            (f"--{name}", given, "a whole number from ")
            for name in NUMBERS
            for given in ("-1", "9" * 30, "x")
        ),
        ("--workers", "1025", "a whole number from 1 to 1024"),
        ("--vocab-size", "2147483648", "a whole number from 1 to 2147483647"),
        ("--null-tokenizer-eod-id", "2147483648", "a whole number from 0 to 2147483647"),
        ("--json-keys", "by\udcffte", "expected UTF-8"),
        ("--output-prefix", "s3://bucket/c", "a path of a file system; mount it, or copy it"),
        ("--output-prefix", "", "a path; is a variable of the shell not set?"),
        ("--eod-token", "", "text; is a variable of the shell not set?"),
        ("--eod-token", "by\udcffte", "expected UTF-8"),
    ],
)
def test_flags_without_measure(
    capsys: pytest.CaptureFixture[str], flag: str, given: str, expected: str
) -> None:
    from tools.preprocess_data import arguments

    with pytest.raises(SystemExit):
        arguments(["--input", "x", "--output-prefix", "out", flag, given])
    shown = given.replace("\udcff", "\\xff") or '""'
    assert (
        f"argument {flag}: {shown}: expected {expected.removeprefix('expected ')}" in capsys.readouterr().err
    )


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


def test_a_list_that_is_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from tools import inspect_data, merge_datasets, preprocess_data

    output = ["--output-prefix", "out"]
    for arguments, flag, others in (
        (preprocess_data.arguments, "--input", output),
        (preprocess_data.arguments, "--json-keys", [*output, "--input", "a"]),
        (merge_datasets.arguments, "--input", output),
        (inspect_data.arguments, "--data-path", []),
        (inspect_data.arguments, "--valid-data-path", []),
    ):
        with pytest.raises(SystemExit):
            arguments([*others, flag, "a", "b", flag, "c"])
        assert f"{flag}: given twice; give all its values behind one" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("task", "last"), [("4294967294x", "1"), ("1" * 5000, "1"), ("0", "1" * 5000), ("0", "")]
)
def test_a_slurm_task_that_is_no_number(monkeypatch: pytest.MonkeyPatch, task: str, last: str) -> None:
    from tools.preprocess_data import arguments, partition_of

    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", last)
    with pytest.raises(DataError, match=r"SLURM_ARRAY_TASK_MAX .{,42}: expected numbers"):
        partition_of(arguments(["--input", "x", "--output-prefix", "y", "--partitions", "2"]))


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
    with pytest.raises(DataError, match="--input -: Parquet is read from files only"):
        find_inputs(["-"], forced="parquet")


@pytest.mark.parametrize("shell", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_what_a_library_prints_is_in_no_file(tmp_path: Path, shell: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    endless = pre_tokenizers.Split(Regex("(x+x+)+y|[^x]+|x"), "isolated")  # Rust prints that it panics
    library.pre_tokenizer = pre_tokenizers.Sequence([endless, pre_tokenizers.ByteLevel(use_regex=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    flags = ["--input", lines(tmp_path / "in.jsonl", ["a", "x" * 60, "b"]), "--on-error", "skip"]
    flags += ["--workers", "1", "--tokenizer-model", str(tmp_path / "tokenizer.json")]
    found = [
        command("preprocess_data", *flags, "--output-prefix", tmp_path / name, shell=closed).returncode
        for name, closed in (("open", ""), ("closed", shell))
    ]
    assert found == [0, 0]
    for file in ("bin", "idx", "skipped.jsonl"):
        assert (
            Path(f"{tmp_path}/open_text_document.{file}").read_bytes()
            == Path(f"{tmp_path}/closed_text_document.{file}").read_bytes()
        )


FULL = "merge_datasets: error: all is done, but standard output takes nothing: No space left on device\n"


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ('"$@" | true', ""),
        ('"$@" > /dev/full', FULL),
        ('"$1" "$2" --input "$4" "$4" "$5" "$6" 2> /dev/full', ""),  # there is a warning
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
    with contextlib.redirect_stdout(text_of(raw := LastingOutput(writer), sys.stdout, "replace")):
        print("all is done")
    drain.join()
    assert (os.read(reader, filled), raw.error) == (b"all is done\n", None)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split", "1e308,1e308,1e308"], "1e308: shares must be finite, also their sum"),
        (["--dump", "/nowhere/x.npz"], "/nowhere/x.npz: cannot be written: No such file"),
        (["--verify"], "need the prefix of a dataset to describe"),
    ],
)
def test_inspect_data_says_what_is_wrong(tmp_path: Path, flags: Sequence[str], message: str) -> None:
    prefix = write_dataset(tmp_path / "a", [30, 40])
    found = command("inspect_data", "--data-path", prefix, "--split", "1", "--seq-length", "8", *flags)
    assert found.returncode != 0
    assert message in found.stderr
    assert "Traceback" not in found.stderr


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


@pytest.mark.parametrize("flag", ["--build-cache", "--dump=x.npz", "--iteration=1"])
def test_flags_of_a_run_need_its_data(tmp_path: Path, flag: str) -> None:
    found = command("inspect_data", write_dataset(tmp_path / "a", [3]), flag)
    assert (found.returncode, "--iteration and --load need --data-path" in found.stderr) == (2, True)


def test_a_picture_made_from_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "of_the_notebook")
    found = command("inspect_data", write_dataset(tmp_path / "a", [3]), "--histogram-png", tmp_path / "a.png")
    assert (found.returncode, found.stderr, (tmp_path / "a.png").is_file()) == (0, "", True)


def test_a_picture_for_which_tex_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def savefig(*_: object, **__: object) -> None:
        raise RuntimeError("xelatex not found")

    monkeypatch.setattr(Figure, "savefig", savefig)
    with pytest.raises(DataError, match=r"--histogram-png .*x\.pgf: xelatex not found"):
        draw_png({"title": []}, tmp_path / "x.pgf")


def test_a_dump_for_which_there_is_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 51200 bytes")

    config = data_config(tmp_path / "cache", write_dataset(tmp_path / "a", [30, 40]))
    train = build_datasets(config, Words(1000, 0), 8, 1, (8, 0, 0)).train
    assert train is not None
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(MemoryError, match="the first 8 samples of 8 tokens do not fit in memory"):
        dump(tmp_path / "dump.npz", {"train": train})
    assert not list(tmp_path.glob("dump*"))


def test_a_size_of_the_vocabulary_alone_is_no_tokenizer(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "a", [30, 40])
    found = command("inspect_data", prefix, "--verify", "--vocab-size", "1000")
    assert (found.returncode, found.stderr) == (0, "")
    found = command("inspect_data", prefix, "--verify", "--vocab-size", "10")
    assert (found.returncode, "Traceback" in found.stderr) == (1, False)


@pytest.mark.parametrize(
    ("tool", "flags", "file"),
    [
        (
            "prepare_sample",
            ["--input", "in.jsonl", "--vocab-size", "257", "--output", "made"],
            "tokenizer.json",
        ),
        ("inspect_data", ["a", "--histogram-png", "made/lengths.png"], "lengths.png"),
    ],
)
def test_a_file_for_which_there_is_no_room(
    tmp_path: Path, tool: str, flags: Sequence[str], file: str
) -> None:
    lines(tmp_path / "in.jsonl")
    write_dataset(tmp_path / "a", [3])
    (tmp_path / "made").mkdir()
    limited = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)); "
    limited += "os.execv(sys.executable, sys.argv[1:])"
    found = subprocess.run(
        [sys.executable, "-c", limited, sys.executable, str(TOOLS / f"{tool}.py"), *flags],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (found.returncode, "Traceback" in found.stderr) == (1, False)
    assert found.stderr.endswith(f"error: made/{file}: cannot be written: File too large\n")
    assert not list((tmp_path / "made").iterdir())


def test_prepare_sample_says_what_it_cannot_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tool = Path(__file__).parents[2] / "tools" / "prepare_sample.py"
    for flags, message in (
        (["--output", str(tmp_path / "file")], "File exists"),
        (["--output", str(tmp_path / "file" / "below")], "Not a directory"),
        (["--output", str(tmp_path / "sample"), "--vocab-size", "1000000000000"], "at most 10000000"),
        (["--entropy", f"{tmp_path}/"], "must end in its name"),
    ):
        done = subprocess.run(
            [sys.executable, str(tool), *flags], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert message in done.stderr
