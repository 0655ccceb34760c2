"""A run that is resumed with another blend or length reads every dataset on from where it was."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.blend import Blend
from megalite.data.blended_dataset import BlendedDataset
from megalite.data.build import Dataset, build_datasets
from megalite.data.data_order import SHOWN, DataOrder, RunHistory
from megalite.data.errors import DataError
from megalite.data.gpt_dataset import Piece
from megalite.data.loader import StepLoader
from megalite.data.source_builder import SourceBuilder
from megalite.data.stretches import DatasetPlace, OrderRecord, ReadBefore, moved
from megalite.training.drawn import Drawn
from tests.data.corpora import Words, data_config, numbered_dataset, write_dataset

SEQ = 8
WORDS = Words(2**30, 0)
CPU = torch.device("cpu")


class Run:
    """Draws samples part by part, as a run that is stopped, and resumed from its checkpoint."""

    def __init__(self, folder: Path, split: str = "1,0,0", seed: int = 5, seq: int = SEQ) -> None:
        self.cache = folder / "cache"
        self.split = split
        self.seed = seed
        self.seq = seq
        self.saved: OrderRecord | None = None
        self.consumed = 0
        self.tokens: list[np.ndarray] = []
        self.pieces: list[list[Piece]] = []
        self.lines: tuple[str, ...] = ()

    def open(self, samples: int, *blend: str) -> tuple[Dataset, DataOrder]:
        config = data_config(self.cache, *blend, split=self.split)
        dataset = build_datasets(config, WORDS, self.seq, self.seed, (samples, 0, 0), self.saved).train
        assert dataset is not None
        assert dataset.order is not None
        return dataset, dataset.order

    def draw(self, count: int, samples: int, *blend: str, micro: int = 1, dp: int = 1) -> None:
        """`count` more samples of a run of `samples`."""
        dataset, order = self.open(samples, *blend)
        rows: dict[int, np.ndarray] = {}
        for rank in range(dp):
            with StepLoader(dataset, micro, micro * dp, rank, dp, self.consumed, CPU) as loader:
                for step in range(count // (micro * dp)):
                    for batch in next(loader):
                        for number, row in zip(batch.sample_index, batch.tokens, strict=True):
                            rows[int(number)] = row.numpy().copy()
                    assert step >= 0
        assert sorted(rows) == list(range(self.consumed, self.consumed + count))
        self.tokens += [rows[number] for number in sorted(rows)]
        self.pieces += [dataset.samples.pieces(number) for number in sorted(rows)]
        self.consumed += count
        self.saved = OrderRecord.from_json(json.loads(json.dumps(order.record(self.consumed).to_json())))
        self.lines = order.lines

    def of(self, low: int, high: int) -> list[int]:
        """Tokens with values in [low, high), in the order in which they were drawn."""
        every = np.concatenate(self.tokens)
        return [int(token) for token in every[(every >= low) & (every < high)]]


def pair(folder: Path) -> tuple[str, str]:
    """A holds tokens 0 to 799, B 1000 to 1799: 99 whole samples of each an epoch."""
    a = numbered_dataset(folder / "a", 40, 20)
    b = numbered_dataset(folder / "b", 40, 20, first=1000)
    return a, b


def samples_of(tokens: list[int]) -> int:
    assert len(tokens) % SEQ == 0
    return len(tokens) // SEQ


def test_nothing_twice_before_an_epoch_is_over_and_nothing_lost(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    run = Run(tmp_path)
    run.draw(40, 120, "3", a, "1", b)
    assert samples_of(run.of(0, 1000)) == 30
    run.draw(40, 120, "1", a, "3", b)
    assert samples_of(run.of(0, 1000)) == 40
    run.draw(59, 300, "1", a)
    epoch = run.of(0, 1000)
    assert samples_of(epoch) == 99
    assert len(set(epoch)) == len(epoch) == 99 * SEQ
    run.draw(59, 300, "1", b)
    epoch = run.of(1000, 2000)
    assert samples_of(epoch) == 99
    assert len(set(epoch)) == 99 * SEQ
    run.draw(99, 600, "1", a)
    second = run.of(0, 1000)[99 * SEQ :]
    assert len(set(second)) == 99 * SEQ
    assert second != epoch


@pytest.mark.parametrize(
    "blend", ["{a}", "{a} {b}", "1 {a}", "3 {a} 1 {b}", "1 {a} 1 {a}", "0.999 {a} 0.001 {b}"]
)
@pytest.mark.parametrize("samples", [60, 150])
def test_a_resume_that_changes_nothing_draws_what_an_uninterrupted_run_would(
    tmp_path: Path, blend: str, samples: int
) -> None:
    a, b = pair(tmp_path)
    words = blend.format(a=a, b=b).split()
    if samples > 99 and blend == "{a}":
        samples = 250
    whole, parts = Run(tmp_path), Run(tmp_path)
    whole.draw(samples, samples, *words)
    for size in (20, 0, 20, samples - 40):
        parts.draw(size, samples, *words)
        assert parts.lines == ()
    assert all(np.array_equal(x, y) for x, y in zip(whole.tokens, parts.tokens, strict=True))


@pytest.mark.parametrize("blend", ["{a}", "1 {a}", "1 {a} 2 {b}"])
def test_a_longer_run_goes_on_through_the_epoch_that_it_is_in(tmp_path: Path, blend: str) -> None:
    a, b = pair(tmp_path)
    words = blend.format(a=a, b=b).split()
    run, shorter = Run(tmp_path), Run(tmp_path)
    for part in (30, 30, 30):
        run.draw(part, run.consumed + part, *words)
    shorter.draw(60, 60, *words)
    assert all(np.array_equal(x, y) for x, y in zip(shorter.tokens, run.tokens, strict=False))
    run.draw(210, 300, *words)
    drawn = run.of(0, 1000)
    for first in range(0, len(drawn), 99 * SEQ):
        epoch = drawn[first : first + 99 * SEQ]
        assert len(set(epoch)) == len(epoch)


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_the_layout_does_not_matter(tmp_path: Path, micro: int, dp: int) -> None:
    a, b = pair(tmp_path)
    plain, other = Run(tmp_path), Run(tmp_path)
    for run, layout in ((plain, (1, 1)), (other, (micro, dp))):
        run.draw(16, 64, "1", a, "1", b, micro=1, dp=1)
        run.draw(24, 64, "1", a, "5", b, micro=layout[0], dp=layout[1])
        run.draw(24, 64, b, a, micro=layout[0], dp=layout[1])
    assert all(np.array_equal(x, y) for x, y in zip(plain.tokens, other.tokens, strict=True))


def test_a_dataset_that_was_left_out_for_a_while_goes_on(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    c = numbered_dataset(tmp_path / "c", 40, 20, first=2000)
    run = Run(tmp_path)
    run.draw(20, 200, "1", a, "1", b)
    run.draw(20, 200, "1", a)
    run.draw(40, 200, "1", b, "1", c)
    assert run.lines == (
        "from sample 40 on the blend is another one",
        f"{b} goes on at its sample 10",
        f"{c} is new",
    )
    for low in (0, 1000, 2000):
        tokens = run.of(low, low + 1000)
        assert len(set(tokens)) == len(tokens)
    assert [samples_of(run.of(low, low + 1000)) for low in (0, 1000, 2000)] == [30, 30, 20]


def test_datasets_without_weights_are_read_once_over_all_stretches(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    c = numbered_dataset(tmp_path / "c", 40, 20, first=2000)
    run = Run(tmp_path)
    run.draw(50, 198, a, b)
    run.draw(247, 297, a, b, c)
    for low in (0, 1000, 2000):
        tokens = run.of(low, low + 1000)
        assert samples_of(tokens) == 99
        assert len(set(tokens)) == 99 * SEQ
    with pytest.raises(DataError, match=r"298 samples are wanted, .* gives 297"):
        run.open(298, a, b, c)
    with pytest.raises(DataError, match="all of its 2 datasets have been read"):
        run.open(298, a, b)


def test_a_dataset_named_twice_is_read_on_as_one(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    run = Run(tmp_path)
    run.draw(10, 80, "1", a, "1", b)
    run.draw(40, 80, "1", a, "2", a, "1", b)
    tokens = run.of(0, 1000)
    assert samples_of(tokens) == 35
    assert len(set(tokens)) == len(tokens)
    before = len(run.tokens)
    run.draw(10, 80, "3", a, "1", b)
    assert run.lines == ()
    assert len(run.tokens) == before + 10


@pytest.mark.parametrize("samples", [60, 150])  # of 99 an epoch
def test_a_single_dataset_that_is_named_twice_at_a_resume_goes_on(tmp_path: Path, samples: int) -> None:
    a, _ = pair(tmp_path)
    one, two = Run(tmp_path), Run(tmp_path)
    one.draw(10, samples, a)
    two.draw(10, samples, a)
    one.draw(40, samples, a)
    two.draw(40, samples, a, a)
    assert np.array_equal(one.tokens, two.tokens)
    assert two.lines == ()
    _, order = two.open(samples, a, a)
    history = RunHistory(SourceBuilder(SEQ, two.seed, two.cache), order)
    assert [history.pieces(sample) for sample in range(50)] == one.pieces


@pytest.mark.parametrize("documents", [30, 40])  # or as many, of the same lengths, with other tokens
def test_other_data_under_a_name_begins_anew_and_moved_data_does_not(tmp_path: Path, documents: int) -> None:
    a, b = pair(tmp_path)
    run = Run(tmp_path)
    run.draw(20, 60, "1", a, "1", b)
    (tmp_path / "moved").mkdir()
    for suffix in (".bin", ".idx"):
        Path(a + suffix).rename(tmp_path / "moved" / f"a{suffix}")
    numbered_dataset(tmp_path / "b", documents, 20, first=3000)
    moved = str(tmp_path / "moved" / "a")
    run.draw(20, 60, "1", moved, "1", f"{tmp_path}/./b")
    assert run.lines[1:] == (
        f"{moved} goes on at its sample 10",
        f"warning: {tmp_path}/./b holds other documents than it did: read from the beginning",
    )
    assert len(set(run.of(0, 1000))) == 20 * SEQ
    (tmp_path / "next").mkdir()
    other = numbered_dataset(tmp_path / "next" / "a", 40, 20, first=5000)
    run.draw(20, 60, "1", other, "1", f"{tmp_path}/b")
    assert run.lines[1] == f"{other} is new"


def test_folders_of_each_job_are_not_kept_for_ever(tmp_path: Path) -> None:
    """Where each copies the data to its node, as to /local/JOB."""
    run = Run(tmp_path)
    for job in range(4):
        (tmp_path / str(job)).mkdir()
        a, b = pair(tmp_path / str(job))
        run.draw(10, 80, "1", a, *(("1", b) if job != 2 else ()))
        read = ({a: 5, b: 5}, {a: 10, b: 10}, {a: 20, f"{tmp_path}/1/b": 10}, {a: 25, b: 15})
        assert run.saved is not None
        assert {place.prefix: place.place for place in run.saved.read} == read[job]
    for low in (0, 1000):
        tokens = run.of(low, low + 1000)
        assert len(set(tokens)) == len(tokens)


def test_relative_paths_are_those_of_the_folder_they_were_given_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the data on two machines, and jobs that start here and there with another mixture each."""
    for machine in ("x", "z", "elsewhere"):
        (tmp_path / machine / "data").mkdir(parents=True)
    pair(tmp_path / "x" / "data")
    pair(tmp_path / "z" / "data")
    run = Run(tmp_path)
    for weight, (folder, data) in enumerate((("x", ""), ("elsewhere", "../z/"), ("x", ""), ("z", ""))):
        monkeypatch.chdir(tmp_path / folder)
        run.draw(10, 80, str(1 + weight), f"{data}data/a", "1", f"{data}data/b")
    for low in (0, 1000):
        tokens = run.of(low, low + 1000)
        assert len(set(tokens)) == len(tokens)
    assert run.saved is not None
    assert {place.prefix for place in run.saved.read} == {f"{tmp_path}/z/data/{name}" for name in "ab"}
    monkeypatch.chdir(tmp_path)
    _, order = run.open(80, "x/data/a")
    history = RunHistory(SourceBuilder(SEQ, run.seed, run.cache), order)
    assert [history.pieces(sample)[0].document for sample in range(20)] == [
        pieces[0].document for pieces in run.pieces[:20]
    ]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_working_folder_that_goes_away_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """Training goes on, as its files are open; what it saves must not fail, nor have other names."""
    pair(tmp_path)
    folder, run = tmp_path / "job", Run(tmp_path)
    folder.mkdir()
    monkeypatch.chdir(folder)
    if resumed:
        run.draw(10, 80, "1", "../a", "2", "../b")
    dataset, order = run.open(80, "1", "../a", "1", "../b")
    drawn = Drawn(dataset, run.consumed, None)
    folder.rmdir()
    for place in order.record(30).read:
        assert place.prefix in (f"{tmp_path}/a", f"{tmp_path}/b")
    assert drawn.after(30).keys() == {f"{tmp_path}/a", f"{tmp_path}/b"}
    assert drawn.order(30) == order.record(30).to_json()


