"""Rules of the pipeline: which layers each stage holds, and the schedule or table that the stages follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from megalite.config.pipeline_layout import layers_of_stages
from megalite.config.pipeline_split import pipeline_schedule, stage_count, stage_layers
from megalite.config.rules.rule import (
    BATCH_SCHEDULES,
    PP,
    TP,
    Candidate,
    Finding,
    divisors,
    listed,
    multiples_around,
    reads,
)
from megalite.config.schedule_file import read_schedule_file
from megalite.config.schema.fields import flag_name

VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
ENDS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
LAYOUT, TABLE = "pipeline_model_parallel_layout", "pipeline_schedule_csv"
PIPELINE = ("pipeline_schedule", LAYOUT, TABLE, *VIRTUAL, GROUP, *ENDS)


@reads("num_layers", PP, *PIPELINE)
def layers_are_divisible(c: Candidate) -> Iterator[Finding]:
    layers, parallel = c.config.model.num_layers, c.config.parallel
    if parallel.pipeline_model_parallel_layout is not None or not _table_is_readable(c):
        return  # their own rules say it
    stages = stage_count(c.config)
    if stages == 1:
        return  # one stage holds all; what asks for several is refused by its own rule
    try:
        stage_layers(c.config)
    except ValueError as error:
        chunks = stages // c.pp
        cut = f"PP {c.pp}" if chunks == 1 else f"PP {c.pp} x {chunks} chunks"
        if parallel.pipeline_schedule_csv is not None:
            advice = f"{multiples_around(layers, stages)} layers, or --pipeline-model-parallel-layout"
            yield "num_layers", layers, f"{error} of the table", advice
        elif layers % stages == 0 or not _even(c):
            advice = "change the layers of the first or last stage, or what is counted as a layer"
            yield "num_layers", layers, str(error), advice
        else:
            advice = f"valid PP: {listed(divisors(layers))}; or {multiples_around(layers, stages)} layers"
            yield "num_layers", layers, f"{layers} layers not divisible by {cut}", advice


def _table_is_readable(c: Candidate) -> bool:
    """Also where there is no table."""
    try:
        stage_count(c.config)
    except ValueError:
        return False
    return True


def _even(c: Candidate) -> bool:
    """Whether all stages are meant to be equal."""
    parallel = c.config.parallel
    given = (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers)
    counted = (parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split)
    return given == (None, None) and not any(counted)


@reads("num_layers", PP, *PIPELINE)
def schedule_fits(c: Candidate) -> Iterator[Finding]:
    parallel = c.config.parallel
    if parallel.pipeline_model_parallel_layout is not None or parallel.pipeline_schedule_csv is not None:
        return  # their own rules say it
    schedule = pipeline_schedule(c.config)
    virtual = {name: getattr(parallel, name) for name in VIRTUAL if getattr(parallel, name) is not None}
    name, value = next(iter(virtual.items()), ("pipeline_schedule", schedule))
    if schedule in ("interleaved", "zbv") and c.pp == 1:
        yield name, value, f"{schedule} needs PP > 1", "leave it out, or set --pipeline-model-parallel-size 2"
    if virtual and schedule != "interleaved":
        yield name, value, f"is for the interleaved schedule, not {schedule}", "leave one of the two out"
    if len(virtual) > 1:
        yield name, value, "says with another flag how many chunks there are", f"give one of {len(virtual)}"


@reads("num_layers", PP, *PIPELINE)
def group_fits(c: Candidate) -> Iterator[Finding]:
    group, layout = getattr(c.config.parallel, GROUP), c.config.parallel.pipeline_model_parallel_layout
    if group is None or (layout is not None and _layout_problem(layout) is not None):
        return
    interleaves = (
        c.config.parallel.pipeline_schedule_csv is None and pipeline_schedule(c.config) == "interleaved"
    )
    if not interleaves or group < c.pp:
        rule = f"is smaller than PP {c.pp}" if interleaves else "is for the interleaved schedule"
        yield GROUP, group, rule, f"leave it out: PP {c.pp} is used"


@reads("num_layers", PP, *PIPELINE)
def ends_are_of_a_pipeline(c: Candidate) -> Iterator[Finding]:
    if c.config.parallel.pipeline_model_parallel_layout is not None or not _table_is_readable(c):
        return  # their own rules say it
    for name in ENDS:
        value = getattr(c.config.parallel, name)
        if value in (None, False):
            continue
        if c.pp == 1:
            yield name, value, "needs PP > 1", "leave it out: one stage holds all layers"
        elif stage_count(c.config) > c.pp and value is not True:
            advice = "count the embedding or the loss as a layer instead, or use 1f1b"
            yield name, value, "is not for several chunks a rank", advice


@reads("num_layers", PP, *PIPELINE)
def pipeline_layout_fits(c: Candidate) -> Iterator[Finding]:
    parallel, layout = c.config.parallel, c.config.parallel.pipeline_model_parallel_layout
    if layout is None:
        return
    for name in (*VIRTUAL, *ENDS):
        if getattr(parallel, name) not in (None, False):
            yield name, getattr(parallel, name), f"is said by {flag_name(LAYOUT)} too", "leave one out"
    if (problem := _layout_problem(layout)) is not None:
        example = f"E{'t' * min(c.config.model.num_layers, 3)}|t*2|tL"
        yield LAYOUT, layout, problem, f"such as {example}"
        return
    counts, wanted = layers_of_stages(layout), c.config.model.num_layers
    if sum(counts) != wanted:
        rule = f"its stages hold {sum(counts)} layers ({listed(counts[:16])}), the model has {wanted}"
        yield LAYOUT, layout, rule, f"write {wanted} t, or --num-layers {sum(counts)}"
    if parallel.pipeline_schedule_csv is not None:
        if _table_is_readable(c) and len(counts) != stage_count(c.config):
            rule = f"has {len(counts)} stages, the table {stage_count(c.config)}"
            yield LAYOUT, layout, rule, "give the table's stages"
        elif _table_is_readable(c):
            file = read_schedule_file(parallel.pipeline_schedule_csv)
            yield from _empty_ranks(layout, [{stage for stage, _, _ in cells} for cells in file.ranks])
        return
    if len(counts) % c.pp:
        rule = f"{len(counts)} stages not divisible by PP {c.pp}"
        yield LAYOUT, layout, rule, f"nearest: {multiples_around(len(counts), c.pp)} stages"
        return
    chunks, schedule = len(counts) // c.pp, pipeline_schedule(c.config)
    needed = {"zbv": (2,), "interleaved": range(1, len(counts) + 1)}.get(schedule, (1,))
    if chunks not in needed:
        rule = f"its {len(counts)} stages are {chunks} chunks a rank, and {schedule} has {needed[0]}"
        yield LAYOUT, layout, rule, f"write {needed[0] * c.pp} stages, or use another --pipeline-schedule"
    elif schedule in ("zbv", "interleaved") and c.pp == 1:
        yield LAYOUT, layout, f"{schedule} needs PP > 1", "write one stage"
    else:
        every, stages = range(c.pp), len(counts)
        v_shaped = [{rank, stages - 1 - rank} for rank in every]
        looped = [set(range(rank, stages, c.pp)) for rank in every]
        yield from _empty_ranks(layout, v_shaped if schedule == "zbv" else looped)


def _empty_ranks(layout: str, placement: Sequence[Set[int]]) -> Iterator[Finding]:
    """`placement`: the stages of each rank."""
    counts = layers_of_stages(layout)
    ends = {0, len(counts) - 1}
    empty = [
        rank
        for rank, stages in enumerate(placement)
        if not stages & ends and not any(counts[stage] for stage in stages)
    ]
    if empty:
        yield LAYOUT, layout, f"pipeline rank {empty[0]} would hold nothing", "give it a layer"


def _layout_problem(layout: str) -> str | None:
    try:
        layers_of_stages(layout)
    except ValueError as error:
        return str(error)
    return None


@reads(
    *("world_size", "global_batch_size", "micro_batch_size", "seq_length", TP, PP, "num_layers"),
    *PIPELINE,
    *BATCH_SCHEDULES,
)
def table_fits(c: Candidate) -> Iterator[Finding]:
    path = c.config.parallel.pipeline_schedule_csv
    if path is None:
        return
    for name in ("pipeline_schedule", *VIRTUAL):
        if getattr(c.config.parallel, name) is not None:
            yield name, getattr(c.config.parallel, name), f"is said by {flag_name(TABLE)} too", "leave it out"
    try:
        file = read_schedule_file(path)
    except ValueError as error:
        yield TABLE, path, str(error), "tools/plan.py schedule --write-csv writes one"
        return
    if len(file.ranks) != c.pp:
        rule = f"has {len(file.ranks)} lines, one a rank, and PP is {c.pp}"
        yield TABLE, path, rule, f"set --pipeline-model-parallel-size {len(file.ranks)}"
    schedule = c.batch_schedule()
    if schedule is not None and len(set(schedule.sizes)) > 1:
        rule = f"is for {file.microbatches} micro-batches a step, but the global batch changes"
        yield TABLE, path, rule, "use a --pipeline-schedule, which has a table for each number"
        return
    microbatches = c.config.num_microbatches(c.world_size)
    if microbatches and file.microbatches != microbatches:
        samples = file.microbatches * c.config.batch.global_batch_size // microbatches
        rule = f"is for {file.microbatches} micro-batches a step, and there are {microbatches}"
        yield TABLE, path, rule, f"set --global-batch-size {samples}, or write another table"


RULES = (
    layers_are_divisible,
    schedule_fits,
    group_fits,
    ends_are_of_a_pipeline,
    pipeline_layout_fits,
    table_fits,
)
