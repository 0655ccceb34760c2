"""Fixtures of the whole suite."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.pool import WorkerPool


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("matrix", "combinations that tests/matrix/test_combinations.py trains")
    group.addoption(
        "--matrix-rounds",
        type=int,
        default=0,
        help="how often to go through every layout, variant and schedule; 0 (default): each layout once",
    )
    group.addoption("--matrix-seed", type=int, default=0, help="seed of what is drawn (default: 0)")


def pytest_configure() -> None:
    """Processes that tests interrupt must not ignore it, as all do that a script starts in the background.
    Nor must they ignore the end of the terminal, as under nohup: torchrun is started otherwise then.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Eight Gloo workers, started at the first job and ended with the session."""
    workers = WorkerPool()
    yield workers
    workers.shutdown()
