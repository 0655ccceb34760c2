"""Times of the fused operations beside torch eager, torch.compile, Liger-Kernel and apex, all in one run.

Medians of alternating rounds with contiguous upstream gradients, and each as a share of the copy bandwidth
measured in the same run. On a GPU: CUDA events, inputs rotated through more memory than the cache.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tools.benchmarks.adamw import benchmark_adamw
from tools.benchmarks.kernel_subjects import Operation, Subject, subjects

CACHE_BYTES = 256 * 2**20  # more than the last cache of any GPU now made
MODES = ("forward", "backward", "both")


@dataclass(frozen=True)
class Row:
    """One measured time."""

    operation: str
    shape: str
    provider: str
    mode: str
    milliseconds: float
    gigabytes_per_second: float
    share_of_copy: float
    device: str


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a copy of 1 GiB (256 MiB on a CPU), read and written."""
    source = torch.empty((2**28 if device.type == "cuda" else 2**26), dtype=torch.float32, device=device)
    result = torch.empty_like(source)
    return 2 * source.numel() * 4 / _time([lambda: result.copy_(source)], device, 10)[0]


def _time(calls: Sequence[Callable[[], object]], device: torch.device, rounds: int) -> list[float]:
    """Seconds of each call: the median of `rounds` in which all take turns."""
    taken: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, times in zip(calls, taken, strict=True):
            if device.type == "cuda":
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                torch.cuda._sleep(2_000_000)  # the queue is full before the first kernel starts
                start.record()
                call()
                stop.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(stop) / 1e3)
            else:
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
    return [statistics.median(times) for times in taken]


def _calls(operation: Operation, inputs: list[tuple[Tensor, ...]], mode: str) -> Callable[[], object]:
    """One call of the mode; successive calls take successive inputs."""
    turn = iter(range(10**9))
    grads: list[Tensor] = []
    graphs: list[tuple[Tensor, ...]] = []

    def forward(leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs = operation(*leaves)
        return (outputs,) if isinstance(outputs, Tensor) else outputs

    if mode != "forward":
        grads = [torch.randn_like(out) for out in forward(inputs[0])]
    if mode == "backward":
        graphs = [forward(leaves) for leaves in inputs]

    def call() -> object:
        place = next(turn) % len(inputs)
        if mode == "forward":
            with torch.no_grad():
                return forward(inputs[place])
        outputs = graphs[place] if mode == "backward" else forward(inputs[place])
        return torch.autograd.grad(outputs, inputs[place], grads, retain_graph=mode == "backward")

    return call


def measure(
    subject: Subject, device: torch.device, rounds: int, copy: float, compiled: bool
) -> Iterator[Row]:
    """Every provider in every mode."""
    bytes_of = {"forward": subject.forward_bytes, "backward": subject.backward_bytes}
    bytes_of["both"] = subject.forward_bytes + subject.backward_bytes
    providers = dict(subject.providers)
    if compiled:
        providers["torch.compile"] = torch.compile(providers["torch"], fullgraph=True)
    first = subject.inputs()
    size = sum(tensor.numel() * tensor.element_size() for tensor in first)
    copies = max(1, min(4, -(-CACHE_BYTES // size))) if device.type == "cuda" else 1
    inputs = [
        tuple(x.requires_grad_() for x in (first if i == 0 else subject.inputs())) for i in range(copies)
    ]
    for mode in MODES:
        times = _time([_calls(operation, inputs, mode) for operation in providers.values()], device, rounds)
        for provider, seconds in zip(providers, times, strict=True):
            rate = bytes_of[mode] / seconds
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
            yield Row(
                subject.operation, subject.shape, provider, mode, seconds * 1e3, rate / 1e9, rate / copy, name
            )


def adamw_rows(rounds: int, copy: float) -> list[Row]:
    """Steps of the optimizer, norm and clipping included; see tools.benchmarks.adamw."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    parameters = 500_000_000 if torch.cuda.is_available() else 50_000_000
    rows = []
    for one in benchmark_adamw(parameters, threads=torch.get_num_threads(), rounds=rounds):
        rate = one.gigabytes_per_second or float("nan")
        shape, share = f"{parameters:.0e}", rate * 1e9 / copy
        rows.append(Row("adamw", shape, one.name, "step", one.milliseconds, rate, share, device))
    return rows


def benchmark_kernels(out: Path, rounds: int, compiled: bool) -> list[Row]:
    """Measure everything, write kernels.csv and one picture an operation into `out`, and return the rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    sizes = [(8192, 2048, 8192), (8192, 4096, 14336), (8192, 8192, 28672)] if on_gpu else [(2048, 2048, 5632)]
    copy = copy_bandwidth(device)
    rows: list[Row] = []
    for subject in subjects(device, sizes, 131072 if on_gpu else 32768):
        rows.extend(measure(subject, device, rounds, copy, compiled))
    rows += adamw_rows(rounds, copy)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "kernels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    plot(rows, out)
    return rows


def plot(rows: Sequence[Row], out: Path) -> None:
    """One PNG an operation, with matplotlib: GB/s of each provider, mode and shape."""
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no pictures, only the CSV")
        return
    from matplotlib.figure import Figure

    for operation in dict.fromkeys(row.operation for row in rows):
        chosen = [row for row in rows if row.operation == operation]
        figure = Figure(figsize=(9, 1.2 + 0.28 * len(chosen)), layout="constrained")
        axes = figure.subplots()
        axes.barh(
            [f"{r.shape} {r.mode} {r.provider}" for r in chosen], [r.gigabytes_per_second for r in chosen]
        )
        axes.invert_yaxis()
        axes.set_xlabel("GB/s of the bytes that must move")
        axes.set_title(f"{operation} on {chosen[0].device}")
        figure.savefig(out / f"{operation}.png", dpi=120)


def table(rows: Sequence[Row]) -> str:
    """Markdown: milliseconds, and how many times megalite's time each other provider takes."""
    ours = {(r.operation, r.shape, r.mode): r.milliseconds for r in rows if r.provider == "megalite"}
    lines = [
        "| operation | shape | mode | provider | ms | GB/s | of copy | times ours |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        mine = ours.get((r.operation, r.shape, r.mode))
        ratio = "" if mine is None else f"{r.milliseconds / mine:.2f}"
        known = not math.isnan(r.gigabytes_per_second)
        rate = f"{r.gigabytes_per_second:.1f} | {r.share_of_copy:.0%}" if known else "|"
        what = f"| {r.operation} | {r.shape} | {r.mode} | {r.provider}"
        lines.append(f"{what} | {r.milliseconds:.3f} | {rate} | {ratio} |")
    return "\n".join(lines)
