"""Every rank sees its own part, all ranks together see everything once, from any place and in any layout."""

from __future__ import annotations

import os
import re
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megalite import _C
from megalite.accelerator import pin
from megalite.config import BatchSchedule
from megalite.data import host_batches
from megalite.data.build import Dataset, DocumentRules, build_datasets
from megalite.data.errors import DataError
from megalite.data.host_batches import read_batches
from megalite.data.loader import StepLoader, rank_samples
from megalite.data.mock_dataset import MockDataset
from megalite.data.read_ahead import ThreadReader
from megalite.data.tokenizer import build_tokenizer
from tests.data.corpora import Words, data_config, numbered_dataset, write_dataset

CPU = torch.device("cpu")


def mock(samples: int, seq_length: int = 8) -> Dataset:
    return Dataset(MockDataset(100, seq_length, 1, samples), DocumentRules(eod=0))


def drawn(
    dataset: Dataset, micro: int, global_batch: int, dp: int, consumed: int = 0
) -> list[list[list[int]]]:
    """Sample numbers by rank and step."""
    ranks = []
    for rank in range(dp):
        with StepLoader(dataset, micro, global_batch, rank, dp, consumed, CPU) as loader:
            ranks.append([[int(i) for batch in step for i in batch.sample_index] for step in loader])
    return ranks


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 2), (4, 1), (1, 4), (1, 8), (2, 4), (8, 1)])
@pytest.mark.parametrize("consumed", [0, 8, 24])
def test_a_global_batch_is_the_same_samples_in_any_layout(micro: int, dp: int, consumed: int) -> None:
    ranks = drawn(mock(50), micro, 8, dp, consumed)
    steps = list(zip(*ranks, strict=True))
    assert len(steps) == (50 - consumed) // 8
    for k, step in enumerate(steps):
        first = consumed + 8 * k
        assert sorted(i for rank in step for i in rank) == list(range(first, first + 8))


def test_order_inside_a_global_batch_is_megatrons() -> None:
    assert rank_samples(0, 2, 8, 0, 2).tolist() == [[0, 1], [4, 5]]
    assert rank_samples(0, 2, 8, 1, 2).tolist() == [[2, 3], [6, 7]]


def test_what_does_not_fill_a_global_batch_is_left_for_all_ranks_alike() -> None:
    # 10 samples, micro-batch 2, 3 ranks
    assert drawn(mock(10), 2, 6, 3) == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_batches_do_not_depend_on_the_layout() -> None:
    dataset = mock(16)
    with StepLoader(dataset, 4, 4, 0, 1, 8, CPU) as loader:
        (whole,) = next(loader)
    for rank in range(2):
        with StepLoader(dataset, 1, 4, rank, 2, 8, CPU) as loader:
            for batch in next(loader):
                row = int(batch.sample_index[0]) - 8
                assert torch.equal(batch.tokens[0], whole.tokens[row])
                assert torch.equal(batch.labels[0], whole.labels[row])


def test_the_batch_may_change_with_the_samples_consumed() -> None:
    """2, then 4, then 8 from the tenth sample on: wherever the run was resumed, in any layout."""

    sizes = BatchSchedule((0, 2, 10), (2, 4, 8))
    expected = [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9], list(range(10, 18)), list(range(18, 26))]
    for consumed, rest in ((0, expected), (2, expected[1:]), (10, expected[3:])):
        for micro, dp in ((1, 1), (2, 1), (1, 2)):
            ranks = []
            for rank in range(dp):
                with StepLoader(mock(30), micro, sizes, rank, dp, consumed, CPU) as loader:
                    ranks.append([[int(i) for one in step for i in one.sample_index] for step in loader])
            steps = [sorted(i for rank in step for i in rank) for step in zip(*ranks, strict=True)]
            assert steps == rest


def test_a_batch_that_does_not_divide_is_an_error_from_the_beginning() -> None:
    with pytest.raises(DataError, match="global batch 3 is not a multiple of micro-batch 2"):
        StepLoader(mock(30), 2, BatchSchedule((0, 4), (4, 3)), 0, 1, 0, CPU)


def test_the_end_of_document_can_be_named_in_training(tmp_path: Path) -> None:
    """For a tokenizer that does not say which of its tokens it is."""
    library = Tokenizer(WordLevel({"a": 0, "b": 1, "<stop>": 2}, unk_token="a"))
    library.save(str(tmp_path / "tokenizer.json"))
    prefix = write_dataset(tmp_path / "d", [10] * 10, vocab_size=3)
    config = data_config(tmp_path / "c", prefix, tokenizer_type="HuggingFaceTokenizer",
                         tokenizer_model=str(tmp_path), eod_mask_loss=True)  # fmt: skip
    with pytest.raises(DataError, match="name it: --eod-token TOKEN"):
        build_datasets(config, build_tokenizer(config, 3), 8, 1, (9, 0, 0))
    named = replace(config, eod_token="<stop>")
    dataset = build_datasets(named, build_tokenizer(named, 3), 8, 1, (9, 0, 0)).train
    assert dataset is not None
    with StepLoader(dataset, 9, 9, 0, 1, 0, CPU) as loader:
        (batch,) = next(loader)
    assert torch.equal(batch.loss_mask == 0, batch.tokens == 2)


