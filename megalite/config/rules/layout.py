"""Rules between the model, the batch, and the ranks they are spread over."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.pipeline_split import pipeline_schedule, stage_layers, virtual_stages
from megalite.config.rules.rule import Candidate, Finding, divisors, listed, multiples_around, reads

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
ENDS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
PIPELINE = ("pipeline_schedule", *VIRTUAL, "microbatch_group_size_per_virtual_pipeline_stage", *ENDS)


@reads("world_size", TP, PP)
def world_is_divisible(c: Candidate) -> Iterator[Finding]:
    ranks = c.tp * c.pp
    if c.world_size % ranks:
        rule = f"{c.world_size} processes not divisible by TP {c.tp} x PP {c.pp} = {ranks}"
        counts, sizes = multiples_around(c.world_size, ranks), listed(divisors(c.world_size))
        name, value = (TP, c.tp) if c.tp > 1 else (PP, c.pp)
        yield name, value, rule, f"start {counts} processes, or choose TP x PP from {sizes}"


@reads("num_attention_heads", TP)
def heads_are_divisible(c: Candidate) -> Iterator[Finding]:
    heads = c.config.model.num_attention_heads
    if heads % c.tp:
        rule = f"{heads} heads not divisible by TP {c.tp}"
        yield "num_attention_heads", heads, rule, f"valid TP: {listed(divisors(heads))}"


@reads("num_query_groups", "group_query_attention", "num_attention_heads", TP)
def groups_are_divisible(c: Candidate) -> Iterator[Finding]:
    groups, heads = c.config.model.num_query_groups, c.config.model.num_attention_heads
    if groups == heads:
        return  # the rule of the heads says it
    if groups % c.tp and c.tp % groups:
        valid = [tp for tp in divisors(heads) if groups % tp == 0 or tp % groups == 0]
        rule = f"{groups} query groups not divisible by TP {c.tp}, nor TP by them"
        yield "num_query_groups", groups, rule, f"valid TP: {listed(valid)}"


@reads("ffn_hidden_size", "swiglu", "hidden_size", TP)
def ffn_is_divisible(c: Candidate) -> Iterator[Finding]:
    ffn = c.config.model.ffn_hidden_size
    if ffn % c.tp:
        rule = f"MLP width {ffn} not divisible by TP {c.tp}"
        yield "ffn_hidden_size", ffn, rule, f"nearest: {multiples_around(ffn, c.tp)}"


@reads("num_layers", PP, *PIPELINE)
def layers_are_divisible(c: Candidate) -> Iterator[Finding]:
    layers, chunks = c.config.model.num_layers, virtual_stages(c.config)
    if c.pp == 1:
        return  # one stage holds all; what asks for several is refused by its own rule
    try:
        stage_layers(c.config)
    except ValueError as error:
        stages = c.pp * chunks
        cut = f"PP {c.pp}" if chunks == 1 else f"PP {c.pp} x {chunks} chunks"
        if layers % stages == 0 or not _even(c):
            advice = "change the layers of the first or last stage, or what is counted as a layer"
            yield "num_layers", layers, str(error), advice
        else:
            advice = f"valid PP: {listed(divisors(layers))}; or {multiples_around(layers, stages)} layers"
            yield "num_layers", layers, f"{layers} layers not divisible by {cut}", advice


def _even(c: Candidate) -> bool:
    """Whether all stages are meant to be equal."""
    parallel = c.config.parallel
    given = (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers)
    counted = (parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split)
    return given == (None, None) and not any(counted)


@reads("num_layers", PP, *PIPELINE)
def schedule_fits(c: Candidate) -> Iterator[Finding]:
    parallel, schedule = c.config.parallel, pipeline_schedule(c.config)
    virtual = {name: getattr(parallel, name) for name in VIRTUAL if getattr(parallel, name) is not None}
    name, value = next(iter(virtual.items()), ("pipeline_schedule", schedule))
    if schedule in ("interleaved", "zbv") and c.pp == 1:
        yield name, value, f"{schedule} needs PP > 1", "leave it out, or set --pipeline-model-parallel-size 2"
    if virtual and schedule != "interleaved":
        yield name, value, f"is for the interleaved schedule, not {schedule}", "leave one of the two out"
    if len(virtual) > 1:
        yield name, value, "says with another flag how many chunks there are", f"give one of {len(virtual)}"
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None and (schedule != "interleaved" or group < c.pp):
        rule = (
            "is for the interleaved schedule" if schedule != "interleaved" else f"is smaller than PP {c.pp}"
        )
        yield (
            "microbatch_group_size_per_virtual_pipeline_stage",
            group,
            rule,
            f"leave it out: PP {c.pp} is used",
        )


@reads("num_layers", PP, *PIPELINE)
def ends_are_of_a_pipeline(c: Candidate) -> Iterator[Finding]:
    for name in ENDS:
        value = getattr(c.config.parallel, name)
        if value in (None, False):
            continue
        if c.pp == 1:
            yield name, value, "needs PP > 1", "leave it out: one stage holds all layers"
        elif virtual_stages(c.config) > 1 and value is not True:
            advice = "count the embedding or the loss as a layer instead, or use 1f1b"
            yield name, value, "is not for several chunks a rank", advice


@reads("sequence_parallel", "seq_length", TP)
def sequence_parallel_fits(c: Candidate) -> Iterator[Finding]:
    if not c.config.parallel.sequence_parallel:
        return
    seq = c.config.model.seq_length
    if c.tp == 1:
        yield "sequence_parallel", None, "needs TP > 1", f"leave it out, or set --{TP.replace('_', '-')} 2"
    elif seq % c.tp:
        rule = f"{seq} tokens not divisible by TP {c.tp}, as --sequence-parallel needs"
        yield "seq_length", seq, rule, f"nearest: {multiples_around(seq, c.tp)}"


@reads("world_size", "global_batch_size", "micro_batch_size", TP, PP)
def global_batch_is_divisible(c: Candidate) -> Iterator[Finding]:
    if c.world_size % (c.tp * c.pp):
        return  # the data-parallel size is not known
    micro, dp = c.config.batch.micro_batch_size, c.config.data_parallel_size(c.world_size)
    samples = c.config.batch.global_batch_size
    if samples % (micro * dp):
        rule = f"{samples} samples not divisible by micro-batch {micro} x DP {dp} = {micro * dp}"
        yield "global_batch_size", samples, rule, f"nearest: {multiples_around(samples, micro * dp)}"


RULES = (
    world_is_divisible,
    heads_are_divisible,
    groups_are_divisible,
    ffn_is_divisible,
    layers_are_divisible,
    schedule_fits,
    ends_are_of_a_pipeline,
    sequence_parallel_fits,
    global_batch_is_divisible,
)
