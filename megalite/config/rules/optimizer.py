"""Rules of the optimizer's number formats."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.rules.rule import Candidate, Finding, reads

NARROW = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@reads("use_precision_aware_optimizer", "params_dtype", *NARROW)
def narrow_formats_are_asked_for(c: Candidate) -> Iterator[Finding]:
    precision = c.config.precision
    for name in NARROW:
        value = getattr(precision, name)
        if value == "fp32":
            continue
        if not precision.use_precision_aware_optimizer:
            yield (
                name,
                value,
                "needs --use-precision-aware-optimizer, as in Megatron",
                "add it, or leave this out",
            )
        if precision.params_dtype == "float64":
            yield name, value, "fp64 weights have an fp64 optimizer", "fp32, which then stands for fp64"
        elif name == "main_grads_dtype" and precision.params_dtype != "bfloat16":
            yield name, value, f"does not go with {precision.params_dtype} weights", "fp32, or --bf16 weights"


RULES = (narrow_formats_are_asked_for,)
