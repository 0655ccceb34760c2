"""What the tools say when the system gives them no thread, or no more memory; in processes of their own."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import orjson
import pytest

from megalite.data import shortage
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import open_dataset
from megalite.data.inputs import find_inputs
from megalite.data.read_ahead import Steps, ThreadReader
from megalite.data.sample_corpus import train_tokenizer
from megalite.data.shortage import Room
from megalite.data.text_batches import PARSED_BYTES, STRINGS_BYTES, look_at_first
from megalite.data.tokenizer import base
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from tests.data.corpora import TOOLS, write_dataset
from tests.data.unprivileged import LINUX, drop

if TYPE_CHECKING:
    from megalite.data.build import Dataset

Finished: TypeAlias = "subprocess.CompletedProcess[str]"
NO_THREAD = "error: can't start new thread: too many run already for the limit of the user or the container"
CAPABILITIES = (21, 24)  # CAP_SYS_ADMIN and CAP_SYS_RESOURCE: whoever has one is not bound by the limit
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]
NOBODY = 61234  # a user that runs nothing else


def few_threads(count: int) -> None:
    """For the process that is made now: `count` threads, the main one included. Root is bound by no such
    limit, so it becomes another user, but for its rights to files.
    """
    if os.getuid() == 0:
        drop(*CAPABILITIES)
        os.setresuid(NOBODY, 0, 0)
    resource.setrlimit(resource.RLIMIT_NPROC, (count, count))


def little_memory(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def run(limit: Callable[[], None], *args: object, stderr: int = subprocess.PIPE) -> Finished:
    """Python with these arguments in a process that is limited so."""
    environment = {**os.environ, "RUST_BACKTRACE": "0"}
    environment.pop("OPENBLAS_NUM_THREADS", None)
    line = [sys.executable, *map(str, args)]
    return subprocess.run(
        line,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=limit,
        env=environment,
    )


def command(limit: Callable[[], None], tool: str, *args: object, stderr: int = subprocess.PIPE) -> Finished:
    return run(limit, TOOLS / f"{tool}.py", *args, stderr=stderr)


def one_line(found: Finished) -> str:
    """The message of a tool that has failed."""
    assert found.returncode == 1, found.stderr
    (line,) = found.stderr.splitlines()
    return line


def corpus(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@LINUX
def test_no_thread_for_preprocessing(tmp_path: Path) -> None:
    work = ["--input", corpus(tmp_path / "in.jsonl", "a", "b"), "--output-prefix", tmp_path / "out", *BYTES]
    assert NO_THREAD in one_line(command(lambda: few_threads(1), "preprocess_data", *work))
    assert not list(tmp_path.glob("out*.bin"))
    assert command(lambda: None, "preprocess_data", *work).returncode == 0
    assert open_dataset(f"{tmp_path}/out_text_document").documents == 2


@LINUX
def test_no_thread_for_the_bar_of_a_terminal(tmp_path: Path) -> None:
    work = ["--input", corpus(tmp_path / "in.jsonl", "a"), "--output-prefix", tmp_path / "out", *BYTES]
    shown, terminal = os.openpty()
    found = command(lambda: few_threads(1), "preprocess_data", *work, stderr=terminal)
    os.close(terminal)
    seen = b""
    with contextlib.suppress(OSError), os.fdopen(shown, "rb", buffering=0) as screen:  # which ends so
        while part := screen.read(1000):
            seen += part
    text = seen.decode()
    assert (found.returncode, "Traceback" in text) == (1, False)
    assert NO_THREAD in text  # in one line, which a bar that is still there would break


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)


@pytest.mark.usefixtures("no_thread")
def test_no_thread_for_the_datasets_of_a_blend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tools.inspect_data import main

    prefixes = [write_dataset(tmp_path / name, [30, 40]) for name in "ab"]
    assert main(["--data-path", *prefixes, "--split", "1", "--seq-length", "8"]) == 1
    assert NO_THREAD in capsys.readouterr().err


@pytest.mark.usefixtures("no_thread")
def test_no_thread_for_reading_ahead() -> None:
    with pytest.raises(DataError, match="can't start new thread: too many run already"):
        ThreadReader(cast("Dataset", None), Steps([]), None)


@LINUX
@pytest.mark.parametrize("name", ["sentencepiece", "tiktoken"])
def test_libraries_that_start_no_threads(tmp_path: Path, name: str) -> None:
    """What those could not have would end the process."""
    made = make(tmp_path, name)
    script = (
        "import os; os.environ['OPENBLAS_NUM_THREADS'] = '1';"  # as the tools have it
        "from types import SimpleNamespace; from megalite.data.tokenizer import build_tokenizer;"
        f"tokenizer = build_tokenizer(SimpleNamespace(**{made!r}), 366);"
        "print(len(tokenizer.encode_flat(['the cat'] * 50)[1]))"
    )
    found = run(lambda: few_threads(1), "-c", script)
    assert (found.stdout, found.stderr) == ("50\n", "")


@LINUX
@pytest.mark.parametrize("name", ["tokenizers", "sentencepiece"])
def test_a_text_for_which_there_is_no_memory(tmp_path: Path, name: str) -> None:
    settings = make(tmp_path, name)
    text = corpus(tmp_path / "in.jsonl", "a", "the cat sat " * 700_000)
    work = ["--input", text, "--output-prefix", tmp_path / "out", "--engine", "library", "--on-error", "skip"]
    for field in ("tokenizer_type", "tokenizer_model"):
        work += [f"--{field.replace('_', '-')}", settings[field]]
    line = one_line(command(lambda: little_memory(700 << 20), "preprocess_data", *work))
    message = (
        r"in\.jsonl: up to record 2: out of memory: [0-9,]+ MiB more may be needed than .*; cut long texts"
    )
    assert re.search(message + ".*; the same command starts anew$", line)
    assert not [*tmp_path.glob("out*.bin"), *tmp_path.glob("out_text_document.skipped.jsonl")]


@LINUX
def test_a_line_that_there_is_no_memory_to_parse(tmp_path: Path) -> None:
    """It is no malformed one, which --on-error skip would leave out."""
    work = ["--input", corpus(tmp_path / "in.jsonl", "x" * (48 << 20)), "--output-prefix", tmp_path / "out"]
    work += [*BYTES, "--on-error", "skip"]
    line = one_line(command(lambda: little_memory(700 << 20), "preprocess_data", *work))
    message = "in.jsonl: up to record 1: out of memory: 768 MiB more may be needed than the process may have "
    assert line.endswith(message + "(ulimit -v); cut long lines; the same command starts anew")


@pytest.mark.parametrize(
    "value",
    ["[]", "[1,2]", '{"a":1}', '"ab"', '"\u0451"', '"x\U0001f600"', "1.5", "[" * 99 + "]" * 99, '{"":{}}'],
)
def test_json_takes_no_more_memory_than_is_reckoned(value: str) -> None:
    line = f"[{','.join([value] * 100_000)}]".encode()
    tracemalloc.start()
    try:
        orjson.loads(line)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(line) < peak <= PARSED_BYTES * len(line)


@pytest.mark.parametrize(("text", "each"), [("a", [STRINGS_BYTES]), (["a"], [STRINGS_BYTES, PARSED_BYTES])])
def test_memory_is_there_for_lines_before_they_are_parsed(
    tmp_path: Path, text: object, each: list[int]
) -> None:
    """Where they are looked at first, too."""

    class Noting(Room):
        @contextlib.contextmanager
        def taken(self, size: int, what: str, instead: str) -> Iterator[None]:
            sizes.append(size)
            yield

    sizes: list[int] = []
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n")
    look_at_first(find_inputs([str(path)]), ["text"], Noting())
    assert sizes == [size * path.stat().st_size for size in each]


def test_threads_wait_for_the_memory_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    order: list[str] = []
    room = Room()

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= 10

    def second() -> None:
        with room.taken(6, "b", "c"):
            order.append("second")

    monkeypatch.setattr(shortage, "_fits", fits)
    with ThreadPoolExecutor(1) as pool:
        with room.taken(5, "a", "b"):
            waiting = pool.submit(second)
            while asked[-1] != 11 and not waiting.done():
                time.sleep(0.001)
            order.append("first")
        waiting.result()
    assert order == ["first", "second"]
    none_left = r"^a: out of memory: 0 MiB more .* \(ulimit -v\); b$"
    with pytest.raises(MemoryError, match=none_left), room.taken(11, "a", "b"):
        pass
    with pytest.raises(MemoryError, match=r"^a: out of memory$"), room.taken(10, "a", "b"):
        raise MemoryError
    assert asked == [5, 11, 6, 11, 10]


@pytest.mark.parametrize("character", ["a", "é", "字", "🙂"])
def test_the_memory_for_texts_is_no_less_than_that_for_their_bytes(
    monkeypatch: pytest.MonkeyPatch, character: str
) -> None:
    monkeypatch.setattr(base, "CHARACTERS_AT_ONCE", 10)
    monkeypatch.setattr(base, "LARGEST_ENCODING", 8 * 50 * len(character.encode()))
    tokenizer, size = ByteLevelTokenizer(), 8 * len(character.encode())
    assert tokenizer.memory_for([character * 50, "a"]) == 50 * size  # alone
    assert 10 * size <= tokenizer.memory_for([character] * 1000) <= 8 * 40  # ten at a time
    assert tokenizer.memory_for([character * 51, ""]) == 0


def make(folder: Path, name: str) -> dict[str, object]:
    """Settings of a small tokenizer by the name of its library."""
    settings = dict.fromkeys(("vocab_file", "merge_file", "null_tokenizer_eod_id", "eod_token"))
    library, texts = pytest.importorskip(name), [f"the cat sat on mat {i}" for i in range(300)]
    if name == "tokenizers":
        train_tokenizer(corpus(folder / "corpus.jsonl", *texts), folder / "tokenizer.json", 300)
        kind, model = "HuggingFaceTokenizer", "tokenizer.json"
    elif name == "sentencepiece":
        (folder / "corpus.txt").write_text("\n".join(texts))
        library.SentencePieceTrainer.train(
            input=str(folder / "corpus.txt"), model_prefix=str(folder / "sp"), vocab_size=40, minloglevel=2
        )
        kind, model = "SentencePieceTokenizer", "sp.model"
    else:
        entries = [
            {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None}
            for i in range(256)
        ]
        (folder / "vocab.json").write_text(json.dumps(entries))
        kind, model = "TikTokenizer", "vocab.json"
    own = {"tokenizer_type": kind, "tokenizer_model": str(folder / model), "tiktoken_num_special_tokens": 110}
    return settings | own
