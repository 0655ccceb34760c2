"""What `tools/inspect_data.py` shows of datasets and of the samples of a run."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from megalite.data.build import build_datasets
from megalite.data.indexed_dataset import DatasetWriter
from megalite.data.length_histogram import SHOWN, Bin, _largest, length_histogram
from megalite.data.sample_corpus import train_tokenizer
from tests.data.corpora import (
    GOLDENS,
    NULL,
    Words,
    data_config,
    lines,
    tool,
    write_dataset,
    write_lines,
)


def test_dump_equals_the_goldens(tmp_path: Path) -> None:
    for case in ("blend3_weights", "empties_seq16_resets", "single_sep_final_epoch", "single_1epoch_seq32"):
        description = json.loads((GOLDENS / f"{case}.json").read_text())
        config, words = description["config"], description["tokenizer"]
        prefixes, weights = config["blend"]
        paths = [str(GOLDENS / "data" / prefix) for prefix in prefixes]
        if weights is not None:
            paths = [word for pair in zip(map(str, weights), paths, strict=True) for word in pair]
        command = [
            "--data-path",
            *paths,
            "--split",
            config["split"],
            "--seq-length",
            str(config["seq_length"]),
        ]
        command += ["--seed", str(config["seed"]), "--data-cache-path", str(tmp_path / "cache")]
        for split, size in zip(("train", "valid", "test"), config["sizes"], strict=True):
            command += [] if size is None else [f"--{split}-samples", str(size)]
        for flag in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            command += [f"--{flag.replace('_', '-')}"] if config[flag] else []
        command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(words["vocab_size"])]
        command += ["--null-tokenizer-eod-id", str(words["eod"]), "--dump", str(tmp_path / "out.npz")]
        assert tool("inspect_data")(command) == 0
        ours, golden = np.load(tmp_path / "out.npz"), np.load(GOLDENS / f"{case}.npz")
        assert set(ours) == set(golden)
        for key in golden:
            assert ours[key].dtype == golden[key].dtype, key
            assert np.array_equal(ours[key], golden[key]), key


def test_a_step_names_its_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_dataset(tmp_path / "d", [10] * 30)
    run = ["--data-path", prefix, "--split", "1,0,0", "--seq-length", "12", "--train-samples", "24"]
    run += ["--data-cache-path", str(tmp_path / "cache")]
    assert tool("inspect_data")([*run, "--iteration", "3", "--global-batch-size", "4"]) == 0
    out = capsys.readouterr().out
    assert [f"sample {i}\n" in out for i in (7, 8, 11, 12)] == [False, True, True, False]
    assert f"{prefix}: document" in out
    assert tool("inspect_data")([*run, "--iteration", "9", "--global-batch-size", "4"]) == 1
    assert "--iteration 9: the 24 samples make steps 1 to 6\n" in capsys.readouterr().err


def test_a_weighted_blend_of_which_only_training_has_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [write_dataset(tmp_path / name, [10] * 30, seed=seed) for seed, name in enumerate("ab")]
    run = ["--data-path", "3", pair[0], "7", pair[1], "--seq-length", "12", "--train-samples", "24"]
    run += ["--data-cache-path", str(tmp_path / "cache")]
    assert tool("inspect_data")([*run, "--iteration", "3", "--global-batch-size", "4"]) == 0
    assert "sample 8\n" in capsys.readouterr().out
    assert tool("inspect_data")(run) == 1
    told = "valid split: a blend with weights has no end of its own; give --valid-samples, 0 for none\n"
    assert capsys.readouterr().err.endswith(told)
    assert tool("inspect_data")([*run, "--valid-samples", "0", "--test-samples", "0"]) == 0
    assert [line[:6] for line in capsys.readouterr().out.splitlines() if line[0] != " "] == ["train:"]


def test_fewer_samples_than_a_run_has_drawn_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_dataset(tmp_path / "d", [10] * 30)
    config = data_config(tmp_path / "cache", prefix)
    train = build_datasets(config, Words(1000, 0), 8, 1234, (30, 0, 0)).train
    assert train is not None
    assert train.order is not None
    record = train.order.record(20)
    monkeypatch.setattr("tools.inspect_data.saved_order", lambda _: record)
    run = ["--data-path", prefix, "--split", "1", "--seq-length", "8", "--load", "checkpoints"]
    for samples, code in (("19", 1), ("20", 0), ("40", 0)):
        assert tool("inspect_data")([*run, "--train-samples", samples]) == code
    assert "--train-samples 19: the run has drawn 20 already; give" in capsys.readouterr().err
    dumped = ["--train-samples", "60", "--dump", str(tmp_path / "out.npz")]
    assert tool("inspect_data")([*run, *dumped]) == 0
    assert "train has been extended: each of its rounds has index arrays of its" in capsys.readouterr().err
    assert "train.tokens" in np.load(tmp_path / "out.npz")


def test_ids_that_the_tokenizer_does_not_have_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of data without a description a look at a document is what tells."""
    with DatasetWriter(str(tmp_path / "d"), "int32") as writer:
        writer.add(np.array([104, 105, 5000]), np.array([3], dtype=np.int32))
    show = [str(tmp_path / "d"), "--document", "0", "--tokenizer-type", "ByteLevelTokenizer"]
    assert tool("inspect_data")(show) == 1
    assert "document 0 holds id 5000, but the tokenizer has 257 ids" in capsys.readouterr().err


