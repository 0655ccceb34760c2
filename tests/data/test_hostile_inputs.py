"""Inputs and files beside datasets that once took memory without bound, or ended in a traceback."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from tokenizers import Encoding
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel

from megalite.config import blend
from megalite.config.blend import read_data_args
from megalite.data import engine_check, records
from megalite.data.build import build_datasets
from megalite.data.dataset_info import read_info
from megalite.data.documents import parse_document
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import DatasetWriter, open_dataset
from megalite.data.inputs import Part, check_apart, find_inputs
from megalite.data.inspect_samples import dump
from megalite.data.merge import merge
from megalite.data.preprocess import PreprocessPlan, preprocess
from megalite.data.records import read_records
from megalite.data.tokenizer import Tokenizer, base, huggingface
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from megalite.data.tokenizer.huggingface import _configured_eod
from megalite.data.tokenizer.null import NullTokenizer
from megalite.data.verify import verify
from tests.data.corpora import Words, data_config, write_dataset
from tests.data.unprivileged import LINUX, drop

NUMBERS = ["workers", "partitions", "partition-index", "log-interval", "vocab-size", "null-tokenizer-eod-id"]
NUMBERS += ["tiktoken-num-special-tokens"]


@pytest.mark.parametrize(
    ("name", "kind", "content", "start", "what"),
    [
        ("a.jsonl", "json", b"x" * 150, 0, "line"),
        ("a.jsonl", "json", b"x" * 150, 20, "line"),
        ("a.jsonl.gz", "json", gzip.compress(bytes(10_000_000)), 0, "line"),
        ("a.txt", "text", b"x\n" * 75, 0, "text"),
        ("a.txt", "paragraphs", b"x\n" * 75, 0, "paragraph"),
    ],
)
def test_a_record_without_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
    content: bytes,
    start: int,
    what: str,
) -> None:
    monkeypatch.setattr(records, "LONGEST_RECORD", 100)
    (tmp_path / name).write_bytes(content)
    message = f"{name}: after record 0: cannot be read: the {what} that follows has more than 100 bytes"
    with pytest.raises(DataError, match=message):
        list(read_records(Part(str(tmp_path / name), kind, start), ["text"]))


def test_large_rows_of_parquet_come_a_few_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": str(i) * 200_000, "n": i} for i in range(10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", use_dictionary=False)
    at_once = []
    convert = records._rows

    def counted(batch: pyarrow.RecordBatch) -> list[object]:
        at_once.append(batch.num_rows)
        return convert(batch)

    monkeypatch.setattr(records, "_rows", counted)
    found = list(read_records(Part(str(tmp_path / "a.parquet"), "parquet"), ["text"]))
    assert [row["text"] for group in found for row in group.contents] == [row["text"] for row in rows]
    assert at_once == [5, 5]  # of 200 KB each to 1 MiB
    mixed = pyarrow.table({"text": ["a"] * 300 + ["b" * 400_000] * 4})
    pyarrow.parquet.write_table(mixed, tmp_path / "a.parquet", use_dictionary=False)
    found = list(read_records(Part(str(tmp_path / "a.parquet"), "parquet"), ["text"]))
    assert [row["text"] for group in found for row in group.contents] == mixed["text"].to_pylist()
    assert max(group.size for group in found) < 2_000_000


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_of_no_bytes_is_not_an_empty_one(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.jsonl.{suffix}").touch()
    with pytest.raises(DataError, match=r"an empty file, which is no compressed one"):
        list(read_records(Part(str(tmp_path / f"a.jsonl.{suffix}"), "json"), ["text"]))


def test_a_row_that_python_has_no_value_for(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    when = pyarrow.array([0, 1 << 62], pyarrow.timestamp("us"))  # the second is behind the year 9999
    assert when[0].as_py() == datetime.datetime(1970, 1, 1)
    meta = pyarrow.StructArray.from_arrays([pyarrow.array(["a", "b"]), when], ["note", "when"])
    pyarrow.parquet.write_table(pyarrow.table({"meta": meta}), tmp_path / "a.parquet")
    plan = PreprocessPlan(find_inputs([str(tmp_path / "a.parquet")]), str(tmp_path / "out"), ["meta.note"])
    with pytest.raises(DataError, match=r"a\.parquet:2: cannot be read: "):
        preprocess(plan, ByteLevelTokenizer())


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.jsonl")
    Path(path).write_text('{"text": "a"}\nbroken\n')
    plan = PreprocessPlan(find_inputs([path]), str(tmp_path / "out"), skip_errors=True)
    (info,) = preprocess(plan, ByteLevelTokenizer())
    assert info.sources == (f"{tmp_path}/a\\xff.jsonl",)
    assert json.loads((tmp_path / "out.skipped.jsonl").read_text())["file"] == info.sources[0]


def test_the_check_of_an_engine_does_not_read_on_for_a_key_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n' * 1000)
    monkeypatch.setattr(engine_check, "CHECKED_DOCUMENTS", 10)
    original, seen = engine_check.parse_document, []

    def counted(*of: object) -> list[list[str]]:
        seen.append(of)
        return original(*of)  # type: ignore[arg-type]  # whatever it was called with

    monkeypatch.setattr(engine_check, "parse_document", counted)
    assert list(engine_check.first_texts(find_inputs([str(tmp_path / "a.jsonl")]), ["text"])) == []
    assert len(seen) == 10


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("vocab_size", "an integer"),
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
    Path(f"{prefix}.json").write_text("[1]")
    with pytest.raises(DataError, match="description: expected an object"):
        read_info(prefix)


def test_a_foreign_file_in_place_of_a_description_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    os.truncate(tmp_path / "a.json", 1 << 40)
    with pytest.raises(DataError, match=r"a\.json: cannot be read .*: it has more than 256 MiB"):
        read_info(str(tmp_path / "a"))


def test_a_dataset_of_no_token_ids(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "a", [3], dtype="int32")
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[17] = 7  # float32
    Path(f"{prefix}.idx").write_bytes(index)
    np.full(3, np.nan, dtype=np.float32).tofile(f"{prefix}.bin")
    with pytest.raises(DataError, match="holds float32, which are no token ids"):
        verify(prefix)


def test_an_end_of_document_token_that_is_no_text(tmp_path: Path) -> None:
    for wrong in (5, ["</s>"], {"content": 5}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": wrong}))
        with pytest.raises(DataError, match=r"tokenizer_config\.json: eos_token: expected a string, found"):
            _configured_eod(tmp_path)


def test_one_document_of_very_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "TEXTS_AT_ONCE", 3)
    most = []

    class Counting(NullTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            most.append(len(texts))
            return super().encode_batch(texts)

    tokens, lengths = Counting(100, 99).encode_flat(["1 2", "", "3", "", "4", "", "5 6"])
    assert (tokens.tolist(), lengths.tolist()) == ([1, 2, 3, 4, 5, 6], [2, 0, 1, 0, 1, 0, 2])
    assert most == [3, 3, 1]


def test_the_library_is_given_a_part_of_very_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "TEXTS_AT_ONCE", 3)
    library = Library(WordLevel({"a": 0, "?": 1}, "?"))
    tokenizer = huggingface.HuggingFaceTokenizer(library, "", None, False, False)
    most = []

    class Counting:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Encoding]:
            most.append(len(texts))
            return library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    tokenizer.check_encodes()  # asks the library about its model
    tokenizer.library = cast("Library", Counting())
    tokens, lengths = tokenizer.encode_flat(["a", "b", "a", "", "a", "b", "a"])
    assert (tokens.tolist(), lengths.tolist()) == ([0, 1, 0, 0, 1, 0], [1, 1, 1, 0, 1, 1, 1])
    assert most == [3, 3, 1]


def test_messages_are_short_and_printable() -> None:
    long_key = b'{"' + b"k" * 100_000 + b'": 1}'
    for line in (long_key, b"x" * 100_000, b'{"text": "a"}\r{"text": "\x1b[2J"}'):
        with pytest.raises(DataError) as error:
            parse_document(line, "json", ["text"])
        assert len(str(error.value)) < 250
        assert str(error.value).isprintable()


class Letters(Tokenizer):
    """The smallest subclass."""

    vocab_size = 128
    identity = None
    memory_per_byte = 8

    @property
    def eod(self) -> int:
        return 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(map(ord, text)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def words() -> huggingface.HuggingFaceTokenizer:
    library = Library(WordLevel({"1": 0, "?": 1}, "?"))
    return huggingface.HuggingFaceTokenizer(library, "", None, False, False)


@pytest.mark.parametrize("make", [words, Letters, ByteLevelTokenizer, lambda: NullTokenizer(9, 8)])
def test_a_text_too_long_for_the_memory_that_its_ids_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Tokenizer]
) -> None:
    tokenizer = make()
    monkeypatch.setattr(base, "CHARACTERS_AT_ONCE", 10)
    monkeypatch.setattr(base, "LARGEST_ENCODING", 100 * tokenizer.memory_per_byte)
    texts = ["1" * n for n in (1, 101, 100)] if tokenizer.identity is None else ["é" * n for n in (1, 51, 50)]
    if isinstance(tokenizer, NullTokenizer):
        texts = [text.replace("11", "1 ") for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plan = PreprocessPlan(find_inputs([str(tmp_path / "a.jsonl")]), str(tmp_path / "out"), skip_errors=True)
    (info,) = preprocess(plan, tokenizer)
    assert info.documents == 2
    listed = json.loads((tmp_path / "out.skipped.jsonl").read_text())
    assert listed["line"] == 2
    assert re.search(r"a text of 10[12] bytes: this tokenizer takes up to 100, as each may", listed["error"])


def test_sequences_are_encoded_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CHARACTERS_AT_ONCE", 10)
    most = []

    class Counting(Letters):
        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            most.append(list(map(len, texts)))
            return super().encode_batch(texts)

    texts = ["a" * n for n in (5, 5, 1, 30, 0, 9, 1, 2)]
    tokens, lengths = Counting().encode_flat(texts)
    assert (bytes(tokens.astype(np.uint8)).decode(), lengths.tolist()) == ("".join(texts), [*map(len, texts)])
    assert most == [[5, 5], [1], [30], [0, 9, 1], [2]]


def test_a_cache_that_is_not_written_is_not_reported_as_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tools.inspect_data import main

    prefix = write_dataset(tmp_path / "a", [40] * 5)
    (tmp_path / "file").touch()
    flags = ["--data-path", prefix, "--split", "1", "--seq-length", "8", "--build-cache"]
    nowhere = ["--data-cache-path", str(tmp_path / "file" / "cache")]
    assert main([*flags, *nowhere]) == 1
    message = f"index arrays cannot be kept in {tmp_path / 'file' / 'cache'} (Not a directory): every process"
    assert f"error: --build-cache: {message}" in capsys.readouterr().err
    assert main([*flags[:-1], "--train-samples", "3", "--valid-samples", "3", *nowhere]) == 0
    assert capsys.readouterr().err.count(f"warning: {message}") == 1
    assert main([*flags, "--data-cache-path", str(tmp_path / "cache")]) == 0
    assert capsys.readouterr().err == ""
    for cache, told in (("file/cache", message), ("cache", None)):
        config = data_config(tmp_path / cache, "1", prefix, "2", prefix)
        found = build_datasets(config, Words(1000, 999), 8, 1, (9, 0, 0)).warning
        assert found is told is None or message in str(found)


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


@pytest.mark.parametrize("given", [".", "c*", "*/*.jsonl", "**/*.jsonl"])
def test_nothing_of_a_folder_is_left_out_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("corpus/a", "corpus/b", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.jsonl").write_text('{"text": "x"}\n')
    os.mkfifo("corpus/pipe")
    Path("corpus/link").symlink_to("../elsewhere")
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
            assert re.search(r"corpus/b/?(: the folder cannot be read|')$", message)
        else:
            assert message == str([Part("corpus/a/x.jsonl", "json")])


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
    assert sorted(told[0].split()) == sorted(f"left out, as hidden or a backup copy: {names}".split())


@pytest.mark.parametrize("pattern", ["*.jsonl", "*.json*", "**"])
def test_what_a_run_has_written_is_not_read_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pattern: str
) -> None:
    from tools import preprocess_data

    monkeypatch.chdir(tmp_path)
    Path("corpus.jsonl").write_text('{"text": "a"}\n{}\n{"text": "c"}\n')
    flags = ["--input", pattern, "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]
    flags += ["--output-prefix", "corpus", "--on-error", "skip"]
    Path("corpus.progress.json").touch()
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
    for given in (["wiki_en_document.json"], ["*.json"], sorted(map(str, Path().glob("*")))):
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
        ("--eod-token", "by\udcffte", "expected UTF-8"),
    ],
)
def test_flags_without_measure(
    capsys: pytest.CaptureFixture[str], flag: str, given: str, expected: str
) -> None:
    from tools.preprocess_data import arguments

    with pytest.raises(SystemExit):
        arguments(["--input", "x", "--output-prefix", "out", flag, given])
    shown = given.replace("\udcff", "\\xff")
    assert (
        f"argument {flag}: {shown}: expected {expected.removeprefix('expected ')}" in capsys.readouterr().err
    )


def test_a_share_of_very_many_is_refused_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    work = PreprocessPlan(
        find_inputs([str(tmp_path / "in.jsonl")]), str(tmp_path / "out"), partition=(3, 10**6), corpus="c"
    )
    preprocess(work, ByteLevelTokenizer())
    tracemalloc.start()
    with pytest.raises(DataError, match=r"one of 1000000 partitions .*; missing: 0, 1, 2, 4, 5"):
        merge([work.prefix("text")], str(tmp_path / "whole"))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20  # a list of them all has 100 MB


def test_a_list_of_datasets_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "list").write_text("corpus " * 3)
    monkeypatch.setattr(blend, "DATA_ARGS_BYTES", 20)
    with pytest.raises(ValueError, match="more than 0 MiB: expected weights and prefixes"):
        read_data_args(str(tmp_path / "list"))
    for path, reason in ((str(tmp_path / "list"), "more than 0 MiB"), ("/dev/zero", "is a pipe or a device")):
        with pytest.raises(DataError, match=f"--data-args-path {path}: cannot be read: {reason}"):
            build_datasets(data_config(tmp_path, data_args_path=path), Words(9, 8), 8, 1, (1, 0, 0))


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: is no file that could be replaced"):
        dump(tmp_path / "pipe", {})
    assert (tmp_path / "pipe").is_fifo()


def test_a_path_that_is_no_utf8(tmp_path: Path) -> None:
    prefix = os.fsdecode(os.fsencode(tmp_path) + b"/by\xffte")
    for use in (open_dataset, lambda path: DatasetWriter(path, "uint16")):
        with pytest.raises(DataError, match=r"by\\xffte: a dataset's path must be UTF-8"):
            use(prefix)


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
