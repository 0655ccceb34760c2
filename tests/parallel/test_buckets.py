"""Flat buckets: layout, and reduction that starts when the last gradient is in."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from megalite.parallel.buckets import BucketOptions, GradientBuckets, main_grad
from megalite.parallel.flat import ALIGNMENT, plan_buckets
from megalite.parallel.gathering import Unit
from megalite.parallel.half_reduction import HalfReduction
from megalite.parallel.not_gathered import NotGathered, mark
from megalite.parallel.params import ParameterFactory, record_of
from megalite.parallel.topology import build_topology
from tests.pool import WorkerPool


@pytest.mark.parametrize(
    ("sizes", "alone", "limit", "expected"),
    [
        ([5, 5, 5], [False] * 3, 10, [[0, 1], [2]]),
        ([5, 5, 5], [False] * 3, 1, [[0], [1], [2]]),
        ([5, 5, 5], [False] * 3, 100, [[0, 1, 2]]),
        ([5, 5, 5], [False, True, False], 100, [[0], [1], [2]]),
        ([5, 5], [True, False], 100, [[0], [1]]),
        ([50, 5], [False, False], 10, [[0], [1]]),
    ],
)
def test_buckets_fill_in_order(
    sizes: list[int], alone: list[bool], limit: int, expected: list[list[int]]
) -> None:
    assert plan_buckets(sizes, alone, limit) == expected


def _parameters(dtype: torch.dtype = torch.float32) -> tuple[list[torch.nn.Parameter], GradientBuckets]:
    topology = build_topology(1, 1, torch.device("cpu"))
    make = ParameterFactory(topology, dtype, seed=1)
    parameters = [make.replicated(f"p{index}", (index + 2, 3), std=1.0) for index in range(3)]
    return parameters, GradientBuckets(parameters, topology, BucketOptions(10, overlap=True))


def test_parameters_keep_their_values_and_share_flat_memory() -> None:
    parameters, buckets = _parameters(torch.bfloat16)
    again = ParameterFactory(build_topology(1, 1, torch.device("cpu")), torch.bfloat16, seed=1)
    for index, param in enumerate(parameters):
        assert torch.equal(param, again.replicated(f"p{index}", (index + 2, 3), std=1.0))
    assert [record_of(param).name for param in buckets.parameters] == ["p2", "p1", "p0"]
    for bucket in buckets.buckets:
        assert bucket.grads.dtype == torch.float32
        for slot in bucket.slots:
            assert slot.start % ALIGNMENT == 0
            assert slot.param.data_ptr() == bucket.weights[slot.start :].data_ptr()
            assert main_grad(slot.param).data_ptr() == bucket.grads[slot.start :].data_ptr()


def test_gradients_of_micro_batches_add_up_in_fp32() -> None:
    parameters, buckets = _parameters(torch.bfloat16)
    buckets.start_step(microbatches=2)
    for step in (1.0, 2.0**-9):  # the sum is not a bf16 number
        (parameters[0].sum() * step).backward()
        assert parameters[0].grad is None
    buckets.finish()
    assert torch.equal(main_grad(parameters[0]), torch.full((2, 3), 1 + 2.0**-9))
    assert not main_grad(parameters[1]).any()


def _reduced_during_backward(overlap: bool) -> tuple[list[bool], list[float]]:
    """Whether each bucket's reduction had begun before finish(), and the gradients after it."""
    topology = build_topology(1, 1, torch.device("cpu"))
    make = ParameterFactory(topology, torch.float64, seed=1)
    parameters = [make.replicated(f"p{index}", (4,), std=1.0) for index in range(3)]
    buckets = GradientBuckets(parameters, topology, BucketOptions(1, overlap=overlap))
    buckets.start_step(microbatches=2)
    loss = sum(((index + 1) * param).sum() for index, param in enumerate(parameters)) * (topology.rank + 1)
    assert isinstance(loss, torch.Tensor)
    loss.backward(retain_graph=True)  # not the last micro-batch: nothing may be reduced yet
    assert all(gradients.work is None for gradients in buckets._gradients)
    loss.backward()
    begun = [gradients.work is not None for gradients in buckets._gradients]
    buckets.finish()
    return begun, [main_grad(param)[0].item() for param in parameters]


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_reduce_during_the_last_backward_only_when_asked(pool: WorkerPool, overlap: bool) -> None:
    for begun, grads in pool.run(4, _reduced_during_backward, overlap):
        assert begun == [overlap] * 3
        assert grads == [2 * (index + 1) * (1 + 2 + 3 + 4) for index in range(3)]


