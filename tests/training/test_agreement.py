"""Ranks that read other settings, as from files of which their nodes have copies, are told before work."""

from __future__ import annotations

import contextlib
import io
import re
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megalite import leave
from megalite.config import Config, ConfigError, ConfigErrors, exit_with_errors, parse
from megalite.config.settings import SETTINGS
from megalite.training import refusal
from megalite.training.agreement import BLENDS, CONTENTS, GIVEN, OWN, check_agreement, settings_to_compare
from megalite.training.errors import RendezvousError, TrainingError
from megalite.training.launcher import Place
from megalite.training.main import _run
from megalite.training.process_group import process_group
from tests.data.corpora import write_dataset
from tests.pool import WorkerPool

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 31 "
    "--lr 1e-2 --eval-iters 0 --no-memory-report --split 1,0,0"
)
PIPELINE = "--global-batch-size 1 --pipeline-model-parallel-size 2 --pipeline-schedule-csv"
ADVICE = "; give every rank the same flags, and every node the same files of settings"


def settings(flags: Sequence[str], world_size: int) -> Config:
    """Those of this rank, which was started with its own of `flags`."""
    return parse([*MODEL.split(), *flags[dist.get_rank()].split()], world_size)


def disagreement(flags: Sequence[str]) -> list[str]:
    place = Place(dist.get_rank(), 0, len(flags))
    store = dist.PrefixStore("the run's", distributed_c10d._get_default_store())
    mine = settings_to_compare(settings(flags, len(flags)))
    try:
        check_agreement(store, place, mine)
    except ConfigErrors as errors:
        return [str(error) for error in errors.errors]
    return []


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of three nodes with data and settings: the second has copies of the first's, the third not."""
    folders = [tmp_path_factory.mktemp(name, numbered=False) for name in ("first", "copy", "old")]
    for folder, blend in zip(
        folders, ("1 {0}/a 3 {0}/b", "1.0 {0}/a\n3 {0}/b", "3 {0}/a 1 {0}/b"), strict=True
    ):
        for name in "ab":
            write_dataset(folder / name, [50] * 20, vocab_size=31)
        (folder / "args").write_text(blend.format(folder))
        (folder / "c.yaml").write_text(f"train_iters: {6 if folder.name == 'old' else 4}\nseed: 7\n")
        (folder / "table.csv").write_text(f"0F0,0B0{',' * (folder.name == 'old')}\n1F0,1B0\n")
    return [str(folder) for folder in folders]


def test_ranks_that_read_other_settings_are_told_which(nodes: list[str], pool: WorkerPool) -> None:
    first, copy, old = nodes
    told = pool.run(
        4,
        disagreement,
        [f"--config {node}/c.yaml --data-args-path {node}/args" for node in (first, old, copy, old)],
    )
    assert (
        told
        == [
            [
                "--data-args-path: a file with 1 a 3 b on rank 0, but a file with 3 a 1 b on rank 1, 3"
                + ADVICE,
                "--train-iters: 4 on rank 0, but 6 on rank 1, 3" + ADVICE,
            ]
        ]
        * 4
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--data-path {0}/a {0}/b", "--data-path {1}/b {1}/a"],
            "--data-path: a b on rank 0, but b a on rank 1",
        ),
        (
            ["--seed 1", "--seed 1", "--seed 2", "--seed 3"],
            "--seed: 1 on rank 0, but 2 on rank 2 and 3 on rank 3",
        ),
        (["--eod-mask-loss", ""], "--eod-mask-loss: true on rank 0, but false on rank 1"),
        (
            ["", "--clip-grad 0.30000000000000004"],
            "--clip-grad: 1.0 on rank 0, but 0.30000000000000004 on rank 1",
        ),
        (["--save {0}", ""], "--save: {0} on rank 0, but not given on rank 1"),
        (["--exit-duration-in-mins 9", ""], "--exit-duration-in-mins: given on rank 0, but not given on"),
        (
            [
                PIPELINE + " {0}/table.csv",
                PIPELINE + " {2}/table.csv",
            ],
            "--pipeline-schedule-csv: a file with hash ",
        ),
    ],
)
def test_one_setting_is_told_with_its_values(
    nodes: list[str], pool: WorkerPool, flags: list[str], message: str
) -> None:
    data = "" if "--data-path" in flags[0] else "--mock-data "
    argv = [f"--train-iters 4 {data}{each.format(*nodes)}" for each in flags]
    told = pool.run(len(flags), disagreement, argv)
    assert [len(errors) for errors in told] == [1] * len(flags), told
    assert {errors[0][: len(message.format(*nodes))] for errors in told} == {message.format(*nodes)}


def test_what_nodes_have_copies_of_may_lie_anywhere(nodes: list[str], pool: WorkerPool) -> None:
    flags = "--train-iters 4 --data-path {0}/a {0}/b --data-cache-path {0} --metrics-file {0}/m"
    copies = "--config {0}/c.yaml --data-args-path {0}/args"
    for given in (flags, copies):
        assert pool.run(2, disagreement, [given.format(node) for node in nodes[:2]]) == [[], []]


