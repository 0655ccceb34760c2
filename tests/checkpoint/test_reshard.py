"""A checkpoint belongs to no layout: what any set of ranks saved, any other set loads, bit for bit."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megalite.checkpoint import Block, load, save
from tests.checkpoint.layouts import Layout, content, load_layout, save_layout, weights
from tests.pool import WorkerPool

LAYOUTS = [
    Layout(tp=1, dp=1, pp=1),
    Layout(tp=2, dp=1, pp=1),
    Layout(tp=4, dp=1, pp=1),
    Layout(tp=1, dp=3, pp=1),
    Layout(tp=1, dp=1, pp=4),
    Layout(tp=2, dp=2, pp=2),
]


def name_of(layout: Layout) -> str:
    return f"tp{layout.tp}-dp{layout.dp}-pp{layout.pp}"


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    """One checkpoint a layout."""
    root = tmp_path_factory.mktemp("layouts")
    directories = {layout: root / name_of(layout) for layout in LAYOUTS}
    for layout, directory in directories.items():
        pool.run(layout.world_size, save_layout, str(directory), layout)
    return directories


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_loads_what_every_layout_saved(pool: WorkerPool, saved: dict[Layout, Path], layout: Layout) -> None:
    directories = [str(directory) for directory in saved.values()]
    wrong = pool.run(layout.world_size, load_layout, directories, layout)
    assert wrong == [[]] * layout.world_size


def test_replicas_are_written_once_and_share_the_work(pool: WorkerPool, tmp_path: Path) -> None:
    layout = Layout(tp=1, dp=4, pp=1)
    pool.run(layout.world_size, save_layout, str(tmp_path), layout)
    folder = tmp_path / "iter_0000001"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    written = Counter(index.fqn for index in metadata.storage_data)
    assert [written[weight.name] for weight in weights()] == [1] * len(weights())
    by_rank = Counter(
        info.relative_path for index, info in metadata.storage_data.items() if index.fqn.startswith("model.")
    )
    assert len(by_rank) == layout.dp  # each replica writes some of the parameters


def test_plain_torch_loads_the_folder(saved: dict[Layout, Path], tmp_path: Path) -> None:
    folder = saved[Layout(tp=2, dp=2, pp=2)] / "iter_0000001"
    tensors = {weight.name: torch.zeros(weight.shape, dtype=weight.dtype) for weight in weights()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(tensors, checkpoint_id=folder)
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for weight in weights():
        expected = content(weight.name, weight.shape, weight.dtype)
        assert torch.equal(tensors[weight.name], expected)
        assert torch.equal(whole[weight.name], expected)


Box = tuple[tuple[int, int], ...]  # start and stop in each dim


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut into rectangles, in any order."""
    boxes: list[Box] = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        start, stop = box[dim]
        cut = draw(st.integers(start, stop))
        boxes += [(*box[:dim], (start, cut), *box[dim + 1 :]), (*box[:dim], (cut, stop), *box[dim + 1 :])]
    return draw(st.permutations(boxes))


@settings(max_examples=25, deadline=None)
@given(saved_as=tilings((5, 4, 3)), loaded_as=tilings((5, 4, 3)))
def test_any_rectangles_load_from_any_others(
    tmp_path_factory: pytest.TempPathFactory, saved_as: list[Box], loaded_as: list[Box]
) -> None:
    shape = (5, 4, 3)
    original = torch.arange(60.0).reshape(shape)
    directory = tmp_path_factory.mktemp("tiling")
    save(directory, 1, _blocks(original, saved_as), {})
    restored = torch.full(shape, -1.0)
    load(directory, _blocks(restored, loaded_as))
    assert torch.equal(restored, original)


def _blocks(tensor: torch.Tensor, boxes: list[Box]) -> list[Block]:
    """Views of a tensor, mostly not contiguous."""
    return [
        Block(
            "x", tensor.shape, tuple(start for start, _ in box), tensor[tuple(slice(*ends) for ends in box)]
        )
        for box in boxes
    ]


def test_scalar_and_strided_tensors(tmp_path: Path) -> None:
    matrix = torch.randn(4, 6)
    save(tmp_path, 1, [Block("t", (6, 4), (0, 0), matrix.t()), Block("s", (), (), torch.tensor(2.5))], {})
    transposed, scalar = torch.zeros(4, 6).t(), torch.zeros(())
    load(tmp_path, [Block("t", (6, 4), (0, 0), transposed), Block("s", (), (), scalar)])
    assert torch.equal(transposed, matrix.t())
    assert scalar.item() == 2.5


def test_parameters_that_require_grad_load_in_place(tmp_path: Path) -> None:
    save(tmp_path, 1, [Block("w", (3,), (0,), torch.ones(3))], {})
    weight = torch.nn.Parameter(torch.zeros(3))
    load(tmp_path, [Block("w", (3,), (0,), weight)])
    assert torch.equal(weight.data, torch.ones(3))
