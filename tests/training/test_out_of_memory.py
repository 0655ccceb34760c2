"""A real allocation that fails in a real run: what it says, and that following it makes the run fit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalite.config import parse
from megalite.training.memory import out_of_memory
from tests.end_to_end.launch import LIMIT_SECONDS, MODEL_FLAGS, ROOT, environment

FREE_MIB = 400  # left to tensors when the run starts

LIMITED = """
import resource, sys
import megalite.training.loop
from megalite.training.main import main
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
most = int(status["VmData"].split()[0]) * 1024 + int(sys.argv[1]) * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
sys.exit(main(sys.argv[2:]))
"""
# glibc keeps freed memory in an arena a thread: of this little, more in one run than in another.
GIVES_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
LARGE = {
    "num-layers": "4",
    "hidden-size": "256",
    "ffn-hidden-size": "1024",
    "seq-length": "256",
    "max-position-embeddings": "256",
    "vocab-size": "256",
    "micro-batch-size": "32",
    "global-batch-size": "32",
    "train-iters": "1",
    "eval-iters": "0",
}


def run(path: Path, *flags: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    path.write_text(LIMITED)
    settings = {name: value for name, value in MODEL_FLAGS.items() if name != "eval-interval"} | LARGE
    model = [part for name, value in settings.items() for part in (f"--{name}", value)]
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    model += ["--group-query-attention", "--mock-data", "--no-memory-report"]  # the limit is tight
    return subprocess.run(
        [*start, str(path), str(FREE_MIB), *model, *flags],
        cwd=ROOT,
        env={**environment(), **GIVES_BACK},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is set through /proc")
def test_the_advice_followed_literally_makes_the_run_fit(tmp_path: Path) -> None:
    failed = run(tmp_path / "limited.py")
    assert failed.returncode == 12, failed.stderr
    assert "Traceback" not in failed.stderr
    assert len(failed.stderr.splitlines()) < 40
    assert "error: rank 0: out of memory: " in failed.stderr
    assert "activations" in failed.stderr
    advice = re.findall(
        r"^  \d+\. (--.*?): saves .* needs .*(fits|not fit alone); ", failed.stderr, re.MULTILINE
    )
    flags = [flags for flags, verdict in advice if verdict == "fits"]
    assert flags, failed.stderr
    print(failed.stderr)
    followed = run(tmp_path / "limited.py", *flags[0].split())
    assert followed.returncode == 0, followed.stderr
    assert "iteration        1/" in followed.stdout


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is set through /proc")
def test_a_rank_without_memory_ends_the_others_and_one_rank_explains(tmp_path: Path) -> None:
    failed = run(tmp_path / "limited.py", "--global-batch-size", "64", processes=2)
    assert failed.returncode != 0
    assert failed.stderr.count("what would help, the cheapest first") == 1, failed.stderr
    assert "--zero-stage 1" in failed.stderr
    assert "exitcode  : 12" in failed.stderr


def test_what_failed_is_told_before_the_seconds_that_its_explanation_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []

    def explain(*_: object) -> str:
        told.append(capsys.readouterr().err)
        return "why"

    monkeypatch.setattr(out_of_memory, "explain", explain)
    model = [part for name, value in MODEL_FLAGS.items() for part in (f"--{name}", value)]
    config = parse([*model, "--group-query-attention", "--mock-data"], 1)
    out_of_memory.tell(config, 0, 1, torch.device("cpu"), None, "no 8 bytes")
    assert told == ["error: rank 0: out of memory: no 8 bytes\n"]
    assert capsys.readouterr().err == "why\n"
