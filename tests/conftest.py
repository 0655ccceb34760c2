"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Eight Gloo workers, started at the first job and ended with the session."""
    workers = WorkerPool()
    yield workers
    workers.shutdown()
