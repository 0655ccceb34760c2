"""Every kernel compiles for four accelerators, within their resources and at full access width."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels import (
    cross_entropy_triton,
    dropout_triton,
    flat_triton,
    rms_norm_triton,
    rope_triton,
    swiglu_triton,
)
from megalite.kernels.launch import processors
from tests.kernels.ahead_of_time import (
    REGISTERS,
    SHARED_LIMIT,
    TARGETS,
    Launch,
    Resources,
    bytes_moved,
    compile_for,
    record,
)

BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN = (128, 1024, 2048, 4096, 5120, 8192, 16384, 65536)


@dataclass(frozen=True)
class Case:
    """What is launched, and what it is allowed: narrow accesses of its scalars and masks, bytes spilled."""

    name: str
    operation: Callable[[], object]
    scalars: int
    spills: Mapping[str, int] = field(default_factory=dict)  # by target; elsewhere none
    half_wide_on_amd: int = 0
    double_precision: bool = False


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rms_norm(
    hidden: int, dtype: torch.dtype, residual: torch.dtype | None, backward: bool
) -> Callable[[], object]:
    x, weight, rstd = meta(4096, hidden, dtype=dtype), meta(hidden, dtype=dtype), meta(4096, dtype=FP32)
    other = None if residual is None else meta(4096, hidden, dtype=residual)
    if backward:
        source = x if other is None else other
        return lambda: rms_norm_triton.backward(x, other, source, weight, rstd, 0.0)
    return lambda: rms_norm_triton.forward(x, other, weight, 1e-5, 0.0)


def cases() -> Iterator[Case]:
    # A row's statistics are one 4-byte access; with several rows a tile each thread reads its own.
    for hidden in HIDDEN:
        scalars = 1 if hidden >= 2048 else 20
        yield Case(f"rms_norm forward {hidden}", rms_norm(hidden, BF16, None, False), scalars)
        # On sm_80 ptxas keeps to 64 registers at the price of two: told of 72 it spills nothing, but one
        # block less fits a multiprocessor. At 65,536 the sweeps over a row cost address registers; half the
        # tile would spill nothing, but eight programs instead of four would read each row.
        spills = {"sm_80": 16} if hidden in (4096, 5120, 8192) else {}
        spills = {"sm_90": 80} if hidden == 65536 else spills
        yield Case(f"rms_norm backward {hidden}", rms_norm(hidden, BF16, None, True), scalars, spills)
    for residual in (BF16, FP32):
        for hidden in (4096, 16384):
            name = f"add_rms_norm {'bf16' if residual == BF16 else 'fp32'} residual {hidden}"
            yield Case(f"{name} forward", rms_norm(hidden, BF16, residual, False), 1)
            # An fp32 residual beside bf16 operands changes the tile's layout. At 16,384 half the tile would
            # spill nothing, but two programs would read each row: 20 bytes an element instead of 14.
            spills = {"sm_80": 32} if (residual, hidden) == (BF16, 4096) else {}
            if (residual, hidden) == (FP32, 16384):
                spills = {"sm_80": 132, "sm_90": 108, "sm_100": 48}
            yield Case(f"{name} backward", rms_norm(hidden, BF16, residual, True), 1, spills)
    for dtype in (FP32, torch.float16):
        for backward in (False, True):
            way = "backward" if backward else "forward"
            spills = {"sm_80": 16} if backward and dtype == torch.float16 else {}
            yield Case(f"rms_norm {way} 4096 {dtype}", rms_norm(4096, dtype, None, backward), 1, spills)
    for ffn in (11008, 14336):
        x, grad = meta(4096, 2, ffn), meta(4096, ffn)
        yield Case(f"swiglu forward {ffn}", partial(swiglu_triton.forward, x[:, 0], x[:, 1]), 0)
        yield Case(f"swiglu backward {ffn}", partial(swiglu_triton.backward, grad, x[:, 0], x[:, 1], x), 0)
    for head_dim, interleaved, inverse in (
        (64, False, False),
        (128, False, True),
        (128, True, False),
        (256, True, True),
    ):
        q, k = meta(4096, 1, 8, 4, head_dim), meta(4096, 1, 8, head_dim)
        table = meta(4096, head_dim // 2, dtype=FP32)
        # The two tables may be read in the narrower layout of the pairs. Tiles of 32-wide halves leave a
        # thread of
        # AMD's 64-wide warps 8 bytes.
        yield Case(
            f"rope {head_dim} {interleaved=}",
            partial(rope_triton.apply, q, k, table, table, interleaved, inverse),
            2,
            half_wide_on_amd=4 if head_dim == 64 else 0,
        )
    for hidden in (4096, 5120):
        x, samples = meta(4096, 2, hidden), meta(2, dtype=torch.int64)
        for added in (None, x):
            yield Case(
                f"dropout {hidden}{'' if added is None else ' with residual'}",
                partial(dropout_triton.apply, x, added, samples, -(2**62) + 1, 0.1, 0, 4096),
                1,
            )
    target, normaliser = meta(8192, dtype=torch.int64), meta(2, 8192, dtype=FP32)
    grad = meta(8192, dtype=FP32)
    for width, columns in ((131072, 131072), (50304, 50257)):
        logits = meta(8192, width)
        # Target, its logit, four statistics; a last tile that ends within a vector is read by element.
        scalars = 6 if columns == width else 22
        for with_sum in (False, True):
            yield Case(
                f"cross_entropy statistics {columns} {with_sum=}",
                partial(cross_entropy_triton.statistics, logits, target, 0, columns, -100, with_sum),
                scalars,
            )
        for smoothing, z_loss in ((0.0, 0.0), (0.1, 1e-4)):
            launched: Callable[..., object] = cross_entropy_triton.backward
            arguments: tuple[Any, ...] = (grad, logits, target, normaliser, 0, columns, columns, -100)
            yield Case(
                f"cross_entropy backward {columns} {smoothing=}",
                partial(launched, *arguments, smoothing, z_loss, logits),
                4,
            )


def every_case() -> list[Case]:
    return [*cases(), *flat_cases()]


def flat_cases() -> Iterator[Case]:
    for elements in (2**27, 2**31 + 2**20):
        state = [meta(elements, dtype=FP32) for _ in range(4)]
        scalars = meta(5, dtype=FP32)
        for weights in (meta(elements), None):
            launched: Callable[..., object] = flat_triton.adamw
            master, grads, m, v = state
            step = partial(launched, master, weights, grads, m, v, scalars, 0.9, 0.95, 1e-8, 0.1, [(0, 4096)])
            # Five scalars, two places of the border table and the border itself.
            yield Case(f"adamw {elements} {'fp32' if weights is None else 'bf16'} weights", step, 8)
        norm = partial(flat_triton.squared_norm, master, [(0, 4096)])
        yield Case(f"squared_norm {elements}", norm, 4, double_precision=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Resources]]:
    """Everything is compiled once, in one thread: CPython 3.11 loses count when two threads parse."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter cannot compile")
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    launches: dict[str, list[Launch]] = {case.name: record(case.operation) for case in every_case()}
    jobs = [(name, target) for name in launches for target in TARGETS]
    return {
        (name, target): [compile_for(target, launch) for launch in launches[name]] for name, target in jobs
    }


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", every_case(), ids=lambda case: case.name)
def test_kernel(case: Case, target: str, compiled: dict[tuple[str, str], list[Resources]]) -> None:
    for kernel in compiled[case.name, target]:
        assert kernel.spill_bytes <= case.spills.get(target, 0)
        assert kernel.registers * kernel.threads <= REGISTERS * (2 if target == "gfx942" else 1)
        assert kernel.shared_bytes <= SHARED_LIMIT[target]
        assert case.double_precision or kernel.fp64_instructions == 0
        assert kernel.wide > 0
        allowed = case.scalars + (case.half_wide_on_amd if target == "gfx942" else 0)
        assert kernel.narrow <= allowed


