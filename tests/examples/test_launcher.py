"""`examples/pretrain_gpt.sh`: valid as bash and as Python, and starting the right processes."""

from __future__ import annotations

import ast
import os
import shlex
import signal
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.data.corpora import write_dataset

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt.sh"
LAUNCHERS = ("SLURM_", "PET_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_")


def launch(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script by bash under this interpreter, with only `variables` of what launchers set."""
    command = ["bash", str(SCRIPT), *flags]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=120)


def environment(**variables: str) -> dict[str, str]:
    """That of the tests, with only `variables` of what launchers set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**kept, "PYTHON": sys.executable, **variables}


def planned(*flags: str, **variables: str) -> tuple[list[str], list[str]]:
    """The flags for torchrun and those for training that the script would use, in their order."""
    done = launch("--dry-run", *flags, **variables)
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout)
    assert command[:2] == [sys.executable, "-c"]
    assert "torch.distributed.run" in command[2]
    script = command.index(str(SCRIPT))
    return command[3:script], command[script + 1 :]


def stub(folder: Path, name: str, body: str) -> Path:
    """An executable shell script `name` in `folder`."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_file_is_bash() -> None:
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert SCRIPT.stat().st_mode & stat.S_IXUSR
    assert SCRIPT.read_text().startswith("#!/usr/bin/env bash\n")


def test_the_file_is_python_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = ast.parse(SCRIPT.read_text())
    assert "set -euo pipefail" in str(ast.get_docstring(tree))


def test_flags_go_where_they_belong() -> None:
    mine = ["--max-restarts", "3", "-t", "3"]
    torchrun, training = planned("--lr", "0.1", "--nproc_per_node=2", "--save", "a folder", *mine, "--swiglu")
    assert training == ["--lr", "0.1", "--save", "a folder", "--swiglu"]
    alone = ["--standalone", "--local-addr=127.0.0.1"]
    assert torchrun == [*mine, "--nnodes=1", "--nproc-per-node=2", *alone]
    given = planned("--nproc-per-node=2", "--local-addr", "10.0.0.1")[0]
    assert "--local-addr=127.0.0.1" not in given


@pytest.mark.parametrize("spelling", ["--{}-{}", "--{}_{}"])
def test_both_spellings_of_torchrun_flags(spelling: str) -> None:
    nodes = [spelling.format("node", "rank"), "1", spelling.format("rdzv", "endpoint"), "first:29400"]
    torchrun, training = planned("--nnodes", "2", *nodes, "--nproc-per-node", "4", "--train-iters", "5")
    assert torchrun == ["--rdzv-endpoint", "first:29400", "--nnodes=2", "--nproc-per-node=4", "--node-rank=1"]
    assert training == ["--train-iters", "5"]


def test_a_rendezvous_of_the_user_replaces_the_private_one() -> None:
    assert "--standalone" not in planned("--nproc-per-node", "2", "--master-port", "29501")[0]
    assert "--standalone" not in planned("--nproc-per-node", "2", PET_MASTER_ADDR="first")[0]


def test_torchrun_variables_are_defaults() -> None:
    torchrun, _ = planned("--node-rank", "1", PET_NNODES="2", PET_NPROC_PER_NODE="4", PET_NODE_RANK="0")
    assert torchrun == ["--nnodes=2", "--nproc-per-node=4", "--node-rank=1"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc-per-node", "many"], "--nproc-per-node many: give a number"),
        (["--nnodes", "0"], "--nnodes 0: not a number of nodes"),
        (["--lr", "0.1", "--nnodes"], "--nnodes needs a value"),
    ],
)
def test_wrong_launch_flags_are_told(flags: list[str], message: str) -> None:
    done = launch(*flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def two_slurm_nodes(folder: Path, node: int) -> dict[str, str]:
    """What SLURM tells a task on one of node07 and node08; `folder`: for its scontrol."""
    stub(folder, "scontrol", 'test "$3" = "node[07-08]" && printf "node07\\nnode08\\n"')
    return {
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node[07-08]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": str(node),
        "SLURMD_NODENAME": f"node0{7 + node}",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }


def test_slurm_with_one_task_a_node(tmp_path: Path) -> None:
    torchrun, training = planned("--nproc-per-node", "8", "--bf16", **two_slurm_nodes(tmp_path, 1))
    where = ["--master-addr=node07", "--master-port=23456"]
    assert torchrun == ["--nnodes=2", "--nproc-per-node=8", *where, "--node-rank=1"]
    assert training == ["--bf16"]


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("flags", [["--max-restarts", "3"], []])
def test_nodes_of_slurm_that_start_ranks_anew_meet_again(tmp_path: Path, node: int, flags: list[str]) -> None:
    """With --master-addr the other nodes went on waiting for the ranks that had died."""
    slurm = two_slurm_nodes(tmp_path, node)
    variables = {} if flags else {"PET_MAX_RESTARTS": "3"}
    torchrun, _ = planned(*flags, "--nproc-per-node", "8", **slurm, **variables)
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=node07:23456", "--rdzv-id=123456.0"]
    here = [f"--rdzv-conf=is_host={1 - node}", f"--local-addr=node0{7 + node}", f"--node-rank={node}"]
    assert torchrun == [*flags, "--nnodes=2", "--nproc-per-node=8", *meeting, *here]
    given = planned("--max-restarts=3", "--local-addr=x", "--nproc-per-node=8", **slurm)[0]
    assert [flag for flag in given if "node0" in flag] == ["--rdzv-endpoint=node07:23456"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--master-port=29501"], ["--master-addr=node07", "--master-port=29501"]),
        (["--rdzv-id=x"], ["--master-addr=node07", "--master-port=23456"]),
        (["--rdzv-conf=join_timeout=900"], ["--master-addr=node07", "--master-port=23456"]),
        (
            ["--max-restarts=1", "--rdzv-conf=join_timeout=900", "--rdzv-id=x", "--master-port=29501"],
            ["--rdzv-endpoint=node07:29501", "--rdzv-conf=is_host=0,join_timeout=900", "--rdzv-id=x"],
        ),
        (["--rdzv-backend=c10d"], ["--rdzv-endpoint=node07:23456", "--rdzv-conf=is_host=0"]),
        (["--max-restarts=1", "--rdzv-backend=static"], ["--master-addr=node07", "--master-port=23456"]),
        (["--rdzv-endpoint=other:1"], []),
    ],
)
def test_what_else_is_said_of_the_meeting_of_slurms_nodes(
    tmp_path: Path, flags: list[str], told: list[str]
) -> None:
    """A port alone left each node waiting for the others at its own address."""
    given = planned(*flags, "--nproc-per-node=8", **two_slurm_nodes(tmp_path, 1))[0]
    assert [flag for flag in told if flag not in given] == []
    assert ("--node-rank=1" in given) == bool(told)
    assert told or not any("node0" in flag for flag in given)


@pytest.mark.parametrize(("step", "port"), [("0", "20007"), ("1", "21016")])
def test_slurm_with_one_task_a_gpu_needs_no_torchrun(tmp_path: Path, step: str, port: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    python = stub(tmp_path, "python", "echo " + " ".join(f"${name}" for name in names) + ' "$@"')
    done = launch(
        "--bf16",
        PYTHON=str(python),
        MASTER_ADDR="first",
        SLURM_JOB_ID="7",
        SLURM_STEP_ID=step,
        SLURM_STEP_NUM_NODES="2",
        SLURM_STEP_NUM_TASKS="8",
        SLURM_PROCID="5",
        SLURM_LOCALID="1",
    )
    assert done.stdout.split() == ["5", "8", "1", "4", "first", port, "-u", str(SCRIPT), "--bf16"]


def test_a_slurm_job_of_several_nodes_does_not_use_one_silently() -> None:
    done = launch("--nproc-per-node", "8", SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="4")
    assert done.returncode == 2
    assert "start it with srun" in done.stderr


def test_started_by_torchrun_without_python_it_is_one_rank(tmp_path: Path) -> None:
    python = stub(tmp_path, "python", 'echo "$@"')
    done = launch("--lr", "0.1", PYTHON=str(python), RANK="3", LOCAL_RANK="3", WORLD_SIZE="4")
    assert done.stdout.split() == ["-u", str(SCRIPT), "--lr", "0.1"]


def test_it_finds_itself_through_a_link_and_with_a_search_path_of_cd(tmp_path: Path) -> None:
    python = stub(tmp_path, "python", 'echo "$@"')
    (tmp_path / "train.sh").symlink_to(SCRIPT)
    rank = {"PYTHON": str(python), "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}
    for script, folder in ((tmp_path / "train.sh", tmp_path), (Path("examples", SCRIPT.name), ROOT)):
        done = subprocess.run(
            ["bash", str(script)],
            env=environment(**rank, CDPATH=f".:{ROOT}"),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout == f"-u {SCRIPT}\n"


def test_what_lies_in_the_folder_of_the_command_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "tokenize.py").write_text("import os\nopen('run', 'w')\nos._exit(3)\n")
    flags = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--nproc-per-node=2"]
    done = subprocess.run(
        ["bash", str(SCRIPT), *flags, "--train-iters", "1", "--eval-iters", "0", "--no-memory-report"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run").exists()


def test_a_rank_that_fails_is_told_also_where_children_are_ignored(tmp_path: Path) -> None:
    """As Perl's `$SIG{CHLD} = "IGNORE"` and daemons have it, and leave it to what they start."""
    data = write_dataset(tmp_path / "d", [9] * 40, 1000)
    flags = [
        "--data-path",
        data,
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "31",
        "--eval-iters",
        "0",
    ]
    done = subprocess.run(
        ["bash", str(SCRIPT), *flags, "--nproc-per-node=1", "--train-iters", "9", "--eval-iters", "0"],
        env=environment(),
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "but the model's vocabulary is the 31 ids from 0" in done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize(("hangup", "ignored"), [(signal.SIG_DFL, False), (signal.SIG_IGN, True)])
def test_under_nohup_torchrun_lives_as_long_as_its_ranks(hangup: signal.Handlers, ignored: bool) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), "--dry-run", "--nproc-per-node", "2"],
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ("--signals-to-handle=SIGTERM\\,SIGINT\\,SIGQUIT" in done.stdout) == ignored


