"""Parameters whose memory is elsewhere: to read one is an error that says so, not a read of freed memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megalite.parallel.params import record_of

PROPERTIES = (
    *("shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize", "is_cpu", "is_cuda", "is_meta"),
    *("is_sparse", "is_leaf", "requires_grad", "grad", "grad_fn", "_version"),
)
METHODS = (
    *("size", "stride", "numel", "dim", "storage_offset", "untyped_storage", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "__len__"),
)
ALLOWED = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in PROPERTIES),
        *(getattr(torch.Tensor, name) for name in METHODS),
        *(getattr(vars(torch._C.TensorBase)["grad"], way) for way in ("__set__", "__delete__")),
    ]
)  # what `__torch_function__` is told of where no value is read


class NotGathered(nn.Parameter):
    """The class of a parameter while its storage is empty.

    Its shape, dtype and gradient may be asked for; every operation that reads or writes values raises
    RuntimeError. A parameter of the class `nn.Parameter` is used without this look-up, at no cost.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in ALLOWED:
            hidden = (each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
            name = next(
                (record_of(each).name for each in hidden), f"that an argument of {func.__name__} holds"
            )
            raise RuntimeError(
                f"the parameter {name} is not on this rank: at --zero-stage 3 a layer's weights are whole "
                "only while the layer computes. Read them within `buckets.gathered()`, in which all ranks "
                "take part, or what this rank keeps in `buckets.held`"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor's takes a keyword, Parameter's does not
        return f"Parameter {record_of(self).name} of shape {tuple(self.shape)}, not gathered"


def mark(parameters: Iterable[nn.Parameter], present: bool) -> None:
    """Let the values of `parameters` be used, or refuse it; fake ones stay as they are."""
    old, new = (NotGathered, nn.Parameter) if present else (nn.Parameter, NotGathered)
    for parameter in parameters:
        if type(parameter) is old:
            parameter.__class__ = new
