"""Rules of the optimizer's number formats, of where it keeps its state, and of what computes its update."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.rules.rule import Candidate, Finding, reads
from megalite.config.schema.fields import flag_name

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


@reads("optimizer_impl", "use_precision_aware_optimizer", "optimizer_cpu_offload", "params_dtype")
def apex_can_compute_it(c: Candidate) -> Iterator[Finding]:
    optimizer, precision, name = c.config.optimizer, c.config.precision, "optimizer_impl"
    if optimizer.optimizer_impl != "apex":
        return
    import torch  # only here: config is read without it

    from megalite.kernels.apex import has_apex

    if not has_apex():
        rule = "NVIDIA's apex with its CUDA extensions is not installed (no module amp_C)"
        yield name, "apex", rule, "auto, or build apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"
    elif not torch.cuda.is_available():
        yield name, "apex", "works on NVIDIA GPUs only, and there is none", "auto"
    for other in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if getattr(optimizer, other, False) or getattr(precision, other, False):
            yield name, "apex", f"does not go with {flag_name(other)}", "auto"
    if precision.params_dtype == "float64":
        yield name, "apex", "does not compute in fp64", "auto"


RULES = (narrow_formats_are_asked_for, apex_can_compute_it)
