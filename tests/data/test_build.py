"""What --data-path and its companions build, and what they say when they cannot."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from megalite.config import blend
from megalite.config.blend import parse_blend, read_data_args
from megalite.config.schema import DataConfig
from megalite.data.build import Splits, build_datasets
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import DatasetWriter
from megalite.data.inputs import find_inputs
from megalite.data.merge import merge
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from tests.data.corpora import Words, data_config, lines, numbered_dataset, run, tool, write_dataset

WORDS = Words(1000, 999)


def build(config: DataConfig, counts: tuple[int, int, int], seq_length: int = 8) -> Splits:
    return build_datasets(config, WORDS, seq_length, 1234, counts)


def test_counts_and_empty_splits(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", [20] * 100)
    train, valid, test, _ = build(data_config(tmp_path / "c", prefix, split="90,10,0"), (1000, 50, 0))
    assert train is not None
    assert valid is not None
    assert len(train) >= 1000
    assert len(valid) >= 50
    assert test is None


def test_split_without_documents(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", [20] * 10)
    config = data_config(tmp_path / "c", prefix, split="969,30,1")
    with pytest.raises(DataError, match="hold no tokens, but 5 samples"):
        build(config, (10, 5, 0))
    assert build(config, (10, 0, 0)).valid is None


def test_a_blend_without_weights_that_does_not_last_for_the_validation(tmp_path: Path) -> None:
    prefixes = [write_dataset(tmp_path / name, [9] * 20) for name in "ab"]
    with pytest.raises(DataError, match=r"valid split: 99 samples .* gives \d+; lower --eval-iters, or"):
        build(data_config(tmp_path / "c", *prefixes, split="50,50,0"), (0, 99, 0))


def test_dataset_smaller_than_a_sample_repeats(tmp_path: Path) -> None:
    train, *_ = build(
        data_config(tmp_path / "c", write_dataset(tmp_path / "d", [3])), (4, 0, 0), seq_length=16
    )
    assert train is not None
    out = np.empty((1, 17), dtype=np.int64)
    train.samples.read(np.array([0]), out)
    assert len(set(out[0].tolist())) <= 3


def test_empty_dataset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hold no tokens"):
        build(data_config(tmp_path / "c", write_dataset(tmp_path / "d", [])), (4, 0, 0))


def test_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data-path"):
        build(data_config(tmp_path / "c"), (4, 0, 0))


def test_blend_in_proportion_to_its_weights(tmp_path: Path) -> None:
    a, b = (write_dataset(tmp_path / name, [50] * 20, seed=i) for i, name in enumerate("ab"))
    train, *_ = build(data_config(tmp_path / "c", "3", a, "1", b), (400, 0, 0))
    assert train is not None
    assert train.samples.consumed(400) == {a: 300, b: 100}


@pytest.mark.parametrize("weights", [("0.001", "0.999"), ("0", "1"), ("1e-9", "1"), ("1", "1")])
def test_extreme_weights_and_the_same_path_twice(tmp_path: Path, weights: tuple[str, str]) -> None:
    prefix = write_dataset(tmp_path / "d", [8] * 11)  # about 10 samples
    for size in (1, 2, 7, 100):
        train, *_ = build(data_config(tmp_path / "c", weights[0], prefix, weights[1], prefix), (size, 0, 0))
        assert train is not None
        out = np.empty((len(train), 9), dtype=np.int64)
        train.samples.read(np.arange(len(train)), out)


def test_blend_without_weights_goes_by_size(tmp_path: Path) -> None:
    a, b = write_dataset(tmp_path / "a", [90]), write_dataset(tmp_path / "b", [30])
    c = write_dataset(tmp_path / "c", [2])  # shorter than a sample: it gives none
    train, *_ = build(data_config(tmp_path / "cache", a, b, c), (14, 0, 0))
    assert train is not None
    assert train.samples.consumed(14) == {a: 11, b: 3, c: 0}
    for config in (data_config(tmp_path / "cache", a, b, c), DataConfig(train_data_path=(a, b, c))):
        with pytest.raises(DataError, match=r"15 samples .* gives 14; lower --train-iters") as told:
            build(config, (15, 0, 0))
        assert "--data-path" not in str(told.value)  # which may not be the flag that gives them


def test_paths_per_split(tmp_path: Path) -> None:
    a, b = numbered_dataset(tmp_path / "a", 10, 10), numbered_dataset(tmp_path / "b", 10, 10)
    config = DataConfig(
        train_data_path=(a,), valid_data_path=("2", a, "1", b), data_cache_path=str(tmp_path / "c")
    )
    train, valid, test, _ = build(config, (5, 6, 7))
    assert train is not None
    assert valid is not None
    assert train.samples.consumed(5) == {a: 5}
    assert valid.samples.consumed(6) == {a: 4, b: 2}
    assert test is None


def test_data_args_path(tmp_path: Path) -> None:
    a, b = write_dataset(tmp_path / "a", [50] * 20), write_dataset(tmp_path / "b", [50] * 20)
    (tmp_path / "args").write_text(f"0.25 {a}\n0.75 {b}\n", encoding="utf-8-sig")  # as editors of Windows do
    train, *_ = build(data_config(tmp_path / "c", data_args_path=str(tmp_path / "args")), (100, 0, 0))
    assert train is not None
    assert train.samples.consumed(100) == {a: 25, b: 75}
    with pytest.raises(DataError, match=r"--data-args-path .*nowhere"):
        build(data_config(tmp_path / "c", data_args_path=str(tmp_path / "nowhere")), (100, 0, 0))


def test_mixed_list_of_weights_and_paths(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", [50])
    with pytest.raises(DataError, match=r"--data-path: .* stands where a weight is expected"):
        build(data_config(tmp_path / "c", "1", prefix, prefix, prefix), (4, 0, 0))


def test_datasets_whose_names_are_numbers_are_not_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    years = [write_dataset(Path(year), [50] * 20) for year in ("2021", "2022")]
    with pytest.raises(DataError, match=r"2021 would be a weight, .* \./2021 for the dataset, \+2021 for"):
        build(data_config(tmp_path / "c", *years), (10, 0, 0))
    train, *_ = build(data_config(tmp_path / "c", *(f"./{year}" for year in years)), (10, 0, 0))
    assert train is not None
    assert train.samples.consumed(10) == {"./2021": 5, "./2022": 5}
    train, *_ = build(data_config(tmp_path / "c", "+2021", "2022"), (10, 0, 0))
    assert train is not None
    assert train.samples.consumed(10) == {"2022": 10}


def test_pieces_name_documents(tmp_path: Path) -> None:
    prefix = numbered_dataset(tmp_path / "d", documents=5, length=4)
    train, *_ = build(data_config(tmp_path / "c", "1", prefix, "1", prefix), (6, 0, 0), seq_length=6)
    assert train is not None
    out = np.empty((6, 7), dtype=np.int64)
    train.samples.read(np.arange(6), out)
    for k in range(6):
        tokens = [
            piece.document * 4 + offset
            for piece in train.samples.pieces(k)
            for offset in range(piece.offset, piece.offset + piece.tokens)
        ]
        assert tokens == out[k].tolist()


def test_pieces_lie_in_documents_of_several_sequences(tmp_path: Path) -> None:
    with DatasetWriter(str(tmp_path / "d"), "int32", sync=False) as writer:
        writer.add(np.arange(12), np.full(3, 4, dtype=np.int32), np.array([0, 2, 1]))
    train, *_ = build(data_config(tmp_path / "c", str(tmp_path / "d")), (1, 0, 0), seq_length=11)
    assert train is not None
    places = [(piece.document, piece.offset, piece.tokens) for piece in train.samples.pieces(0)]
    assert sorted(places) == [(1, 0, 4), (1, 4, 4), (2, 0, 4)]


def test_mock_data(tmp_path: Path) -> None:
    train, valid, test, _ = build(data_config(tmp_path / "c", mock_data=True), (10, 5, 0))
    assert train is not None
    assert valid is not None
    assert test is None
    assert (len(train), len(valid)) == (10, 5)


def test_a_list_of_datasets_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "list").write_text("corpus " * 3)
    monkeypatch.setattr(blend, "DATA_ARGS_BYTES", 20)
    with pytest.raises(ValueError, match="more than 0 MiB: expected weights and prefixes"):
        read_data_args(str(tmp_path / "list"))
    for path, reason in ((str(tmp_path / "list"), "more than 0 MiB"), ("/dev/zero", "is a pipe or a device")):
        with pytest.raises(DataError, match=f"--data-args-path {path}: cannot be read: {reason}"):
            build_datasets(data_config(tmp_path, data_args_path=path), Words(9, 8), 8, 1, (1, 0, 0))


def test_weights_whose_sum_overflows() -> None:
    with pytest.raises(ValueError, match="the sum of the weights 1e308 1e308 is not finite"):
        parse_blend(["1e308", "a", "1e308", "b"])


def test_a_blend_that_is_too_long_is_told_before_it_is_made(tmp_path: Path) -> None:
    prefixes = [write_dataset(tmp_path / name, [30] * 20) for name in "ab"]
    config = data_config(tmp_path / "cache", "1", prefixes[0], "1", prefixes[1])
    with pytest.raises(DataError, match="a blend of 1000000000000 samples would take an index of 10000 GB"):
        build_datasets(config, Words(1000, 999), 8, 1, (10**12, 0, 0))


def test_a_description_of_another_dataset_vouches_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when only the .bin and the .idx of a dataset were replaced."""
    source = lines(tmp_path / "in.jsonl", ["the cat sat on the mat"] * 9)
    run(find_inputs([source]), tmp_path / "d")
    prefix, tokenizer = str(tmp_path / "d_text_document"), ByteLevelTokenizer()

    def read() -> None:
        build_datasets(data_config(tmp_path / "c", prefix), tokenizer, 8, 1234, (10, 0, 0))

    read()
    write_dataset(tmp_path / "other", [20] * 9)
    for suffix in ("bin", "idx"):
        shutil.copy(tmp_path / f"other.{suffix}", f"{prefix}.{suffix}")
    found = rf"{prefix}: tokens: {prefix}\.json says 198, found 180: .*, or remove {prefix}\.json where"
    for believing in (read, lambda: merge([prefix], str(tmp_path / "whole"))):
        with pytest.raises(DataError, match=found):
            believing()
    assert tool("inspect_data")([prefix]) == 1
    shown = capsys.readouterr()
    assert re.search(found, shown.err)
    assert "made by megalite" not in shown.out
    Path(f"{prefix}.json").unlink()
    read()


def test_flags_of_documents_need_ends_of_documents(tmp_path: Path) -> None:
    source, tokenizer = lines(tmp_path / "in.jsonl", ["the cat sat on the mat"] * 9), ByteLevelTokenizer()
    for append_eod in (True, False):
        run(find_inputs([source]), tmp_path / str(append_eod), append_eod=append_eod)
        prefix = f"{tmp_path}/{append_eod}_text_document"
        build_datasets(data_config(tmp_path / "c", prefix), tokenizer, 8, 1234, (10, 0, 0))
    masked = data_config(tmp_path / "c", prefix, eod_mask_loss=True)
    with pytest.raises(DataError, match=r"made without --append-eod, so that .* find no end of a document"):
        build_datasets(masked, tokenizer, 8, 1234, (10, 0, 0))
