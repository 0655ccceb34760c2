"""The commands at work: shares that merge to the whole, runs that are killed, the benchmark."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from megalite.data import preprocess
from megalite.data.indexed_dataset import open_dataset
from tests.data.corpora import NULL, TOOLS, tool, write_dataset, write_lines


@pytest.mark.parametrize("partitions", [1, 3, 7, 40])
def test_partitions_merge_to_the_bytes_of_one_run(tmp_path: Path, partitions: int) -> None:
    inputs = [write_lines(tmp_path / f"in{n}.jsonl", 20 * n, n) for n in range(3)]
    assert (
        tool("preprocess_data")(["--input", *inputs, "--output-prefix", str(tmp_path / "whole"), *NULL]) == 0
    )
    for index in range(partitions):
        share = ["--partitions", str(partitions), "--partition-index", str(index)]
        out = ["--output-prefix", str(tmp_path / "parts" / "p")]
        assert tool("preprocess_data")(["--input", *inputs, *out, *NULL, *share]) == 0
    merged = str(tmp_path / "merged")
    assert tool("merge_datasets")(["--input", str(tmp_path / "parts"), "--output-prefix", merged]) == 0
    for suffix in (".bin", ".idx"):
        whole = (tmp_path / f"whole_text_document{suffix}").read_bytes()
        assert Path(merged + suffix).read_bytes() == whole
    assert tool("inspect_data")([merged, "--verify"]) == 0


FORKED = """
import os, sys
from tools.preprocess_data import main

main([*sys.argv[2:], "--output-prefix", sys.argv[1] + "/before"])
child = os.fork()
if child == 0:
    os._exit(main([*sys.argv[2:], "--output-prefix", sys.argv[1] + "/behind"]))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_library_encodes_also_behind_a_fork(sample: Path, tmp_path: Path) -> None:
    """Where a script uses the tool for one corpus after another."""
    flags = ["--input", str(sample / "corpus.jsonl"), "--tokenizer-model", str(sample), "--workers", "2"]
    subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path), *flags, "--engine", "library"],
        cwd=TOOLS.parent,
        capture_output=True,
        timeout=120,
        check=True,
    )
    before, behind = ((tmp_path / f"{name}_text_document.bin").read_bytes() for name in ("before", "behind"))
    assert before == behind