def test_a_stage_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one parameter"):
        GradientBuckets([], build_topology(1, 1, torch.device("cpu")), BucketOptions())


def _shared_out(dtype: torch.dtype, overlap: bool) -> tuple[list[float], list[int], bool]:
    """One step by hand at stage 1: the gradients of this rank's parts, all weights, and whether they fit."""
    topology = build_topology(1, 1, torch.device("cpu"))
    make = ParameterFactory(topology, dtype, seed=1)
    module = torch.nn.Module()
    module.first, module.second = (make.replicated(name, (100, 3), constant=1.0) for name in ("a", "b"))
    options = BucketOptions(10**6, overlap, zero_stage=1, overlap_gather=overlap)
    buckets = GradientBuckets([module.first, module.second], topology, options, [Unit(module)])
    buckets.start_step(microbatches=1)
    ((module.first.sum() + 2 * module.second.sum()) * (topology.dp.rank + 1)).backward()
    buckets.finish()
    (bucket,) = buckets.buckets
    grads = [bucket.grads[slot.start : slot.stop] for slot in bucket.slots]
    bucket.weights.fill_(topology.dp.rank)
    buckets.gather_weights()
    buckets.wait_for_weights()
    whole = buckets.held[0].weights
    owners = torch.arange(topology.dp.size, dtype=dtype).repeat_interleave(bucket.weights.numel())
    return [float(grad[0]) for grad in grads], [len(grad) for grad in grads], torch.equal(whole, owners)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_gets_the_sum_of_its_part_and_the_weights_of_all(pool: WorkerPool, overlap: bool) -> None:
    """Slots of 300 elements from 0 and 384 on, the later parameter first, in 4 parts of 256 elements."""
    results = pool.run(4, _shared_out, torch.bfloat16, overlap)
    total = 1 + 2 + 3 + 4
    assert [grads for grads, _, _ in results] == [[2 * total], [2 * total, total], [total], []]
    assert [lengths for _, lengths, _ in results] == [[256], [44, 128], [172], []]
    assert all(whole for _, _, whole in results)


