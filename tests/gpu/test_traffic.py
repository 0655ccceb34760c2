"""The clock of a device, and a reduction to parts over NCCL, in a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.accelerator import clock_of, local_device
from megalite.parallel.mappings import start_reduce_to_parts
from megalite.parallel.topology import Axis
from megalite.parallel.traffic import TimedTraffic


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Axis]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield Axis("dp", 1, 0, dist.group.WORLD, (0,))
    dist.destroy_process_group()


def test_a_reduction_is_timed_on_the_device(alone: Axis) -> None:
    device = local_device()
    traffic = TimedTraffic(clock_of(device))
    values = torch.arange(1 << 22, dtype=torch.float32, device=device)
    work = traffic.start("reduction", 0, lambda: start_reduce_to_parts(values, alone))
    with traffic.part("optimizer"):
        product = torch.ones(2048, 2048, device=device) @ torch.ones(2048, 2048, device=device)
    work.wait()
    torch.accelerator.synchronize(device)
    timing = traffic.take()
    assert timing is not None
    assert torch.equal(values, torch.arange(1 << 22, dtype=torch.float32, device=device))
    assert product[0, 0].item() == 2048
    assert timing.shares["reduction", 0].seconds > 0
    assert timing.parts["optimizer"] > 0
    assert timing.exposed >= 0
