"""The data pipeline beside its alternatives, each pair measured in turn in one run.

Times are CPU seconds of the process, the least of several rounds, unless a row says wall time: they hold on
a machine that others use as well, and leave out waiting for the disk. Memory is the growth of the peak
resident set of a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalite import _C
from megalite.data.blended_dataset import normalize
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import DatasetWriter, open_dataset
from megalite.data.sample_plan import plan_samples

SEQ = 4096
MEAN_LENGTH = 492
EOD = 1


@dataclass(frozen=True)
class Row:
    """One line of the table: ours, the peer's, and ours as part of the peer's where both are times."""

    measure: str
    ours: float
    peer: float | None
    unit: str

    def cells(self) -> list[str]:
        peer = "not installed" if self.peer is None else f"{self.peer:,.4g}"
        ratio = "" if not self.peer else f"{self.ours / self.peer:.2f}"
        return [self.measure, f"{self.ours:,.4g}", peer, ratio, self.unit]


def least(rounds: int, *tasks: Callable[[], object]) -> list[float]:
    """CPU seconds of each task, the least of `rounds` in which they take turns."""
    best = [float("inf")] * len(tasks)
    for _ in range(rounds):
        for i, task in enumerate(tasks):
            start = time.process_time()
            task()
            best[i] = min(best[i], time.process_time() - start)
    return best


def megatron_helpers() -> Any:
    """The compiled part of megatron-core's datasets, where it is installed."""
    try:
        return importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return None


def write_lengths(prefix: Path, documents: int, mean: int) -> str:
    """A dataset with lengths drawn around `mean`; each document is zeros and then EOD."""
    lengths = np.random.default_rng(0).integers(1, 2 * mean, documents).astype(np.int32)
    with DatasetWriter(str(prefix), "uint16", sync=False) as writer:
        writer.add_sequences(lengths)
        writer.add_documents(np.ones(documents, dtype=np.int64))
        for part in np.array_split(lengths, max(1, documents * mean >> 22)):
            ends = np.cumsum(part, dtype=np.int64)
            tokens = np.zeros(ends[-1], dtype=np.uint16)
            tokens[ends - 1] = EOD
            writer.add_tokens(tokens)
    return str(prefix)


# KiB from /proc: getrusage's peak begins with that of the process which started this one.
RESIDENT = """
def resident(name):
    if name == "VmRSS":
        open("/proc/self/clear_refs", "w").write("5")  # VmHWM begins anew
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
"""
INDEX = """
import json, sys, time
prefix, epochs, who, cache = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
seq = 4096
if who == "megalite":
    from pathlib import Path
    from megalite.data.gpt_dataset import GPTDataset
    from megalite.data.indexed_dataset import open_dataset
    from megalite.data.sample_plan import plan_samples
    dataset = open_dataset(prefix)
    wanted = None if epochs == 1 else int((epochs - 0.1) * dataset.tokens / seq)
    def build():
        plan = plan_samples(dataset, (0, dataset.sequences), seq, 1234, wanted)
        return GPTDataset(dataset, plan, Path(cache))
else:
    import numpy
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split
    dataset = IndexedDataset(prefix)
    total = int(dataset.sequence_lengths.sum(dtype=numpy.int64))
    wanted = None if epochs == 1 else int((epochs - 0.1) * total / seq)
    class Words:
        unique_identifiers = {"class": "Words"}
        eod, pad, vocab_size = 1, 0, 65000
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=seq, blend=([prefix], None), split="1,0,0", path_to_cache=cache,
        tokenizer=Words(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False,
    )
    documents = numpy.arange(len(dataset.sequence_lengths), dtype=numpy.int32)
    def build():
        return GPTDataset(dataset, prefix, documents, wanted, Split.train, config)
before = resident("VmRSS")
start = time.process_time()
made = build()
seconds = time.process_time() - start
print(json.dumps([seconds, resident("VmHWM") - before, len(made)]))
"""


