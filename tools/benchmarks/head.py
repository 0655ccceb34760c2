"""The output layer with its loss: the logits of a micro-batch at once, beside a chunk of tokens at a time.

The product's own head, with its main gradient in a bucket, on one process. Times are medians of alternating
rounds. Memory is that of a process of its own: bytes that autograd holds between forward and backward, and
how far the resident memory rose above what it was before the first forward (Linux counts it).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.config import LossConfig, ModelConfig
from megalite.model.gpt import StagePlace, build_stages
from megalite.parallel.buckets import BucketOptions, GradientBuckets
from megalite.parallel.params import ParameterFactory
from megalite.parallel.topology import build_topology

ROOT = Path(__file__).resolve().parents[2]
IMPLEMENTATIONS = ("native", "linear")


@dataclass(frozen=True)
class HeadTimings:
    """One implementation: median milliseconds of forward and backward, MiB saved and at the peak."""

    implementation: str
    milliseconds: float
    saved_mib: float
    peak_mib: float


def _step(
    implementation: str, tokens: int, hidden: int, vocabulary: int, chunk_mib: float
) -> Callable[[], Tensor]:
    """Forward and backward of the head once, in bf16; returns the loss."""
    topology = build_topology(1, 1, torch.device("cpu"))
    make = ParameterFactory(topology, torch.bfloat16, 1)
    config = ModelConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        seq_length=tokens,
        max_position_embeddings=tokens,
        vocab_size=vocabulary,
        position_embedding_type="none",
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=True,
    )
    loss = LossConfig(
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl=implementation,
        cross_entropy_chunk_mib=chunk_mib,
    )
    (stage,) = build_stages(config, make, [StagePlace(range(0), first=False)], loss)
    buckets = GradientBuckets(stage.parameters(), topology, BucketOptions())
    buckets.start_step(1)  # the main gradient's memory is there before anything is measured
    head = stage.head
    assert head is not None
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 1, hidden, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(vocabulary, (1, tokens), generator=generator)
    mask, upstream = torch.ones(1, tokens), torch.tensor(1.0 / tokens)

    def step() -> Tensor:
        x.grad = None
        buckets.start_step(1)
        total: Tensor = head(x, labels, mask, upstream)
        total.backward(upstream)
        buckets.finish()
        return total.detach()

    return step


def memory_of(
    implementation: str, tokens: int, hidden: int, vocabulary: int, chunk_mib: float
) -> list[float]:
    """MiB saved for backward, and the rise of the resident memory; for a fresh process."""
    step = _step(implementation, tokens, hidden, vocabulary, chunk_mib)
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if tensor.shape != (vocabulary, hidden):  # the weight is there in any case
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of making the weights, is forgotten
    before = _resident_peak()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        step()
    return [sum(saved.values()) / 2**20, _resident_peak() - before]


def _resident_peak() -> float:
    """MiB (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    return float(line.split()[1]) / 2**10


def benchmark_head(
    tokens: int, hidden: int, vocabulary: int, chunk_mib: float, threads: int, rounds: int
) -> list[HeadTimings]:
    """Both implementations at one shape."""
    shape = (tokens, hidden, vocabulary, chunk_mib)
    torch.set_num_threads(threads)
    steps = [_step(implementation, *shape) for implementation in IMPLEMENTATIONS]
    losses = [float(step()) for step in steps]
    if abs(losses[0] - losses[1]) > 1e-3 * abs(losses[0]):
        raise RuntimeError(f"the implementations disagree: {losses}")
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, taken in zip(steps, times, strict=True):
            begin = time.perf_counter()
            step()
            taken.append(time.perf_counter() - begin)
    results = []
    for implementation, taken in zip(IMPLEMENTATIONS, times, strict=True):
        command = [sys.executable, "-m", "tools.benchmarks.head", implementation, *map(str, shape)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        saved, peak = json.loads(done.stdout)
        results.append(HeadTimings(implementation, 1e3 * statistics.median(taken), saved, peak))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("implementation", choices=IMPLEMENTATIONS)
    for name in ("tokens", "hidden", "vocabulary"):
        parser.add_argument(name, type=int)
    parser.add_argument("chunk_mib", type=float)
    print(json.dumps(memory_of(**vars(parser.parse_args()))))
