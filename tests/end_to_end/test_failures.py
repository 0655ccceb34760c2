"""What cannot work ends at once, non-zero, with its reason visible."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megalite.data.indexed_dataset import DatasetWriter
from tests.end_to_end.launch import LIMIT_SECONDS, MODEL_FLAGS, ROOT, SCRIPT, command, environment, launch


def test_configuration_errors_are_told_once_and_all_together() -> None:
    done = launch("--tensor-model-parallel-size", "3", "--sequence-paralel", "--micro-batch-size", "0")
    assert done.returncode == 2
    for flag in ("--tensor-model-parallel-size 3", "--sequence-paralel", "--micro-batch-size 0"):
        assert done.stderr.count(flag) == 1, done.stderr
    assert "did you mean --sequence-parallel?" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_configuration_errors_under_torchrun_are_told_by_one_rank() -> None:
    flags = [part for name, value in MODEL_FLAGS.items() for part in (f"--{name}", value)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(SCRIPT), *flags, "--mock-data", "--num-attention-heads", "5"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode != 0
    at_once, report = done.stderr.split("Root Cause (first observed failure):")
    assert "exitcode  : 2" in report
    for part in (at_once, report):  # as soon as it is known, and as torchrun's last words
        assert part.count("--num-attention-heads 5:") == 1, done.stderr


def test_a_pipeline_table_that_would_deadlock_is_told_before_there_are_groups(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n")
    flags = [part for name, value in MODEL_FLAGS.items() for part in (f"--{name}", value)]
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(  # one process of two: it would wait for the other in the first collective
        [
            *(sys.executable, str(SCRIPT), *flags, "--group-query-attention", "--mock-data"),
            *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4"),
            *("--pipeline-schedule-csv", str(table)),
        ],
        cwd=ROOT,
        env={**environment(), **place, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"--pipeline-schedule-csv {table}: {table}: " in done.stderr
    assert (
        "rank 0 sends rank 1 the F result of stage 0, micro-batch 0, where stage 0, micro-batch 1 is received"
        in (done.stderr)
    )


def test_a_folder_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = launch("--save", str(tmp_path / "file" / "checkpoints"))
    assert done.returncode == 2
    assert f"--save {tmp_path}/file/checkpoints" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dataset_without_tokens_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": ""}\n')
    made = subprocess.run(
        [
            *(sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--workers", "1"),
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", MODEL_FLAGS["vocab-size"]),
            *("--input", str(tmp_path / "corpus.jsonl"), "--output-prefix", str(tmp_path / "corpus")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    done = launch("--data-path", str(tmp_path / "corpus_text_document"), "--split", "1,0,0", mock=False)
    assert done.returncode == 1
    (message,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert str(tmp_path / "corpus_text_document") in message
    assert "no tokens" in message


def test_an_id_beyond_the_vocabulary_ends_the_job_though_one_rank_alone_reads_it(tmp_path: Path) -> None:
    """Data that Megatron-LM prepared has no description that could tell before."""
    length = int(MODEL_FLAGS["seq-length"]) + 1
    with DatasetWriter(str(tmp_path / "d"), "int32", sync=False) as writer:
        tokens = np.ones((38, length), dtype=np.int64)  # the 40 samples of 5 iterations
        tokens[20, 8] = 61
        writer.add(tokens.ravel(), np.full(38, length, dtype=np.int32))
    flags = ["--split", "1,0,0", "--train-iters", "5", "--tensor-model-parallel-size", "1"]
    done = launch("--data-path", str(tmp_path / "d"), *flags, mock=False)
    assert done.returncode == 1
    (message,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert re.match(rf"error: rank [01]: {tmp_path}/d: document 20 holds id 61 at token 8, but ", message)
    assert "the 61 ids from 0" in message
    assert "DataError" not in done.stderr  # nor a traceback


RAISES = """
import sys
from megalite.training import main
from megalite.training.metrics import Reporter

def fails(reporter, metrics):
    if reporter.enabled:
        raise OSError("the reason")

Reporter.step = fails
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_rank_that_raises_ends_the_job_with_its_message(tmp_path: Path) -> None:
    """The last rank alone reports; the first waits for its gradient then."""
    done = run_script(tmp_path, RAISES, "--pipeline-model-parallel-size", "2")
    assert done.returncode == 1
    assert "OSError: the reason" in done.stderr
    assert "rank      : 1 (local_rank: 1)" in done.stderr.split("Root Cause")[1]


