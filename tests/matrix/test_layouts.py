"""In fp64 every layout gives the numbers of the plain one-process reference."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch

from megalite.config import ModelConfig
from tests.matrix import cases
from tests.matrix.batches import global_batch
from tests.matrix.cases import LAYOUTS, MODELS, Layout
from tests.matrix.combinations import Combination
from tests.matrix.gather import assemble, times_counted
from tests.matrix.job import Trained, random_weight, train_three_steps
from tests.matrix.shapes import global_shapes, number_of_parameters
from tests.pool import WorkerPool
from tests.reference.compare import differences
from tests.reference.train import Recipe, Step, train

TOLERANCE = 1e-10


@functools.cache
def reference(model: ModelConfig, by_document: bool = False, recipe: Recipe = cases.RECIPE) -> list[Step]:
    weights = {name: random_weight(name, shape) for name, shape in global_shapes(model).items()}
    batches = [global_batch(step, by_document) for step in range(cases.STEPS)]
    return train(weights, cases.architecture(model), batches, cases.LEARNING_RATES, recipe)


@functools.cache
def rounding(model: ModelConfig, by_document: bool, recipe: Recipe) -> list[float]:
    """How far each step's gradients and their norm move when the reference starts with every weight 16 units
    in the last place off: what its rounding may cost there.

    Below 1e-10 but for deep variants with large gradients: Adam divides by the size of a gradient, however
    small. In the third step of `mixed` with 8 layers, dropout and a norm of 81 one such unit is 4e-10.
    """
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in global_shapes(model).items():
        signs = torch.randint(2, tuple(shape), generator=generator, dtype=torch.float64) * 2 - 1
        weights[name] = random_weight(name, shape) * (1 + 16 * torch.finfo(torch.float64).eps * signs)
    batches = [global_batch(step, by_document) for step in range(cases.STEPS)]
    moved = train(weights, cases.architecture(model), batches, cases.LEARNING_RATES, recipe)
    return [
        max(abs(one.grad_norm - other.grad_norm), *differences(one.gradients, other.gradients, 0.0).values())
        for one, other in zip(moved, reference(model, by_document, recipe), strict=True)
    ]


def check_against(
    model: ModelConfig,
    layout: Layout,
    ranks: Sequence[Trained],
    by_document: bool = False,
    recipe: Recipe = cases.RECIPE,
    sharded: bool = False,
) -> None:
    """Every rank's results on `layout` are those of one process.

    `sharded`: the data-parallel ranks share out what they update, else each has all of it.
    """
    expected = reference(model, by_document, recipe)

    def is_rounding(off: float, step: int) -> bool:
        return off <= TOLERANCE or off <= rounding(model, by_document, recipe)[step]

    assert {one.parameter_count for one in ranks} == {number_of_parameters(model)}
    for step, wanted in enumerate(expected):
        where = f"{model} on {layout}, step {step}"
        for tp_rank in range(layout.tensor):
            loss = sum(
                one.losses[step] for rank, one in enumerate(ranks) if layout.coordinates(rank)[0] == tp_rank
            )
            assert loss == pytest.approx(wanted.loss, abs=TOLERANCE), where
        gradients = assemble([one.gradients[step] for one in ranks])
        off = differences(gradients, wanted.gradients, TOLERANCE)
        assert is_rounding(max(off.values(), default=0.0), step), f"{where}: {off}"
        assert len({one.grad_norms[step] for one in ranks}) == 1, where
        assert is_rounding(abs(ranks[0].grad_norms[step] - wanted.grad_norm), step), where
        assert not any(one.skipped[step] for one in ranks), where
    weights = assemble([one.weights for one in ranks])
    assert not differences(weights, expected[-1].weights, TOLERANCE), f"weights of {model} on {layout}"
    copies = 1 if sharded else layout.data
    assert times_counted([one.gradients[-1] for one in ranks]) == {copies}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_numbers_of_the_reference(pool: WorkerPool, layout: Layout) -> None:
    chosen = cases.options(layout)
    trained = [Combination(variant, layout, chosen[variant]) for variant in MODELS]
    ranks = pool.run(layout.ranks, train_three_steps, layout, [one.config for one in trained])
    for number, combination in enumerate(trained):
        check_combination(combination, [one[number] for one in ranks])


def check_combination(combination: Combination, ranks: Sequence[Trained]) -> None:
    options = combination.options
    check_against(
        combination.config.model,
        combination.layout,
        ranks,
        options.by_document,
        cases.recipe(options),
        sharded=options.zero_stage > 0,
    )


def test_the_layouts_are_all_factorisations() -> None:
    assert [sum(layout.ranks == ranks for layout in LAYOUTS) for ranks in (1, 2, 4, 8)] == [1, 3, 6, 10]
    assert len(set(LAYOUTS)) == 20


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_layout_sees_every_combination_of_options(layout: Layout) -> None:
    seen = {(one.sequence_parallel, one.overlap_grad_reduce) for one in cases.options(layout).values()}
    switches = (
        (False, True) if layout.tensor > 1 else (False,),
        (False, True) if layout.data > 1 else (False,),
    )
    assert seen == set(itertools.product(*switches))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.tensor > 1], ids=str)
def test_each_layout_overlaps_sequence_shards_with_products_once_and_once_not(layout: Layout) -> None:
    chosen = [one for one in cases.options(layout).values() if one.sequence_parallel]
    assert {one.tp_comm_overlap for one in chosen} == {False, True}


def test_each_variant_sees_every_schedule_and_each_layout_several() -> None:
    pipelines = [layout for layout in LAYOUTS if layout.pipeline > 1]
    chosen = {
        (layout, variant): one.pipeline_schedule
        for layout in pipelines
        for variant, one in cases.options(layout).items()
    }
    for variant in MODELS:
        assert {chosen[layout, variant] for layout in pipelines} == set(cases.SCHEDULES)
    for layout in pipelines:
        assert {chosen[layout, variant] for variant in MODELS} == set(cases.SCHEDULES)


@pytest.mark.parametrize("variant", MODELS)
def test_each_variant_sees_every_combination_of_options(variant: str) -> None:
    """With accumulation, with more micro-batches than stages, with fewer, with one; and clipping at work."""
    runs = [(layout, cases.options(layout)[variant]) for layout in LAYOUTS]
    seen = {(one.sequence_parallel, one.overlap_grad_reduce) for _, one in runs}
    assert seen == set(itertools.product((False, True), repeat=2))
    counts = [
        (cases.SAMPLES // (one.micro_batch_size * layout.data), layout.pipeline) for layout, one in runs
    ]
    assert any(microbatches == 8 for microbatches, _ in counts)
    assert any(1 < microbatches < stages for microbatches, stages in counts)
    assert any(microbatches == 1 for microbatches, stages in counts if stages > 1)
    assert any(microbatches > stages > 1 for microbatches, stages in counts)
    assert all(step.grad_norm > cases.RECIPE.clip_grad for step in reference(MODELS[variant]))


@pytest.mark.parametrize("variant", MODELS)
def test_each_variant_is_trained_plainly_with_documents_and_with_dropout(variant: str) -> None:
    runs = [cases.options(layout)[variant] for layout in LAYOUTS]
    assert {(one.by_document, one.dropout) for one in runs} == {(False, False), (True, False), (False, True)}


@pytest.mark.parametrize("variant", MODELS)
def test_each_variant_is_trained_with_every_loss_and_head(variant: str) -> None:
    """The fused head meets both losses, both kinds of tensor parallelism, and a split backward."""
    runs = [(layout, cases.options(layout)[variant]) for layout in LAYOUTS]
    both = set(itertools.product((False, True), repeat=2))
    assert {(one.linear_cross_entropy, one.regularised_loss) for _, one in runs} == both
    tensor_parallel = [one for layout, one in runs if layout.tensor > 1]
    assert {(one.linear_cross_entropy, one.sequence_parallel) for one in tensor_parallel} == both
    schedules = {one.pipeline_schedule for _, one in runs if one.linear_cross_entropy}
    assert len(schedules) >= 4
    assert schedules & {"zb-h1", "zbv"}


@pytest.mark.parametrize("variant", MODELS)
def test_each_variant_is_trained_with_its_state_on_the_device_the_host_and_both(variant: str) -> None:
    runs = [(layout, cases.options(layout)[variant]) for layout in LAYOUTS]
    places = {None, 1.0, 0.4}
    assert {one.offload_fraction for _, one in runs} == places
    assert {one.offload_fraction for layout, one in runs if layout.data > 1} == places


@pytest.mark.parametrize("variant", MODELS)
def test_each_variant_is_read_by_a_thread_by_one_process_and_by_two(variant: str) -> None:
    runs = [(layout, cases.options(layout)[variant].num_workers) for layout in LAYOUTS]
    assert {workers for _, workers in runs} == {0, 1, 2}
    assert {workers for layout, workers in runs if layout.data > 1} == {0, 1, 2}


def test_every_stage_of_sharding_meets_every_place_of_the_state() -> None:
    chosen = [one for layout in LAYOUTS for one in cases.options(layout).values()]
    met = {(one.zero_stage, one.offload_fraction) for one in chosen}
    assert met == set(itertools.product(range(4), (None, 1.0, 0.4)))


@pytest.mark.parametrize("variant", MODELS)
def test_each_variant_is_trained_with_every_mode_of_recompute(variant: str) -> None:
    runs = [cases.options(layout)[variant] for layout in LAYOUTS]
    assert {one.recompute for one in runs} == set(cases.RECOMPUTE)
    assert {one.offloaded_layers for one in runs} == {0, 1}


def test_recompute_meets_split_backwards_and_both_ways_to_cut_its_inputs() -> None:
    runs = [
        (one, cases.activations(MODELS[variant], layout, one))
        for layout in LAYOUTS
        for variant, one in cases.options(layout).items()
    ]
    split = {
        chosen.recompute_granularity for one, chosen in runs if one.pipeline_schedule in ("zb-h1", "zbv")
    }
    assert {"full", "selective"} <= split
    assert any(chosen.distribute_saved_activations for _, chosen in runs)
    assert any(one.sequence_parallel and chosen.recompute_granularity == "full" for one, chosen in runs)


def test_the_batches_are_uneven() -> None:
    for step in range(cases.STEPS):
        valid = global_batch(step).loss_mask.sum(dim=1)
        assert valid[4:8].sum() == 0, "a micro-batch of up to four samples without a valid token"
        assert len(valid.unique()) > 5


@pytest.mark.parametrize("variant", MODELS)
def test_each_variant_is_shared_out_at_every_stage(variant: str) -> None:
    runs = [cases.options(layout)[variant] for layout in LAYOUTS if layout.data > 1]
    assert {one.zero_stage for one in runs} == {0, 1, 2, 3}


def test_every_stage_meets_sequence_parallelism_overlap_and_both_losses() -> None:
    runs = [one for layout in LAYOUTS if layout.data > 1 for one in cases.options(layout).values()]
    for stage in range(4):
        same = [one for one in runs if one.zero_stage == stage]
        assert {one.sequence_parallel for one in same} == {False, True}
        assert {one.overlap_grad_reduce for one in same} == {False, True}
        assert {one.linear_cross_entropy for one in same} == {False, True}
        assert {one.overlap_param_gather for one in same} == ({False, True} if stage in (1, 2) else {False})
