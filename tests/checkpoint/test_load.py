"""A load gives back what was saved, or says what is wrong with the checkpoint or the request."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.checkpoint import (
    Block,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    complete_iterations,
    latest_iteration,
    load,
    read_state,
    save,
)
from tests.pool import WorkerPool

TRACKER = "latest_checkpointed_iteration.txt"


def block(name: str, tensor: torch.Tensor) -> Block:
    """A whole tensor."""
    return Block(name, tensor.shape, (0,) * tensor.dim(), tensor)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Checkpoints of iterations 100 and 200 whose tensor `x` is filled with 1 and 2."""
    for iteration in (100, 200):
        save(
            tmp_path,
            iteration,
            [block("x", torch.full((64,), iteration / 100))],
            {"iteration_was": iteration},
        )
    return tmp_path


def value_of(directory: Path, iteration: int | None = None) -> float:
    tensor = torch.zeros(64)
    load(directory, [block("x", tensor)], iteration)
    return float(tensor.mean())


def cut_tensors(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def remove_tensors(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def change_tensor(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    two = torch.full((64,), 2.0).numpy().tobytes()
    assert data.count(two) == 1
    path.write_bytes(data.replace(two, two[:100] + b"\x01" + two[101:]))


def change_tensor_header(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(b"\0" * 4 + path.read_bytes()[4:].replace(b"PK", b"KP"))


def remove_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:-20])


def change_state(folder: Path) -> None:
    path = folder / "state.json"
    path.write_text(path.read_text().replace("200", "201"))


def raise_version(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))


def replace_by_foreign_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    (folder / "mp_rank_00").mkdir(parents=True)


DAMAGES = [
    (cut_tensors, "__0_0.distcp has"),
    (remove_tensors, "__0_0.distcp is missing"),
    (change_tensor, "block of x at (0,) is damaged"),
    (change_tensor_header, "block of x at (0,) is damaged: it is no tensor"),
    (remove_metadata, ".metadata is missing"),
    (remove_manifest, "has no manifest.json"),
    (cut_manifest, "manifest.json cannot be read"),
    (change_state, "state.json was changed"),
    (raise_version, "format version 99, this program reads 1"),
    (replace_by_foreign_folder, "iter_0000200 is not a checkpoint of this program"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    directory: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], message: str
) -> None:
    damage(directory / "iter_0000200")
    with pytest.raises(CheckpointCorruptError) as raised:
        value_of(directory, 200)
    assert message in str(raised.value)
    assert str(directory) in str(raised.value)
    with caplog.at_level(logging.WARNING):
        assert value_of(directory) == 1.0
    assert message in caplog.text


def test_a_removed_latest_checkpoint_is_passed_over(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(directory / "iter_0000200")
    assert value_of(directory) == 1.0
    assert "iter_0000200 does not exist" in caplog.text
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of iteration 200; it has 100"):
        value_of(directory, 200)


def test_a_run_does_not_start_anew_over_damaged_checkpoints(directory: Path) -> None:
    for folder in directory.glob("iter_*"):
        remove_tensors(folder)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded") as raised:
        value_of(directory)
    assert not isinstance(raised.value, CheckpointNotFoundError)
    assert latest_iteration(directory) is None


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError):
        value_of(tmp_path / name)
    assert latest_iteration(tmp_path / name) is None


def test_the_latest_is_a_complete_one(directory: Path) -> None:
    remove_tensors(directory / "iter_0000100")
    assert latest_iteration(directory) == 200
    assert read_state(directory, 200) == {"iteration_was": 200, "iteration": 200}
    with pytest.raises(CheckpointCorruptError, match="missing"):
        read_state(directory, 100)


def test_the_record_decides_what_is_latest(directory: Path) -> None:
    (directory / TRACKER).write_text("100")
    assert latest_iteration(directory) == 100
    assert value_of(directory) == 1.0


def test_what_a_rollback_left_is_neither_history_nor_fallen_back_to(directory: Path) -> None:
    """Nor removed: the tracker may name it again."""

    def save_filled(iteration: int, value: float) -> None:
        save(directory, iteration, [block("x", torch.full((64,), value))], {})

    (directory / TRACKER).write_text("100")
    save_filled(150, 1.5)
    save_filled(300, 3.0)
    assert list(complete_iterations(directory)) == [300, 150, 100]
    cut_tensors(directory / "iter_0000150")
    assert list(complete_iterations(directory)) == [300, 100]
    cut_tensors(directory / "iter_0000300")
    assert value_of(directory) == 1.0
    save_filled(200, 5.0)  # takes the place of the other 200
    assert list(complete_iterations(directory)) == [200, 100]
    save_filled(250, 2.5)
    (directory / TRACKER).write_text("200")
    save_filled(400, 4.0)
    assert list(complete_iterations(directory)) == [400, 200, 100]
    (directory / TRACKER).write_text("250")
    assert list(complete_iterations(directory)) == [250, 200, 100]


def test_a_checkpoint_that_does_not_say_what_it_comes_after_has_all_before_it(directory: Path) -> None:
    """As those that earlier versions wrote."""
    path = directory / "iter_0000200" / "manifest.json"
    document = json.loads(path.read_text())
    assert document.pop("earlier") == [100]
    path.write_text(json.dumps(document))
    save(directory, 300, [block("x", torch.zeros(64))], {})
    assert list(complete_iterations(directory)) == [300, 200, 100]
    (directory / TRACKER).write_text("200")
    assert list(complete_iterations(directory)) == [200, 100]


@pytest.mark.parametrize("record", [None, "", "release", "²"])
def test_without_a_readable_record_the_newest_is_loaded(
    directory: Path, caplog: pytest.LogCaptureFixture, record: str | None
) -> None:
    (directory / TRACKER).unlink()
    if record is not None:
        (directory / TRACKER).write_text(record)
    assert value_of(directory) == 2.0
    assert "does not record a latest iteration" in caplog.text


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    saved = {
        "model.a": torch.ones(3),
        "model.b": torch.ones(4),
        "model.c": torch.ones(5),
        "model.old": torch.ones(1),
        "optimizer.a": torch.ones(3),
    }
    save(tmp_path, 1, [block(name, tensor) for name, tensor in saved.items()], {})
    wanted = {
        "model.a": torch.ones(3, dtype=torch.bfloat16),
        "model.b": torch.ones(6),
        "model.c": torch.ones(5, dtype=torch.int32),
        "model.new": torch.ones(1),
    }
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path, [block(n, t) for n, t in wanted.items()], ignored_prefixes=("optimizer.",))
    assert str(raised.value) == (
        "the checkpoint does not fit: missing from it (1): model.new; "
        "in it but not asked for (1): model.old; different (3): "
        "model.a: torch.float32 saved, torch.bfloat16 expected; conversion was not asked for, "
        "model.b: shape (4,) saved, (6,) expected, model.c: torch.float32 saved, torch.int32 expected"
    )
    assert torch.equal(wanted["model.b"], torch.ones(6))


