"""Every lever against memory: offered where the rules accept it, with the bytes that following it gives."""

from __future__ import annotations

import functools
import sys

import pytest

from megalite.config import Config, parse, replace
from megalite.model import recompute_budget
from megalite.model.recompute_budget import Choice, Measured, within_budget
from megalite.training.memory.advice import Advice, advise, levers
from megalite.training.memory.plan import plan_memory
from tests.end_to_end.launch import MODEL_FLAGS

WORLD = 8
FLAGS = [part for name, value in MODEL_FLAGS.items() for part in (f"--{name}", value)]
SHAPE = {
    "vocab-size": "4096",
    "cross-entropy-chunk-mib": "0.1",
    "seq-length": "128",
    "max-position-embeddings": "128",
    "position-embedding-type": "rope",
}
FLAGS += [part for name, value in SHAPE.items() for part in (f"--{name}", value)]
FLAGS += ["--group-query-attention", "--swiglu", "--bf16", "--mock-data", "--tensor-model-parallel-size", "2"]
# In the order of the issue: micro-batch, recompute parts, sequence parallelism, zero stage, fused linear and
# loss, tensor and pipeline parallelism; and what may wait in host memory.
LEVERS = (
    "--micro-batch-size 1",
    "--recompute-granularity selective --recompute-modules norm mlp_act rope",
    "--recompute-granularity selective --recompute-modules core_attn norm mlp_act rope",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--sequence-parallel",
    "--zero-stage 1",
    "--zero-stage 2",
    "--zero-stage 3",
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear",
    "--tensor-model-parallel-size 4 --sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--cpu-offloading-num-layers 2",
    "--optimizer-cpu-offload",
)


@functools.cache
def advised() -> dict[str, Advice]:
    """Every lever, by its flags: nothing fits into no memory at all."""
    return {each.flags: each for each in advise(parse(FLAGS, WORLD), WORLD, 0, host_is_device=False)}


def offered(*flags: str, host_is_device: bool = False) -> list[str]:
    """The flags of every lever beside `flags`."""
    return [lever.flags for lever in levers(parse([*FLAGS, *flags], WORLD), WORLD, host_is_device)]


def test_every_lever_is_offered_and_gives_what_it_says_when_its_flags_are_typed() -> None:
    found = advised()
    assert set(LEVERS) <= set(found), set(LEVERS) - set(found)
    before = plan_memory(parse(FLAGS, WORLD), WORLD, False).largest.account
    for flags, advice in found.items():
        account = plan_memory(parse([*FLAGS, *flags.split()], WORLD), WORLD, False).largest.account
        assert (advice.needed, advice.host) == (account.total, account.host), flags
        assert advice.saved == before.total - account.total > 0, flags
    *_, together = found.values()
    assert together.needed == min(advice.needed for advice in found.values())
    # What --sequence-parallel costs is told no more where --tensor-model-parallel-size 4 brings it along.
    assert together.cost.count("no more traffic") == 1


def test_where_the_host_is_the_device_nothing_is_sent_there() -> None:
    assert not any("offload" in flags for flags in offered(host_is_device=True))


def test_what_waits_on_the_host_is_told_with_what_its_transfer_costs() -> None:
    activations, optimizer = (advised()[flags] for flags in LEVERS[-2:])
    moved = activations.host / 2**20
    assert f" and {moved:.2f} MiB of host memory, " in activations.line(0)
    assert activations.cost.startswith(f"{moved:.2f} MiB to host memory and back for each micro-batch")
    # fp32 master and two moments; the copies by which bf16 weights and fp32 gradients come and go.
    parameters = plan_memory(parse(FLAGS, WORLD), WORLD, False).largest.account.parameters // 2
    assert optimizer.host == (12 + 2 + 4) * parameters
    assert optimizer.saved <= 12 * parameters


@pytest.mark.parametrize(
    ("given", "offers", "not_offered"),
    [
        (
            "--recompute-granularity selective --recompute-modules norm mlp",
            "--recompute-granularity full --recompute-modules core_attn --recompute-method uniform "
            "--recompute-num-layers 1",
            "mlp_act",  # a part of mlp
        ),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", "", "selective"),
        ("--recompute-budget 0.9", "--recompute-budget 0.", "--recompute-granularity"),
        ("--cpu-offloading-num-layers 1", "--cpu-offloading-num-layers 2", "--cpu-offloading-num-layers 1"),
        ("--zero-stage 2", "--zero-stage 3", "--zero-stage 1"),
    ],
)
def test_levers_go_on_from_what_is_chosen_already(given: str, offers: str, not_offered: str) -> None:
    found = offered(*given.split())
    assert any(flags.startswith(offers) for flags in found), found
    assert not any(not_offered in flags for flags in found), found
    for flags in found:
        parse([*FLAGS, *given.split(), *flags.split()], WORLD)  # no flag contradicts one before


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations of which all sets of parts are measured, without the seconds that it takes."""
    found: list[Config] = []

    def measure(config: Config) -> list[Choice]:
        found.append(config)
        return [Choice((), 1000, 1.0, 0.0), Choice(("norm",), 500, 0.5, 0.0)]

    monkeypatch.setattr(recompute_budget, "measured_choices", measure)
    return found


def test_a_budget_is_measured_once_for_levers_that_change_no_share(measurements: list[Config]) -> None:
    config = parse([*FLAGS, "--recompute-budget", "0.9"], WORLD)
    (zero,) = advise(config, WORLD, sys.maxsize, host_is_device=False)  # beside the run as it is
    assert zero.flags == "--zero-stage 1"
    assert len(measurements) == 1


def test_what_a_budget_is_measured_for_has_all_that_changes_a_share(measurements: list[Config]) -> None:
    config, measured = parse([*FLAGS, "--recompute-budget", "0.9"], WORLD), Measured()
    found = [replace(config, **lever.changes) for lever in levers(config, WORLD, False, measured)]
    for changed in found:
        within_budget(changed, measured)
    shapes = {
        (
            changed.batch.micro_batch_size,
            changed.parallel.tensor_model_parallel_size,
            changed.parallel.sequence_parallel,
            changed.loss,
        )
        for changed in (config, *found)
    }
    assert len(measurements) == len(shapes) < len(found)