def test_without_a_size_the_order_is_that_of_one_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--data-path", write_dataset(tmp_path / "d", [10] * 30), "--split", "1", "--seq-length", "12"]
    assert tool("inspect_data")([*run, "--iteration", "1", "--global-batch-size", "4"]) == 0
    told = "train: 24 samples of 12 tokens, one epoch; a longer run has another order: give --train-samples\n"
    assert capsys.readouterr().out.startswith(told)
    assert tool("inspect_data")([*run, "--train-samples", "24"]) == 0
    assert capsys.readouterr().out.startswith("train: 24 samples of 12 tokens\n")


def test_ids_beyond_int32_are_dumped_as_they_are(tmp_path: Path) -> None:
    ids = np.arange(1 << 31, (1 << 31) + 30)
    with DatasetWriter(str(tmp_path / "d"), "int64") as writer:
        writer.add(ids, np.array([30], dtype=np.int32))
    run = ["--data-path", str(tmp_path / "d"), "--split", "1", "--seq-length", "8"]
    assert tool("inspect_data")([*run, "--dump", str(tmp_path / "out.npz")]) == 0
    found = np.load(tmp_path / "out.npz")
    assert sorted(found["train.tokens"].flatten()) == ids[:24].tolist()
    assert sorted(found["train.labels"].flatten()) == ids[1:25].tolist()
    assert found["train.position_ids"].dtype == np.int32


@pytest.mark.parametrize("what", ["--document", "--dump"])
def test_another_tokenizer_than_that_of_the_data_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    bytes_ = ["--tokenizer-type", "ByteLevelTokenizer"]
    source = lines(tmp_path / "in.jsonl", ["the cat sat"])
    train_tokenizer(Path(source), tmp_path / "tokenizer.json", 260)
    assert tool("preprocess_data")(["--input", source, "--output-prefix", str(tmp_path / "d"), *bytes_]) == 0
    prefix = str(tmp_path / "d_text_document")
    other = ["--tokenizer-model", str(tmp_path / "tokenizer.json")]
    show = [prefix, "--document", "0"]
    if what == "--dump":
        show = ["--data-path", prefix, "--split", "1", "--seq-length", "4", "--dump", str(tmp_path / "d.npz")]
    capsys.readouterr()
    assert tool("inspect_data")([*show, *other]) == 1
    found = capsys.readouterr()
    assert f"{prefix}: made with another tokenizer" in found.err
    assert "---" not in found.out
    assert tool("inspect_data")([*show, *bytes_]) == 0
    assert ("the cat sat" in capsys.readouterr().out) == (what == "--document")


DECREASED = ["--decrease-batch-size-if-needed", "--micro-batch-size", "1", "--data-parallel-size", "2"]


@pytest.mark.parametrize(
    ("flags", "iteration", "samples"),
    [
        # 2 samples a step, 4 from sample 3 on, 6 from sample 6 on: steps at 0, 2, 4, 8, 14
        (["--global-batch-size", "6", "--rampup-batch-size", "2", "2", "6"], "4", range(8, 14)),
        # 4 a step until 120 tokens, 10 samples, are consumed: steps at 0, 4, 8, 12
        (["--step-batch-size-schedule", "0:4 120:5"], "4", range(12, 17)),
        (["--global-batch-size", "5", *DECREASED], "2", range(4, 8)),
    ],
)
def test_a_step_has_the_batch_size_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], iteration: str, samples: range
) -> None:
    prefix = write_dataset(tmp_path / "d", [10] * 30)
    run = ["--data-path", prefix, "--split", "1,0,0", "--seq-length", "12", "--train-samples", "24"]
    run += ["--data-cache-path", str(tmp_path / "cache")]
    assert tool("inspect_data")([*run, *flags, "--iteration", iteration]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("sample ")] == [f"sample {i}" for i in samples]


