"""The commands at work: shares that merge to the whole, what is shown of data, engines, the benchmark."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel

from megalite.data import preprocess
from megalite.data.build import build_datasets
from megalite.data.indexed_dataset import DatasetWriter
from megalite.data.sample_corpus import train_tokenizer
from megalite.data.tokenizer import gigatoken
from megalite.data.tokenizer.huggingface import HuggingFaceTokenizer, load_tokenizer_json
from tests.data.corpora import GOLDENS, TOOLS, Words, data_config, lines, write_dataset


def tool(name: str) -> Callable[[list[str]], int]:
    return importlib.import_module(f"tools.{name}").main


def write_lines(path: Path, count: int, offset: int = 0) -> str:
    rng = np.random.default_rng(offset)
    with path.open("w") as file:
        for i in range(count):
            text = " ".join(map(str, rng.integers(0, 90, rng.integers(0, 30))))
            file.write(json.dumps({"text": text, "id": i}) + "\n")
    return str(path)


NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--append-eod", "--workers", "2"]


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


def test_dump_equals_the_goldens(tmp_path: Path) -> None:
    for case in ("blend3_weights", "empties_seq16_resets", "single_sep_final_epoch", "single_1epoch_seq32"):
        description = json.loads((GOLDENS / f"{case}.json").read_text())
        config, words = description["config"], description["tokenizer"]
        prefixes, weights = config["blend"]
        paths = [str(GOLDENS / "data" / prefix) for prefix in prefixes]
        if weights is not None:
            paths = [word for pair in zip(map(str, weights), paths, strict=True) for word in pair]
        command = [
            "--data-path",
            *paths,
            "--split",
            config["split"],
            "--seq-length",
            str(config["seq_length"]),
        ]
        command += ["--seed", str(config["seed"]), "--data-cache-path", str(tmp_path / "cache")]
        for split, size in zip(("train", "valid", "test"), config["sizes"], strict=True):
            command += [] if size is None else [f"--{split}-samples", str(size)]
        for flag in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            command += [f"--{flag.replace('_', '-')}"] if config[flag] else []
        command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(words["vocab_size"])]
        command += ["--null-tokenizer-eod-id", str(words["eod"]), "--dump", str(tmp_path / "out.npz")]
        assert tool("inspect_data")(command) == 0
        ours, golden = np.load(tmp_path / "out.npz"), np.load(GOLDENS / f"{case}.npz")
        assert set(ours) == set(golden)
        for key in golden:
            assert ours[key].dtype == golden[key].dtype, key
            assert np.array_equal(ours[key], golden[key]), key


def test_a_step_names_its_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_dataset(tmp_path / "d", [10] * 30)
    run = ["--data-path", prefix, "--split", "1,0,0", "--seq-length", "12", "--train-samples", "24"]
    run += ["--data-cache-path", str(tmp_path / "cache")]
    assert tool("inspect_data")([*run, "--iteration", "3", "--global-batch-size", "4"]) == 0
    out = capsys.readouterr().out
    assert [f"sample {i}\n" in out for i in (7, 8, 11, 12)] == [False, True, True, False]
    assert f"{prefix}: document" in out
    assert tool("inspect_data")([*run, "--iteration", "9", "--global-batch-size", "4"]) == 1
    assert "--iteration 9: the 24 samples make steps 1 to 6\n" in capsys.readouterr().err


def test_a_weighted_blend_of_which_only_training_has_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [write_dataset(tmp_path / name, [10] * 30, seed=seed) for seed, name in enumerate("ab")]
    run = ["--data-path", "3", pair[0], "7", pair[1], "--seq-length", "12", "--train-samples", "24"]
    run += ["--data-cache-path", str(tmp_path / "cache")]
    assert tool("inspect_data")([*run, "--iteration", "3", "--global-batch-size", "4"]) == 0
    assert "sample 8\n" in capsys.readouterr().out
    assert tool("inspect_data")(run) == 1
    told = "valid split: a blend with weights has no end of its own; give --valid-samples, 0 for none\n"
    assert capsys.readouterr().err.endswith(told)
    assert tool("inspect_data")([*run, "--valid-samples", "0", "--test-samples", "0"]) == 0
    assert [line[:6] for line in capsys.readouterr().out.splitlines() if line[0] != " "] == ["train:"]


def test_fewer_samples_than_a_run_has_drawn_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_dataset(tmp_path / "d", [10] * 30)
    config = data_config(tmp_path / "cache", prefix)
    train = build_datasets(config, Words(1000, 0), 8, 1234, (30, 0, 0)).train
    assert train is not None
    assert train.order is not None
    record = train.order.record(20)
    monkeypatch.setattr("tools.inspect_data.saved_order", lambda _: record)
    run = ["--data-path", prefix, "--split", "1", "--seq-length", "8", "--load", "checkpoints"]
    for samples, code in (("19", 1), ("20", 0), ("40", 0)):
        assert tool("inspect_data")([*run, "--train-samples", samples]) == code
    assert "--train-samples 19: the run has drawn 20 already; give" in capsys.readouterr().err


def test_ids_beyond_int32_are_dumped_as_they_are(tmp_path: Path) -> None:
    ids = np.arange(1 << 31, (1 << 31) + 30)
    with DatasetWriter(str(tmp_path / "d"), "int64") as writer:
        writer.add(ids, np.array([30], dtype=np.int32))
    run = ["--data-path", str(tmp_path / "d"), "--split", "1", "--seq-length", "8"]
    assert tool("inspect_data")([*run, "--dump", str(tmp_path / "out.npz")]) == 0
    found = np.load(tmp_path / "out.npz")
    assert sorted(found["train.tokens"].flatten()) == ids[:24].tolist()
    assert sorted(found["train.labels"].flatten()) == ids[1:25].tolist()
    assert found["train.position_ids"].dtype == np.int32


@pytest.mark.parametrize("what", ["--document", "--dump"])
def test_another_tokenizer_than_that_of_the_data_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    bytes_ = ["--tokenizer-type", "ByteLevelTokenizer"]
    source = lines(tmp_path / "in.jsonl", ["the cat sat"])
    train_tokenizer(Path(source), tmp_path / "tokenizer.json", 260)
    assert tool("preprocess_data")(["--input", source, "--output-prefix", str(tmp_path / "d"), *bytes_]) == 0
    prefix = str(tmp_path / "d_text_document")
    other = ["--tokenizer-model", str(tmp_path / "tokenizer.json")]
    show = [prefix, "--document", "0"]
    if what == "--dump":
        show = ["--data-path", prefix, "--split", "1", "--seq-length", "4", "--dump", str(tmp_path / "d.npz")]
    capsys.readouterr()
    assert tool("inspect_data")([*show, *other]) == 1
    found = capsys.readouterr()
    assert f"{prefix}: made with another tokenizer" in found.err
    assert "---" not in found.out
    assert tool("inspect_data")([*show, *bytes_]) == 0
    assert ("the cat sat" in capsys.readouterr().out) == (what == "--document")


DECREASED = ["--decrease-batch-size-if-needed", "--micro-batch-size", "1", "--data-parallel-size", "2"]


@pytest.mark.parametrize(
    ("flags", "iteration", "samples"),
    [
        # 2 samples a step, 4 from sample 3 on, 6 from sample 6 on: steps at 0, 2, 4, 8, 14
        (["--global-batch-size", "6", "--rampup-batch-size", "2", "2", "6"], "4", range(8, 14)),
        # 4 a step until 120 tokens, 10 samples, are consumed: steps at 0, 4, 8, 12
        (["--step-batch-size-schedule", "0:4 120:5"], "4", range(12, 17)),
        (["--global-batch-size", "5", *DECREASED], "2", range(4, 8)),
    ],
)
def test_a_step_has_the_batch_size_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], iteration: str, samples: range
) -> None:
    prefix = write_dataset(tmp_path / "d", [10] * 30)
    run = ["--data-path", prefix, "--split", "1,0,0", "--seq-length", "12", "--train-samples", "24"]
    run += ["--data-cache-path", str(tmp_path / "cache")]
    assert tool("inspect_data")([*run, *flags, "--iteration", iteration]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("sample ")] == [f"sample {i}" for i in samples]


def test_description_and_histogram(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    prefix = write_dataset(tmp_path / r"d$\x$", [0, 1, 2, 3, 700])  # which is no formula of TeX
    png = tmp_path / "lengths.png"
    assert tool("inspect_data")([prefix, "--histogram-png", str(png), "--document", "2"]) == 0
    out = capsys.readouterr().out
    assert "5 documents, 5 sequences, 706 tokens of uint16" in out
    assert "512 to 1023" in out
    assert "--- document 2, sequence 2: 2 tokens" in out
    assert png.read_bytes().startswith(b"\x89PNG")


def test_one_picture_of_several_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    lengths = {"_a": 3, "b$\\x$": 700, "c": 0}
    prefixes = [write_dataset(Path(name), [length]) for name, length in lengths.items()]
    assert tool("inspect_data")([*prefixes, "--histogram-png", "lengths.svg"]) == 0
    drawn = re.findall("<!-- (.*) -->", Path("lengths.svg").read_text())  # above the outlines of each text
    assert [text for text in drawn if text in prefixes] == prefixes
    assert {"0", "2", "512"} <= {*drawn}


def test_verify_finds_what_opening_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "in.jsonl", 30)
    tool("preprocess_data")(["--input", path, "--output-prefix", str(tmp_path / "d"), *NULL])
    prefix = str(tmp_path / "d_text_document")
    assert tool("inspect_data")([prefix, "--verify"]) == 0
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[100] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)
    assert tool("inspect_data")([prefix, "--verify"]) == 1
    assert "crc32" in capsys.readouterr().err
    content[101] = 1
    Path(f"{prefix}.bin").write_bytes(content)
    assert tool("inspect_data")([prefix, "--verify"]) == 1
    assert "token 50 (sequence" in capsys.readouterr().err


def start_preprocess(tmp_path: Path, source: str) -> subprocess.Popen[str]:
    code = (
        "import sys; from megalite.data import preprocess as p; p.BATCH_DOCUMENTS = 50; p.CHECKPOINT_SECONDS "
        "= 0.0; "
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
    while process.poll() is None and not (tmp_path / "out.progress.json").exists():
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
    flags = ["--input", source, *NULL[:-2]]
    done = subprocess.run(
        [sys.executable, str(RAY), *flags, "--partitions", "3", "--output-prefix", str(tmp_path / "ray")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert tool("preprocess_data")([*flags, "--output-prefix", str(tmp_path / "one")]) == 0
    for suffix in (".bin", ".idx"):
        ray, one = (tmp_path / f"{name}_text_document{suffix}" for name in ("ray", "one"))
        assert ray.read_bytes() == one.read_bytes()


@pytest.mark.parametrize("fast", ["gigatoken", "fastokens"])
@pytest.mark.parametrize("spelled", [[], ["--allow-special-tokens"]])
def test_an_engine_gives_the_librarys_bytes(
    sample: Path, tmp_path: Path, fast: str, spelled: list[str]
) -> None:
    pytest.importorskip(fast)
    for engine in ("library", fast):
        out = ["--engine", engine, "--output-prefix", str(tmp_path / engine), "--json-keys", "text", "more"]
        assert tool("preprocess_data")([*text_flags(sample), *out, *spelled]) == 0
    for key in ("text", "more"):
        for suffix in (".bin", ".idx"):
            ours, theirs = (tmp_path / f"{engine}_{key}_document{suffix}" for engine in (fast, "library"))
            assert ours.read_bytes() == theirs.read_bytes()


def test_gigatoken_does_not_remember_all_words(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gigatoken")
    monkeypatch.setattr(gigatoken, "RENEWED_AFTER", 20)
    reference = load_tokenizer_json(str(sample / "tokenizer.json"), None, False, False)
    engine = gigatoken.GigatokenEngine(reference)
    made, texts = [], ["the cat sat", "on the mat", "with a hat"]
    for text in texts:
        assert engine.encode_batch([text]) == reference.encode_batch([text])
        made.append(engine._engine)
    assert made[0] is not made[1] is made[2]


def test_one_thread_renews_gigatoken_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Encoder:
        def encode_batch(self, texts: list[str]) -> SimpleNamespace:
            lengths = np.cumsum([0, *map(len, texts)])
            layout = {"offsets": lengths, "content": np.zeros(lengths[-1], dtype=np.int32)}
            return SimpleNamespace(
                layout=SimpleNamespace(**{k: SimpleNamespace(data=v) for k, v in layout.items()})
            )

    def from_json(_: bytes) -> Encoder:
        made.append(0)
        time.sleep(0.1 * (len(made) - 1))  # until the other thread has come to it
        return Encoder()

    library = SimpleNamespace(Tokenizer=SimpleNamespace(from_json=from_json))
    monkeypatch.setitem(sys.modules, "gigatoken", cast("ModuleType", library))
    monkeypatch.setattr(gigatoken, "RENEWED_AFTER", 20)
    words = Library(WordLevel({"a": 0, "?": 1}, "?"))
    engine = gigatoken.GigatokenEngine(HuggingFaceTokenizer(words, "", None, False, False))
    engine.encode_flat(["a" * 15])
    with ThreadPoolExecutor(2) as pool:
        assert [len(ids) for ids, _ in pool.map(engine.encode_flat, [["a" * 15]] * 2)] == [15, 15]
    assert len(made) == 2


def test_gigatoken_is_refused_where_it_is_not_known_to_be_equal(
    sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gigatoken")
    content = json.loads((sample / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    out = ["--output-prefix", str(tmp_path / "p"), "--engine", "gigatoken"]
    model = ["--tokenizer-model", str(tmp_path)]
    assert tool("preprocess_data")([*text_flags(sample), *model, *out]) == 1
    assert "normalizer Lowercase is not known to be equal; leave --engine out" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["gigatoken", "fastokens"])
def test_an_engine_that_is_missing_says_so(
    sample: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: str,
) -> None:
    monkeypatch.setitem(sys.modules, engine, None)
    out = ["--output-prefix", str(tmp_path / "p"), "--engine", engine]
    assert tool("preprocess_data")([*text_flags(sample), *out]) == 1
    assert f"needs the package {engine}: pip install {engine}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with two keys and a tokenizer."""
    folder = tmp_path_factory.mktemp("sample")
    texts = [f"the cat sat on\u00a0mat {i}<|endoftext|> na\u00efve\u088f's" for i in range(30)]
    lines = [json.dumps({"text": text, "more": ["", text * 2, "\r\n x"]}) for text in texts]
    (folder / "corpus.jsonl").write_text("".join(line + "\n" for line in lines))
    train_tokenizer(folder / "corpus.jsonl", folder / "tokenizer.json", 300)
    return folder


def text_flags(folder: Path) -> list[str]:
    model = ["--tokenizer-model", str(folder / "tokenizer.json"), "--append-eod", "--workers", "2"]
    return ["--input", str(folder / "corpus.jsonl"), *model]
