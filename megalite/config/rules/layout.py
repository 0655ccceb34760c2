"""Rules between the model, the batch, and the ranks they are spread over."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from .rule import Candidate, Finding, divisors, listed, multiples_around, reads

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


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
    if groups % c.tp:
        both = listed(divisors(gcd(groups, heads)))
        yield (
            "num_query_groups",
            groups,
            f"{groups} query groups not divisible by TP {c.tp}",
            f"valid TP: {both}",
        )


@reads("ffn_hidden_size", "swiglu", "hidden_size", TP)
def ffn_is_divisible(c: Candidate) -> Iterator[Finding]:
    ffn = c.config.model.ffn_hidden_size
    if ffn % c.tp:
        rule = f"MLP width {ffn} not divisible by TP {c.tp}"
        yield "ffn_hidden_size", ffn, rule, f"nearest: {multiples_around(ffn, c.tp)}"


@reads("num_layers", PP)
def layers_are_divisible(c: Candidate) -> Iterator[Finding]:
    layers = c.config.model.num_layers
    if layers % c.pp:
        rule = f"{layers} layers not divisible by PP {c.pp}"
        advice = f"valid PP: {listed(divisors(layers))}; or {multiples_around(layers, c.pp)} layers"
        yield "num_layers", layers, rule, advice


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
    sequence_parallel_fits,
    global_batch_is_divisible,
)
