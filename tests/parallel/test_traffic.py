"""What of the traffic is hidden behind computing: the sums by hand, and a real reduction."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from megalite.accelerator import HostClock
from megalite.parallel.buckets import BucketOptions, GradientBuckets
from megalite.parallel.gathering import Unit
from megalite.parallel.mappings import all_reduce
from megalite.parallel.params import ParameterFactory
from megalite.parallel.topology import build_topology, with_traffic
from megalite.parallel.traffic import Message, Share, Span, TimedTraffic, Timing, make_timing
from megalite.training.timing import timing_lines
from tests.pool import WorkerPool


def test_messages_queue_and_waits_are_what_is_not_hidden() -> None:
    """The second message is asked for while the first runs: its own time begins when that is done."""
    messages = [Message("reduction", 0, 1.0, 4.0), Message("reduction", 1, 2.0, 6.0)]
    waits = [Span("dp", 1.0, 1.5), Span("dp", 5.0, 6.0), Span("tp", 8.0, 8.25), Span("pp", 9.0, 11.0)]
    timing = make_timing(messages, waits, [Span("optimizer", 7.5, 8.5), Span("optimizer", 12.0, 13.0)])
    assert timing.shares == {("reduction", 0): Share(3.0, 2.5), ("reduction", 1): Share(2.0, 1.0)}
    assert timing.of("reduction") == Share(5.0, 3.5)
    assert timing.of("gathering").ratio == 1.0
    assert (timing.exposed, timing.bubble) == (1.75, 2.0)
    assert timing.parts == {"optimizer": 1.75}
    assert timing + timing == make_timing(
        [*messages, *(Message(one.kind, one.bucket, one.start + 20, one.end + 20) for one in messages)],
        [*waits, *(Span(one.name, one.start + 20, one.end + 20) for one in waits)],
        [Span("optimizer", 40.0, 43.5)],
    )


def test_the_parts_of_a_step_add_up_to_it() -> None:
    timing = Timing(
        0.3, 0.1, {"optimizer": 0.2}, {("reduction", 0): Share(0.4, 0.3), ("gathering", 0): Share(0.1, 0.0)}
    )
    one, reduction, gathering = timing_lines(timing, 2, seconds=2.0, data_wait=0.4, level=1, lengths=[1000])
    assert one == (
        " time of a step (ms) | data wait: 200.0 (20%) | compute: 500.0 (50%) | exposed communication: "
        "150.0 (15%) | pipeline bubble: 50.0 (5%) | optimizer: 100.0 (10%) |"
    )
    assert reduction == " gradient reduction | time (ms): 200.0 | hidden: 75.0% |"
    assert gathering == " gathering of weights | time (ms): 50.0 | hidden: 0.0% |"
    lines = list(timing_lines(timing, 2, seconds=2.0, data_wait=0.4, level=2, lengths=[1000]))
    assert lines[2] == "   bucket 0, 1,000 elements | time (ms): 200.0 | hidden: 75.0% |"


class _SlowBackward(torch.autograd.Function):
    """The identity; its backward computes for 0.3 s."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)
        return grad


def _timed_step(overlap: bool) -> Timing:
    traffic = TimedTraffic(HostClock())
    topology = with_traffic(build_topology(1, 1, torch.device("cpu")), traffic)
    make = ParameterFactory(topology, torch.float32, seed=1)
    module = torch.nn.Module()
    module.early, module.late = (make.replicated(name, (1000, 40), std=1.0) for name in ("early", "late"))
    options = BucketOptions(1, overlap, zero_stage=1)
    buckets = GradientBuckets([module.early, module.late], topology, options, [Unit(module)])
    buckets.start_step(1)
    (_SlowBackward.apply(module.early.sum().reshape(1)) * module.late.sum()).sum().backward()
    buckets.finish()
    buckets.gather_weights()
    with traffic.part("optimizer"):
        all_reduce(torch.ones(1), topology.dp)
    timing = traffic.take()
    assert timing is not None
    assert traffic.take() == Timing()
    return timing


@pytest.mark.parametrize("overlap", [True, False])
def test_a_reduction_is_timed_bucket_by_bucket(pool: WorkerPool, overlap: bool) -> None:
    """Bucket 0 has the 0.3 s before the other gradient to travel in, if it may."""
    for timing in pool.run(2, _timed_step, overlap):
        kinds = ("reduction", "gathering")
        assert set(timing.shares) == {(kind, bucket) for kind in kinds for bucket in (0, 1)}
        assert all(0 <= share.hidden <= share.seconds for share in timing.shares.values())
        assert timing.shares["reduction", 0].seconds > 0
        assert timing.exposed > 0
        assert timing.bubble == 0
        assert timing.parts["optimizer"] >= 0
        if overlap:
            assert timing.shares["reduction", 0].hidden > 0
