"""Ranks that read other settings, as from files of which their nodes have copies, are told before work."""

from __future__ import annotations

import contextlib
import io
import re
import socket
from collections.abc import Sequence

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megalite import leave
from megalite.config import Config, ConfigErrors, parse
from megalite.config.settings import SETTINGS
from megalite.training.agreement import BLENDS, CONTENTS, OWN_PATHS, check_agreement, settings_to_compare
from megalite.training.launcher import Place
from megalite.training.main import _run
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
    assert {*OWN_PATHS, *BLENDS, *CONTENTS} <= {*SETTINGS}


def test_long_values_are_told_in_short(nodes: list[str], pool: WorkerPool) -> None:
    blends = [" ".join([f"{nodes[0]}/a"] * datasets) for datasets in (200, 201)]
    ((message,), _) = pool.run(2, disagreement, [f"--train-iters 1 --data-path {blend}" for blend in blends])
    hashed = r"a a a [a ]*\.\.\. \(%d characters, hash [0-9a-f]{16}\) on rank"
    assert re.search(f"{hashed % 399} 0, but {hashed % 401} 1", message), message
    assert len(message) < 500


def start(port: int, flags: Sequence[str]) -> tuple[object, str]:
    """The exit code of a rank and what it says on stderr."""
    rank = dist.get_rank()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": len(flags)}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        patch.setattr(leave.time, "sleep", lambda seconds: None)
        with pytest.raises(SystemExit) as leaving:
            _run(settings(flags, len(flags)), Place(rank, rank, len(flags)))
    return leaving.value.code, said.getvalue()


def test_a_run_ends_before_it_has_groups_and_one_rank_says_why(pool: WorkerPool) -> None:
    """The second rank would have made its groups over other ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--mock-data --train-iters 4", "--mock-data --train-iters 4 --tensor-model-parallel-size 2"]
    (code, said), other = pool.run(2, start, port, flags)
    assert (code, other) == (2, (2, ""))
    assert "  2. --tensor-model-parallel-size: 1 on rank 0, but 2 on rank 1" in said, said
