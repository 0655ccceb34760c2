"""Rules between the model, the batch, and the tensor- and data-parallel ranks they are spread over."""

from __future__ import annotations

from collections.abc import Iterator

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

BATCH = ("global_batch_size", "micro_batch_size", *BATCH_SCHEDULES, "decrease_batch_size_if_needed")


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


@reads("tp_comm_overlap", "sequence_parallel")
def overlap_has_shards(c: Candidate) -> Iterator[Finding]:
    if c.config.parallel.tp_comm_overlap and not c.config.parallel.sequence_parallel:
        rule = "cuts communication by the shards of --sequence-parallel, which is off"
        yield "tp_comm_overlap", None, rule, "add --sequence-parallel, or leave it out"


@reads("world_size", "seq_length", *BATCH, TP, PP)
def global_batch_is_divisible(c: Candidate) -> Iterator[Finding]:
    if c.world_size % (c.tp * c.pp):
        return  # the data-parallel size is not known
    batch, dp = c.config.batch, c.config.data_parallel_size(c.world_size)
    micro, multiple = batch.micro_batch_size, batch.micro_batch_size * dp
    name, schedule = "global_batch_size", c.batch_schedule()
    if schedule is None:
        return  # its own rule says it
    for size in sorted({*schedule.sizes, batch.global_batch_size}):
        if batch.decrease_batch_size_if_needed and size >= multiple:
            continue
        if size % multiple:
            rule = f"{size} samples not divisible by micro-batch {micro} x DP {dp} = {multiple}"
            scheduled = [other for other in BATCH_SCHEDULES if getattr(batch, other)]
            name = scheduled[0] if scheduled and size != batch.global_batch_size else name
            yield name, getattr(batch, name), rule, f"nearest: {multiples_around(size, multiple)}"
            return


RULES = (
    world_is_divisible,
    heads_are_divisible,
    groups_are_divisible,
    ffn_is_divisible,
    sequence_parallel_fits,
    overlap_has_shards,
    global_batch_is_divisible,
)
