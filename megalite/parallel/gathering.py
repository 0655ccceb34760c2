"""One bucket's weights, whole where they are used, from the parts that the data-parallel ranks update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megalite.parallel.mappings import start_all_gather_into
from megalite.parallel.not_gathered import mark
from megalite.parallel.topology import Axis


class BucketWeights:
    """The weights of a bucket: `whole` (n,), of which the parameters are views, and this rank's `part`.

    `whole` may be given up for a while when its storage is its own: parameters, and what autograd has saved
    of them, keep their place in the storage, which is emptied and filled again beneath them. In between the
    `parameters` themselves refuse to be read.
    """

    def __init__(
        self,
        whole: torch.Tensor,
        part: torch.Tensor,
        dp: Axis,
        index: int,
        parameters: Sequence[nn.Parameter] = (),
    ):
        self.whole, self.part, self.dp, self.index = whole, part, dp, index
        self.parameters = parameters
        self.present = True
        self._work: dist.Work | None = None

    def start_gathering(self) -> None:
        """Begin to collect the parts of all ranks."""
        gather = partial(start_all_gather_into, self.whole, self.part, self.dp)
        self._work = self.dp.traffic.start("gathering", self.index, gather)

    def wait(self) -> None:
        """Wait until the weights are whole, if they are being gathered."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            mark(self.parameters, present=True)

    def recall(self) -> None:
        """Begin to gather weights that had been given up."""
        if not self.present:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            self.start_gathering()
            self.present = True

    def give_up(self) -> None:
        """Free the memory of `whole`."""
        if self.present:
            self.wait()
            self.whole.untyped_storage().resize_(0)
            self.present = False
            mark(self.parameters, present=False)


@dataclass(frozen=True)
class Unit:
    """A module that the model calls, and whether its backward pass reads its weights."""

    module: nn.Module
    weights_in_backward: bool = True


WeightsOf = Callable[[nn.Module], list[BucketWeights]]


def wait_before_use(units: Sequence[Unit], weights_of: WeightsOf) -> None:
    """From now on the weights of each unit are waited for just before its forward."""

    def wait(needed: list[BucketWeights], module: nn.Module, args: tuple[Any, ...]) -> None:
        for weights in needed:
            weights.wait()

    for unit in units:
        unit.module.register_forward_pre_hook(partial(wait, weights_of(unit.module)))


class GatherAhead:
    """Keeps whole only the weights of the unit that computes, and of the `prefetch` units after it.

    `units` in the order of the forward pass. Gathering the next ones goes on while one computes, in forward
    and in backward order. A unit asks each time it begins, so that any order is right, also that of a forward
    pass repeated in backward; the expected order is merely the one without waiting.
    """

    def __init__(self, units: Sequence[Unit], weights_of: WeightsOf, prefetch: int):
        self._needed = [weights_of(unit.module) for unit in units]
        self._in_backward = [unit.weights_in_backward for unit in units]
        self._all = list(dict.fromkeys(weights for needed in self._needed for weights in needed))
        self._prefetch = prefetch
        for index, unit in enumerate(units):
            unit.module.register_forward_pre_hook(partial(self._before_forward, index))
            if unit.weights_in_backward:
                unit.module.register_forward_hook(partial(self._after_forward, index))

    @property
    def most_bytes(self) -> int:
        """Of whole weights at one time."""
        places = range(len(self._needed))
        windows = [*map(self._forward_window, places), *map(self._backward_window, places)]
        held = [{weights for index in window for weights in self._needed[index]} for window in windows]
        return max(sum(weights.whole.nbytes for weights in one) for one in held)

    def give_up_all(self) -> None:
        """Free all whole weights: before the parts change, and when nothing computes."""
        for weights in self._all:
            weights.give_up()

    def recall_all(self) -> None:
        """Gather all weights."""
        for weights in self._all:
            weights.recall()
        for weights in self._all:
            weights.wait()

    def _before_forward(self, index: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._use(self._forward_window(index))
        else:  # a forward pass repeated within backward
            self._use(self._backward_window(index))

    def _after_forward(self, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: self._use(self._backward_window(index)))

    def _forward_window(self, index: int) -> list[int]:
        return list(range(index, min(index + self._prefetch + 1, len(self._needed))))

    def _backward_window(self, index: int) -> list[int]:
        before = range(index - 1, max(index - self._prefetch, 0) - 1, -1)
        return [index, *(other for other in before if self._in_backward[other])]

    def _use(self, window: Sequence[int]) -> None:
        wanted = dict.fromkeys(weights for index in window for weights in self._needed[index])
        for weights in self._all:
            if weights not in wanted:
                weights.give_up()
        for weights in wanted:
            weights.recall()
        for weights in self._needed[window[0]]:
            weights.wait()