def test_of_two_spellings_of_a_path_that_counts_which_was_read_furthest() -> None:
    """Checkpoints had relative paths."""
    before = ReadBefore(
        [DatasetPlace("a", "1", (), 39), DatasetPlace(os.path.abspath("a"), "1", (), 27)], {"a": "1"}
    )
    assert before.take_up("a", "1") == DatasetPlace("a", "1", (), 39)


def test_what_was_read_further_or_lies_there_still_has_not_moved() -> None:
    old, new = DatasetPlace("/x/a", "1", (), 5), DatasetPlace("/y/a", "1", (), 5)
    behind, other = DatasetPlace("/y/a", "1", (), 4), DatasetPlace("/y/a", "2", (), 9)
    assert moved([old], [new]) == {"/x/a": "/y/a"}
    assert moved([old], [old, new]) == moved([old], [behind]) == moved([old], [other]) == {}
    replaced, again = DatasetPlace("/x/a", "2", (), 7), DatasetPlace("/z/a", "2", (), 7)
    assert moved([old, replaced], [new]) == moved([replaced, old], [new]) == {}
    assert moved([old, replaced], [new, again]).keys() == {"/x/a"}


def test_what_took_the_place_of_a_dataset_goes_on_when_that_was_read_elsewhere(tmp_path: Path) -> None:
    """A fixed path holds a release, then the next one; the first is read again where it is kept."""
    run, path = Run(tmp_path), tmp_path / "corpus"
    (tmp_path / "old").mkdir()
    numbered_dataset(path, 40, 20)
    run.draw(10, 80, str(path))
    for suffix in (".bin", ".idx"):
        path.with_suffix(suffix).rename(tmp_path / "old" / f"corpus{suffix}")
    numbered_dataset(path, 40, 20, first=1000)
    run.draw(10, 80, str(path))
    run.draw(10, 80, str(tmp_path / "old" / "corpus"))
    run.draw(10, 80, str(path))
    assert run.lines[1:] == (f"{path} goes on at its sample 10",)
    for low in (0, 1000):
        tokens = run.of(low, low + 1000)
        assert len(set(tokens)) == len(tokens) == 20 * SEQ