def test_a_slurm_task_does_the_share_of_its_number(sample: Path, tmp_path: Path) -> None:
    script = str(TOOLS.parent / "examples" / "data" / "preprocess_slurm.sh")
    job = ["bash", script, "3", str(sample / "corpus.jsonl"), str(tmp_path / "p"), str(sample)]
    outside = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    variables = {"SUBMIT_DIR": str(TOOLS.parent), "CPUS_PER_TASK": "1"}
    for task, least, most, told in (
        ("1", "1", "2", ""),  # of a job that does two of them again
        (
            "1",
            "1",
            "3",
            "--partitions 3: the SLURM array has a task 3, but the tasks are the shares: --array=0-2,",
        ),
        ("", "", "", "SLURM_ARRAY_TASK_ID: is not set: give sbatch --array=0-2,"),
    ):
        array = {"ARRAY_TASK_ID": task, "ARRAY_TASK_MIN": least, "ARRAY_TASK_MAX": most}
        slurm = {f"SLURM_{name}": value for name, value in {**variables, **array}.items() if value}
        found = subprocess.run(
            job,
            capture_output=True,
            text=True,
            check=False,
            env={**outside, **slurm, "PYTHON": sys.executable},
        )
        assert (found.returncode == 0, told in found.stderr) == (not told, True), found.stderr
    assert [path.name for path in tmp_path.glob("*.idx")] == ["p_part00001of00003_text_document.idx"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["2", "{0}/in.jsonl", "{0}/p", "{0}", "--json-keys", "raw_text", "--on-error", "skip"], ""),
        (["2", "{0}/in.jsonl", "{0}/more.jsonl", "{0}/p", "{0}"], "put the pattern of the inputs in quotes"),
        (["2", "{0}/in.jsonl", "{0}/p"], "is missing: give the number of shares, the inputs, the output"),
        (["merge", "{0}/p", "raw_text", "--key"], "merge takes a prefix and a key, but also got: --key"),
    ],
)
def test_what_else_is_given_to_the_slurm_script(
    sample: Path, tmp_path: Path, words: Sequence[str], told: str
) -> None:
    shutil.copy(sample / "tokenizer.json", tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "a", "raw_text": "b"}\n{"raw_text": 1}\n')
    script = str(TOOLS.parent / "examples" / "data" / "preprocess_slurm.sh")
    slurm = {"SLURM_SUBMIT_DIR": str(TOOLS.parent), "SLURM_ARRAY_TASK_ID": "0", "SLURM_CPUS_PER_TASK": "1"}
    found = subprocess.run(
        ["bash", script, *(word.format(tmp_path) for word in words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **slurm, "PYTHON": sys.executable},
    )
    assert (found.returncode == 0, told in found.stderr) == (not told, True), found.stderr
    made = [] if told else ["p_part00000of00002_raw_text_document.idx"]
    assert [path.name for path in tmp_path.glob("*.idx")] == made


def test_slurm_merges_the_shares_of_the_key_that_is_given(tmp_path: Path) -> None:
    corpus = tmp_path / "in.jsonl"
    corpus.write_text('{"text": "1", "raw_text": "2"}\n' * 4)
    out = ["--input", str(corpus), "--output-prefix", str(tmp_path / "p"), *NULL]
    for index in "01":
        share = ["--partitions", "2", "--partition-index", index, "--json-keys", "text", "raw_text"]
        assert tool("preprocess_data")([*out, *share]) == 0
    script = str(TOOLS.parent / "examples" / "data" / "preprocess_slurm.sh")

    def merged(key: str) -> subprocess.CompletedProcess[str]:
        merge = ["bash", script, "merge", str(tmp_path / "p"), key]
        environment = {**os.environ, "PYTHON": sys.executable, "SLURM_SUBMIT_DIR": str(TOOLS.parent)}
        return subprocess.run(merge, capture_output=True, text=True, check=False, env=environment)

    for key, token in (("text", 1), ("raw_text", 2)):
        found = merged(key)
        assert found.returncode == 0, found.stderr
        assert open_dataset(f"{tmp_path}/p_{key}_document").stream().tolist() == [token, 99] * 4
    other = merged("t")
    assert other.returncode == 1
    assert f"no shares to merge: no {tmp_path}/p_partIofN_t_document.idx; give" in other.stderr


def test_workers_without_a_number_are_the_cores_that_the_job_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6}, raising=False)
    monkeypatch.setenv("RAYON_NUM_THREADS", "2")
    started: list[int] = []
    pool = preprocess.started_pool

    def counting(count: int) -> ThreadPoolExecutor:
        started.append(count)
        return pool(count)

    monkeypatch.setattr(preprocess, "started_pool", counting)
    path = write_lines(tmp_path / "in.jsonl", 3)
    for workers, rayon in ([], "2"), (["--workers", "4"], "4"):
        flags = [*NULL[:-2], *workers, "--output-prefix", str(tmp_path / "out")]
        assert tool("preprocess_data")(["--input", path, *flags]) == 0
        assert os.environ["RAYON_NUM_THREADS"] == rayon
    assert started == [3 + 1, 4 + 1]


def test_a_missing_partition_is_not_merged_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "in.jsonl", 30)
    for index in (0, 2):
        share = ["--partitions", "3", "--partition-index", str(index)]
        tool("preprocess_data")(
            ["--input", path, "--output-prefix", str(tmp_path / "parts" / "p"), *NULL, *share]
        )
    assert (
        tool("merge_datasets")(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "m")])
        == 1
    )
    assert "3 partitions of a corpus, which must all be given in order; missing: 1" in capsys.readouterr().err
    listed = [str(tmp_path / f"parts/p_part{index:05}of00003_text_document") for index in range(3)]
    assert tool("merge_datasets")(["--input", *listed, "--output-prefix", str(tmp_path / "m")]) == 1
    assert "part00001of00003_text_document.idx does not exist; a dataset is" in capsys.readouterr().err
    assert not list(tmp_path.glob("m*"))


def test_datasets_that_do_not_fit_are_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_dataset(tmp_path / "a", [3, 4])
    b = write_dataset(tmp_path / "b", [5], dtype="int32")
    assert tool("merge_datasets")(["--input", a, b, "--output-prefix", str(tmp_path / "m")]) == 1
    assert "b: holds int32, but" in capsys.readouterr().err
    c = write_dataset(tmp_path / "c", [5], dtype="int16")
    assert tool("merge_datasets")(["--input", c, c, "--output-prefix", str(tmp_path / "m")]) == 1
    assert f"{c}: holds int16; what can be merged is uint8, uint16, int32, int64" in capsys.readouterr().err
    path = write_lines(tmp_path / "in.jsonl", 3)
    for name, size in (("x", "100"), ("y", "120")):
        flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", size]
        tool("preprocess_data")(["--input", path, "--output-prefix", str(tmp_path / name), *flags])
    pair = [str(tmp_path / f"{name}_text_document") for name in "xy"]
    assert tool("merge_datasets")(["--input", *pair, "--output-prefix", str(tmp_path / "m")]) == 1
    assert "vocabulary size is 120, but that of" in capsys.readouterr().err