def test_description_and_histogram(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    prefix = write_dataset(tmp_path / r"d$\x$", [0, 1, 2, 3, 700])  # which is no formula of TeX
    png = tmp_path / "lengths.png"
    assert tool("inspect_data")([prefix, "--histogram-png", str(png), "--document", "2"]) == 0
    out = capsys.readouterr().out
    assert "5 documents, 5 sequences, 706 tokens of uint16" in out
    assert "512 to 1023" in out
    assert "--- document 2, sequence 2: 2 tokens" in out
    assert png.read_bytes().startswith(b"\x89PNG")


def test_one_picture_of_several_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    lengths = {"_a": 3, "b$\\x$": 700, "c": 0}
    prefixes = [write_dataset(Path(name), [length]) for name, length in lengths.items()]
    assert tool("inspect_data")([*prefixes, "--histogram-png", "lengths.svg"]) == 0
    drawn = re.findall("<!-- (.*) -->", Path("lengths.svg").read_text())  # above the outlines of each text
    assert [text for text in drawn if text in prefixes] == prefixes
    assert {"0", "2", "512"} <= {*drawn}


def test_a_picture_of_very_many_datasets_shows_the_smallest_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names would cover it."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    prefixes = [write_dataset(Path(f"d{number}"), [1 + number % 7] * 2) for number in range(40)]
    assert tool("inspect_data")([*prefixes, "--histogram-png", "lengths.svg"]) == 0
    drawn = re.findall("<!-- (.*) -->", Path("lengths.svg").read_text())
    assert [text for text in drawn if text in prefixes] == [
        f"d{n}" for n in range(40) if n == 4 or n % 7 >= 5
    ]
    assert "29 others" in drawn
    bins = length_histogram([np.array([5, 5, 6]), np.array([300])])
    shown = _largest({**{f"large {n}": bins for n in range(SHOWN - 1)}, "b": bins[:1], "a": bins[:1]})
    assert shown["2 others"] == [Bin(4, 7, 6, 32)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dump", "d.bin"], "--dump d.bin: what is written is an .npz; give it a name that ends so"),
        (["--histogram-png", "d.bin"], "--histogram-png d.bin: is no picture that may be replaced"),
        (["--histogram-png", "README"], "--histogram-png README: is no picture that may be replaced"),
    ],
)
def test_nothing_else_is_replaced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("README").touch()
    write_dataset(Path("d"), [30])
    before = Path("d.bin").read_bytes()
    run = ["d", "--data-path", "d", "--split", "1", "--seq-length", "8"]
    with contextlib.suppress(SystemExit):
        assert tool("inspect_data")([*run, *flags]) == 1
    found = capsys.readouterr()
    assert (found.out, message in found.err) == ("", True)
    assert (Path("d.bin").read_bytes(), Path("README").read_bytes()) == (before, b"")


def test_a_picture_may_be_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write_dataset(Path("d"), [3])
    for name in ("lengths", "lengths", "lengths.SVG", "lengths.SVG"):
        assert tool("inspect_data")(["d", "--histogram-png", name]) == 0


def test_a_document_of_a_dataset_without_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_dataset(tmp_path / "d", [])
    assert tool("inspect_data")([prefix, "--document", "0"]) == 1
    assert capsys.readouterr().err.endswith(f"--document 0: {prefix} has no documents\n")


def test_verify_finds_what_opening_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "in.jsonl", 30)
    tool("preprocess_data")(["--input", path, "--output-prefix", str(tmp_path / "d"), *NULL])
    prefix = str(tmp_path / "d_text_document")
    assert tool("inspect_data")([prefix, "--verify"]) == 0
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[100] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)
    assert tool("inspect_data")([prefix, "--verify"]) == 1
    assert "crc32" in capsys.readouterr().err
    content[101] = 1
    Path(f"{prefix}.bin").write_bytes(content)
    assert tool("inspect_data")([prefix, "--verify"]) == 1
    assert "token 50 (sequence" in capsys.readouterr().err