@dataclass(frozen=True)
class Traffic:
    """What each argument must move: bytes an element, and which of them come from a cache.

    `trips`: of the kernel's loop in one program. `guarded`: whether what a branch can skip is done.
    """

    name: str
    operation: Callable[[], object]
    elements: int
    moved: dict[str, float]
    cached: Mapping[str, float] = field(default_factory=dict)
    roofline: float = 0.0
    trips: int = 1
    guarded: bool = True


def traffic() -> Iterator[Traffic]:
    tokens, ffn, vocabulary, n = 4096, 14336, 131072, 2**27
    x, grad = meta(tokens, 2, ffn), meta(tokens, ffn)
    yield Traffic(
        "swiglu forward", partial(swiglu_triton.forward, x[:, 0], x[:, 1]), tokens * ffn,
        {"GATE": 2, "UP": 2, "Y": 2}, roofline=6,
    )  # fmt: skip
    yield Traffic(
        "swiglu backward", partial(swiglu_triton.backward, grad, x[:, 0], x[:, 1], x), tokens * ffn,
        {"DY": 2, "GATE": 2, "UP": 2, "DGATE": 2, "DUP": 2}, roofline=10,
    )  # fmt: skip
    logits, target = meta(tokens, vocabulary), meta(tokens, dtype=torch.int64)
    # The tail of a row that is no multiple of the tile is skipped here.
    yield Traffic(
        "cross_entropy forward",
        partial(cross_entropy_triton.statistics, logits, target, 0, vocabulary, -100, False),
        tokens * vocabulary, {"LOGITS": 2}, roofline=2,
        trips=vocabulary // cross_entropy_triton.STATISTICS_BLOCK, guarded=False,
    )  # fmt: skip
    normaliser, token_grad = meta(2, tokens, dtype=FP32), meta(tokens, dtype=FP32)
    backward: Callable[..., object] = cross_entropy_triton.backward
    yield Traffic(
        "cross_entropy backward",
        partial(
            backward, token_grad, logits, target, normaliser, 0, vocabulary, vocabulary, -100, 0.0, 0.0,
            logits,
        ),
        tokens * vocabulary, {"LOGITS": 2, "OUT": 2}, roofline=4,
    )  # fmt: skip
    for hidden in (4096, 8192, 16384):
        yield from _norm_traffic(tokens, hidden)
    states = [meta(n, dtype=FP32) for _ in range(4)]
    adamw: Callable[..., object] = flat_triton.adamw
    for weights, roofline in ((meta(n), 30), (None, 28)):
        master, grads, m, v = states
        yield Traffic(
            f"adamw {roofline}",
            partial(
                adamw, master, weights, grads, m, v, meta(5, dtype=FP32), 0.9, 0.95, 1e-8, 0.1, [(0, 4096)]
            ),
            n,
            {"GRADS": 4, "MASTER": 8, "EXP_AVG": 8, "EXP_AVG_SQ": 8}
            | ({} if weights is None else {"WEIGHTS": 2}),
            roofline=roofline,
        )  # fmt: skip
    norm = partial(flat_triton.squared_norm, states[0], [(0, 4096)])
    yield Traffic("squared_norm", norm, n, {"VALUES": 4}, roofline=4)
    states_of_a_batch, samples = meta(tokens, 2, 4096), meta(2, dtype=torch.int64)
    for added in (None, states_of_a_batch):
        yield Traffic(
            f"dropout{'' if added is None else ' with residual'}",
            partial(dropout_triton.apply, states_of_a_batch, added, samples, 12345, 0.1, 0, tokens),
            states_of_a_batch.numel(),
            {"X": 2, "Y": 2} | ({} if added is None else {"RESIDUAL": 2}),
            roofline=4 if added is None else 6,
        )  # fmt: skip


