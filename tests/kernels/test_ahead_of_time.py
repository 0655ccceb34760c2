"""Every kernel compiles for four accelerators, within their resources and at full access width, and moves the
bytes of its equation.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from megalite.kernels import (
    cross_entropy_triton,
    dropout_triton,
    flat_triton,
    rms_norm_triton,
    rope_triton,
    swiglu_triton,
)
from tests.kernels.ahead_of_time import (
    REGISTERS,
    SHARED_LIMIT,
    TARGETS,
    Compiled,
    Launch,
    adamw,
    bytes_moved,
    compile_for,
    meta,
    record,
    rms_norm,
)
from tests.kernels.traffic import Traffic, traffic

BF16, FP32 = torch.bfloat16, torch.float32
TRAFFIC_TARGETS = ("sm_80", "sm_90")
HIDDEN = (128, 1024, 2048, 4096, 5120, 8192, 16384, 65536)
# On sm_80 ptxas keeps to 64 registers at the price of two: told of 72 it spills nothing, but one block less
# fits a multiprocessor. At 65,536 the sweeps over a row cost address registers; half the tile would spill
# nothing, but eight programs instead of four would read each row.
NORM_SPILLS = {
    1024: {"sm_100": 8},
    4096: {"sm_80": 16, "sm_90": 8},
    5120: {"sm_80": 16},
    8192: {"sm_80": 16},
    65536: {"sm_80": 8, "sm_90": 112},
}


@dataclass(frozen=True)
class Case:
    """What is launched, and what it is allowed: narrow accesses of its scalars and masks, bytes spilled."""

    name: str
    operation: Callable[[], object]
    scalars: int
    # By target, elsewhere none; of Triton 3.6 and 3.9 the larger.
    spills: Mapping[str, int] = field(default_factory=dict)
    half_wide_on_amd: int = 0
    double_precision: bool = False


def cases() -> Iterator[Case]:
    # A row's statistics are one 4-byte access; with several rows a tile each thread reads its own.
    for hidden in HIDDEN:
        scalars = 1 if hidden >= 2048 else 20
        yield Case(f"rms_norm forward {hidden}", rms_norm(hidden, BF16, None, False), scalars)
        norm = rms_norm(hidden, BF16, None, True)
        yield Case(f"rms_norm backward {hidden}", norm, scalars, NORM_SPILLS.get(hidden, {}))
    for residual in (BF16, FP32):
        for hidden in (4096, 16384):
            name = f"add_rms_norm {'bf16' if residual == BF16 else 'fp32'} residual {hidden}"
            yield Case(f"{name} forward", rms_norm(hidden, BF16, residual, False), 1)
            # An fp32 residual beside bf16 operands changes the tile's layout. At 16,384 half the tile would
            # spill nothing, but two programs would read each row: 20 bytes an element instead of 14.
            spills = {"sm_80": 32} if (residual, hidden) == (BF16, 4096) else {}
            if (residual, hidden) == (FP32, 16384):
                spills = {"sm_80": 216, "sm_90": 180, "sm_100": 96, "gfx942": 8}
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


def flat_cases() -> Iterator[Case]:
    forms: list[tuple[Any, ...]] = [(FP32, None, FP32, FP32, FP32), (BF16, FP32, FP32, FP32, FP32)]
    forms += [(torch.float16, FP32, FP32, BF16, BF16), (FP32, None, FP32, BF16, BF16)]
    forms += [(BF16, FP32, *rest) for rest in itertools.product((FP32, BF16), repeat=3) if BF16 in rest]
    forms += [(BF16, torch.int16, *rest) for rest in itertools.product((FP32, BF16), repeat=3)]
    for form in forms:
        elements = 2**27
        # Where everything has 16 bits, a thread of AMD's 64-wide warps has four elements: 8 bytes.
        half = 9 if FP32 not in form else 0
        # Neither master nor weights in one piece costs sm_80 a register too many with one kind of moments.
        spills = {"sm_80": 8} if form == (BF16, torch.int16, FP32, FP32, BF16) else {}
        name = f"adamw {' '.join(map(str, form))}"
        yield Case(name, adamw(elements, *form), ADAMW_SCALARS, spills, half_wide_on_amd=half)
    elements = 2**31 + 2**20
    for form in forms[:2]:
        yield Case(f"adamw {elements} {form[0]} weights", adamw(elements, *form), ADAMW_SCALARS)
    for elements, dtype in ((2**27, FP32), (2**27, BF16), (2**31 + 2**20, FP32)):
        norm = partial(flat_triton.squared_norm, meta(elements, dtype=dtype), [(0, 4096)])
        yield Case(f"squared_norm {elements} {dtype}", norm, 4, double_precision=True)


ADAMW_SCALARS = 8  # five scalars, two places of the border table and the border itself
CASES, TRAFFIC = [*cases(), *flat_cases()], list(traffic())


@functools.cache
def launched(operation: Callable[[], object]) -> Launch:
    (launch,) = record(operation)
    return launch


@functools.cache
def wanted() -> dict[tuple[str, str], Launch]:
    """A launch of each distinct code, for each target that a test looks at."""
    jobs = itertools.product([launched(case.operation) for case in CASES], TARGETS)
    more = itertools.product([launched(case.operation) for case in TRAFFIC], TRAFFIC_TARGETS)
    return {(launch.code, target): launch for launch, target in (*jobs, *more)}


def compile_wanted(code: str, target: str) -> Compiled:
    return compile_for(target, wanted()[code, target])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Compiled]]:
    """Everything is compiled once, in a process for each core: CPython 3.11 loses count when two threads
    parse.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter cannot compile")
    spawn = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        with ProcessPoolExecutor(min(8, os.cpu_count() or 1), spawn) as processes:
            made = processes.map(compile_wanted, *zip(*wanted(), strict=True), chunksize=8)
            result = dict(zip(wanted(), made, strict=True))
        yield result


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel(case: Case, target: str, compiled: dict[tuple[str, str], Compiled]) -> None:
    kernel = compiled[launched(case.operation).code, target]
    assert kernel.spill_bytes <= case.spills.get(target, 0)
    assert kernel.registers * kernel.threads <= REGISTERS * (2 if target == "gfx942" else 1)
    assert kernel.shared_bytes <= SHARED_LIMIT[target]
    assert case.double_precision or kernel.fp64_instructions == 0
    assert kernel.wide > 0 or (target == "gfx942" and case.half_wide_on_amd)
    allowed = case.scalars + (case.half_wide_on_amd if target == "gfx942" else 0)
    assert kernel.narrow <= allowed


@pytest.mark.parametrize("target", TRAFFIC_TARGETS)
@pytest.mark.parametrize("case", TRAFFIC, ids=lambda case: case.name)
def test_bytes_moved(case: Traffic, target: str, compiled: dict[tuple[str, str], Compiled]) -> None:
    """Counted in the compiled code, argument by argument."""
    launch = launched(case.operation)
    moved = bytes_moved(launch, compiled[launch.code, target], case.trips, case.guarded)
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
    assert bytes_moved(launch, kernel) == {}
    assert kernel.narrow > 16


def test_double_precision_scalars_stay_out_of_the_arithmetic() -> None:
    """Liger#1350: torch.compile handed eps over in fp64, and the whole row was computed in it."""
    (launch,) = record(rms_norm(4096, BF16, None, False))
    typed = {**launch.signature, "eps": "fp64", "weight_offset": "fp64"}
    kernel = compile_for("sm_90", replace(launch, signature=typed))
    assert kernel.fp64_instructions <= 4  # loading the two and rounding them to fp32, once a program
