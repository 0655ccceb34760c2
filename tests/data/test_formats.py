"""Text files, Parquet, and the tokenizers whose libraries are optional."""

from __future__ import annotations

import base64
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megalite.data.errors import DataError
from megalite.data.indexed_dataset import open_dataset
from megalite.data.inputs import find_inputs
from megalite.data.preprocess import PreprocessPlan, preprocess
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from tests.data.test_tokenizers import make

BYTES = ByteLevelTokenizer()


def texts_of(
    tmp_path: Path, path: Path | str, text_format: str = "text", keys: tuple[str, ...] = ("text",)
) -> list[str]:
    plan = PreprocessPlan(find_inputs([str(path)], text_format), str(tmp_path / "out"), keys, append_eod=True)
    preprocess(plan, BYTES)
    dataset = open_dataset(str(tmp_path / f"out_{keys[-1]}_document"))
    return [BYTES.decode(dataset.sequence(i).tolist()[:-1]) for i in range(dataset.sequences)]


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("first line\n\nnaïve\n")
    assert texts_of(tmp_path, tmp_path / "in.txt") == ["first line\n\nnaïve\n"]


@pytest.mark.parametrize("compressed", [False, True])
def test_paragraphs(tmp_path: Path, compressed: bool) -> None:
    content = b"\n\none\ntwo\n \nthree\r\n\r\n\r\nfour"
    path = tmp_path / ("in.txt.gz" if compressed else "in.txt")
    path.write_bytes(gzip.compress(content) if compressed else content)
    assert texts_of(tmp_path, path, "paragraphs") == ["one\ntwo", "three", "four"]
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + content)
    assert texts_of(tmp_path, tmp_path / "marked.txt", "paragraphs") == ["one\ntwo", "three", "four"]
    assert open_dataset(str(tmp_path / "out_text_document")).documents == 3  # with none that is empty


@pytest.mark.parametrize("name", ["in.txt", "in.txt.gz", "in.jsonl", "in.jsonl.gz"])
def test_the_byte_order_mark_of_a_file_is_no_text(tmp_path: Path, name: str) -> None:
    content = b'{"text": "one"}\n{"text": "\\ufefftwo"}\n' if "json" in name else b"one\n\n\xef\xbb\xbftwo"
    content = b"\xef\xbb\xbf" + content
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert texts_of(tmp_path, tmp_path / name, "paragraphs") == ["one", "\ufefftwo"]
    content = content[:3]  # of an empty file
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert texts_of(tmp_path, tmp_path / name, "paragraphs") == []


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"good\n\nbad \xff\n")
    with pytest.raises(DataError, match=r"in\.txt:2: not valid UTF-8: invalid start byte at byte 4"):
        texts_of(tmp_path, tmp_path / "in.txt", "paragraphs")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": f"row {i}", "meta": {"note": f"note {i}"}, "n": i} for i in range(3000)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet", row_group_size=700)
    assert texts_of(tmp_path, tmp_path / "in.parquet") == [row["text"] for row in rows]
    notes = texts_of(tmp_path, tmp_path / "in.parquet", keys=("text", "meta.note"))
    assert notes == [f"note {i}" for i in range(3000)]
    with pytest.raises(DataError, match=r"in\.parquet:1: no key 'body'"):
        texts_of(tmp_path, tmp_path / "in.parquet", keys=("body",))
    content = (tmp_path / "in.parquet").read_bytes()
    (tmp_path / "in.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"in\.parquet: after row 0: cannot be read"):
        texts_of(tmp_path, tmp_path / "in.parquet")


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_bytes(b'{"text": "a"}\n{"text": "b"}\n')
    with (tmp_path / "in").open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert texts_of(tmp_path, "-") == ["a", "b"]


@pytest.mark.parametrize("name", ["IN.JSONL", "IN.JSONL.GZ", "IN.ZST", "IN.TXT", "IN.TXT.GZ", "IN.PARQUET"])
def test_names_in_capitals(tmp_path: Path, name: str) -> None:
    content = b"a" if ".TXT" in name else b'{"text": "a"}\n'
    if name.endswith("PARQUET"):
        import pyarrow.parquet

        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), buffer)
        content = buffer.getvalue()
    if name.endswith("GZ"):
        content = gzip.compress(content)
    elif name.endswith("ZST"):
        content = zstandard.compress(content)
    (tmp_path / name).write_bytes(content)
    assert texts_of(tmp_path, tmp_path / name) == ["a"]


def test_bytes() -> None:
    text = "naïve 🙂"
    flat, lengths = BYTES.encode_flat([text, "", "x"])
    assert flat.tolist() == [*text.encode(), ord("x")]
    assert lengths.tolist() == [len(text.encode()), 0, 1]
    assert BYTES.decode(BYTES.encode_batch([text])[0]) == text
    assert (BYTES.check_eod(), BYTES.vocab_size) == (256, 257)