class _Scale(torch.nn.Module):
    """`x * weight`: backward needs the weight."""

    def __init__(self, make: ParameterFactory, name: str, shape: tuple[int, ...] = (30, 11)):
        super().__init__()
        self.weight = make.replicated(name, shape, std=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def _whole_at_once(buckets: GradientBuckets) -> int:
    return sum(weights.whole.untyped_storage().nbytes() > 0 for weights in buckets._weights)


def _train_by_units(stage: int, overlap: bool, prefetch: int) -> tuple[list[float], list[int], int]:
    """Two steps of three micro-batches through six units, against autograd on whole copies.

    Returns the largest errors, how many units' weights were whole at each call forward and back of one
    micro-batch and after the step, and how many buckets have whole gradients then.
    """
    topology = build_topology(1, 1, torch.device("cpu"))
    make = ParameterFactory(topology, torch.float64, seed=1)
    modules = [_Scale(make, f"w{index}") for index in range(6)]
    copies = [module.weight.detach().clone().requires_grad_() for module in modules]
    options = BucketOptions(500, overlap, stage, prefetch_units=prefetch)
    units = [Unit(module, weights_in_backward=module is not modules[0]) for module in modules]
    buckets = GradientBuckets([module.weight for module in modules], topology, options, units)
    whole: list[int] = []

    def look(grad: torch.Tensor | None = None) -> None:
        whole.append(_whole_at_once(buckets))

    for step in range(2):
        buckets.start_step(microbatches=3)
        for scale in (1.0, 4.0, 16.0):
            whole.clear()
            for microbatch_rank in range(topology.dp.size):
                x = torch.full((30, 11), scale * (microbatch_rank + step + 1), dtype=torch.float64)
                if microbatch_rank == topology.dp.rank:
                    y = x
                    for module in modules:
                        y = module(y)
                        look()
                        y.register_hook(look)
                    y.sum().backward()
                for weight in copies:
                    x = x * weight
                x.sum().backward()
        buckets.finish()
        look()
        by_name = dict(zip((record_of(module.weight).name for module in modules), copies, strict=True))
        errors = [0.0]
        for bucket in buckets.buckets:
            for slot in bucket.slots:
                grad = by_name[record_of(slot.param).name].grad
                assert grad is not None
                expected = grad.flatten()[slot.first : slot.first + slot.stop - slot.start]
                errors.append(float((bucket.grads[slot.start : slot.stop] / expected - 1).abs().max()))
        for weight in copies:
            weight.grad = None
    unit = buckets._weights[0].whole.nbytes
    assert buckets.gathered_bytes == (min(6, prefetch + 1) * unit if stage == 3 else 0)
    return errors, whole, sum(gradients._whole is not None for gradients in buckets._gradients)


@pytest.mark.parametrize(("overlap", "prefetch"), [(False, 0), (True, 1), (True, 2), (True, 9)])
def test_weights_are_whole_only_around_their_use(pool: WorkerPool, overlap: bool, prefetch: int) -> None:
    forward = [min(6 - index, prefetch + 1) for index in range(6)]
    backward = [min(index, prefetch + 1) for index in range(5, 0, -1)]
    for errors, whole, left in pool.run(4, _train_by_units, 3, overlap, prefetch):
        assert max(errors) < 1e-13
        assert whole == [*forward, *backward, 1, 0]  # the first unit needs nothing in backward
        assert left == 0


READS: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "sum": lambda param: param.sum(),
    "arithmetic": lambda param: 2 * param,
    "item": lambda param: param[0].tolist(),
    "data": lambda param: param.data,
    "detach": lambda param: param.detach(),
    "numpy": lambda param: param.detach().numpy(),
    "copy": lambda param: copy.deepcopy(param),
    "write": lambda param: torch.nn.init.zeros_(param),
}


def _read_outside() -> tuple[dict[str, str], str, bool, bool, list[type]]:
    """What each of READS says at stage 3, a parameter printed, whether its shape and gradient may be asked
    for, whether all are right within `gathered`, and their classes there and after it.
    """
    topology = build_topology(1, 1, torch.device("cpu"))
    make = ParameterFactory(topology, torch.float64, seed=1)
    modules = [_Scale(make, f"w{index}") for index in range(3)]
    expected = [module.weight.detach().clone() for module in modules]
    units = [Unit(module) for module in modules]
    buckets = GradientBuckets(
        [module.weight for module in modules], topology, BucketOptions(zero_stage=3), units
    )
    param = modules[1].weight
    said = {}
    for name, read in READS.items():
        with pytest.raises(RuntimeError) as caught:
            read(param)
        said[name] = str(caught.value)
    asked = param.shape == (30, 11) and param.numel() == 330 and param.grad is None and len(param) == 30
    with buckets.gathered():
        right = all(torch.equal(module.weight, each) for module, each in zip(modules, expected, strict=True))
        classes = [type(param)]
    return said, repr(param), asked, right, [*classes, type(param)]


def test_a_parameter_read_outside_its_unit_names_itself_and_the_remedy(pool: WorkerPool) -> None:
    for said, printed, asked, right, classes in pool.run(2, _read_outside):
        assert list(said) == list(READS)
        for text in said.values():
            assert text.startswith("the parameter w1 is not on this rank: at --zero-stage 3")
            assert "buckets.gathered()" in text
        assert printed == "Parameter w1 of shape (30, 11), not gathered"
        assert asked
        assert right
        assert classes == [torch.nn.Parameter, NotGathered]  # whole, it costs what any other does


class _Holder:
    """An argument of a function for tensors that is no container to torch."""

    def __init__(self, param: torch.nn.Parameter) -> None:
        self.param = param


def _norm_of(holder: _Holder) -> torch.Tensor:
    if has_torch_function_unary(holder.param):
        return handle_torch_function(_norm_of, (holder.param,), holder)
    return holder.param.norm()


