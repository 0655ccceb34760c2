"""Which device a process takes, on machines that this one is not."""

from __future__ import annotations

import pytest
import torch

from megalite.accelerator import DeviceError, is_lost_peer, local_device, peak_flops


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


GLOO = "[/third_party/gloo/gloo/transport/tcp/pair.cc:537] {} [127.0.0.1]:11690: {}. This is typically"


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        (GLOO.format("Read error", "Connection reset by peer"), True),
        (GLOO.format("writev", "Broken pipe"), True),
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4271", True),
        ("NCCL error: ncclRemoteError: A call failed possibly due to a network error or a remote", True),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation", False),
        ("Broken pipe", False),
    ],
)
def test_a_lost_rank_is_told_from_other_errors(message: str, lost: bool) -> None:
    assert is_lost_peer(RuntimeError(message)) == lost
    assert not is_lost_peer(OSError(message))