def test_long_lists_are_cut(tmp_path: Path) -> None:
    save(tmp_path, 1, [block("x", torch.ones(1))], {})
    wanted = [block("x", torch.ones(1)), *(block(f"w{i:02}", torch.ones(1)) for i in range(25))]
    with pytest.raises(CheckpointError, match=r"missing from it \(25\): w00, .*, w09 and 15 more"):
        load(tmp_path, wanted)


def test_part_of_a_checkpoint_loads_when_the_rest_is_ignored(tmp_path: Path) -> None:
    save(tmp_path, 1, [block("model.x", torch.ones(2)), block("optimizer.x", torch.ones(2))], {})
    model = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"not asked for \(1\): optimizer\.x"):
        load(tmp_path, [block("model.x", model)])
    load(tmp_path, [block("model.x", model)], ignored_prefixes=("optimizer.",))
    assert torch.equal(model, torch.ones(2))


def test_conversion_between_float_dtypes_when_asked(tmp_path: Path) -> None:
    saved = torch.randn(100)
    save(tmp_path, 1, [block("x", saved)], {})
    loaded = torch.zeros(100, dtype=torch.bfloat16)
    load(tmp_path, [block("x", loaded)], convert_dtype=True)
    assert torch.equal(loaded, saved.bfloat16())


def test_every_bit_pattern_survives(tmp_path: Path) -> None:
    saved = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)  # NaNs and all
    save(tmp_path, 1, [block("x", saved)], {})
    loaded = torch.zeros(2**16, dtype=torch.bfloat16)
    load(tmp_path, [block("x", loaded)])
    assert torch.equal(loaded.view(torch.int16), saved.view(torch.int16))


def load_half(directory: str, iteration: int | None) -> tuple[str, float]:
    """Runs on every rank: load its half of `x`; the error or an empty string, and the value."""
    tensor = torch.zeros(32)
    try:
        load(directory, [Block("x", (64,), (32 * dist.get_rank(),), tensor)], iteration)
    except CheckpointError as error:
        return str(error), 0.0
    return "", float(tensor.mean())


def save_half(directory: str, iteration: int) -> None:
    tensor = torch.full((32,), iteration / 100)
    save(directory, iteration, [Block("x", (64,), (32 * dist.get_rank(),), tensor)], {})


def test_damage_that_one_rank_reads_is_an_error_on_all(pool: WorkerPool, tmp_path: Path) -> None:
    for iteration in (100, 200):
        pool.run(2, save_half, str(tmp_path), iteration)
    path = tmp_path / "iter_0000200" / "__1_0.distcp"
    data, two = path.read_bytes(), torch.full((32,), 2.0).numpy().tobytes()
    path.write_bytes(data.replace(two, b"\x01" + two[1:]))
    first, second = pool.run(2, load_half, str(tmp_path), 200)
    assert first == second
    assert "the block of x at (32,) is damaged" in first[0]
    assert pool.run(2, load_half, str(tmp_path), None) == [("", 1.0)] * 2


def load_other_names(directory: str) -> str:
    """Rank 0 asks for what is there, rank 1 for what is not."""
    names = ["x", "y"][: dist.get_rank() + 1]
    try:
        load(directory, [block(name, torch.zeros(64)) for name in names])
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_name_missing_on_one_rank_is_an_error_on_all(pool: WorkerPool, directory: Path) -> None:
    messages = pool.run(2, load_other_names, str(directory))
    assert messages == ["the checkpoint does not fit: missing from it (1): y"] * 2


def test_nothing_to_load_is_the_same_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    results = pool.run(2, load_half, str(tmp_path), None)
    assert results == [(f"{tmp_path} has no checkpoint", 0.0)] * 2