@pytest.mark.parametrize(("nodes", "store"), [("1", "unset"), ("2", "1")])
def test_ranks_that_are_started_anew_on_several_nodes_have_a_new_store(
    tmp_path: Path, nodes: str, store: str
) -> None:
    python = stub(tmp_path, "python", 'echo "${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-unset}"')
    done = launch("--nnodes", nodes, "--nproc-per-node", "1", "--master-addr", "first", PYTHON=str(python))
    assert done.stdout.split() == [store, store]


@pytest.mark.parametrize(("processes", "threads"), [("1", "unset"), ("4096", "1")])
def test_processes_share_the_cores(tmp_path: Path, processes: str, threads: str) -> None:
    python = stub(tmp_path, "python", "echo ${OMP_NUM_THREADS:-unset}")
    done = launch("--nproc-per-node", processes, PYTHON=str(python))
    assert done.stdout.split() == [threads, threads]  # the check, then torchrun


def with_defaults(flags: list[str], world_size: int) -> list[str]:
    """The function of the script's Python part."""
    names: dict[str, object] = {"__name__": "pretrain_gpt", "__file__": str(SCRIPT)}
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), names)
    function = names["with_defaults"]
    assert callable(function)
    result = function(flags, world_size)
    assert isinstance(result, list)
    return result


@pytest.mark.parametrize(
    ("world_size", "tensor", "pipeline"), [(1, 1, 1), (2, 2, 1), (4, 2, 2), (8, 2, 2), (6, 2, 1), (3, 1, 1)]
)
def test_the_default_layout(world_size: int, tensor: int, pipeline: int) -> None:
    flags = with_defaults(["--lr", "0.1"], world_size)
    assert flags[2:] == [
        *("--tensor-model-parallel-size", str(tensor)),
        *("--pipeline-model-parallel-size", str(pipeline)),
        *("--lr", "0.1"),
    ]
    assert flags[:2] == ["--config", str(ROOT / "examples" / "configs" / "tiny_llama.yaml")]


@pytest.mark.parametrize("flag", ["--tensor-model-parallel-size=4", "--pipeline-model-parallel-size=4"])
def test_a_parallel_size_given_replaces_the_default_layout(flag: str) -> None:
    assert with_defaults([flag], 8)[2:] == [flag]


@pytest.mark.parametrize("flags", [["--config", "my.yaml"], ["--config=my.yaml"]])
def test_a_config_given_replaces_recipe_and_layout(flags: list[str]) -> None:
    assert with_defaults(flags, 8) == flags
