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
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megalite.kernels import (
    add_rms_norm,
    linear_cross_entropy,
    rms_norm,
    rope,
    rotary_table,
    swiglu,
    vocab_parallel_cross_entropy,
)
from megalite.kernels.apex import has_apex
from tools.benchmarks.adamw import benchmark_adamw

Operation = Callable[..., "Tensor | tuple[Tensor, ...]"]
CACHE_BYTES = 256 * 2**20  # more than the last cache of any GPU now made
MODES = ("forward", "backward", "both")


@dataclass(frozen=True)
class Subject:
    """One operation at one shape: providers, a maker of inputs, bytes that each direction must move."""

    operation: str
    shape: str
    providers: dict[str, Operation]
    inputs: Callable[[], tuple[Tensor, ...]]
    forward_bytes: int
    backward_bytes: int


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


def subjects(
    device: torch.device, sizes: Sequence[tuple[int, int, int]], vocabulary: int
) -> Iterator[Subject]:
    """`sizes`: (tokens, hidden, ffn) of each model."""
    functional = torch.nn.functional

    def normals(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)

    def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, 1e-6)

    def eager_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return eager_norm(total, weight), total

    def eager_swiglu(x: Tensor) -> Tensor:
        return functional.silu(x[:, 0]) * x[:, 1]

    for tokens, hidden, ffn in sizes:
        shape, n = f"{tokens}x{hidden}", tokens * hidden
        wide, weight = (tokens, hidden), (hidden,)
        norms: dict[str, Operation] = {"megalite": rms_norm, "torch": eager_norm, **_others("rms_norm")}
        yield Subject("rms_norm", shape, norms, normals(wide, weight), 4 * n, 6 * n)
        added: dict[str, Operation] = {"megalite": add_rms_norm, "torch": eager_add_norm}
        yield Subject("add_rms_norm", shape, added, normals(wide, wide, weight), 8 * n, 8 * n)
        gated: dict[str, Operation] = {"megalite": swiglu, "torch": eager_swiglu, **_others("swiglu")}
        elements = tokens * ffn
        stacked = f"{tokens}x2x{ffn}"
        yield Subject("swiglu", stacked, gated, normals((tokens, 2, ffn)), 6 * elements, 10 * elements)
        heads, groups = hidden // 128, max(1, hidden // 512)
        cos, sin = rotary_table(torch.arange(tokens, device=device), 128)
        turned: dict[str, Operation] = {
            "megalite": partial(rope, cos=cos, sin=sin),
            "torch": partial(_eager_rope, cos=cos, sin=sin),
        }
        inputs = normals((tokens, 1, heads, 128), (tokens, 1, groups, 128))
        moved = 4 * tokens * (heads + groups) * 128
        yield Subject("rope", f"{tokens}x{heads}+{groups}x128", turned, inputs, moved, moved)
        blocks: dict[str, Operation] = {
            "megalite": partial(_block, rms_norm, turned["megalite"], add_rms_norm, swiglu),
            "torch": partial(_block, eager_norm, turned["torch"], eager_add_norm, eager_swiglu),
        }
        inputs = normals(
            wide,
            weight,
            (tokens, 1, heads, 128),
            (tokens, 1, groups, 128),
            wide,
            weight,
            (tokens, 2, ffn),
            wide,
        )
        forward, backward = 18 * n + 6 * elements + moved, 14 * n + 10 * elements + moved
        yield Subject("llama_block", f"{shape}x{ffn}", blocks, inputs, forward, backward)
    tokens, hidden = sizes[0][:2] if device.type == "cuda" else (512, 512)
    target = torch.randint(0, vocabulary, (tokens,), device=device)
    logit_bytes = 2 * tokens * vocabulary

    def ours(x: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(x, target, 0, vocabulary)

    def eager(x: Tensor) -> Tensor:
        return functional.cross_entropy(x.float(), target, reduction="none")

    def narrow(x: Tensor) -> Tensor:
        return functional.cross_entropy(x, target, reduction="none")

    def chunked(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, target, 0, vocabulary, budget=logit_bytes // 4)

    losses: dict[str, Operation] = {
        "megalite": ours,
        "torch": eager,
        "torch in bf16": narrow,
        **_others("cross_entropy", target),
    }
    logits = normals((tokens, vocabulary))
    yield Subject("cross_entropy", f"{tokens}x{vocabulary}", losses, logits, logit_bytes, 2 * logit_bytes)
    heads_and_losses: dict[str, Operation] = {
        "megalite": chunked,
        "unfused": lambda x, weight: ours(x @ weight.t()).sum(),
        "torch": lambda x, weight: eager(x @ weight.t()).sum(),
        **_others("linear_cross_entropy", target),
    }
    shape = f"{tokens}x{hidden}x{vocabulary}"
    inputs = normals((tokens, hidden), (vocabulary, hidden))
    yield Subject("linear_cross_entropy", shape, heads_and_losses, inputs, logit_bytes, 2 * logit_bytes)


def _eager_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As model code writes it: x cos + rotate_half(x) sin in the dtype of x."""
    wide_cos, wide_sin = (torch.cat((table, table), -1).to(q.dtype)[:, None, None] for table in (cos, sin))

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * wide_cos + torch.cat((-second, first), -1) * wide_sin

    return turn(q), turn(k)


def _block(
    norm: Operation,
    turn: Operation,
    add_norm: Operation,
    gate: Operation,
    x: Tensor,
    first_weight: Tensor,
    q: Tensor,
    k: Tensor,
    attended: Tensor,
    second_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
) -> tuple[Tensor, ...]:
    """All of a Llama block but its matrix products and attention."""
    normed, total = add_norm(attended, x, second_weight)
    first, activated = norm(x, first_weight), gate(gate_up)
    assert isinstance(first, Tensor)
    assert isinstance(activated, Tensor)
    return (first, *turn(q, k), normed, activated, total + down)


def _others(operation: str, target: Tensor | None = None) -> dict[str, Operation]:
    """Liger-Kernel's and apex's forms, where they are installed and a GPU is there to run them."""
    found: dict[str, Operation] = {}
    if not torch.cuda.is_available():
        return found
    if has_apex() and operation == "rms_norm":
        apex = importlib.import_module("apex.normalization.fused_layer_norm")
        found["apex"] = lambda x, w: apex.fused_rms_norm_affine(x, w, w.shape, 1e-6)
    if importlib.util.find_spec("liger_kernel") is None:
        return found
    liger = importlib.import_module("liger_kernel.transformers.functional")
    forms: dict[str, Operation] = {
        "rms_norm": lambda x, w: liger.liger_rms_norm(x, w, 1e-6, in_place=False),
        "swiglu": lambda x: liger.liger_swiglu(x[:, 0].contiguous(), x[:, 1].contiguous()),
        "cross_entropy": lambda x: liger.liger_cross_entropy(x * 1, target, reduction="none"),  # overwrites x
        "linear_cross_entropy": lambda x, w: liger.liger_fused_linear_cross_entropy(
            x, w, target, reduction="sum"
        ),
    }
    return found | {"liger": forms[operation]}


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
        row = (
            "adamw",
            f"{parameters:.0e}",
            one.name,
            "step",
            one.milliseconds,
            rate,
            rate * 1e9 / copy,
            device,
        )
        rows.append(Row(*row))
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
        rate = (
            "|"
            if math.isnan(r.gigabytes_per_second)
            else f"{r.gigabytes_per_second:.1f} | {r.share_of_copy:.0%}"
        )
        lines.append(
            f"| {r.operation} | {r.shape} | {r.mode} | {r.provider} | {r.milliseconds:.3f} | {rate} | {ratio} |"
        )
    return "\n".join(lines)