def test_shapes_and_dtypes() -> None:
    with StepLoader(mock(8), 2, 4, 0, 1, 0, CPU) as loader:
        step = next(loader)
        assert loader.wait_seconds > 0
    assert len(step) == 2
    batch = step[0]
    for name, dtype in (
        ("tokens", torch.int64),
        ("labels", torch.int64),
        ("loss_mask", torch.float32),
        ("position_ids", torch.int64),
    ):
        assert getattr(batch, name).shape == (2, 8), name
        assert getattr(batch, name).dtype == dtype, name
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert torch.equal(batch.position_ids, torch.arange(8).expand(2, 8))
    assert batch.loss_mask.min() == 1
    assert batch.cu_seqlens is None


def test_document_rules(tmp_path: Path) -> None:
    class Fixed(MockDataset):
        def read(self, samples: np.ndarray, out: np.ndarray) -> None:
            out[:] = [[0, 5, 0, 0, 7, 8, 0], [1, 2, 3, 4, 5, 6, 7]]

    rules = DocumentRules(0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    with StepLoader(Dataset(Fixed(9, 6, 0, 2), rules), 2, 2, 0, 1, 0, CPU) as loader:
        (batch,) = next(loader)
    assert batch.loss_mask.tolist() == [[0, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 1, 3, 4, 6, 12]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_document_length == 6


@pytest.mark.parametrize("seq", [1, 15, 16, 17, 127, 128, 129, 300])
def test_an_end_of_document_at_every_place(seq: int) -> None:
    rng = np.random.default_rng(seq)
    tokens = rng.integers(1, 2**40, (seq + 1, seq + 3))
    tokens[:, :seq][np.eye(seq + 1, seq, dtype=bool)] = 0  # row i ends a document at i, the last row none
    tokens[seq // 2, rng.random(seq + 3) < 0.3] = 0
    tokens[:, seq:] = 0  # behind the sequence
    positions, mask = np.empty((seq + 1, seq), dtype=np.int64), np.empty((seq + 1, seq), dtype=np.float32)
    starts = _C.mask_documents(tokens, seq, 0, positions, mask)
    ends = tokens[:, :seq] == 0
    first = np.pad(ends[:, :-1], ((0, 0), (1, 0)))  # behind an end something begins
    first[:, 0] = True
    assert starts.tolist() == [*np.flatnonzero(first).tolist(), first.size]
    assert np.array_equal(mask, 1.0 - ends)
    begun = np.maximum.accumulate(np.where(first, np.arange(seq), 0), axis=1)
    assert np.array_equal(positions, np.arange(seq) - begun)


@pytest.mark.parametrize("at_once", [1, 40])
def test_a_step_is_read_in_parts_that_a_cache_holds(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = DocumentRules(3, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    dataset = Dataset(MockDataset(8, 6, 1, 50), rules)
    samples = np.random.default_rng(0).permutation(50)[:14].reshape(7, 2)
    whole = read_batches(dataset, samples, 8, pin)
    monkeypatch.setattr(host_batches, "CACHED_TOKENS", at_once)
    parts = read_batches(dataset, samples, 8, pin)
    assert len(parts.boundaries or []) == 7
    for field in fields(whole):
        torch.testing.assert_close(getattr(parts, field.name), getattr(whole, field.name), rtol=0, atol=0)


def test_an_epoch_holds_every_token_once(tmp_path: Path) -> None:
    prefix = numbered_dataset(tmp_path / "d", documents=40, length=20)
    datasets = build_datasets(data_config(tmp_path / "cache", prefix), Words(800, 799), 10, 3, (79, 0, 0))
    assert datasets.train is not None
    assert len(datasets.train) == 79
    seen: list[int] = []
    for rank in range(2):
        with StepLoader(datasets.train, 1, 2, rank, 2, 0, CPU) as loader:
            seen += [int(token) for step in loader for batch in step for token in batch.tokens.flatten()]
    assert len(seen) == len(set(seen)) == 780


@pytest.mark.parametrize(("micro", "dp"), [(1, 2), (2, 1), (1, 4)])
def test_resume_in_another_layout_across_epochs(tmp_path: Path, micro: int, dp: int) -> None:
    prefix = numbered_dataset(tmp_path / "d", documents=7, length=9)
    datasets = build_datasets(data_config(tmp_path / "cache", prefix), Words(63, 62), 4, 3, (60, 0, 0))
    assert datasets.train is not None
    with StepLoader(datasets.train, 4, 4, 0, 1, 0, CPU) as loader:
        whole = [step[0].tokens for step in loader]
    resumed = [torch.empty(4, 4, dtype=torch.int64) for _ in whole[3:]]
    for rank in range(dp):
        with StepLoader(datasets.train, micro, 4, rank, dp, 12, CPU) as loader:
            for k, step in enumerate(loader):
                for batch in step:
                    for row, sample in zip(batch.tokens, batch.sample_index, strict=True):
                        resumed[k][int(sample) - 12 - 4 * k] = row
    assert all(torch.equal(a, b) for a, b in zip(resumed, whole[3:], strict=True))


def test_mistakes_are_messages() -> None:
    with pytest.raises(
        DataError, match="global batch 6 is not a multiple of micro-batch 4 x data parallel 1"
    ):
        StepLoader(mock(8), 4, 6, 0, 1, 0, CPU)
    with pytest.raises(DataError, match="9 samples are already consumed, but the dataset has 8"):
        StepLoader(mock(8), 1, 1, 0, 1, 9, CPU)


def test_an_error_while_reading_reaches_the_caller() -> None:
    class Failing(MockDataset):
        def read(self, samples: np.ndarray, out: np.ndarray) -> None:
            if samples[0] == 2:
                raise DataError("sample 2 is broken")
            super().read(samples, out)

    with StepLoader(Dataset(Failing(9, 6, 0, 4), DocumentRules(0)), 1, 1, 0, 1, 0, CPU) as loader:
        assert len([next(loader), next(loader)]) == 2
        with pytest.raises(DataError, match="sample 2 is broken"):
            next(loader)
        with pytest.raises(StopIteration):
            next(loader)


def test_a_loader_that_was_interrupted_is_not_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: ThreadReader) -> None:
        raise KeyboardInterrupt

    with StepLoader(mock(8), 1, 1, 0, 1, 0, CPU) as loader:
        next(loader)
        with monkeypatch.context() as notebook:
            notebook.setattr(ThreadReader, "__next__", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(loader)
        with pytest.raises(RuntimeError, match="was interrupted: make a new one at the sample that comes"):
            next(loader)


def test_an_id_beyond_the_models_vocabulary_is_told_by_its_place(tmp_path: Path) -> None:
    """Not by a loss of NaN: a split embedding gives zeros for it."""
    prefix = numbered_dataset(tmp_path / "d", documents=7, length=9)  # ids 0 to 62, each once
    dataset = build_datasets(data_config(tmp_path / "cache", prefix), Words(63, 62), 4, 3, (15, 0, 0)).train
    assert dataset is not None
    with StepLoader(dataset, 1, 1, 0, 1, 0, CPU, vocab_size=63) as loader:
        assert len(list(loader)) == 15
    with (
        StepLoader(dataset, 1, 1, 0, 1, 0, CPU, vocab_size=40) as loader,
        pytest.raises(DataError) as caught,
    ):
        list(loader)
    found = re.fullmatch(
        rf"{prefix}: document (\d+) holds id (\d+) at token (\d+), but the model's vocabulary is the 40 ids "
        r"from 0; was the data made with another tokenizer\?",
        str(caught.value),
    )
    assert found, caught.value
    document, token, place = map(int, found.groups())
    assert token == 9 * document + place >= 40


def test_a_negative_id_is_no_id_of_the_model(tmp_path: Path) -> None:
    prefix = numbered_dataset(tmp_path / "d", documents=1, length=5)
    (tmp_path / "d.bin").write_bytes(np.array([1, 2, -3, 4, 5], dtype=np.int32).tobytes())
    datasets = build_datasets(data_config(tmp_path / "cache", prefix), Words(9, 8), 4, 3, (1, 0, 0))
    assert datasets.train is not None
    with (
        StepLoader(datasets.train, 1, 1, 0, 1, 0, CPU, vocab_size=9) as loader,
        pytest.raises(DataError, match="document 0 holds id -3 at token 2,"),
    ):
        next(loader)


def test_mock_tokens_are_a_function_of_the_sample() -> None:
    source = MockDataset(50, 16, 7, 100)
    one, many = np.empty((1, 17), dtype=np.int64), np.empty((100, 17), dtype=np.int64)
    source.read(np.arange(100), many)
    source.read(np.array([42]), one)
    assert np.array_equal(one[0], many[42])
    assert many.min() >= 0
    assert many.max() == 49
    assert len({row.tobytes() for row in many}) == 100


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_is_cut_while_it_is_read_is_a_message(tmp_path: Path, suffix: str) -> None:
    """And one that was replaced by another of its name is still read as it was."""
    prefix = numbered_dataset(tmp_path / "d", documents=4000, length=9)
    config = data_config(tmp_path / "c", prefix)
    dataset = build_datasets(config, Words(40000, 39999), 8, 3, (4000, 0, 0)).train
    assert dataset is not None
    path = Path(prefix + suffix)
    content = path.read_bytes()
    out = np.empty((4000, 9), dtype=np.int64)
    dataset.samples.read(np.arange(4000), out)
    before = out.copy()
    (tmp_path / "other").write_bytes(content[:10])
    path.rename(tmp_path / "kept")
    (tmp_path / "other").rename(path)
    dataset.samples.read(np.arange(4000), out)
    assert np.array_equal(out, before)
    (tmp_path / "kept").rename(path)
    os.truncate(path, 10)
    time.sleep(0.02)  # a file that was good is not looked at for 10 ms
    with pytest.raises(DataError, match=rf"{suffix}: had {len(content)} bytes when it was opened and has 10"):
        dataset.samples.read(np.arange(4000), out)
