"""Flat buckets: layout, and reduction that starts when the last gradient is in."""

from __future__ import annotations

import pytest
import torch

from megalite.parallel.buckets import ALIGNMENT, GradientBuckets, main_grad, plan_buckets
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
    return parameters, GradientBuckets(parameters, topology, bucket_size=10, overlap=True)


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
    buckets = GradientBuckets(parameters, topology, bucket_size=1, overlap=overlap)
    buckets.start_step(microbatches=2)
    loss = sum(((index + 1) * param).sum() for index, param in enumerate(parameters)) * (topology.rank + 1)
    assert isinstance(loss, torch.Tensor)
    loss.backward(retain_graph=True)  # not the last micro-batch: nothing may be reduced yet
    assert all(reduction.work is None for reduction in buckets._reductions)
    loss.backward()
    begun = [reduction.work is not None for reduction in buckets._reductions]
    buckets.finish()
    return begun, [main_grad(param)[0].item() for param in parameters]


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_reduce_during_the_last_backward_only_when_asked(pool: WorkerPool, overlap: bool) -> None:
    for begun, grads in pool.run(4, _reduced_during_backward, overlap):
        assert begun == [overlap] * 3
        assert grads == [2 * (index + 1) * (1 + 2 + 3 + 4) for index in range(3)]


def test_a_stage_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one parameter"):
        GradientBuckets([], build_topology(1, 1, torch.device("cpu")), None, overlap=False)
