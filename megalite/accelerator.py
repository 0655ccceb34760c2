"""Every line that depends on the kind of device.

What a CPU-only machine cannot run is marked "device only" below and is exercised by the GPU script of the
tests.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Dense bf16/fp16 peak, FLOP/s, from the vendors' data sheets (no sparsity); the longest matching name wins.
_PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "MI300X": 1307e12,
}


class DeviceError(RuntimeError):
    """This process cannot have a device of its own."""


def local_device(local_rank: int = 0) -> torch.device:
    """The device of this process: CUDA's (or ROCm's) numbered `local_rank`, else the CPU.

    A process that sees a single device takes it: schedulers bind one to each task. Other accelerators are
    left alone: Apple's has no fp64, in which losses and norms are added up. Raises DeviceError when this
    machine has fewer devices than processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    index = 0 if devices == 1 else local_rank
    if index >= devices:
        raise DeviceError(
            f"LOCAL_RANK {local_rank}: this process sees {devices} GPUs, and each takes one process; "
            f"start at most {devices} on this machine"
        )
    torch.cuda.set_device(index)  # device only
    return torch.device("cuda", index)


def backend_for(device: torch.device, requested: str = "auto") -> str:
    """Name of the process-group backend: `requested`, or torch's default for `device` (gloo, nccl, ...)."""
    return dist.get_default_backend_for_device(device) if requested == "auto" else requested


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in page-locked host memory when a GPU is there, so that its copy can be asynchronous."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor  # device only


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`; the copy from page-locked memory does not block the host."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until everything submitted to `device` is done; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # device only


Mark = Any
"""A point on a clock's time line."""


class Clock(Protocol):
    """Marks points in the time of what a process computes; to be read when its device is idle."""

    def now(self) -> Mark:
        """What was submitted so far is done."""

    def when_done(self, work: dist.Work) -> Mark:
        """A collective is done, whoever waits for it."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """From one mark to another."""


class HostClock:
    """For computing on the CPU. A mark is a list of one number, which may come later."""

    def now(self) -> list[float]:
        return [time.perf_counter()]

    def when_done(self, work: dist.Work) -> list[float]:
        mark: list[float] = []
        work.get_future().then(lambda _: mark.append(time.perf_counter()))
        return mark

    def seconds(self, start: list[float], end: list[float]) -> float:
        return end[0] - start[0]


class DeviceClock:  # device only
    """Events on the device's own time line: nothing waits for them."""

    def __init__(self, device: torch.device):
        self._beside = torch.cuda.Stream(device)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def when_done(self, work: dist.Work) -> torch.cuda.Event:
        with torch.cuda.stream(self._beside):
            work.wait()
            return self.now()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of what `device` computes."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far, in bytes: the allocator's peak on an accelerator, else the resident set's."""
    if device.type == "cpu":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.accelerator.max_memory_allocated(device)  # device only


def restart_peak_memory(device: torch.device) -> None:
    """From now on `peak_memory_bytes` of an accelerator tells the most that is held since."""
    torch.accelerator.reset_peak_memory_stats(device)  # device only


def free_memory_bytes(device: torch.device) -> int | None:
    """Bytes that tensors may still take: the accelerator's, or up to this process's or machine's limit."""
    if device.type == "cpu":
        return _free_host_memory()
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None  # device only


def _free_host_memory() -> int | None:
    import resource

    try:
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
        used = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("VmSize:", "VmData:")}
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # no Linux
        return None
    for limit, field in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            free = min(free, most - used[field])
    return free


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an allocation that failed, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # torch's CPU allocator raises a plain RuntimeError
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` is a collective of Gloo or NCCL that lost another rank, as one that has ended. One that
    waited too long is none: where it waited tells something.
    """
    text = str(error)
    closed = "Connection reset by peer", "Connection closed by peer", "Broken pipe"
    return isinstance(error, RuntimeError) and (
        ("gloo/transport" in text and any(each in text for each in closed)) or "ncclRemoteError" in text
    )


def peak_flops(device: torch.device) -> float | None:
    """Data-sheet dense bf16 peak of `device` in FLOP/s, None where it is not known (no MFU then)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)  # device only
    matches = [key for key in _PEAK_FLOPS if key in name]
    return _PEAK_FLOPS[max(matches, key=len)] if matches else None