def test_what_each_node_may_have_of_its_own(pool: WorkerPool) -> None:
    own = ["--num-workers 1 --exit-duration-in-mins 61", "--exit-duration-in-mins 60"]
    assert pool.run(2, disagreement, [f"--train-iters 4 --mock-data {each}" for each in own]) == [[], []]
    assert {*OWN, *GIVEN, *BLENDS, *CONTENTS} <= {*SETTINGS}


def test_long_values_are_told_in_short(nodes: list[str], pool: WorkerPool) -> None:
    blends = [" ".join([f"{nodes[0]}/a"] * datasets) for datasets in (200, 201)]
    ((message,), _) = pool.run(2, disagreement, [f"--train-iters 1 --data-path {blend}" for blend in blends])
    hashed = r"a a a [a ]*\.\.\. \(%d characters, hash [0-9a-f]{16}\) on rank"
    assert re.search(f"{hashed % 399} 0, but {hashed % 401} 1", message), message
    assert len(message) < 500


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextlib.contextmanager
def started(port: int, rank: int, ranks: int) -> Iterator[io.StringIO]:
    """As a launcher does, without waiting for others to end; gives what is said on stderr."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": ranks}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        patch.setattr(leave.time, "sleep", lambda seconds: None)
        yield said


def start(port: int, flags: Sequence[str]) -> tuple[object, str]:
    """The exit code of a rank and what it says on stderr."""
    rank = dist.get_rank()
    with started(port, rank, len(flags)) as said, pytest.raises(SystemExit) as leaving:
        _run(settings(flags, len(flags)), Place(rank, rank, len(flags)))
    return leaving.value.code, said.getvalue()


def test_a_run_ends_before_it_has_groups_and_one_rank_says_why(pool: WorkerPool) -> None:
    """The second rank would have made its groups over other ranks."""
    flags = ["--mock-data --train-iters 4", "--mock-data --train-iters 4 --tensor-model-parallel-size 2"]
    (code, said), other = pool.run(2, start, free_port(), flags)
    assert (code, other) == (2, (2, ""))
    assert "  2. --tensor-model-parallel-size: 1 on rank 0, but 2 on rank 1" in said, said


MISSING = ConfigErrors([ConfigError("--data-path", "A", "no such file: A.idx", "look again")])


def refuse(port: int, failed: Sequence[int]) -> tuple[object, str]:
    """Those in `failed` have found an error, the others would make a process group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with started(port, rank, ranks) as said, pytest.raises(SystemExit) as leaving:
        leave_or_go_on(Place(rank, rank, ranks), rank in failed)
    return leaving.value.code, said.getvalue()


def leave_or_go_on(place: Place, has_failed: bool) -> None:
    if has_failed:
        refusal.leave_with_errors(MISSING, place)
    try:
        with process_group("gloo", place, timedelta(seconds=60)):
            pass
    except ConfigErrors as errors:
        exit_with_errors(errors, place.rank)


@pytest.mark.parametrize(
    ("failed", "where"), [([2], "on rank 2: "), ([1, 2], "on rank 1, 2: "), ([0], ""), ([0, 1, 2], "")]
)
def test_what_only_some_ranks_find_is_told_once_and_ends_all(
    pool: WorkerPool, failed: list[int], where: str
) -> None:
    told = pool.run(3, refuse, free_port(), failed)
    error = f"1 configuration error:\n  1. --data-path A: {where}no such file: A.idx; look again\n"
    assert told == [(2, error), (2, ""), (2, "")]


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_rank_that_does_not_meet_the_first_tells_its_own_errors(
    torchrun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    else:
        monkeypatch.setattr(refusal, "PATIENCE", timedelta(seconds=0.1))
    with started(free_port(), 9, 16) as said, pytest.raises(SystemExit) as leaving:
        refusal.leave_with_errors(MISSING, Place(9, 1, 16))
    assert leaving.value.code == 2
    assert said.getvalue().startswith("rank 9: 1 configuration error:\n  1. --data-path A: no such")
    assert (tmp_path / "error.json").exists() == torchrun


def test_under_a_torchrun_of_all_ranks_the_first_leaves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(refusal, "_is_reachable", None)
    with started(free_port(), 0, 2) as said, pytest.raises(SystemExit, match="2"):
        refusal.leave_with_errors(MISSING, Place(0, 0, 2))
    assert said.getvalue().count("--data-path A: no such") == 1


def come(place: Place) -> None:
    with process_group("gloo", place, timedelta(seconds=1)):
        pass


def come_alone(port: int, ranks: int) -> str:
    """What a rank is told that waits a second for one that never comes."""
    rank = dist.get_rank()
    with started(port, rank, ranks), pytest.raises(TrainingError) as raised:
        come(Place(rank, rank, ranks))
    return f"{type(raised.value).__name__}: {raised.value}"


def test_ranks_that_never_come_are_a_message(pool: WorkerPool) -> None:
    first, _ = pool.run(2, come_alone, free_port(), 3)
    assert re.search(r"RendezvousError: the 3 ranks have not met: .* 2/3 clients joined", first), first
    with (
        started(free_port(), 1, 2),
        pytest.raises(RendezvousError, match="look for those that have not started"),
    ):
        come(Place(1, 1, 2))