def test_of_very_many_datasets_those_are_told_that_a_reader_must_know(tmp_path: Path) -> None:
    many = [numbered_dataset(tmp_path / str(n), 10, 20, first=1000 * n) for n in range(SHOWN + 2)]
    run = Run(tmp_path)
    run.draw(20, 60, *(item for prefix in many[:-1] for item in ("1", prefix)))
    numbered_dataset(tmp_path / "20", 11, 20)
    run.draw(20, 60, *(item for prefix in many for item in ("1", prefix)))
    _, warning, new, *others = run.lines
    assert warning == f"warning: {many[20]} holds other documents than it did: read from the beginning"
    assert new == f"{many[21]} is new"
    assert others == [*(f"{each} goes on at its sample 1" for each in many[: SHOWN - 2]), "2 more datasets"]


@pytest.mark.parametrize("back", [True, False])
def test_a_dataset_goes_on_also_where_another_has_taken_its_place(tmp_path: Path, back: bool) -> None:
    """New data in its folder, or that of the folder to which it was moved."""
    folders = [tmp_path / name for name in ("current", "archive")]
    for folder in folders:
        folder.mkdir()
    current, archive = (str(folder / "text") for folder in folders)
    numbered_dataset(folders[0] / "text", 40, 20)
    if back:
        numbered_dataset(folders[1] / "text", 40, 20, first=1000)
    blend = ("1", current, "1", archive) if back else ("1", current)
    run = Run(tmp_path)
    run.draw(40, 120, *blend)
    numbered_dataset(folders[1] / "text", 40, 20)
    numbered_dataset(folders[0] / "text", 40, 20, first=1000)
    run.draw(60, 120, "2", archive, "1", current)
    before = 20 if back else 40
    second = "goes on at its sample 20" if back else "holds other documents than it did: read from the begin"
    assert run.lines[1] == f"{archive} goes on at its sample {before}"
    assert f"{current} {second}" in run.lines[2]
    drawn = run.of(0, 1000)
    assert len(set(drawn)) == len(drawn) == (before + 40) * SEQ