def test_a_parameter_read_through_an_object_is_refused_too() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    mark([param], present=False)
    with pytest.raises(RuntimeError, match="the parameter that an argument of _norm_of holds is not on this"):
        _norm_of(_Holder(param))


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_of_each_micro_batch_are_added_to_the_part(pool: WorkerPool, overlap: bool) -> None:
    for errors, whole, left in pool.run(4, _train_by_units, 2, overlap, 1):
        assert max(errors) < 1e-13
        assert set(whole) == {3}, "stage 2 keeps all weights, here in three buckets"
        assert left == 0


def _held_after_the_wait(in_bf16: bool) -> list[int]:
    """Bytes of the messages of a step of stage 2, to which this function still refers when they are done."""
    topology = build_topology(1, 1, torch.device("cpu"))
    make = ParameterFactory(topology, torch.float32, seed=1)
    modules = [_Scale(make, f"w{index}") for index in range(2)]
    options = BucketOptions(10, overlap=True, zero_stage=2, reduce_in_bf16=in_bf16)
    buckets = GradientBuckets([module.weight for module in modules], topology, options)
    buckets.start_step(microbatches=1)
    modules[1](modules[0](torch.ones(30, 11))).sum().backward()
    messages = [each._reducing for each in buckets._gradients]
    for each in buckets._gradients:
        if isinstance(each.work, HalfReduction):
            messages += [each.work._sent, each.work._received]
    buckets.finish()
    return [message.untyped_storage().nbytes() for message in messages if message is not None]


@pytest.mark.parametrize("in_bf16", [False, True])
def test_a_message_that_was_waited_for_is_freed_whoever_refers_to_it(pool: WorkerPool, in_bf16: bool) -> None:
    """A thread of the process group does, for a moment."""
    expected = [0] * (2 + 4 * in_bf16)
    assert pool.run(2, _held_after_the_wait, in_bf16) == [expected, expected]


def _values(rank: int) -> torch.Tensor:
    """fp32 numbers that bf16 does not have."""
    return torch.randn(300, 3, generator=torch.Generator().manual_seed(rank))


def _reduced_in_bf16(stage: int) -> tuple[torch.Tensor, int]:
    """The rank's part of the sum over dp, and where it begins."""
    topology = build_topology(1, 1, torch.device("cpu"))
    module = _Scale(ParameterFactory(topology, torch.float32, seed=1), "w", (300, 3))
    options = BucketOptions(zero_stage=stage, reduce_in_bf16=True)
    buckets = GradientBuckets([module.weight], topology, options, [Unit(module)])
    buckets.start_step(1)
    module(_values(topology.dp.rank)).sum().backward()
    buckets.finish()
    (bucket,) = buckets.buckets
    (slot,) = bucket.slots or (None,)
    if slot is None:
        return torch.empty(0), 0
    return bucket.grads[slot.start : slot.stop].clone(), slot.first


@pytest.mark.parametrize("stage", range(4))
def test_gradients_in_bf16_are_rounded_once_and_added_up_in_fp32(pool: WorkerPool, stage: int) -> None:
    """900 elements, 256 a part: each owner adds the others' rounded values to its own."""
    results = pool.run(4, _reduced_in_bf16, stage)
    values = [_values(rank).flatten() for rank in range(4)]
    expected = torch.empty(900)
    for owner in range(4):
        part = slice(256 * owner, 256 * owner + 256)
        total = values[owner][part].clone()
        for rank in range(4):
            if rank != owner:
                total += values[rank][part].bfloat16().float()
        expected[part] = total if stage else total.bfloat16().float()
    for grads, first in results:
        assert torch.equal(grads, expected[first : first + len(grads)])
    assert sum(len(grads) for grads, _ in results) == (900 if stage else 4 * 900)


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (2, 2), (3, 3), (100, 3)])
def test_the_number_of_buckets_can_be_given(number: int, expected: int) -> None:
    topology = build_topology(1, 1, torch.device("cpu"))
    make = ParameterFactory(topology, torch.float32, seed=1)
    parameters = [make.replicated(f"p{index}", (40,)) for index in range(3)]
    assert len(GradientBuckets(parameters, topology, BucketOptions(num_buckets=number)).buckets) == expected
