"""The bytes of one rank by purpose, at the moment of a training step at which it holds the most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from megalite.model.live_bytes import ACTIVATIONS, COMMUNICATION, LOGITS, device_bytes
from megalite.model.rebuild import storage_id
from megalite.training.memory.timeline import Moment
from megalite.training.step import Trainer


@dataclass(frozen=True)
class Account:
    """Bytes by purpose.

    `parameters`, `gradients`, `optimizer`: flat buffers, padding included. `activations`: held from forward
    passes until their backward. `working`: of the operation that runs at the peak. `logits_and_loss`: both,
    of the last stage's head. `communication`: messages between stages, buffers of collectives. `host`: the
    most that is in host memory in a step, no part of the device's total: offloaded optimizer state with the
    copies that it takes to bring gradients there and weights back, and activations.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    working: int = 0
    logits_and_loss: int = 0
    communication: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """On the device."""
        return sum(getattr(self, field.name) for field in fields(self)) - self.host


def peak(of: Sequence[Moment]) -> Moment:
    """The moment with the most bytes, the first of equals."""
    return max(of, key=lambda moment: device_bytes(moment.most))


def account(buffers: Counter[str], moment: Moment, activations_on_host: int) -> Account:
    """`buffers`: bytes by purpose of what is always held, see `buffer_bytes`."""
    held = min(moment.held[ACTIVATIONS], moment.most[ACTIVATIONS])  # a backward may have freed some already
    return Account(
        parameters=buffers["parameters"],
        gradients=buffers["gradients"],
        optimizer=buffers["optimizer"] - buffers["offloaded"],
        host=buffers["offloaded"] + activations_on_host,
        activations=held,
        working=moment.most[ACTIVATIONS] - held,
        logits_and_loss=moment.most[LOGITS],
        communication=moment.most[COMMUNICATION] + buffers["communication"],
    )


def buffer_bytes(trainer: Trainer) -> Counter[str]:
    """Bytes by purpose of what a trainer holds from its construction on; each storage once.

    `offloaded`: the part of `optimizer` that is in host memory, or would be if the weights were elsewhere.
    """
    states = (("optimizer", tensor) for tensor in trainer.optimizer.held())
    total = _sizes([*trainer.buckets.buffers(), *states])
    total["communication"] += trainer.buckets.gathered_bytes
    return total + _sizes([("offloaded", tensor) for tensor in trainer.optimizer.offloaded()])


def buffers_on_device(buffers: Counter[str]) -> int:
    """Bytes of `buffer_bytes` that are not in host memory."""
    return buffers.total() - 2 * buffers["offloaded"]  # which "optimizer" includes


def _sizes(tensors: Sequence[tuple[str, torch.Tensor]]) -> Counter[str]:
    storages = {storage_id(tensor): (purpose, tensor) for purpose, tensor in tensors}
    total: Counter[str] = Counter()
    for purpose, tensor in storages.values():
        total[purpose] += tensor.untyped_storage().nbytes()
    return total