@pytest.mark.parametrize("weights", [("1", "2"), ("", "")])
def test_data_that_every_job_has_in_a_folder_of_its_own_is_read_on(
    tmp_path: Path, weights: tuple[str, str]
) -> None:
    """Copies under a new path each time, and at last under the first again: as if it had stayed."""

    def blend(folder: Path) -> list[str]:
        return [
            each for weight, name in zip(weights, "ab", strict=True) for each in (weight, f"{folder}/{name}")
        ]

    pair(tmp_path)
    stayed, moved = Run(tmp_path), Run(tmp_path)
    for job in (1, 2, 3, 1):
        folder = tmp_path / f"job{job}"
        folder.mkdir(exist_ok=True)
        for file in ("a.bin", "a.idx", "b.bin", "b.idx"):
            shutil.copy(tmp_path / file, folder)
        stayed.draw(20, 120, *filter(None, blend(tmp_path)))
        moved.draw(20, 120, *filter(None, blend(folder)))
        assert moved.lines == ()
    assert all(np.array_equal(x, y) for x, y in zip(stayed.tokens, moved.tokens, strict=True))
    for job in (2, 3):
        shutil.rmtree(tmp_path / f"job{job}")
    _, order = moved.open(120, *filter(None, blend(tmp_path / "job1")))
    history = RunHistory(SourceBuilder(SEQ, moved.seed, moved.cache), order)
    for sample in range(80):
        here = [
            piece._replace(prefix=f"{tmp_path}/job1/{Path(piece.prefix).name}")
            for piece in moved.pieces[sample]
        ]
        assert history.pieces(sample) == here