@contextlib.contextmanager
def running(mark: str, iteration: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A job with `mark` in its environment that has done so many iterations; it ends with the block."""
    name, value = mark.split("=")
    process = subprocess.Popen(
        command(*flags),
        cwd=ROOT,
        env={**environment(), name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(LIMIT_SECONDS, kill_all, (mark,))
    watchdog.start()
    try:
        assert process.stdout is not None
        reached = f" iteration {iteration:8}/"
        assert any(reached in line for line in process.stdout), "the run never got going"
        yield process
    finally:
        watchdog.cancel()
        kill_all(mark)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the rank through /proc")
@pytest.mark.parametrize("killed", ["rank 0", "rank 1", "torchrun"])
def test_a_process_that_is_killed_ends_the_job(killed: str, tmp_path: Path) -> None:
    mark = f"STARTED_BY={tmp_path}"
    with running(mark, 3, "--train-iters", "1000000", "--pipeline-model-parallel-size", "2") as process:
        ranks = [processes_with(mark, f"RANK={rank}")[0] for rank in (0, 1)]
        victim = process.pid if killed == "torchrun" else ranks[int(killed[-1])]
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate()  # returns when the last that could write has ended
        if killed == "torchrun":
            # By one at least: the other may see first that its neighbour has left.
            assert f"error: torchrun (process {victim}) has died: its ranks end\n" in errors
        else:
            assert process.returncode == 1, "the job must end by itself"
            assert f"Signal 9 (SIGKILL) received by PID {victim}" in errors
            assert "[rank" not in errors, "the other must not add a traceback of the lost connection"
        assert not processes_with(mark), "no rank may outlive the job"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the rank through /proc")
def test_torchrun_starts_a_job_anew_behind_its_last_checkpoint(tmp_path: Path) -> None:
    mark, folder = f"STARTED_BY={tmp_path}", str(tmp_path / "run")
    saving = ["--save", folder, "--load", folder, "--save-interval", "10"]
    with running(
        mark, 15, "--train-iters", "100", "--eval-iters", "0", *saving, "--max-restarts", "1"
    ) as process:
        os.kill(processes_with(mark, "RANK=0")[0], signal.SIGKILL)
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert " iteration      100/" in output
    assert " iteration        1/" not in output, "the second start began at the beginning"


def processes_with(*variables: str) -> list[int]:
    """The processes that have all these in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            present = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or not ours
            continue
        if all(variable.encode() in present for variable in variables):
            found.append(int(folder.name))
    return found


def kill_all(mark: str) -> None:
    for process in processes_with(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


OTHER_DEVICE = """
import os, sys
from megalite import accelerator
from megalite.training import main

backend_for = accelerator.backend_for
accelerator.backend_for = lambda *given: "nccl" if os.environ["RANK"] == "0" else backend_for(*given)
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_node_without_the_devices_of_the_others_is_told(tmp_path: Path) -> None:
    """Its ranks would take its CPU cores, and groups of two kinds wait for each other."""
    done = run_script(tmp_path, OTHER_DEVICE)
    assert done.returncode == 1
    assert "--distributed-backend: nccl (cpu) on rank 0, but gloo (cpu) on rank 1" in done.stderr


SLOW_TO_SPEAK = """
import os, sys, time
from megalite.training import loop, main
from megalite.training.errors import TrainingError

def fails_everywhere(*_):
    time.sleep(2 * (os.environ["RANK"] == "0"))
    raise TrainingError("the reason")

loop.run = fails_everywhere
sys.exit(main.main(sys.argv[1:]))
"""


def test_an_error_of_all_ranks_is_told_even_when_the_one_who_speaks_is_slow(tmp_path: Path) -> None:
    """torchrun kills all ranks as soon as one leaves."""
    done = run_script(tmp_path, SLOW_TO_SPEAK)
    assert done.returncode == 1
    at_once, report = done.stderr.split("Root Cause (first observed failure):")
    assert (at_once.count("error: the reason"), report.count("error: the reason")) == (1, 1), done.stderr


def run_script(folder: Path, code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """What two ranks of a script with `code` do that is given the flags of the tiny model and these."""
    script = folder / "script.py"
    script.write_text(code)
    model = [part for name, value in MODEL_FLAGS.items() for part in (f"--{name}", value)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*torchrun, str(script), *model, "--group-query-attention", "--mock-data", *flags],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
