"""Parameter records, blocks and layout-independent initial values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megalite.config import ModelConfig, kv_replicas
from megalite.model.qkv import QKVProjection
from megalite.parallel.params import (
    ParameterFactory,
    draw_into,
    global_block,
    narrow_to_block,
    record_of,
    seeded_normal,
)
from megalite.parallel.topology import Axis, Topology


def _factory(tp_size: int, tp_rank: int, seed: int = 7, kv_size: int = 1) -> ParameterFactory:
    axes = {name: Axis(name) for name in ("dp", "pp", "model", "embedding")}
    tp = Axis("tp", tp_size, tp_rank, None, tuple(range(tp_size)))
    kv = Axis("kv", kv_size, tp_rank % kv_size)
    topology = Topology(tp_rank, tp_size, tp=tp, **axes, device=torch.device("cpu"), kv=kv)
    return ParameterFactory(topology, torch.float64, seed)


@pytest.mark.parametrize(
    ("shape", "split_dim", "padded"),
    [
        ((6, 5), 0, None),
        ((2, 6, 5), 1, None),
        ((5, 6), 1, None),
        ((4, 3, 2, 7), 0, None),
        ((7, 5), 0, 12),
        ((2, 5), 0, 8),
    ],
)
@pytest.mark.parametrize("tp", [2, 4])
def test_initial_values_do_not_depend_on_the_layout(
    shape: tuple[int, ...], split_dim: int, padded: int | None, tp: int
) -> None:
    length = padded or shape[split_dim]
    if length % tp:
        tp = 2
    whole = _factory(1, 0).sharded("w", shape, split_dim, std=0.5, padded=padded)
    assembled = torch.full(shape, torch.nan, dtype=torch.float64)
    for rank in range(tp):
        part = _factory(tp, rank).sharded("w", shape, split_dim, std=0.5, padded=padded)
        offsets, sizes = global_block(part)
        region = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        assembled[region] = narrow_to_block(part.detach(), part)
        padding = part.detach().clone()
        narrow_to_block(padding, part).zero_()
        assert not padding.any()  # rows that the global tensor does not have are zero
    assert torch.equal(assembled, narrow_to_block(whole.detach(), whole))


def test_initial_values_are_normal_and_depend_on_seed_and_name() -> None:
    rows = np.arange(400)
    drawn = seeded_normal(1, "a", (400, 301), rows, std=0.02)
    assert abs(drawn.mean().item()) < 4 * 0.02 / (400 * 301) ** 0.5
    assert drawn.std().item() == pytest.approx(0.02, rel=0.01)  # 4 standard errors of the deviation
    assert (drawn.abs() > 3 * 0.02).double().mean().item() == pytest.approx(0.0027, abs=0.0006)
    assert not torch.equal(drawn, seeded_normal(2, "a", (400, 301), rows, std=0.02))
    assert not torch.equal(drawn, seeded_normal(1, "b", (400, 301), rows, std=0.02))
    assert torch.unique(drawn).numel() == drawn.numel()  # no row repeats another's numbers
    some = np.array([3, 4, 399])
    assert torch.equal(drawn[some], seeded_normal(1, "a", (400, 301), some, std=0.02))


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.w: dimension 0 of length 6 is not divisible by tp 4"):
        _factory(4, 0).within("layers.0").sharded("w", (6, 2), 0)


def test_replicas_are_counted_once() -> None:
    counted = [
        record_of(_factory(2, rank).replicated("norm", (4,), constant=1.0)).counted for rank in range(2)
    ]
    assert counted == [True, False]


@pytest.mark.parametrize(("groups", "tp"), [(2, 4), (1, 4), (2, 8), (4, 4), (4, 2)])
def test_queries_are_held_once_and_shared_keys_and_values_counted_once(groups: int, tp: int) -> None:
    """Of the one global weight, whatever tp; each rank's heads are those that its attention output uses."""
    config = ModelConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=8,
        num_query_groups=groups,
        seq_length=4,
        max_position_embeddings=4,
        vocab_size=8,
        kv_channels=3,
        add_qkv_bias=True,
    )
    per_group, kv_size = 8 // groups, kv_replicas(config, tp)
    shape = (groups, per_group + 2, 3, 16)
    whole = QKVProjection(config, _factory(1, 0)).weights[0]
    held, counted = torch.zeros(shape[:2]), torch.zeros(shape[:2])
    for rank in range(tp):
        projection = QKVProjection(config, _factory(tp, rank, kv_size=kv_size))
        assert len(projection.weights) == len(projection.biases) == (2 if kv_size > 1 else 1)
        for weight, bias in zip(projection.weights, projection.biases, strict=True):
            record = record_of(weight)
            assert (record.name, record.global_shape) == ("weight", shape)
            offsets, sizes = global_block(weight)
            assert (offsets[:3], sizes[:3]) == global_block(bias)
            place = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            assert torch.equal(weight, whole[place])
            held[place[:2]] += 1
            counted[place[:2]] += record.counted
            assert record.counted == record_of(bias).counted
            shared = ("kv",) if kv_size > 1 and offsets[1] == per_group else ()
            assert record.sum_grad_over == record.replicated_over == shared
        heads = torch.arange(groups * per_group).view(groups, per_group)
        block = global_block(projection.weights[0])
        mine = heads[block[0][0] : block[0][0] + block[1][0], block[0][1] : block[0][1] + projection.queries]
        assert mine.flatten().tolist() == list(range(rank * 8 // tp, (rank + 1) * 8 // tp))
    assert (held[:, :per_group] == 1).all()
    assert (held[:, per_group:] == kv_size).all()
    assert (counted == 1).all()


def test_a_parameter_without_a_record_is_refused() -> None:
    with pytest.raises(KeyError, match="has no record"):
        record_of(torch.nn.Parameter(torch.zeros(2)))


def test_names_are_joined_with_dots() -> None:
    assert record_of(_factory(1, 0).within("a").within("b").replicated("c", (3,))).name == "a.b.c"


def test_deferred_parameters_take_memory_when_they_are_drawn() -> None:
    at_once = _factory(2, 1).within("layer")
    later = ParameterFactory(at_once.topology, at_once.dtype, at_once.seed, deferred=True).within("layer")
    for std, constant in ((0.5, 0.0), (0.0, 1.0)):
        expected, parameter = (
            make.part("w", (7, 5), (4, 0), (4, 5), std=std, constant=constant) for make in (at_once, later)
        )
        assert parameter.shape == expected.shape
        assert parameter.untyped_storage().nbytes() == 0
        target = torch.full((4, 5), torch.nan, dtype=torch.float64)
        draw_into(target, parameter)
        assert torch.equal(parameter, expected)
        assert parameter.data_ptr() == target.data_ptr()
