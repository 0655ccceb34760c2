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
        yield "zero_stage", stage, rule, "1: PP has divided weights and gradients already"


@reads(*STAGE, "overlap_param_gather")
def there_is_something_to_gather(c: Candidate) -> Iterator[Finding]:
    stage, advice = zero_stage(c.config), "use --zero-stage 1 (--use-distributed-optimizer), or leave it out"
    if c.config.parallel.overlap_param_gather and stage == 0:
        yield "overlap_param_gather", None, "every rank updates all weights: none are gathered", advice
    if c.config.parallel.overlap_param_gather and stage == 3:
        rule = "stage 3 gathers each layer just ahead of its use anyway"
        yield "overlap_param_gather", None, rule, "leave it out"


RULES = (stage_is_given_once, gradients_are_not_shared_in_a_pipeline, there_is_something_to_gather)
