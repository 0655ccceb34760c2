"""Rules of recompute and offload."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.errors import nearest
from megalite.config.pipeline_split import stage_layers
from megalite.config.rules.pipeline import PIPELINE
from megalite.config.rules.rule import PP, TP, Candidate, Finding, multiples_around, reads
from megalite.config.schema.activations import DEFAULT_PARTS, PARTS

GRANULARITY = ("recompute_granularity", "recompute_budget")
WITHIN = {"attn": ("core_attn", "rope"), "mlp": ("mlp_act",)}  # parts of a part
ELSEWHERE = {"layernorm": "norm is its name here"}


@reads(*GRANULARITY, "recompute_method", "recompute_num_layers")
def full_recompute_is_complete(c: Candidate) -> Iterator[Finding]:
    chosen = c.config.activations
    rest = {
        "recompute_method": chosen.recompute_method,
        "recompute_num_layers": chosen.recompute_num_layers,
    }
    if chosen.recompute_granularity == "full":
        for name, value in rest.items():
            if value is None:
                advice = "every layer: --recompute-method uniform --recompute-num-layers 1"
                yield name, None, "is required with --recompute-granularity full", advice
        return
    for name, value in rest.items():
        if value is not None:
            yield name, value, "is for --recompute-granularity full", "add that, or leave it out"


@reads("num_layers", PP, *PIPELINE, *GRANULARITY, "recompute_num_layers", "cpu_offloading_num_layers")
def chunks_have_the_layers(c: Candidate) -> Iterator[Finding]:
    try:
        most = max(map(len, stage_layers(c.config)))
    except ValueError:
        return  # the rule of the layers says it
    chosen = c.config.activations
    for name in ("recompute_num_layers", "cpu_offloading_num_layers"):
        value = getattr(chosen, name)
        if value is not None and value > most:
            yield name, value, f"more than the {most} layers of a pipeline chunk", f"at most {most}"


@reads(*GRANULARITY, "recompute_modules", "position_embedding_type", "cross_entropy_fusion_impl")
def parts_are_known(c: Candidate) -> Iterator[Finding]:
    chosen = c.config.activations
    names = chosen.recompute_modules
    if names != DEFAULT_PARTS and chosen.recompute_granularity != "selective":
        advice = "add --recompute-granularity selective, or leave it out"
        yield "recompute_modules", names, "is for --recompute-granularity selective", advice
        return
    for name in names:
        if name not in PARTS:
            advice = ELSEWHERE.get(name) or nearest(name, PARTS) or f"choose from {', '.join(PARTS)}"
            yield "recompute_modules", name, "no such part", advice
    for whole, parts in WITHIN.items():
        doubled = [part for part in parts if whole in names and part in names]
        if doubled:
            rule = f"{whole} contains {' and '.join(doubled)}; recompute is not nested"
            yield "recompute_modules", names, rule, f"leave out {whole}, or {' and '.join(doubled)}"
    if "logits" in names and c.config.loss.cross_entropy_fusion_impl == "linear":
        rule = "--cross-entropy-fusion-impl linear never holds all logits"
        yield "recompute_modules", "logits", rule, "leave it out"
    if "rope" in names and not c.config.model.has_rotary_positions:
        yield "recompute_modules", "rope", "the model has no rotary positions", "leave it out"
    if not names and chosen.recompute_granularity == "selective":
        yield "recompute_modules", names, "no part is named", f"choose from {', '.join(PARTS)}"


@reads(*GRANULARITY, "recompute_modules")
def budget_chooses_alone(c: Candidate) -> Iterator[Finding]:
    chosen = c.config.activations
    if chosen.recompute_budget is None:
        return
    if chosen.recompute_granularity == "full":
        rule = "chooses parts, but --recompute-granularity full makes whole layers again"
        yield "recompute_budget", chosen.recompute_budget, rule, "leave out one of the two"
    elif chosen.recompute_granularity == "selective" and chosen.recompute_modules != DEFAULT_PARTS:
        rule = "chooses the parts, which --recompute-modules names too"
        yield "recompute_budget", chosen.recompute_budget, rule, "leave out one of the two"


@reads(TP, *GRANULARITY, "distribute_saved_activations", "sequence_parallel", "seq_length")
def inputs_can_be_distributed(c: Candidate) -> Iterator[Finding]:
    chosen, seq = c.config.activations, c.config.model.seq_length
    if not chosen.distribute_saved_activations:
        return
    name = "distribute_saved_activations"
    if chosen.recompute_granularity != "full":
        yield name, True, "is for --recompute-granularity full", "add that, or leave it out"
    if c.tp == 1:
        yield name, True, "needs TP > 1", "leave it out"
    elif c.config.parallel.sequence_parallel:
        yield name, True, "--sequence-parallel cuts activations already", "leave it out"
    elif seq % c.tp:
        rule = f"{seq} tokens not divisible by TP {c.tp}"
        yield name, True, rule, f"leave it out; nearest --seq-length: {multiples_around(seq, c.tp)}"


RULES = (
    full_recompute_is_complete,
    chunks_have_the_layers,
    parts_are_known,
    budget_chooses_alone,
    inputs_can_be_distributed,
)
