"""Which of two sets of named tensors differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor


def differences(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> dict[str, float]:
    """Largest absolute difference of each tensor that is more than `tolerance` off.

    Infinite if only one side has it, if the shapes differ or if a value is not finite.
    """
    found = dict.fromkeys(actual.keys() ^ expected.keys(), math.inf)
    for name in actual.keys() & expected.keys():
        if actual[name].shape != expected[name].shape:
            found[name] = math.inf
            continue
        worst = (actual[name] - expected[name]).abs().max().item()
        if not worst <= tolerance:
            found[name] = worst if math.isfinite(worst) else math.inf
    return found
