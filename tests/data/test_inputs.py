"""What is found as an input: folders, patterns, links, pipes, parts of files, and what is left out."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from megalite.data import folders, text_batches
from megalite.data.errors import DataError
from megalite.data.folders import matches
from megalite.data.indexed_dataset import open_dataset
from megalite.data.inputs import Part, check_apart, corpus_hash, find_inputs, take_partition
from megalite.data.merge import merge
from megalite.data.preprocess import PreprocessPlan, preprocess
from megalite.data.resume import NotContinued, Place, RunState
from megalite.data.shortage import Room
from megalite.data.temporary_names import temporary_name
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from tests.data.corpora import command, lines, run, write_dataset
from tests.data.unprivileged import LINUX, drop


@pytest.fixture
def corpus_with_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the working folder: corpus/a, corpus/b and corpus/link, each with a file."""
    monkeypatch.chdir(tmp_path)
    for name in ("corpus/a", "corpus/b", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.jsonl").write_text('{"text": "x"}\n')
    Path("corpus/link").symlink_to("../elsewhere")


@pytest.mark.usefixtures("corpus_with_a_link")
@pytest.mark.parametrize("given", [".", "c*", "*/*.jsonl", "**/*.jsonl"])
def test_nothing_of_a_folder_is_left_out_without_a_word(given: str) -> None:
    os.mkfifo("corpus/pipe")
    pattern = f"corpus/{given}" if given != "c*" else given
    assert len(find_inputs([pattern])) == 3
    Path("corpus/a/gone.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"corpus/.*a/gone\.jsonl: a link to .*/nowhere, which is not there"):
        find_inputs([pattern])
    Path("corpus/a/gone.jsonl").unlink()
    Path("corpus/b/back").symlink_to("..")
    if given != "*/*.jsonl":
        with pytest.raises(DataError, match="b/back: a link to a folder that it lies in"):
            find_inputs([pattern])


def test_what_is_no_file_is_not_an_input_of_no_documents(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.jsonl")
    for given, message in (
        ("/dev/null", "/dev/null: a socket or a device; give - for standard input"),
        (f"{tmp_path}/*.jsonl", r"in\.jsonl: a pipe, socket or device; give a pipe by its name"),
    ):
        with pytest.raises(DataError, match=message):
            find_inputs([given])
    with pytest.raises(DataError, match=r"in\.jsonl: a pipe can be read only once"):
        find_inputs([f"{tmp_path}/in.jsonl"] * 2)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_beside_its_compressed_copy_is_told(tmp_path: Path, suffix: str) -> None:
    told: list[str] = []
    for name in ("a.jsonl", f"a.jsonl.{suffix}", "b.jsonl.gz"):
        (tmp_path / name).touch()
    find_inputs([str(tmp_path)], warn=told.append)
    name = f"{tmp_path}/a.jsonl"
    assert told == [
        f"read again, so that documents come several times: {name}.{suffix} (compressed what {name} is, by "
        "its name)"
    ]


@pytest.mark.parametrize("name", ["a.jsonl.xz", "a.BZ2", "a.lz4", "a.tar", "a.tgz", "a.tar.gz", "a.zip"])
def test_a_compression_that_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    for given in (tmp_path / name, tmp_path / "a.*", tmp_path):
        with pytest.raises(
            DataError, match=rf"{name}: \.\w+ is not read; recompress .*: \w+ -\w+ .*{name} \|"
        ):
            find_inputs([str(given)])
    assert find_inputs([str(tmp_path)], forced="json") == [Part(str(tmp_path / name), "json")]


def test_an_input_that_grows_while_it_is_cut_into_shares(tmp_path: Path) -> None:
    path = lines(tmp_path / "in.jsonl")
    whole = find_inputs([path])
    corpus, inputs = corpus_hash(whole), take_partition(whole, 0, 1)
    with open(path, "a") as file:
        file.write('{"text": "3"}\n')
    with pytest.raises(DataError, match="inputs changed while they were cut into shares"):
        run(inputs, tmp_path / "out", partition=(0, 1), corpus=corpus, whole=whole)
    inputs, corpus = take_partition(whole, 0, 1), corpus_hash(whole)
    run(inputs, tmp_path / "out", partition=(0, 1), corpus=corpus, whole=whole)


FIND_EACH = """
import sys
from megalite.data.errors import DataError
from megalite.data.inputs import find_inputs
for pattern in sys.argv[1:]:
    try:
        print(find_inputs([pattern]))
    except (DataError, OSError) as error:
        print(error)
"""
READS_ALL = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: whoever has one may read every folder


@LINUX
@pytest.mark.parametrize("name", ["b", "lost+found"])
def test_a_folder_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    for folder in ("a", name):
        (tmp_path / "corpus" / folder).mkdir(parents=True)
        (tmp_path / "corpus" / folder / "x.jsonl").touch()
    (tmp_path / "corpus" / name).chmod(0)
    patterns = ["corpus", "c*", "corpus/*", "corpus/*/*.jsonl", "corpus/**/*.jsonl"]
    line = [sys.executable, "-c", FIND_EACH, *patterns]
    done = subprocess.run(
        line, capture_output=True, text=True, cwd=tmp_path, check=True, preexec_fn=lambda: drop(*READS_ALL)
    )
    (tmp_path / "corpus" / name).chmod(0o755)
    found = done.stdout.splitlines()
    assert len(found) == len(patterns)
    for message in found:
        if name == "b":
            assert re.search(r"corpus/b/?: cannot be read: Permission denied$", message)
        else:
            assert message == str([Part("corpus/a/x.jsonl", "json")])


class Failing:
    """Looks at files and folders of which one fails, as on NFS for a moment."""

    def __init__(self, fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._before_failure = fails
        scandir, looks = os.scandir, {"stat": os.stat, "lstat": os.lstat}

        def failing(look: Callable[..., os.stat_result], *args: object, **how: object) -> os.stat_result:
            self._look()
            return look(*args, **how)

        def looked_at(entries: Iterator[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
            for entry in entries:
                self._look()
                yield entry

        @contextlib.contextmanager
        def failing_scandir(path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
            with scandir(path) as entries:
                yield looked_at(entries)

        monkeypatch.setattr(os, "scandir", failing_scandir)
        for name, look in looks.items():
            monkeypatch.setattr(os, name, functools.partial(failing, look))

    def _look(self) -> None:
        self._before_failure -= 1
        if self._before_failure == -1:
            raise OSError(errno.ESTALE, "Stale file handle")

    @property
    def failed(self) -> bool:
        return self._before_failure < 0


@pytest.mark.usefixtures("corpus_with_a_link")
@pytest.mark.parametrize("pattern", ["corpus", "c*", "c*/*", "*/*/x.jsonl", "corpus/**", "**/*.jsonl"])
def test_no_failing_look_leaves_out_a_file(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    expected = find_inputs([pattern])
    told: list[Part] | str
    for fails in itertools.count():
        with monkeypatch.context() as context:
            failing = Failing(fails, context)
            try:
                told = find_inputs([pattern])
            except DataError as error:
                told = str(error)
        if told != expected:
            assert re.search(r"^--input \S+: cannot be read: Stale file handle$", str(told))
        if not failing.failed:
            break
    assert fails > 10


def test_patterns_match_what_they_match_for_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random = Random(0)
    names = ("a", "ab", ".h", "b~", "x.jsonl", "[b]")
    for number in range(30):
        folders = [Path(str(number))]
        folders[0].mkdir()
        for _ in range(12):
            path = random.choice(folders) / random.choice(names)
            if os.path.lexists(path):
                continue
            match random.choice(("folder", "file", "file", "link")):
                case "folder":
                    path.mkdir()
                    folders.append(path)
                case "file":
                    path.touch()
                case "link":
                    path.symlink_to(random.choice(("nowhere", "x.jsonl", "../file")))
        monkeypatch.chdir(tmp_path / str(number))
        for _ in range(60):
            parts = random.choices((*names, "*", "**", "a*", ".*", "?", "*[b~]", "[!a]*", "x**", ".."), k=3)
            pattern = "/".join(parts[: random.randint(1, 3)]) + random.choice(("", "", "/"))
            expected = glob.glob(pattern, recursive=True)
            expected = [path for path in expected if not path.endswith("/") or os.path.isdir(path)]
            assert [path for path in matches(pattern) if path] == sorted(expected), pattern
        monkeypatch.chdir(tmp_path)


def test_a_folder_that_stars_match_is_read_once_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in/part1/part.jsonl", "in/part1/other/x.jsonl", "in/deep/part2/x.jsonl", "in/part3"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    told: list[str] = []
    every = {str(path) for path in Path("in").rglob("*") if path.is_file()}
    missed = {"in/p**": {"in/deep/part2/x.jsonl"}, "in/**/part1/*": {"in/deep/part2/x.jsonl", "in/part3"}}
    for pattern in ("in/**/part*", "in/p**", "in/**/part1/*", "in/**/", "in/**/*", "in/**"):
        found = [part.path for part in find_inputs([pattern], warn=told.append)]
        assert sorted(found) == sorted(every - missed.get(pattern, set())), pattern
    assert told == []
    Path("empty/empty").mkdir(parents=True)
    with pytest.raises(DataError, match=r"--input empty/\*\*: no such file, folder or match"):
        find_inputs(["empty/**"])


@pytest.mark.parametrize("pattern", ["a", "**/*.jsonl"])
def test_folders_in_folders_beyond_pythons_depth_of_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("/".join("a" * 100)).mkdir(parents=True)
    Path("/".join("a" * 100), "x.jsonl").touch()
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 70)
    try:
        assert len(find_inputs([pattern])) == 1
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("pattern", ["corpus", "corpus/**", "**/*.jsonl"])
def test_folders_that_are_linked_in_circles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, other in ("ab", "ba"):
        (tmp_path / "corpus" / folder).mkdir(parents=True)
        (tmp_path / "corpus" / folder / "x.jsonl").touch()
        for name in ("link", "twin"):  # two: 2^40 ways to read on
            (tmp_path / "corpus" / folder / name).symlink_to(f"../{other}")
    with pytest.raises(DataError, match=r"corpus/./(link|twin)/(link|twin): a link to a folder that"):
        find_inputs([pattern])


def test_hidden_files_and_backup_copies_are_left_out(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl~", ".DS_Store", ".git/x.jsonl", "b/.a.jsonl.tmp", "b/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    told: list[str] = []
    found = find_inputs([str(tmp_path)], warn=told.append)
    assert [part.path for part in found] == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b/c.jsonl"]
    names = ", ".join(f"{tmp_path}/{name}" for name in (".git", "a.jsonl~", ".DS_Store", "b/.a.jsonl.tmp"))
    expected = f"left out, as hidden, a backup copy or no data: {names}"
    assert sorted(told[0].split()) == sorted(expected.split())


@pytest.mark.parametrize("pattern", ["", "/*", "/**", "/**/*"])
def test_what_spark_and_dask_leave_beside_their_data_is_left_out(tmp_path: Path, pattern: str) -> None:
    """A part of a job that failed would be read twice, and what is no Parquet ends the run."""
    unread = ("_temporary/0/task_7/part-0.json", "_delta_log/0.json", "_metadata", "_common_metadata")
    for name in ("part-0.json", "_posts/x.json", "_metadata.json", "_SUCCESS", *unread):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    told: list[str] = []
    found = find_inputs([f"{tmp_path}{pattern}"], warn=told.append)
    assert sorted(Path(part.path).name for part in found) == ["_metadata.json", "part-0.json", "x.json"]
    assert len(told) == 1
    assert "no data: " in told[0]
    named = find_inputs([str(tmp_path / "_temporary/*/*/*.json"), str(tmp_path / "_delta_log")])
    assert len(named) == 2


def test_a_copy_that_a_killed_resume_left_is_no_input(tmp_path: Path) -> None:
    """It makes one where there are no locks."""
    copies = ("_text_document.bin.partial.node.7.1.partial", "_part00003of00010_a_document.idx.partial")
    for name in (".jsonl", "_text_document.binary.partial", *copies):
        (tmp_path / f"corpus{name}").touch()
    found = find_inputs([str(tmp_path / "*")], output_prefix=str(tmp_path / "corpus"))
    assert [Path(part.path).name for part in found] == ["corpus.jsonl", "corpus_text_document.binary.partial"]


@pytest.mark.parametrize("beginning", ["corpus", "c" * 100])
def test_a_copy_with_a_shortened_name_is_no_input(tmp_path: Path, beginning: str) -> None:
    own = temporary_name(tmp_path / f"{beginning}_part00003of00010_{'k' * 100}_document.bin.partial")
    others = temporary_name(tmp_path / f"other{'k' * 130}_document.bin.partial")
    (tmp_path / "below").mkdir()
    for path in (own, others, tmp_path / "below" / own.name):
        path.touch()
    found = find_inputs([str(tmp_path)], output_prefix=str(tmp_path / beginning))
    assert [part.path for part in found] == [str(tmp_path / "below" / own.name), str(others)]


@pytest.mark.parametrize("pattern", ["", "*", "**", "corpus*"])
def test_a_file_of_a_share_that_gets_its_name_meanwhile_is_no_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """Between the listing of the folder and the look at each file of it."""
    (tmp_path / "corpus.jsonl").touch()
    names = folders._names

    def listed(folder: str) -> list[str]:
        gone = "corpus_part00001of00002_text_document.progress.json.partial"
        return sorted([*names(folder), gone, *more])

    more: list[str] = []
    monkeypatch.setattr(folders, "_names", listed)
    given = [os.path.join(tmp_path, pattern)]
    found = find_inputs(given, output_prefix=str(tmp_path / "corpus"))
    assert [Path(part.path).name for part in found] == ["corpus.jsonl"]
    more.append("corpus.jsonl.partial")
    with pytest.raises(DataError, match=r"corpus\.jsonl\.partial: a link to .*, which is not there"):
        find_inputs(given, output_prefix=str(tmp_path / "corpus"))


@pytest.mark.parametrize("pattern", ["*.jsonl", "*.json*", "**"])
def test_what_a_run_has_written_is_not_read_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pattern: str
) -> None:
    from tools import preprocess_data

    monkeypatch.chdir(tmp_path)
    Path("corpus.jsonl").write_text('{"text": "a"}\n{}\n{"text": "c"}\n')
    flags = ["--input", pattern, "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]
    flags += ["--output-prefix", "corpus", "--on-error", "skip"]
    Path("corpus_text_document.progress.json").touch()
    for share in ("0", "1", "0"):
        assert preprocess_data.main([*flags, "--partitions", "2", "--partition-index", share]) == 0
    assert re.search("left out, as output of this command: .*_part00000of00002", capsys.readouterr().err)
    merge([f"corpus_part0000{i}of00002_text_document" for i in range(2)], "whole")
    assert open_dataset("whole").stream().tolist() == list(b"ac")
    Path("x_text_document.json").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"x_text_document\.json: cannot be read as a dataset's description"):
        preprocess(PreprocessPlan(find_inputs(["corpus.jsonl"]), "x"), ByteLevelTokenizer())


def test_a_corpus_with_the_name_of_a_description_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools import preprocess_data

    monkeypatch.chdir(tmp_path)
    Path("wiki_en_document.json").write_text('{"text": "a"}\n')
    flags = ["--output-prefix", "wiki", "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]
    Path("wiki_text_document.cache").mkdir()  # as a training run makes it
    Path("wiki_text_document.cache/0.npz.lock").write_text("process 1")
    for given in (["wiki_en_document.json"], ["*.json"], sorted(map(str, Path().glob("*.*")))):
        assert preprocess_data.main(["--input", *given, *flags]) == 0
        assert open_dataset("wiki_text_document").stream().tolist() == list(b"a")
    capsys.readouterr()
    products = ["wiki_text_document.json", "wiki_text_document.bin"]
    assert preprocess_data.main(["--input", *products, *flags]) == 1
    message = f"error: --input: all inputs are output of this command: {', '.join(products)}\n"
    assert capsys.readouterr().err == f"preprocess_data: {message}"
    assert open_dataset("wiki_text_document").documents == 1


def test_an_output_in_a_folder_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    for prefix in ("corpus/out", "corpus/deep/out", str(tmp_path / "corpus" / "new" / "out")):
        with pytest.raises(DataError, match=r"lies in the folder corpus, all of which is read"):
            check_apart(["corpus"], prefix)
    check_apart(["corpus", "*"], "out")
    check_apart(["corpus"], "corpus_out")


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
    with pytest.raises(NotContinued, match="standard input and pipes give nothing again"):
        state.load()  # what a killed run took from it is gone
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


@pytest.mark.parametrize("name", ["in.jsonl.gz", "IN.JSONL.GZ", "IN.ZST"])
def test_a_compressed_file_is_in_one_share(tmp_path: Path, name: str) -> None:
    """Cut inside, by the bytes of the file, it would lose lines."""
    (tmp_path / name).write_bytes(b"compressed")
    whole = find_inputs([str(tmp_path / name)])
    assert [take_partition(whole, share, 3) for share in range(3)] == [whole, [], []]


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


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.jsonl")
    Path(path).write_text('{"text": "a"}\nbroken\n')
    plan = PreprocessPlan(find_inputs([path]), str(tmp_path / "out"), skip_errors=True)
    (info,) = preprocess(plan, ByteLevelTokenizer())
    assert info.sources == (f"{tmp_path}/a\\xff.jsonl",)
    assert json.loads((tmp_path / "out_text_document.skipped.jsonl").read_text())["file"] == info.sources[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("z_README.md", "# Corpus\n", r"z_README\.md:1: not valid JSON: "),
        ("z.jsonl", '{"content": "x"}\n', r"z\.jsonl:1: no key 'text'; the keys are 'content'"),
        ("z.jsonl.gz", "no gzip", r"z\.jsonl\.gz: after record 0: cannot be read: Not a gzipped file"),
        ("z.parquet", "no Parquet", r"z\.parquet: after row 0: cannot be read: "),
    ],
)
def test_a_stray_file_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, message: str
) -> None:
    """Not only where its turn comes, hours later."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(3):
        lines(folder / f"{number}.jsonl", ["a", 5])
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=message):
        run(find_inputs([str(folder)]), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
    # In no time none but the first is looked at, and that is one whose name says nothing.
    monkeypatch.setattr(text_batches, "LOOKING_SECONDS", -1.0)
    told = pytest.raises(DataError, match=message) if name.endswith(".md") else contextlib.nullcontext()
    with told:
        text_batches.look_at_first(find_inputs([str(folder)]), ["text"], Room())


def test_only_the_beginnings_of_files_are_looked_at_first(tmp_path: Path) -> None:
    """A share begins inside a line; what --on-error skip leaves out is listed; pipes are read once."""
    path = lines(tmp_path / "in.jsonl", ["a" * 50, "b", "c"])
    (share,) = take_partition(find_inputs([path]), 1, 2)
    text_batches.look_at_first([share], ["text"], Room())
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text_batches.look_at_first(find_inputs([str(pipe)]), ["text"], Room())
    run(find_inputs([lines(tmp_path / "bad.jsonl", [5, "a"])]), tmp_path / "out", skip_errors=True)
    assert open_dataset(str(tmp_path / "out_text_document")).tokens == 1