def _norm_traffic(tokens: int, hidden: int) -> Iterator[Traffic]:
    """The weight comes from cache but for the first time; so does, in backward, the second look at a row."""
    plan = rms_norm_triton.backward_plan(hidden)
    trips = tokens // (plan.programs_per_processor * processors(torch.device("meta")))
    for residual, size in ((None, 2), (BF16, 2), (FP32, 4)):
        forward = {"X": 2.0, "W": 2.0, "Y": 2.0} | ({} if residual is None else {"R": size, "S": size})
        name = f"{hidden}{'' if residual is None else f' {residual} residual'}"
        yield Traffic(
            f"rms_norm forward {name}", rms_norm(hidden, BF16, residual, False), tokens * hidden, forward,
            {"W": 2}, roofline=4 if residual is None else 4 + 2 * size,
        )  # fmt: skip
        backward = {"X": 2.0 * size, "DY": 4.0, "W": 4.0, "DX": 1.0 * size}
        backward |= {} if residual is None else {"DS": 1.0 * size}
        yield Traffic(
            f"rms_norm backward {name}", rms_norm(hidden, BF16, residual, True), tokens * hidden, backward,
            {"X": size, "DY": 2, "W": 4}, roofline=2 + (2 if residual is None else 3) * size, trips=trips,
        )  # fmt: skip


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("case", list(traffic()), ids=lambda case: case.name)
def test_bytes_moved(case: Traffic, target: str) -> None:
    """Each operand crosses the memory bus once: counted in the compiled code, argument by argument."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter cannot compile")
    (launch,) = record(case.operation)
    moved = bytes_moved(target, launch, case.trips, case.guarded)
    partial_sums = moved.pop("PARTIAL", 0)  # of the norm's weight: a row a program
    assert {name: total / case.elements for name, total in moved.items()} == case.moved
    assert partial_sums <= 0.02 * case.elements
    assert sum(case.moved.values()) - sum(case.cached.values()) == case.roofline


def test_the_check_sees_lost_vector_accesses() -> None:
    """A hidden size that is no multiple of 16 is read element by element, and the user is told so."""
    x, weight = meta(4096, 4100), meta(4100)
    with pytest.warns(UserWarning, match="pad it to 4112"):
        (launch,) = record(lambda: rms_norm_triton.forward(x, None, weight, 1e-5, 0.0))
    kernel = compile_for("sm_90", launch)
    assert kernel.wide == 0
    assert bytes_moved("sm_90", launch) == {}
    assert kernel.narrow > 16


def test_double_precision_scalars_stay_out_of_the_arithmetic() -> None:
    """Liger#1350: torch.compile handed eps over in fp64, and the whole row was computed in it."""
    (launch,) = record(rms_norm(4096, BF16, None, False))
    typed = {**launch.signature, "eps": "fp64", "weight_offset": "fp64"}
    kernel = compile_for("sm_90", replace(launch, signature=typed))
    assert kernel.fp64_instructions <= 4  # loading the two and rounding them to fp32, once a program
