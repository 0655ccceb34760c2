"""One call of every registered operator, for torch's own checker of operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import megalite.kernels.adamw
import megalite.kernels.squared_norm  # noqa: F401  importing registers the operators


@dataclass(frozen=True)
class Case:
    """An operator and its arguments before the backend."""

    name: str
    arguments: Callable[[], tuple[Any, ...]]


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda" if torch.cuda.is_available() else "cpu")


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="cuda" if torch.cuda.is_available() else "cpu")


def _adamw(master: torch.Tensor | None = None, remainder: torch.Tensor | None = None) -> tuple[Any, ...]:
    state = [_normal(32).square() for _ in range(3)]
    return (_normal(32).bfloat16(), master, remainder, *state, _normal(5), 0.9, 0.9, 1e-8, 0.1, [3, 20])


CASES = (
    Case("rms_norm_forward", lambda: (_normal(3, 32), _normal(32), 1e-5, 0.0)),
    Case("add_rms_norm_forward", lambda: (_normal(3, 32), _normal(3, 32), _normal(32), 1e-5, 0.0)),
    Case("rms_norm_backward", lambda: (_normal(3, 32), None, _normal(3, 32), _normal(32), _normal(3), 0.0)),
    Case("swiglu_forward", lambda: (_normal(3, 32), _normal(3, 32))),
    Case("swiglu_backward", lambda: (_normal(3, 32), _normal(3, 32), _normal(3, 32))),
    Case("dropout", lambda: (_normal(3, 2, 32), _normal(3, 2, 32), _ids(2), 7, 0.1, 0, 3)),
    Case(
        "rope",
        lambda: (_normal(3, 1, 2, 16), _normal(3, 1, 1, 16), _normal(3, 8), _normal(3, 8), False, True),
    ),
    Case("cross_entropy_statistics", lambda: (_normal(3, 32), _ids(3), 0, 30, -100, True)),
    Case(
        "cross_entropy_backward",
        lambda: (_normal(3), _normal(3, 32), _ids(3), _normal(2, 3), 0, 30, -100, 0.1, 1e-3),
    ),
    Case(
        "cross_entropy_backward_",
        lambda: (_normal(3), _normal(3, 32), _ids(3), _normal(2, 3), 0, 30, -100, 0.1, 1e-3),
    ),
    Case("squared_norm", lambda: (_normal(32), [3, 20])),
    Case("adamw", lambda: _adamw(master=_normal(32))),
    Case("adamw", lambda: _adamw(remainder=_ids(32).short())),
)


def check_operator(case: Case, backend: str) -> None:
    """Hold the operator's schema, aliasing, fake form and traced form against what it does."""
    operator = getattr(torch.ops.megalite, case.name).default
    torch.library.opcheck(operator, (*case.arguments(), backend))