def test_errors_name_file_and_line_inside_a_partition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": "1 2 3"})] * 50
    lines[40] = "broken"
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    share = ["--partitions", "2", "--partition-index", "1"]
    common = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "p"), *NULL]
    assert tool("preprocess_data")([*common, *share]) == 1
    assert "in.jsonl:41: not valid JSON" in capsys.readouterr().err


def test_a_flag_that_does_not_exist_here_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool("preprocess_data")(["--input", "x", "--output-prefix", "y", "--split-sentences"])
    assert "--split-sentences does not exist here: give each document as a list" in capsys.readouterr().err


def start_preprocess(tmp_path: Path, source: str) -> subprocess.Popen[str]:
    code = (
        "import sys; from megalite.data import preprocess, text_batches; "
        "text_batches.BATCH_DOCUMENTS = 50; preprocess.CHECKPOINT_SECONDS = 0.0; "
        "sys.path.insert(0, sys.argv.pop(1)); import preprocess_data; "
        "sys.exit(preprocess_data.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, str(TOOLS), "--input", source]
    command += [
        "--output-prefix",
        str(tmp_path / "out"),
        "--tokenizer-type",
        "ByteLevelTokenizer",
        "--append-eod",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_process_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", 30000)
    flags = ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod"]
    assert (
        tool("preprocess_data")(["--input", source, "--output-prefix", str(tmp_path / "whole"), *flags]) == 0
    )
    process = start_preprocess(tmp_path, source)
    while process.poll() is None and not (tmp_path / "out_text_document.progress.json").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not [
        name for name in os.listdir(tmp_path) if name.startswith("out") and name.endswith((".bin", ".idx"))
    ]
    assert tool("preprocess_data")(["--input", source, "--output-prefix", str(tmp_path / "out"), *flags]) == 0
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out_text_document{suffix}").read_bytes() == (
            tmp_path / f"whole_text_document{suffix}"
        ).read_bytes()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the allocator of glibc has this setting")
def test_freed_memory_is_kept() -> None:
    code = (
        "import resource, threading\n"
        "from megalite import _C\n"
        "_C.keep_freed_memory(64 << 20)\n"
        "def work():\n"
        "    for _ in range(9):\n"
        "        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "        pieces = [b'x' * (1 << 20) for _ in range(16)]\n"
        "        del pieces\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100  # pages; without it most of the 4,096 of 16 MiB are new


SMALL_BENCHMARK = """
import sys
from tools import benchmark
from tools.benchmarks.data import preprocessing
preprocessing.ENGINE_BYTES = 1000
sys.exit(benchmark.main())
"""


def test_the_benchmark_measures_every_stage(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"the cat sat on mat {i}"}) + "\n" for i in range(50)))
    done = subprocess.run(
        [
            *(sys.executable, "-c", SMALL_BENCHMARK, "data"),
            *("--documents", "20000", "--rounds", "1", "--corpus", str(corpus)),
        ],
        cwd=TOOLS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    measures = [line.split("|")[1].strip() for line in table]
    engines = sum(find_spec(engine) is not None for engine in ("fastokens", "gigatoken"))
    assert [
        sum(measure.startswith(start) for measure in measures)
        for start in (
            "preprocessing",
            "20,000 documents",
            "4096-token samples",
            "index of 20,000",
            "blending",
        )
    ] == [1 + 4 * engines, 3, 7, 4, 3]


RAY = TOOLS.parent / "examples" / "data" / "preprocess_ray.py"


def test_the_ray_example_says_what_it_needs(tmp_path: Path) -> None:
    without = "import runpy, sys; sys.modules['ray'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    flags = ["--partitions", "2", "--input", "x", "--output-prefix", str(tmp_path / "p")]
    done = subprocess.run(
        [sys.executable, "-c", without, str(RAY), *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "preprocess_ray: error: needs the package ray: pip install ray\n"


def test_ray_gives_the_bytes_of_one_run(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    source = write_lines(tmp_path / "in.jsonl", 50)
    with open(source, "a", encoding="utf-8") as file:
        file.write("no json\n")
    flags = ["--input", source, *NULL[:-2], "--on-error", "skip"]

    def by_ray(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(RAY), *flags, "--output-prefix", str(tmp_path / "ray"), *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = by_ray("--partitions", "3")
    assert done.returncode == 0, done.stderr
    assert "share 2: 1 documents were skipped; " in done.stderr
    lacking = by_ray("--partitions", "3", "--cpus-per-task", "100000")
    assert lacking.returncode == 1
    assert "--cpus-per-task 100000: the largest machine has" in lacking.stderr
    assert tool("preprocess_data")([*flags, "--output-prefix", str(tmp_path / "one")]) == 0
    for suffix in (".bin", ".idx"):
        ray, one = (tmp_path / f"{name}_text_document{suffix}" for name in ("ray", "one"))
        assert ray.read_bytes() == one.read_bytes()
