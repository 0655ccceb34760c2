"""The data pipeline beside its alternatives, each pair measured in turn in one run.

Times are CPU seconds of the process, the least of several rounds: they hold on a machine that others use as
well, and leave out waiting for the disk. Memory is the growth of the peak resident set of a process of its
own.
"""

from __future__ import annotations

import importlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalite import _C
from megalite.data.blended_dataset import normalize
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import DatasetWriter, open_dataset
from megalite.data.sample_plan import build_sample_index, plan_samples

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


def index_build(prefix: str, epochs: int, rounds: int, helpers: Any) -> Row:
    """The three index arrays of `epochs` epochs; the peer's are the steps of Megatron-LM's GPTDataset."""
    dataset = open_dataset(prefix)
    documents = dataset.sequences
    wanted = None if epochs == 1 else int((epochs - 0.1) * dataset.tokens / SEQ)
    plan = plan_samples(dataset, (0, documents), SEQ, 1234, wanted)
    lengths = np.array(dataset.lengths)

    def peer() -> None:
        generator = np.random.RandomState(1234)
        order = np.mgrid[0:epochs, 0:documents][1]
        order[:] = np.arange(documents)
        order = order.reshape(-1).astype(np.int32)
        generator.shuffle(order)
        rows = helpers.build_sample_idx_int32(lengths, order, SEQ, epochs, dataset.tokens, True, 1)
        shuffled = np.arange(len(rows) - 1, dtype=np.uint32)
        generator.shuffle(shuffled)

    tasks: list[Callable[[], object]] = [lambda: build_sample_index(dataset, plan)]
    times = least(rounds, *tasks, *([peer] if helpers else []))
    name = f"index of {documents:,} documents, {epochs} epoch{'s' * (epochs > 1)}"
    return Row(name, times[0], times[1] if helpers else None, "s")


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


def reading(prefix: str, rounds: int) -> Row:
    """Random samples through the dataset into int64 batches of 64; the peer is NumPy's memmap, a slice and
    a cast a document.
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

    def peer() -> None:
        for first in range(0, count, 64):
            for row in range(64):
                place = 0
                for piece in source.pieces(first + row):
                    start = offsets[piece.document] + piece.offset
                    out[row, place : place + piece.tokens] = stream[start : start + piece.tokens]
                    place += piece.tokens

    times = least(rounds, ours, peer)
    return Row(f"{SEQ}-token samples through the dataset", count / times[0], count / times[1], "samples/s")


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
import json, resource, sys, time
import numpy as np
from megalite.data.indexed_dataset import DatasetWriter
documents = int(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()
writer = DatasetWriter(sys.argv[1], "uint16", sync=False)
tokens, ones = np.zeros(4000, dtype=np.uint16), np.ones(4000, dtype=np.int32)
for _ in range(documents // 4000):
    writer.add(tokens, ones)
added = time.process_time()
writer.publish()
seconds = [added - start, time.process_time() - added]
print(json.dumps([*seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""


def writing(folder: Path, documents: int) -> list[Row]:
    """One-token documents in batches of 4,000: time to add them, to complete the .idx, and the memory that
    took.
    """
    command = [sys.executable, "-c", WRITE_INDEX, str(folder / "tiny"), str(documents)]
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


def preprocessing(folder: Path, corpus: Path, tokenizer_json: Path, repeats: int) -> list[Row]:
    """The tool, writing included, beside encode_batch_fast alone on the same text; and its start-up."""
    tool = Path(__file__).parents[1] / "preprocess_data.py"
    text = corpus.read_bytes() * repeats
    (folder / "corpus.jsonl").write_bytes(text)
    (folder / "empty.jsonl").write_bytes(b"")
    raw = (
        "import json,sys,tokenizers\n"
        "t=tokenizers.Tokenizer.from_file(sys.argv[1]); t.encode_special_tokens=True\n"
        "texts=[json.loads(line)['text'] for line in open(sys.argv[2])]\n"
        "import time; start=time.process_time()\n"
        "for i in range(0,len(texts),1000): t.encode_batch_fast(texts[i:i+1000])\n"
        "print(time.process_time()-start)"
    )

    def run_tool(source: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [
            sys.executable,
            str(tool),
            "--input",
            str(folder / source),
            "--output-prefix",
            str(folder / "out"),
        ]
        command += ["--tokenizer-model", str(tokenizer_json), "--append-eod", "--workers", "2"]
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    command = [sys.executable, "-c", raw, str(tokenizer_json), str(folder / "corpus.jsonl")]
    engine = min(float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(2))
    start_up = min(run_tool("empty.jsonl") for _ in range(3))
    whole = min(run_tool("corpus.jsonl") for _ in range(2))
    return [
        Row(
            f"preprocessing {len(text) / 1e6:.0f} MB without start-up; encode_batch_fast alone",
            whole - start_up,
            engine,
            "s",
        ),
        Row("start-up of preprocess_data.py", start_up, None, "s"),
    ]


def benchmark_data(documents: int, rounds: int, corpus: Path, tokenizer_json: Path) -> list[Row]:
    """All measures; megatron-core's come along where it can be imported."""
    helpers = megatron_helpers()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows += preprocessing(folder, corpus, tokenizer_json, 4)
        rows += writing(folder, documents)
        small = write_lengths(folder / "small", min(200_000, documents), MEAN_LENGTH)
        rows += [reading(small, rounds), loading(small)]
        large = write_lengths(folder / "large", documents, 20)
        rows += [index_build(large, epochs, rounds, helpers) for epochs in (1, 3)]
        rows += [blending(count, rounds, helpers) for count in (3, 100, 1000)]
    return rows


def markdown(rows: list[Row]) -> str:
    lines = ["| measure | megalite | peer | ratio | unit |", "| --- | --- | --- | --- | --- |"]
    return "\n".join(lines + [f"| {' | '.join(row.cells())} |" for row in rows])
