"""Which device a process takes, on machines that this one is not."""

from __future__ import annotations

import pytest
import torch

from megalite.accelerator import DeviceError, local_device, peak_flops


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.set_device", lambda index: None)


def test_each_process_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=2)
    assert [local_device(rank) for rank in (0, 1)] == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_two_processes_never_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=2)
    with pytest.raises(DeviceError, match=r"LOCAL_RANK 2: this process sees 2 GPU.* at most 2 on this"):
        local_device(2)


def test_an_accelerator_without_cuda_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's has no fp64."""
    pretend(monkeypatch, gpus=0)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("mps"))
    assert local_device(7) == torch.device("cpu")


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_only_gpus_have_a_peak_rate(kind: str) -> None:
    assert peak_flops(torch.device(kind)) is None
