"""These tests run Triton kernels: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from tests.kernels.triton_cases import bfloat16

    bfloat16.install()
elif not torch.cuda.is_available():
    collect_ignore_glob = [
        "test_*.py"
    ]  # tests/kernels/test_interpreter.py runs them in a process of their own


def pytest_configure(config: pytest.Config) -> None:
    # Odd shapes are the point.
    config.addinivalue_line("filterwarnings", "ignore:.*accessed element by element")
