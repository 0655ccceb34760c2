"""The memory traffic of each kernel's equation: each operand crosses the bus once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from megalite.kernels import cross_entropy_triton, dropout_triton, flat_triton, rms_norm_triton, swiglu_triton
from megalite.kernels.launch import processors
from tests.kernels.ahead_of_time import adamw, meta, rms_norm

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Traffic:
    """What each argument must move: bytes an element, and which of them come from a cache.

    `trips`: of the kernel's loop in one program. `guarded`: whether what a branch can skip is done.
    """

    name: str
    operation: Callable[[], object]
    elements: int
    moved: Mapping[str, float]
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
    for weights, beside, grads, moments, roofline in (
        (BF16, FP32, FP32, FP32, 30),
        (FP32, None, FP32, FP32, 28),
        (BF16, torch.int16, FP32, FP32, 28),
        (BF16, torch.int16, BF16, BF16, 18),
    ):
        form = (weights, beside, grads, moments, moments)
        twice = {"EXP_AVG": 2 * moments.itemsize, "EXP_AVG_SQ": 2 * moments.itemsize}
        if beside == torch.int16:
            twice |= {"WEIGHTS": 4, "REMAINDER": 4}  # read and written
        else:
            twice |= {"MASTER": 8} | ({} if beside is None else {"WEIGHTS": 2})
        yield Traffic(
            f"adamw {weights} beside {beside}, {moments}", adamw(n, *form), n,
            {"GRADS": grads.itemsize, **twice}, roofline=roofline,
        )  # fmt: skip
    norm = partial(flat_triton.squared_norm, meta(n, dtype=FP32), [(0, 4096)])
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
