"""The Triton backend as torch sees it: schemas, shapes without data, gradients in a traced graph."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.registered import CASES, check_operator


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operator(case: Any) -> None:
    check_operator(case, "triton")
