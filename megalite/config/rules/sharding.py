"""Rules of what the data-parallel ranks share out."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.derived import zero_stage
from megalite.config.rules.rule import Candidate, Finding, reads

STAGE = ("zero_stage", "use_distributed_optimizer")


@reads(*STAGE)
def stage_is_given_once(c: Candidate) -> Iterator[Finding]:
    parallel = c.config.parallel
    if parallel.use_distributed_optimizer and parallel.zero_stage == 0:
        rule = "contradicts --use-distributed-optimizer, which is stage 1"
        yield "zero_stage", 0, rule, "leave one of the two out"


@reads(*STAGE, "pipeline_model_parallel_size")
def gradients_are_not_shared_in_a_pipeline(c: Candidate) -> Iterator[Finding]:
    stage = zero_stage(c.config)
    if stage > 1 and c.pp > 1:
        rule = (
            f"would reduce all gradients{' and gather all weights twice' if stage == 3 else ''} in each of "
            f"the many micro-batches that PP {c.pp} needs"
        )
        yield "zero_stage", stage, rule, "use 1: PP has divided weights and gradients already"


@reads(*STAGE, "overlap_param_gather")
def there_is_something_to_gather(c: Candidate) -> Iterator[Finding]:
    stage, advice = zero_stage(c.config), "use --zero-stage 1 (--use-distributed-optimizer), or leave it out"
    if c.config.parallel.overlap_param_gather and stage == 0:
        yield "overlap_param_gather", None, "every rank updates all weights: none are gathered", advice
    if c.config.parallel.overlap_param_gather and stage == 3:
        rule = "stage 3 gathers each layer just ahead of its use anyway"
        yield "overlap_param_gather", None, rule, "leave it out"


@reads("ddp_bucket_size", "ddp_num_buckets")
def buckets_are_sized_once(c: Candidate) -> Iterator[Finding]:
    parallel = c.config.parallel
    if parallel.ddp_num_buckets is not None and parallel.ddp_bucket_size is not None:
        rule = f"contradicts --ddp-bucket-size {parallel.ddp_bucket_size}"
        yield "ddp_num_buckets", parallel.ddp_num_buckets, rule, "leave one of the two out"


@reads("grad_reduce_in_bf16", "params_dtype", "main_grads_dtype")
def gradients_of_bf16_travel_in_bf16(c: Candidate) -> Iterator[Finding]:
    dtype = c.config.precision.params_dtype
    if c.config.parallel.grad_reduce_in_bf16 and dtype != "bfloat16":
        rule = f"would round gradients of {dtype} weights"
        yield "grad_reduce_in_bf16", None, rule, "add --bf16, or leave it out"
    elif c.config.parallel.grad_reduce_in_bf16 and c.config.precision.main_grads_dtype == "bf16":
        rule = "gradients are bf16 already (--main-grads-dtype)"
        yield "grad_reduce_in_bf16", None, rule, "leave one of the two out"


RULES = (
    stage_is_given_once,
    gradients_are_not_shared_in_a_pipeline,
    there_is_something_to_gather,
    buckets_are_sized_once,
    gradients_of_bf16_travel_in_bf16,
)