def test_sentencepiece(tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    (tmp_path / "corpus.txt").write_text("\n".join(f"the cat sat on the mat {i}" for i in range(300)))
    library.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "sp"), vocab_size=40, minloglevel=2
    )
    model = str(tmp_path / "sp.model")
    tokenizer = make("SentencePieceTokenizer", tokenizer_model=model)
    reference = library.SentencePieceProcessor(model_file=model)
    texts = ["the cat", "a </s> b", ""]
    assert tokenizer.encode_batch(texts) == [reference.encode(text) for text in texts]
    assert (tokenizer.eod, tokenizer.vocab_size) == (reference.eos_id(), 40)
    assert tokenizer.eod not in tokenizer.encode_batch(["</s>"])[0]
    assert make("SentencePieceTokenizer", tokenizer_model=model, eod_token="<s>").eod == reference.bos_id()
    assert make("SentencePieceTokenizer", tokenizer_model=model, eod_token="<s>").check_eod() == 1
    for piece in ("a", "<unk>"):
        with pytest.raises(DataError, match=f"end-of-document token {piece}: text can have its id"):
            make("SentencePieceTokenizer", tokenizer_model=model, eod_token=piece).check_eod()
    with pytest.raises(DataError, match="--eod-token nothing: not among the 40 pieces"):
        _ = make("SentencePieceTokenizer", tokenizer_model=model, eod_token="nothing").eod
    (tmp_path / "broken.model").write_bytes(b"no model")
    with pytest.raises(DataError, match=r"broken\.model: cannot be read"):
        make("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "broken.model"))


@pytest.mark.parametrize(
    ("key", "expected"), [("meta.text", "inner"), ("meta.deep.text", "deep"), ("outer.text", "dotted")]
)
def test_beside_a_part_of_a_column_nothing_else_of_it_is_read(
    tmp_path: Path, key: str, expected: str
) -> None:
    import pyarrow.parquet

    nanoseconds = pyarrow.scalar(1, pyarrow.timestamp("ns"))  # for which Python has no value
    meta = pyarrow.StructArray.from_arrays(
        [
            pyarrow.array(["inner"]),
            pyarrow.array([nanoseconds.value], pyarrow.timestamp("ns")),
            pyarrow.array([{"text": "deep", "texts": ["a", "b"]}]),
        ],
        ["text", "time", "deep"],
    )
    table = pyarrow.table({"meta": meta, "outer.text": ["dotted"], "outer": [{"text": "not this"}]})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    assert texts_of(tmp_path, tmp_path / "in.parquet", keys=(key,)) == [expected]
    both = texts_of(tmp_path, tmp_path / "in.parquet", keys=("meta.deep.texts", key))
    assert both == [expected]


def test_tiktoken_json_vocabulary(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the"]
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for i, token in enumerate(tokens)
    ]
    (tmp_path / "vocab.json").write_text(json.dumps(entries))
    fields: dict[str, Any] = {
        "tokenizer_model": str(tmp_path / "vocab.json"),
        "tiktoken_num_special_tokens": 10,
        "vocab_size": 269,
    }
    tokenizer = make("TikTokenizer", **fields)
    assert tokenizer.encode_batch(["the the", "</s>"]) == [[267, 268], [10 + byte for byte in b"</s>"]]
    assert (tokenizer.eod, tokenizer.vocab_size) == (2, 269)
    assert make("TikTokenizer", allow_special_tokens=True, **fields).encode_batch(["</s>"]) == [[2]]
    assert tokenizer.decode(tokenizer.encode_batch(["the naïve"])[0]) == "the naïve"
    with pytest.raises(DataError, match="259 tokens, but 300 are wanted"):
        make("TikTokenizer", **{**fields, "vocab_size": 310})
    with pytest.raises(DataError, match="--vocab-size 10: no more than --tiktoken-num-special-tokens 10"):
        make("TikTokenizer", **{**fields, "vocab_size": 10})
    with pytest.raises(DataError, match=r"cannot be used .*: lacks bytes .*: 0xc3, .* and 40 more"):
        make("TikTokenizer", **{**fields, "vocab_size": 205})
    entries[-1]["rank"] = 3
    (tmp_path / "vocab.json").write_text(json.dumps(entries))
    with pytest.raises(DataError, match=r"the tokens b'\\x03' and b' the' have one id, 13$"):
        make("TikTokenizer", **fields)
    (tmp_path / "tekken.json").write_text(json.dumps({"config": {}, "vocab": entries, "special_tokens": []}))
    with pytest.raises(DataError, match="expected a JSON list of tokens; of a Mistral model use"):
        make("TikTokenizer", **{**fields, "tokenizer_model": str(tmp_path / "tekken.json")})
    (tmp_path / "ranks.tiktoken").write_text("dGg= 0\n")
    message = r"^[^:]*ranks\.tiktoken: cannot be read as a tiktoken vocabulary: 1 ranks; the known"
    with pytest.raises(DataError, match=message):
        make("TikTokenizer", tokenizer_model=str(tmp_path / "ranks.tiktoken"))