def test_a_step_of_data_that_is_nowhere_now_cannot_be_shown(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    run = Run(tmp_path)
    run.draw(20, 120, "1", a, "1", b)
    run.draw(20, 120, b)
    for suffix in (".bin", ".idx"):
        Path(a + suffix).unlink()
    _, order = run.open(120, b)
    history = RunHistory(SourceBuilder(SEQ, run.seed, run.cache), order)
    assert history.pieces(20) == run.pieces[20]
    message = r"/a: holds other documents than those from which samples 0 to 19 were drawn, or none; where"
    with pytest.raises(DataError, match=message):
        history.pieces(0)


def test_ranks_with_copies_in_other_folders_go_on_alike(tmp_path: Path) -> None:
    pair(tmp_path)
    run = Run(tmp_path)
    for node in ("n0", "n1"):
        (tmp_path / node).mkdir()
        for file in ("a.bin", "a.idx", "b.bin", "b.idx"):
            shutil.copy(tmp_path / file, tmp_path / node)

    def order(node: str, *weights: str) -> DataOrder:
        blend = (
            each
            for weight, name in zip(weights, "ab", strict=True)
            for each in (weight, f"{tmp_path}/{node}/{name}")
        )
        return run.open(120, *blend)[1]

    run.draw(21, 120, "3", f"{tmp_path}/n0/a", "7", f"{tmp_path}/n0/b")
    for weights in (("3", "7"), ("1", "1")):
        first, second = (order(node, *weights) for node in ("n0", "n1"))
        pieces = [[piece._replace(prefix="") for piece in one.source.pieces(60)] for one in (first, second)]
        assert pieces[0] == pieces[1]
        identities = [one.before.stretches[-1].identity() for one in (first, second)]
        assert identities[0] == identities[1]
    assert order("n0", "3", "7").before.stretches[-1].identity() != identities[0]


def test_the_work_of_a_resume_grows_with_the_datasets_not_with_their_square(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 40
    names = [numbered_dataset(tmp_path / f"d{n}", 2, 9, first=100 * n) for n in range(count)]
    run = Run(tmp_path)
    run.draw(10, 30, *(word for name in names[: count // 2] for word in ("1", name)))
    paths: list[str] = []
    abspath = os.path.abspath

    def noted(path: str) -> str:
        paths.append(path)
        return abspath(path)

    monkeypatch.setattr(os.path, "abspath", noted)
    _, order = run.open(30, *(word for name in names for word in ("1", name)))
    history = RunHistory(SourceBuilder(SEQ, run.seed, run.cache), order)
    assert history.pieces(0) == run.pieces[0]
    assert len(paths) < 10 * count


def test_datasets_in_and_behind_a_link_are_two(tmp_path: Path) -> None:
    """`..` leads to the folder above the one that the link leads to."""
    (tmp_path / "scratch" / "run").mkdir(parents=True)
    (tmp_path / "run").symlink_to("scratch/run")
    here = numbered_dataset(tmp_path / "a", 40, 20)
    numbered_dataset(tmp_path / "scratch" / "a", 40, 20, first=1000)
    run = Run(tmp_path)
    run.draw(20, 80, "1", here, "1", f"{tmp_path}/run/../a")
    run.draw(20, 80, "1", f"/{here}", "1", here, "2", f"{tmp_path}/run/../a")
    (tmp_path / "linked").symlink_to(tmp_path)
    linked, also = f"{tmp_path}/linked/a", f"{tmp_path}/scratch/../linked/a"
    run.draw(20, 80, "1", linked, "1", also, "2", f"{tmp_path}/run/../a")
    for low in (0, 1000):
        tokens = run.of(low, low + 1000)
        assert len(set(tokens)) == len(tokens) == 30 * SEQ
    assert run.saved is not None
    assert {place.prefix for place in run.saved.read} == {f"{tmp_path}/linked/a", f"{tmp_path}/scratch/a"}


def test_one_dataset_under_several_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path)
    for given in ((a, b), ("a", "b"), (a, b)):
        run.draw(20, 120, "1", given[0], "1", given[1])
    run.draw(10, 120, "1", "a", "1", "./a", "2", a)
    assert run.lines[1:] == ("a goes on at its sample 30",)
    assert len(set(run.of(0, 1000))) == 40 * SEQ


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"seed": 6}, "seed was 5 and is 6 now"),
    ({"split": "9,1,0"}, "training's share of the documents was 0 to 1 and is 0 to 0.9 now"),
    ({"seq": 4, "seed": 6}, "sequence length was 8 and is 4 now, seed was 5 and is 6 now"),
]


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_another_seed_share_or_sequence_is_the_order_of_a_new_run_and_told(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    a, _ = pair(tmp_path)
    run = Run(tmp_path)
    run.draw(20, 40, "1", a)
    assert run.lines == ()
    other = Run(tmp_path, **change)
    other.saved, other.consumed = run.saved, 20
    other.draw(10, 40, "1", a)
    assert other.lines == (
        f"warning: {told}: that makes another order, of which the run goes on at sample 20; samples may "
        "repeat or be left out",
    )
    other.draw(10, 40, "1", a)
    assert not other.lines
    fresh = Run(tmp_path, **change)
    fresh.draw(40, 40, "1", a)
    assert all(np.array_equal(x, y) for x, y in zip(fresh.tokens[20:], other.tokens, strict=True))


def test_another_spelling_of_the_share_changes_nothing(tmp_path: Path) -> None:
    """The second rounds to another number than the first; the last leaves more for the other splits."""
    a, b = pair(tmp_path)
    run = Run(tmp_path, split="7,2,1")
    run.draw(20, 120, "3", a, "1", b)
    for split in (".7,.2,.1", " 7, 2, 1", "7,3"):
        run.split = split
        run.draw(10, 120, "1", a, "1", b)
        assert not any("warning" in line for line in run.lines)
    tokens = run.of(0, 1000)
    assert len(set(tokens)) == len(tokens) == 30 * SEQ


@pytest.mark.parametrize(("change", "_told"), CHANGES)
def test_the_history_goes_back_behind_another_order(
    tmp_path: Path, change: dict[str, Any], _told: str
) -> None:
    a, b = pair(tmp_path)
    run = Run(tmp_path)
    run.draw(20, 60, a, b)
    run.draw(20, 60, "1", a, "9", b)
    for name, value in change.items():
        setattr(run, name, value)
    for part in ((10, 60, a), (0, 60, a), (10, 70, b)):
        run.draw(*part)
    run.split, run.seed, run.seq = "1,0,0", 5, SEQ
    run.draw(10, 80, b)
    _, order = run.open(80, b)
    history = RunHistory(SourceBuilder(run.seq, run.seed, run.cache), order)
    assert [history.pieces(sample) for sample in range(70)] == run.pieces


def test_the_history_does_not_show_other_documents_than_were_drawn(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    run = Run(tmp_path)
    run.draw(20, 40, a)
    run.draw(10, 40, b)
    numbered_dataset(tmp_path / "a", 40, 20, first=3000)
    _, order = run.open(40, b)
    history = RunHistory(SourceBuilder(SEQ, run.seed, run.cache), order)
    assert history.pieces(25) == run.pieces[25]
    with pytest.raises(DataError, match=r"a: holds other documents than those .* samples 0 to 19 were drawn"):
        history.pieces(3)


def test_the_history_shows_every_sample_as_it_was_drawn(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    run = Run(tmp_path)
    run.draw(20, 198, a, b)
    run.draw(30, 200, "1", a, "9", b)
    run.draw(30, 80, "1", b)
    run.draw(60, 400, a)
    _, order = run.open(400, "2", b, "1", a)
    history = RunHistory(SourceBuilder(SEQ, run.seed, run.cache), order)
    assert [history.pieces(sample) for sample in range(140)] == run.pieces
    assert len(history) >= 400


def test_random_histories_read_every_epoch_evenly(tmp_path: Path) -> None:
    """Whatever the blends, a round of one epoch has each token at most once, a round of two twice."""
    rng = np.random.default_rng(0)
    names = [numbered_dataset(tmp_path / f"d{n}", 10 + n, 9, first=1000 * n) for n in range(5)]
    for trial in range(12):
        run = Run(tmp_path / str(trial), seed=trial)
        for _ in range(6):
            chosen = rng.permutation(5)[: rng.integers(1, 6)]
            blend = [word for n in chosen for word in (f"{rng.random():.3f}", names[n])]
            count = int(rng.integers(0, 25))
            run.draw(count, run.consumed + count + int(rng.integers(0, 30)), *blend)
        assert run.saved is not None
        for place in run.saved.read:
            n = names.index(place.prefix)
            tokens = run.of(1000 * n, 1000 * n + 1000)
            assert samples_of(tokens) == place.place
            for epochs, _ in place.rounds:
                size = (epochs * 9 * (10 + n) - 1) // SEQ * SEQ
                part, tokens = tokens[:size], tokens[size:]
                assert max(Counter(part).values(), default=0) <= epochs
            assert not tokens


def test_the_sizes_of_a_blend_of_an_empty_dataset(tmp_path: Path) -> None:
    """A dataset without a whole sample is never chosen, wherever it stands."""
    a, _ = pair(tmp_path)
    empty = write_dataset(tmp_path / "empty", [3])
    run = Run(tmp_path)
    run.draw(99, 99, empty, a)
    assert len(set(run.of(0, 1000))) == 99 * SEQ


def test_a_blend_that_draws_more_than_was_asked_for_has_the_order_of_what_was(tmp_path: Path) -> None:
    """Of 5 epochs of 86 tokens, 49 samples of 53 are asked for, 50 are drawn: Megatron-LM shuffles the fifth
    by itself, as it would not for 50.
    """
    lengths = [[300] * 9, [43, 43], [300] * 9, [300] * 9]
    prefixes = [write_dataset(tmp_path / f"{i}", each) for i, each in enumerate(lengths)]
    blend = Blend(tuple(prefixes), (0.01, 7, 0.3, 0.001))
    source = SourceBuilder(8, 1234, tmp_path).build("train", blend, (0.0, 1.0), 50)
    assert isinstance(source, BlendedDataset)
    drawn = int((source.dataset_index == 1).sum())
    plan = source.datasets[1].plan
    assert (drawn, plan.samples, plan.epochs, plan.separate_final_epoch) == (50, 53, 5, True)
