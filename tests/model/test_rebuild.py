"""What a watch keeps, drops and makes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megalite.model.rebuild import Packed, Watch, held


class _Square(torch.autograd.Function):
    """Saves its input and counts its forward passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: list[int]) -> Tensor:
        ctx.save_for_backward(x)
        calls.append(1)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * x * grad, None


@pytest.fixture
def calls() -> list[int]:
    return []


def squared(calls: list[int]) -> Callable[[Tensor], Tensor]:
    def twice(x: Tensor) -> Tensor:
        inner: Tensor = _Square.apply(x * 3, calls)
        outer: Tensor = _Square.apply(inner, calls)
        return outer

    return twice


def leaf() -> Tensor:
    return torch.arange(1.0, 5.0, dtype=torch.float64).requires_grad_()


def test_a_region_is_called_again_once_and_only_as_far_as_it_is_needed(calls: list[int]) -> None:
    x, watch = leaf(), Watch()
    watch.run(squared(calls), x).sum().backward()
    assert len(calls) == 4  # the inner square and the outer, which stops at its saved input, each twice
    assert torch.equal(x.grad, 4 * 81 * x.detach() ** 3)  # type: ignore[arg-type]  # d(81 x^4)


def test_a_second_backward_makes_everything_once_more(calls: list[int]) -> None:
    x, watch = leaf(), Watch()
    loss = watch.run(squared(calls), x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(calls) == 6
    assert torch.equal(x.grad, 2 * 4 * 81 * x.detach() ** 3)  # type: ignore[arg-type]


def test_nothing_of_a_region_is_alive_between_forward_and_backward() -> None:
    references = []

    def function(x: Tensor) -> Tensor:
        inner = x.sin()
        references.append(StorageWeakRef(inner.untyped_storage()))
        return inner.exp()  # saves its result

    x, watch = leaf(), Watch()
    with watch.saving():
        result = watch.run(function, x)
        references.append(StorageWeakRef(result.untyped_storage()))
        total = (result * result).sum()  # saves the region's result
    del result
    assert all(reference.expired() for reference in references)
    total.backward()
    assert torch.equal(x.grad, expected(lambda x: (x.sin().exp() ** 2).sum()))  # type: ignore[arg-type]


def expected(function: Callable[[Tensor], Tensor]) -> Tensor:
    x = leaf()
    return torch.autograd.grad(function(x), x)[0]


def test_a_discarded_result_is_freed_and_made_again_for_whoever_saved_a_view_of_it() -> None:
    x, watch = leaf(), Watch()
    with watch.saving():
        doubled = x * 2
        watch.discard(doubled, lambda x: x * 2, x)
        reference = StorageWeakRef(doubled.untyped_storage())
        product = doubled[1:] * doubled.view(2, 2).t().reshape(4)[:3]
    del doubled
    assert reference.expired()
    product.sum().backward()
    assert torch.allclose(
        x.grad,  # type: ignore[arg-type]
        expected(lambda x: ((x * 2)[1:] * (x * 2).view(2, 2).t().reshape(4)[:3]).sum()),
    )


def test_regions_follow_one_another_without_keeping_what_is_between() -> None:
    x, watch = leaf(), Watch()
    with watch.saving():
        first = watch.run(torch.sin, x)
        reference = StorageWeakRef(first.untyped_storage())
        second = watch.run(torch.exp, first)
    del first
    assert reference.expired()
    second.sum().backward()
    assert torch.equal(x.grad, expected(lambda x: x.sin().exp().sum()))  # type: ignore[arg-type]


def test_a_rebuilt_tensor_is_gone_when_its_backward_is_done() -> None:
    """The rebuild of the last region must not leave anything behind for the first one's backward."""
    seen: list[bool] = []
    references: list[StorageWeakRef] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(all(reference.expired() for reference in references))
            return grad

    def noted(x: Tensor) -> Tensor:
        inner = x.sin()
        references.append(StorageWeakRef(inner.untyped_storage()))
        return inner.exp()

    x, watch = leaf(), Watch()
    with watch.saving():
        below = x * x
        looked: Tensor = Look.apply(below)
        total = watch.run(noted, looked).sum()
    del below, looked
    total.backward()
    assert len(references) == 2
    assert seen == [True]


@pytest.mark.parametrize("inner", ["run", "discard"])
def test_nesting_is_refused(inner: str) -> None:
    watch = Watch()

    def function(x: Tensor) -> Tensor:
        if inner == "run":
            return watch.run(torch.sin, x)
        result = x.sin()
        watch.discard(result, torch.sin, x)
        return result

    with pytest.raises(RuntimeError, match="recompute inside recompute"):
        watch.run(function, leaf())
    assert torch.equal(watch.run(torch.sin, leaf()), leaf().sin())  # the watch is still of use


def alternating(answers: Iterator[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    return lambda x: next(answers)(x)


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (lambda x: x * 1, "saved fewer tensors than the first forward pass"),
        (lambda x: x[:2].sin(), "the function is not the same the second time"),
        (lambda x: x.float().sin(), "the function is not the same the second time"),
    ],
    ids=["fewer", "shorter", "another dtype"],
)
def test_a_function_that_does_something_else_the_second_time_is_an_error(
    again: Callable[[Tensor], Tensor], message: str
) -> None:
    total = Watch().run(alternating(iter([torch.sin, again])), leaf()).sum()
    with pytest.raises(RuntimeError, match=message):
        total.backward()


def test_a_parameter_is_looked_up_when_backward_needs_it() -> None:
    """Its memory may move in between: sharded parameters are gathered anew."""
    weight = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
    x, watch = leaf(), Watch([weight])
    with watch.saving():
        product = (watch.run(lambda x: x * weight, x) * weight).sum()
    weight.data = torch.full((4,), 3.0, dtype=torch.float64)
    product.backward()
    assert torch.equal(x.grad, torch.full((4,), 9.0, dtype=torch.float64))  # type: ignore[arg-type]


def test_what_cannot_be_made_again_goes_to_keep() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Packed:
        kept.append(tensor)
        return held(tensor)

    x, watch = leaf(), Watch(keep=keep)
    with watch.saving():
        sine = x.sin()
        watch.run(torch.exp, sine).sum().backward()
    assert [each.untyped_storage()._cdata for each in kept] == [
        each.untyped_storage()._cdata for each in (x, sine)
    ]