def index_build(prefix: str, epochs: int, rounds: int, peer: bool) -> list[Row]:
    """The three index arrays of `epochs` epochs into a cache folder, each time in a new process; the peer is
    megatron-core's GPTDataset.
    """
    best: dict[str, list[float]] = {}
    for _ in range(rounds):
        for who in ("megalite", *(["megatron"] if peer else [])):
            with tempfile.TemporaryDirectory() as cache:
                command = [sys.executable, "-c", RESIDENT + INDEX, prefix, str(epochs), who, cache]
                done = subprocess.run(command, capture_output=True, check=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            best[who] = [min(pair) for pair in zip(found, best.get(who, found), strict=True)]
    ours, theirs = best["megalite"], best.get("megatron")
    if theirs is not None and ours[2] != theirs[2]:
        raise RuntimeError(f"{prefix}: {ours[2]} samples here, {theirs[2]} there")
    name = f"index of {prefix_documents(prefix):,} documents, {epochs} epoch{'s' * (epochs > 1)}"
    return [
        Row(name, ours[0], None if theirs is None else theirs[0], "s"),
        Row(f"{name}: memory", ours[1] / 1024, None if theirs is None else theirs[1] / 1024, "MiB"),
    ]


def prefix_documents(prefix: str) -> int:
    return open_dataset(prefix).sequences


def blending(datasets: int, rounds: int, helpers: Any) -> Row:
    """A sample of a blend with random weights."""
    weights = np.array(normalize(list(np.random.default_rng(1).random(datasets))))
    count = 300_000
    index, samples = np.empty(count, dtype=np.int16), np.empty(count, dtype=np.int64)

    def peer() -> None:
        helpers.build_blending_indices(index, samples, weights, datasets, count, False)

    times = least(rounds, lambda: _C.fill_blend(index, samples, weights), *([peer] if helpers else []))
    each = [1e9 * seconds / count for seconds in times]
    return Row(f"blending, {datasets:,} datasets", each[0], each[1] if helpers else None, "ns a sample")


def reading(prefix: str, rounds: int, peer: bool) -> list[Row]:
    """Random samples through the dataset into int64 batches of 64, with and without the boundaries of
    documents; the peers are megatron-core's GPTDataset and NumPy's memmap, a slice and a cast a document.
    """
    dataset = open_dataset(prefix)
    plan = plan_samples(dataset, (0, dataset.sequences), SEQ, 1234, None)
    source = GPTDataset(dataset, plan, None)
    count = min(len(source), 4096) // 64 * 64
    out = np.empty((64, SEQ + 1), dtype=np.int64)
    stream, offsets = dataset.stream(), np.array(dataset.offsets) // 2

    def ours() -> None:
        for first in range(0, count, 64):
            source.read(np.arange(first, first + 64), out)

    def with_boundaries() -> None:
        for first in range(0, count, 64):
            source.read(np.arange(first, first + 64), out)
            _C.mask_documents(out, SEQ, EOD)

    def memmap() -> None:
        for first in range(0, count, 64):
            for row in range(64):
                place = 0
                for piece in source.pieces(first + row):
                    start = offsets[piece.document] + piece.offset
                    out[row, place : place + piece.tokens] = stream[start : start + piece.tokens]
                    place += piece.tokens

    plain, bounded, mapped = (count / seconds for seconds in least(rounds, ours, with_boundaries, memmap))
    rates: Sequence[float | None] = getitem(prefix) if peer else (None, None, None)
    item, restarts, dense = rates
    name = f"{SEQ}-token samples through the dataset"
    return [
        Row(f"{name}; NumPy memmap", plain, mapped, "samples/s"),
        Row(f"{name}; GPTDataset[i]", plain, item, "samples/s"),
        Row("... with cu_seqlens; GPTDataset[i] with restarts", bounded, restarts, "samples/s"),
        Row("... with cu_seqlens; GPTDataset[i] with a dense mask", bounded, dense, "samples/s"),
    ]


GETITEM = """
import json, sys, time
import numpy
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
prefix, cache = sys.argv[1:3]
class Words:
    unique_identifiers = {"class": "Words"}
    eod, pad, vocab_size = 1, 0, 65000
rates = []
for reset, mask, count in ((False, False, 2048), (True, False, 2048), (True, True, 64)):
    dataset = IndexedDataset(prefix)
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=4096, blend=([prefix], None), split="1,0,0", path_to_cache=cache,
        tokenizer=Words(), reset_position_ids=reset, reset_attention_mask=reset, eod_mask_loss=reset,
        create_attention_mask=mask,
    )
    documents = numpy.arange(len(dataset.sequence_lengths), dtype=numpy.int32)
    made = GPTDataset(dataset, prefix, documents, None, Split.train, config)
    best = 1e9
    for _ in range(3):
        start = time.process_time()
        for i in range(count):
            made[i]
        best = min(best, time.process_time() - start)
    rates.append(count / best)
print(json.dumps(rates))
"""


def getitem(prefix: str) -> list[float]:
    """Samples/s of megatron-core's `GPTDataset.__getitem__`: plain, with positions and loss restarted at
    documents, and with the dense mask of attention too.
    """
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", GETITEM, prefix, cache], capture_output=True, check=True, text=True
        )
    rates: list[float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def loading(prefix: str) -> Row:
    """The same through the loader, wall time: its reading thread and this one share the work."""
    import torch

    from megalite.data.build import Dataset, DocumentRules
    from megalite.data.loader import StepLoader

    dataset = open_dataset(prefix)
    source = GPTDataset(dataset, plan_samples(dataset, (0, dataset.sequences), SEQ, 1234, None), None)
    best = {}
    for name, rules in (
        ("plain", DocumentRules(EOD)),
        ("cu_seqlens", DocumentRules(EOD, False, True, False)),
    ):
        best[name] = 0.0
        for _ in range(3):
            with StepLoader(Dataset(source, rules), 64, 64, 0, 1, 0, torch.device("cpu")) as loader:
                start, steps = time.perf_counter(), 0
                for steps, _ in enumerate(loader, 1):
                    if steps == 60:
                        break
                best[name] = max(best[name], 64 * steps / (time.perf_counter() - start))
    return Row(
        "... through the loader, wall time; peer column: with cu_seqlens",
        best["plain"],
        best["cu_seqlens"],
        "samples/s",
    )


WRITE_INDEX = """
import json, sys, time
import numpy as np
from megalite.data.indexed_dataset import DatasetWriter
documents = int(sys.argv[2])
before = resident("VmRSS")
start = time.process_time()
writer = DatasetWriter(sys.argv[1], "uint16", sync=False)
tokens, ones = np.zeros(4000, dtype=np.uint16), np.ones(4000, dtype=np.int32)
for _ in range(documents // 4000):
    writer.add(tokens, ones)
added = time.process_time()
writer.publish()
seconds = [added - start, time.process_time() - added]
print(json.dumps([*seconds, resident("VmHWM") - before]))
"""


def writing(folder: Path, documents: int) -> list[Row]:
    """One-token documents in batches of 4,000: time to add them, to complete the .idx, and the memory that
    took.
    """
    command = [sys.executable, "-c", RESIDENT + WRITE_INDEX, str(folder / "tiny"), str(documents)]
    runs = [
        json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        for _ in range(2)
    ]
    adding, publishing, kilobytes = (min(values) for values in zip(*runs, strict=True))
    name = f"{documents:,} documents of one token"
    return [
        Row(f"{name}: adding", adding, None, "s"),
        Row(f"{name}: completing the .idx", publishing, None, "s"),
        Row(f"{name}: memory", kilobytes / 1024, None, "MiB"),
    ]


RAW = """
import importlib, json, sys, time
import orjson
engine, model, corpus = sys.argv[1:4]
texts = [orjson.loads(line)["text"] for line in open(corpus, "rb")]
library = importlib.import_module(engine)
if engine == "fastokens":
    tokenizer = library.Tokenizer.from_file(model)
    encode = lambda batch: tokenizer.encode_batch_flat(batch, False, True)
elif engine == "gigatoken":
    tokenizer = library.Tokenizer.from_json(open(model, "rb").read())
    encode = tokenizer.encode_batch
else:
    tokenizer = library.Tokenizer.from_file(model)
    tokenizer.encode_special_tokens = True
    encode = tokenizer.encode_batch_fast
wall, start = time.perf_counter(), time.process_time()
for i in range(0, len(texts), 1000):
    encode(texts[i : i + 1000])
print(json.dumps([time.process_time() - start, time.perf_counter() - wall]))
"""


def preprocessing(
    folder: Path, corpus: Path, tokenizer_json: Path, megabytes: float, engine: str
) -> list[Row]:
    """The tool, writing included, beside its engine alone on the same text and threads, both cold; for the
    library without the tool's start-up, for a faster engine with it and with the check of its ids.
    """
    tool = Path(__file__).parents[1] / "preprocess_data.py"
    lines = corpus.read_bytes().splitlines(keepends=True)
    shuffle, size = random.Random(0), 0
    with (folder / "corpus.jsonl").open("wb") as file:
        while size < megabytes * 1_000_000:
            shuffle.shuffle(lines)
            size += sum(map(len, lines))
            file.writelines(lines)
    (folder / "empty.jsonl").write_bytes(b"")
    threads = {**os.environ, "RAYON_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "true"}

    def run_tool(source: str) -> tuple[float, float]:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, str(tool), "--input", str(folder / source)]
        command += ["--output-prefix", str(folder / "out"), "--tokenizer-model", str(tokenizer_json)]
        command += ["--append-eod", "--workers", "2", "--engine", engine]
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return cpu, time.perf_counter() - start

    module = "tokenizers" if engine == "library" else engine
    command = [sys.executable, "-c", RAW, module, str(tokenizer_json), str(folder / "corpus.jsonl")]
    alone, whole = [], []
    for _ in range(3):
        done = subprocess.run(command, check=True, capture_output=True, env=threads)
        alone.append(json.loads(done.stdout))
        whole.append(run_tool("corpus.jsonl"))
    (cpu_alone, wall_alone), (cpu, wall) = (
        [min(times) for times in zip(*runs, strict=True)] for runs in (alone, whole)
    )
    name = f"preprocessing {size / 1e6:.0f} MB, {engine}"
    if engine != "library":
        return [
            Row(f"{name}; the engine alone", cpu, cpu_alone, "s"),
            Row(f"{name}; the engine alone, wall time", wall, wall_alone, "s"),
        ]
    starts = [run_tool("empty.jsonl") for _ in range(3)]
    return [
        Row(f"{name}, without start-up; encode_batch_fast alone", cpu - min(starts)[0], cpu_alone, "s"),
        Row("start-up of preprocess_data.py", min(starts)[0], None, "s"),
    ]


PARTS = ("preprocessing", "writing", "reading", "index", "blending")


def benchmark_data(
    documents: int, rounds: int, corpus: Path, tokenizer_json: Path, parts: Sequence[str] = PARTS
) -> list[Row]:
    """The measures of `parts`; megatron-core's and the engines' come along where they can be imported."""
    helpers = megatron_helpers()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "preprocessing" in parts:
            four_times = 4e-6 * corpus.stat().st_size
            rows += preprocessing(folder, corpus, tokenizer_json, four_times, "library")
            for engine in ("fastokens", "gigatoken"):
                if importlib.util.find_spec(engine) is not None:
                    rows += preprocessing(folder, corpus, tokenizer_json, 300, engine)
        if "writing" in parts:
            rows += writing(folder, documents)
        if "reading" in parts:
            small = write_lengths(folder / "small", min(200_000, documents), MEAN_LENGTH)
            rows += [*reading(small, rounds, helpers is not None), loading(small)]
        if "index" in parts:
            large = write_lengths(folder / "large", documents, 20)
            for epochs in (1, 3):
                rows += index_build(large, epochs, rounds, helpers is not None)
    if "blending" in parts:
        rows += [blending(count, rounds, helpers) for count in (3, 100, 1000)]
    return rows


def markdown(rows: list[Row]) -> str:
    lines = ["| measure | megalite | peer | ratio | unit |", "| --- | --- | --- | --- | --- |"]
    return "\n".join(lines + [f"| {' | '.join(row.cells())} |" for row in rows])
