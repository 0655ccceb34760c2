"""The recipes beside `examples/pretrain_gpt.sh`, through the configuration check that it makes first."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from megalite.config import parse
from tests.examples.test_launcher import launch, with_defaults

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "configs"
NO_CORPUS = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000")


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_default_recipe_fits_the_default_layouts(world_size: int) -> None:
    config = parse(with_defaults([*NO_CORPUS], world_size), world_size)
    assert config.num_microbatches(world_size) >= 1


@pytest.mark.parametrize(
    ("recipe", "world_size"), [("gpt2_124m", 1), ("gpt2_124m", 8), ("llama_1b", 8), ("llama_1b", 64)]
)
def test_recipes_are_valid(recipe: str, world_size: int) -> None:
    config = parse(["--config", str(RECIPES / f"{recipe}.yaml"), *NO_CORPUS], world_size)
    assert config.precision.params_dtype == "bfloat16"


def test_flags_override_the_recipe() -> None:
    flags = ["--num-layers", "2", "--train-samples", "640", "--no-swiglu", "--lr-warmup-samples", "32"]
    config = parse(with_defaults([*NO_CORPUS, *flags], 8), 8)
    assert (config.model.num_layers, config.model.swiglu) == (2, False)
    assert (config.batch.train_iters, config.batch.train_samples) == (None, 640)
    assert config.data.mock_data
    assert config.data.data_path == ()


def test_configuration_errors_come_once_and_together() -> None:
    done = launch("--nproc-per-node", "8", *NO_CORPUS, "--num-layers", "3", "--hiden-size", "8")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("--num-layers 3") == 1
    assert "did you mean --hidden-size?" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_sample_a_newcomer_is_told_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = launch("--nproc-per-node", "2")
    assert done.returncode == 2
    assert "no such file: runs/sample/corpus_text_document.idx" in done.stderr
    assert done.stderr.count("`make pretrain` puts into runs/sample") == 1
    assert "make pretrain" not in launch("--nproc-per-node", "2", "--data-path", "mine").stderr


def test_started_by_torchrun_the_newcomer_is_told_by_the_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ThreadPoolExecutor() as pool:
        ranks = list(pool.map(lambda rank: launch(RANK=rank, LOCAL_RANK=rank, **place), ("0", "1")))
    assert [done.returncode for done in ranks] == [2, 2]
    assert ["no such file: runs/sample" in done.stderr for done in ranks] == [True, False]
    assert ["make pretrain" in done.stderr for done in ranks] == [True, False]


def test_several_nodes_tell_an_error_on_the_first_only() -> None:
    wrong = ["--nnodes", "2", "--nproc-per-node", "8", *NO_CORPUS, "--hiden-size", "8"]
    first, second = launch("--node-rank", "0", *wrong), launch("--node-rank", "1", *wrong)
    assert (first.returncode, second.returncode) == (2, 2)
    assert "did you mean --hidden-size?" in first.stderr
    assert second.stderr == ""


def test_print_config_shows_what_would_run_and_stops() -> None:
    done = launch("--nproc-per-node", "4", *NO_CORPUS, "--print-config")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert (shown["tensor_model_parallel_size"], shown["pipeline_model_parallel_size"]) == (2, 2)
    assert (shown["vocab_size"], shown["mock_data"]) == (1000, True)
