"""Counts the bytes of all tensors that are alive, operation by operation, on real and on fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.model.rebuild import storage_id

ACTIVATIONS, LOGITS, COMMUNICATION = "activations", "logits and loss", "communication"
HOST = "host"  # what waits in host memory instead


class LiveBytes(TorchDispatchMode):
    """Within its `with` block: the storages that operations made and that still exist.

    A storage counts as long as anything holds it (a variable, autograd for the backward pass, a message on
    its way), once however many views it has, and under the `label` that was set when it was made. Storages
    from before the block do not count. What a kernel uses and frees within one operation is not seen.

    `elsewhere`: how many of the bytes are activations that wait in host memory; they count as HOST alone.
    `peak`: the bytes by label at the moment with the most on the device, `most_elsewhere`: the most that were
    elsewhere, both since `restart`.
    """

    def __init__(self, elsewhere: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.label = ACTIVATIONS
        self._elsewhere = elsewhere
        self._labels: dict[int, str | None] = {}  # by storage; None: from before
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}  # of those that count, as they were seen last
        self._total: Counter[str] = Counter()  # of these
        self.peak: Counter[str] = Counter()
        self.most_elsewhere = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            self._note(leaf, None)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            self._note(leaf, self.label)
        self._look()
        return result

    def bytes(self) -> Counter[str]:
        """Bytes that exist now, by label."""
        for key in list(self._sizes):  # a storage may have been emptied by other means than an operation
            if (storage := self._storages[key]()) is not None:
                self._see(key, storage.nbytes())
        total = +self._total
        if hosted := self._elsewhere():
            total[ACTIVATIONS] -= hosted
            total[HOST] = hosted
        return total

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.bytes()
        self.most_elsewhere = self.peak[HOST]

    def _look(self) -> None:
        hosted = self._elsewhere()
        self.most_elsewhere = max(self.most_elsewhere, hosted)
        most = device_bytes(self.peak)
        # What was seen last is at least what there is: only a new peak is worth looking at everything.
        if self._total.total() - hosted > most and device_bytes(now := self.bytes()) > most:
            self.peak = now

    def _note(self, leaf: Any, label: str | None) -> None:
        if not isinstance(leaf, torch.Tensor):
            return
        storage, key = leaf.untyped_storage(), storage_id(leaf)
        if key not in self._storages:
            self._labels[key] = label
            self._storages[key] = weakref.ref(storage, lambda _: self._forget(key))
        if self._labels[key] is not None:
            self._see(key, storage.nbytes())

    def _see(self, key: int, size: int) -> None:
        before = self._sizes.get(key, 0)
        if size != before:
            self._sizes[key] = size
            self._total[self._labels[key] or ""] += size - before

    def _forget(self, key: int) -> None:
        self._storages.pop(key, None)
        label = self._labels.pop(key, None)
        self._total[label or ""] -= self._sizes.pop(key, 0)


def device_bytes(by_label: Counter[str]) -> int:
    """Bytes that are not in host memory."""
    return by_label.total() - by_label[HOST]
