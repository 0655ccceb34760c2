"""The index builders against NumPy and against a walk in plain Python."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite import _C
from megalite.data.blend_counts import BlendCounts
from megalite.data.blended_dataset import blend_index, exhaustive_blend_index, normalize
from megalite.data.errors import DataError
from megalite.data.indexed_dataset import open_dataset
from megalite.data.sample_plan import build_sample_index, plan_samples
from megalite.data.splits import document_range, split_shares
from tests.data.corpora import write_dataset


@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_shuffle_equals_numpy(seed: int, sizes: list[int]) -> None:
    shuffler, reference = _C.LegacyShuffler(seed), np.random.RandomState(seed)
    for size in sizes:  # one generator, several arrays
        ours, theirs = np.arange(size, dtype=np.int64), np.arange(size, dtype=np.int64)
        shuffler.shuffle(ours)
        reference.shuffle(theirs)
        assert np.array_equal(ours, theirs)


def walk(lengths: list[int], documents: np.ndarray, samples: int, seq_length: int) -> list[tuple[int, int]]:
    """Where each sample starts, token by token."""
    stream = [(position, offset) for position, doc in enumerate(documents) for offset in range(lengths[doc])]
    return [(0, 0)] + [stream[row * seq_length] for row in range(1, samples + 1)]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any),
    seq_length=st.integers(1, 50),
    requested=st.one_of(st.none(), st.integers(1, 60)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_indices_against_a_plain_walk(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_length: int,
    requested: int | None,
    seed: int,
) -> None:
    dataset = open_dataset(write_dataset(tmp_path_factory.mktemp("d") / "d", lengths))
    plan = plan_samples(dataset, (0, len(lengths)), seq_length, seed, requested)
    index = build_sample_index(dataset, plan)

    total, epochs = sum(lengths), 1
    while requested is not None and epochs * total < requested * seq_length + 1:
        epochs += 1
    samples = (epochs * total - 1) // seq_length
    before = ((epochs - 1) * total - 1) // seq_length
    separate = (
        epochs > 1 and requested is not None and requested - before < int(0.8 * ((total - 1) // seq_length))
    )
    generator = np.random.RandomState(seed)
    documents = np.tile(np.arange(len(lengths)), epochs)
    joint = len(documents) - (len(lengths) if separate else 0)
    order = np.arange(samples)
    generator.shuffle(documents[:joint])
    if separate:
        generator.shuffle(documents[joint:])
    generator.shuffle(order[: before if separate else samples])
    if separate:
        generator.shuffle(order[before:])

    assert np.array_equal(index.document_index, documents)
    assert index.sample_index.tolist() == [list(row) for row in walk(lengths, documents, samples, seq_length)]
    assert np.array_equal(index.shuffle_index, order)
    # And the tokens: consecutive in the stream, the last one the label of the last.
    stream = np.concatenate([dataset.sequence(int(doc)) for doc in documents])
    reader = _C.SampleReader(dataset, *index, seq_length)
    out = np.empty((samples, seq_length + 1), dtype=np.int64)
    _C.read_samples([reader], np.zeros(samples, dtype=np.int64), np.arange(samples), out)
    for k in range(samples):
        start = int(order[k]) * seq_length
        assert np.array_equal(out[k], stream[start : start + seq_length + 1])
        assert sum(count for _, _, count in reader.pieces(k)) == seq_length + 1


def test_a_damaged_index_is_an_error_not_a_crash(tmp_path: Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "d", [10] * 20))
    index = build_sample_index(dataset, plan_samples(dataset, (0, 20), 16, 0, None))
    rng = np.random.default_rng(0)
    out = np.empty((1, 17), dtype=np.int64)
    failures = 0
    for _ in range(2000):
        arrays = [array.copy() for array in index]
        victim = arrays[rng.integers(3)].reshape(-1)
        victim[rng.integers(len(victim))] = (
            rng.integers(-5, 2**31 - 1) if victim.dtype == np.int32 else rng.integers(0, 2**32)
        )
        reader = _C.SampleReader(dataset, *arrays, 16)
        for sample in range(len(arrays[2])):
            try:
                _C.read_samples([reader], np.zeros(1, dtype=np.int64), np.array([sample]), out)
            except DataError:
                failures += 1
    assert failures > 500


def blend(weights: list[float], size: int) -> list[tuple[int, int]]:
    counts = np.zeros(len(weights))
    drawn = []
    for i in range(size):
        lags = np.array(weights) * max(float(i), 1.0) - counts
        chosen = int(np.argmax(lags))  # the first of equals
        drawn.append((chosen, int(counts[chosen])))
        counts[chosen] += 1
    return drawn


WEIGHTS = [
    [1.0],
    [0.5, 0.5],
    [0.001, 0.999],
    [1e-9, 1.0],
    [0.0, 1.0, 0.0],
    [1.0] * 40,
    [float(i) for i in range(1, 70)],
    [1.0 / i for i in range(1, 200)],
    [2.0**-i for i in range(60)],
    [1.0] * 200,
    [float(i % 3) for i in range(300)],
    [1.0 / i for i in range(1, 500)],
    [2.0 ** -(i % 90) for i in range(700)],
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=range(len(WEIGHTS)))
def test_blend_against_a_plain_argmax(weights: list[float]) -> None:
    normalized = normalize(weights)
    datasets, samples = blend_index(normalized, 3000)
    assert list(zip(datasets.tolist(), samples.tolist(), strict=True)) == blend(normalized, 3000)


@given(weights=st.lists(st.floats(0, 1), min_size=1, max_size=150).filter(any), size=st.integers(0, 500))
@settings(max_examples=60, deadline=None)
def test_random_blends(weights: list[float], size: int) -> None:
    normalized = normalize(weights)
    datasets, samples = blend_index(normalized, size)
    assert list(zip(datasets.tolist(), samples.tolist(), strict=True)) == blend(normalized, size)


# Around the numbers at which another search is taken, and at which whole vectors and blocks are full.
@pytest.mark.parametrize(
    "datasets", [15, 16, 17, 31, 33, 112, 127, 128, 129, 160, 161, 512, 513, 1000, 1099, 1100, 1121]
)
@pytest.mark.parametrize("values", [3, 1 << 20], ids=["many ties", "few ties"])
def test_blends_of_many(datasets: int, values: int) -> None:
    weights = normalize(np.random.default_rng(datasets).integers(1, values, datasets).astype(float).tolist())
    found, samples = blend_index(weights, 2500)
    assert list(zip(found.tolist(), samples.tolist(), strict=True)) == blend(weights, 2500)


@pytest.mark.parametrize("datasets", [17, 100, 129, 300])
def test_exhaustive_blends_of_many(datasets: int) -> None:
    sizes = np.random.default_rng(datasets).integers(0, 9, datasets).tolist()
    check_exhaustive(sizes)


@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=40).filter(any))
@settings(max_examples=60, deadline=None)
def test_exhaustive_blend_reads_everything_once(sizes: list[int]) -> None:
    check_exhaustive(sizes)


def check_exhaustive(sizes: list[int]) -> None:
    datasets, samples = exhaustive_blend_index(sizes)
    drawn = sorted(zip(datasets.tolist(), samples.tolist(), strict=True))
    assert drawn == [(d, k) for d, size in enumerate(sizes) for k in range(size)]
    weights, unspent, counts = (
        [size / sum(sizes) for size in sizes],
        [d for d in range(len(sizes)) if sizes[d]],
        [0] * len(sizes),
    )
    for i, dataset in enumerate(datasets.tolist()):
        lags = [weights[d] * max(float(i), 1.0) - counts[d] for d in unspent]
        assert dataset == unspent[lags.index(max(lags))]
        counts[dataset] += 1
        if counts[dataset] == sizes[dataset]:
            unspent.remove(dataset)


def test_dtypes_of_large_indices(tmp_path: Path) -> None:
    """The rule is a function of the plan; no array of that size is needed."""
    from dataclasses import replace

    from megalite.data.sample_plan import sample_index_dtype, shuffle_index_dtype

    dataset = open_dataset(write_dataset(tmp_path / "d", [10]))
    plan = plan_samples(dataset, (0, 1), 1, 0, None)
    assert [sample_index_dtype(replace(plan, epochs=n)) for n in (2**31 - 1, 2**31)] == [np.int32, np.int64]
    large = replace(plan, tokens=2**32 - 2)  # one sample less than tokens
    assert [shuffle_index_dtype(replace(large, tokens=2**32 - 2 + n)) for n in (0, 1)] == [
        np.uint32,
        np.int64,
    ]


def test_splits() -> None:
    train, valid, test = split_shares("969, 30, 1")
    assert train is not None
    assert valid is not None
    assert test is not None
    assert [document_range(share, 3000) for share in (train, valid, test)] == [
        (0, 2907),
        (2907, 2997),
        (2997, 3000),
    ]
    assert split_shares("1,0,0") == [(0.0, 1.0), None, None]
    assert document_range((0.5, 1.0), 5) == (2, 5)  # halves round to even
    for text in ("", "a", "1,2,3,4", "0,0,0", "-1,2"):
        with pytest.raises(DataError, match="--split"):
            split_shares(text)


def test_documents_without_tokens(tmp_path: Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "d", [0, 0, 5]))
    with pytest.raises(DataError, match=r"sequences \[0, 2\) of its 3 hold no tokens, but 4 samples"):
        plan_samples(dataset, (0, 2), 8, 0, 4)
    assert plan_samples(dataset, (0, 2), 8, 0, None).samples == 0
    assert plan_samples(dataset, (2, 3), 8, 0, 4).epochs == 7


def test_absurd_requests(tmp_path: Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "d", [1]))
    with pytest.raises(DataError, match="use more data or fewer samples"):
        plan_samples(dataset, (0, 1), 4096, 0, 10**9)
    with pytest.raises(DataError, match="--seed"):
        plan_samples(dataset, (0, 1), 1, 2**32, 1)


def test_split_order_is_disjoint() -> None:
    shares = [share for share in split_shares("8,1,1") if share is not None]
    ranges = [document_range(share, 101) for share in shares]
    assert list(itertools.chain.from_iterable(range(*r) for r in ranges)) == list(range(101))


def test_samples_of_each_dataset_are_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a run of 1e9 samples goes through those since the one before, without a wider copy."""
    datasets, _ = blend_index(normalize([3, 1, 2, 0.5]), 1003)
    counts, went_through, compute = BlendCounts(datasets, 5), [], _C.count_datasets

    def count_datasets(index: np.ndarray, out: np.ndarray) -> None:
        went_through.append(len(index))
        compute(index, out)

    monkeypatch.setattr(_C, "count_datasets", count_datasets)
    for samples in (700, 703, 703, 1003, 2000, 10, 0):
        assert counts.first(samples).tolist() == np.bincount(datasets[:samples], minlength=5).tolist()
    assert went_through == [700, 3, 0, 300, 0, 10, 0]


@pytest.mark.parametrize("wrong", [-1, 4])
def test_a_dataset_that_there_is_not_is_not_counted(wrong: int) -> None:
    index = np.array([0, 3, 1, 2, wrong, 0], dtype=np.int16)
    with pytest.raises(DataError, match=rf"dataset_index\[4\] = {wrong}: the blend has 4 datasets"):
        BlendCounts(index, 4).first(6)
