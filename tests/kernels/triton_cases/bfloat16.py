"""Corrects bf16 in Triton's interpreter: it truncates where hardware rounds, and multiplies bits in dot.

It reaches into Triton's private classes, so `test_bfloat16.py` holds it against torch before any kernel is
judged by it.
"""
# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(values: np.ndarray) -> np.ndarray:
    """To the nearest bf16, ties to even, as bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def install() -> None:
    """Replace the casts and the matrix product of the interpreter; call once, before any kernel runs."""
    builder = interpreter.InterpreterBuilder
    plain_cast, plain_dot, plain_fp_to_fp = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp

    def cast(self, source, target):
        before, after = source.dtype.scalar, target.scalar
        if before == tl.float32 and after == tl.bfloat16:
            return interpreter.TensorHandle(_round(source.data), after)
        if before == tl.bfloat16 and after == tl.float32:
            return interpreter.TensorHandle(_widen(source.data), after)
        return plain_cast(self, source, target)

    def fp_to_fp(self, source, target, rounding):
        if {source.dtype.scalar, target.scalar} == {tl.float32, tl.bfloat16}:
            return cast(self, source, target)
        return plain_fp_to_fp(self, source, target, rounding)

    def wide(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(_widen(handle.data), tl.float32)

    def dot(self, a, b, accumulator, *rest):
        return plain_dot(self, wide(a), wide(b), accumulator, *rest)

    builder.cast_impl = builder.create_fp_trunc = builder.create_fp_ext = cast
    builder.create_fp_to_fp = fp_to_fp
    builder.create_dot = dot
