"""How far work on data is, as people see it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megalite.data import dataset_files, progress
from megalite.data.inputs import Part, find_inputs
from megalite.data.merge import merge
from megalite.data.preprocess import Progress, preprocess
from megalite.data.progress import ProgressDisplay, ReadingDisplay
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from megalite.data.verify import verify
from tests.data.corpora import every_batch_is_kept, lines, plan, write_dataset


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_what_is_merged_or_verified_is_told_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_files, "CHUNK_BYTES", 16)
    prefixes = [write_dataset(tmp_path / name, [length]) for name, length in (("a", 30), ("b", 5))]
    size = {prefix: os.path.getsize(f"{prefix}.bin") for prefix in prefixes}
    told: list[tuple[int, int]] = []
    merge(prefixes, str(tmp_path / "whole"), lambda *piece: told.append(piece))
    assert len(told) > 2
    assert (sum(piece for piece, _ in told), {total for _, total in told}) == (
        sum(size.values()),
        {sum(size.values())},
    )
    told.clear()
    verify(prefixes[0], read=lambda *piece: told.append(piece))
    assert len(told) > 1
    assert (sum(piece for piece, _ in told), {total for _, total in told}) == (
        size[prefixes[0]],
        {size[prefixes[0]]},
    )


def test_what_a_killed_run_wrote_is_told_while_it_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_batch_is_kept(monkeypatch)
    work = plan(lines(tmp_path / "in.jsonl", ["abc"] * 20), tmp_path / "out", json_keys=("text",))

    def stop(progress: Progress) -> None:
        if progress.documents > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(work, ByteLevelTokenizer(), stop)
    told: list[tuple[int, int]] = []
    seen: list[Progress] = []
    preprocess(work, ByteLevelTokenizer(), seen.append, lambda *piece: told.append(piece))
    (size, total) = told[0]
    assert 0 < size == total < os.path.getsize(tmp_path / "out_text_document.bin")


def test_lines_have_the_rate_and_the_time_left(
    seconds: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with ReadingDisplay("Merged") as display:
        for _ in range(25):
            seconds[0] += 1
            display.show(2_000_000_000, 100_000_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "Merged 20.0 of 100.0 GB (2,000 MB/s), 0:00:40 left",
        "Merged 40.0 of 100.0 GB (2,000 MB/s), 0:00:30 left",
    ]


def test_a_resumed_run_counts_what_it_does_itself(
    tmp_path: Path, seconds: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = find_inputs([lines(tmp_path / "in.jsonl", ["a" * 1000] * 1000)])
    size = os.path.getsize(tmp_path / "in.jsonl")
    with ProgressDisplay(inputs, 10) as display:
        seconds[0] += 50
        display.read_back(6_000_000_000, 6_000_000_000)
        half = size // 2
        for documents, done in ((500, half), (505, half + size // 8), (600, half + size // 4)):
            seconds[0] += 2
            display.show(Progress(documents, 10 * documents, done))
    rate = (size // 4) / 6 / 1e6
    assert capsys.readouterr().err.splitlines() == [
        "Read back 6.0 of 6.0 GB (120 MB/s), 0:00:00 left",
        "Processed 500 documents (0 docs/s, 0.0 MB/s, 0 tokens/s)",
        f"Processed 600 documents (17 docs/s, {rate:,.1f} MB/s, 167 tokens/s), 0:00:06 left",
    ]


def test_the_last_line_of_a_share_ends_behind_it(
    tmp_path: Path, seconds: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "in.jsonl", ["a" * 1000] * 2)
    with ProgressDisplay([Part(str(path), "json", 0, 500)], 1) as display:
        for documents, done in ((1, 0), (2, 1020)):
            seconds[0] += 2
            display.show(Progress(documents, 1000, done))
    assert capsys.readouterr().err.splitlines()[-1].endswith(" tokens/s), 0:00:00 left")


def test_a_terminal_has_one_bar_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = find_inputs([lines(tmp_path / "in.jsonl")])
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0)
    with ProgressDisplay(inputs, 10) as display:
        display.read_back(5, 5)
        display.show(Progress(3, 6, os.path.getsize(tmp_path / "in.jsonl")))
    shown = capsys.readouterr().err
    assert re.search(r"100%.*Read back 0.0 of 0.0 GB.*100%.*Processed 3 documents", shown, re.DOTALL), shown
