"""Rules of the run's length, the learning rate, and number formats."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.batch_schedule import batch_schedule
from megalite.config.derived import schedule_samples, split_sample_counts
from megalite.config.rules.rule import BATCH_SCHEDULES, Candidate, Finding, reads
from megalite.config.schema.fields import FP32_SMALLEST, flag_name
from megalite.limits import INT64_LARGEST

LENGTHS = ("train_iters", "train_samples")
BY_STEPS = ("lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters")
BY_SAMPLES = ("lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples")


@reads(*LENGTHS)
def length_is_given(c: Candidate) -> Iterator[Finding]:
    if c.config.batch.train_iters is None and c.config.batch.train_samples is None:
        yield "train_iters", None, "the length of the run is missing", "give --train-iters or --train-samples"


@reads("train_samples", "global_batch_size", "micro_batch_size", "seq_length", *BATCH_SCHEDULES)
def run_has_a_step(c: Candidate) -> Iterator[Finding]:
    samples, schedule = c.config.batch.train_samples, c.batch_schedule()
    if samples is not None and schedule is not None and samples < schedule.sizes[0]:
        step = schedule.sizes[0]
        yield "train_samples", samples, f"less than one global batch of {step}", f"at least {step}"


@reads(
    "train_iters", "train_samples", "global_batch_size", "micro_batch_size", "seq_length", *BATCH_SCHEDULES
)
def batch_schedule_is_readable(c: Candidate) -> Iterator[Finding]:
    batch = c.config.batch
    examples = ("such as 32 32 1000000", "such as '0:768 250B:1536'")
    for name, example in zip(BATCH_SCHEDULES, examples, strict=True):
        if not getattr(batch, name):
            continue
        given = getattr(batch, name)
        if batch.train_samples is None:
            yield name, given, "a batch that changes needs a length in samples", "give --train-samples"
        try:
            schedule = batch_schedule(batch, c.config.model.seq_length)
        except ValueError as error:
            yield name, given, str(error), example
            continue
        if schedule.sizes[-1] != batch.global_batch_size:
            rule = f"ends with {schedule.sizes[-1]}, not with --global-batch-size {batch.global_batch_size}"
            yield name, given, rule, "leave --global-batch-size out"


@reads(*LENGTHS, *BY_STEPS, *BY_SAMPLES)
def schedule_has_the_units_of_the_run(c: Candidate) -> Iterator[Finding]:
    batch, optimizer = c.config.batch, c.config.optimizer
    by_samples = batch.train_samples is not None
    for steps, samples in zip(BY_STEPS, BY_SAMPLES, strict=True):
        wrong, right = (steps, samples) if by_samples else (samples, steps)
        if getattr(optimizer, wrong):
            length = "--train-samples" if by_samples else "--train-iters"
            yield wrong, getattr(optimizer, wrong), f"does not go with {length}", f"use {flag_name(right)}"


@reads("lr", "min_lr", "lr_warmup_init")
def rates_are_ordered(c: Candidate) -> Iterator[Finding]:
    optimizer = c.config.optimizer
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(optimizer, name) > optimizer.lr:
            rule = f"above the peak learning rate --lr {optimizer.lr:g}"
            yield name, getattr(optimizer, name), rule, f"at most {optimizer.lr:g}"


@reads(
    *LENGTHS,
    *BY_STEPS,
    *BY_SAMPLES,
    "lr_warmup_fraction",
    "lr_decay_style",
    "global_batch_size",
    "micro_batch_size",
)
def schedule_fits(c: Candidate) -> Iterator[Finding]:
    optimizer, by_samples = c.config.optimizer, c.config.batch.train_samples is not None
    lengths = schedule_samples(optimizer, c.config.batch)
    if lengths.decay == 0:
        return  # the length of the run is missing, which is an error of its own
    unit = 1 if by_samples else c.config.batch.global_batch_size
    word = "samples" if by_samples else "steps"
    if lengths.warmup >= lengths.decay:
        name = BY_SAMPLES[0] if by_samples else BY_STEPS[0]
        rule = (
            f"the warm-up is not shorter than the decay of {lengths.decay // unit} {word}, which includes it"
        )
        yield name, getattr(optimizer, name), rule, f"at most {lengths.decay // unit - 1}"
    if optimizer.lr_decay_style == "WSD":
        name = BY_SAMPLES[2] if by_samples else BY_STEPS[2]
        if not lengths.wsd_decay:
            rule = "is required with --lr-decay-style WSD"
            yield name, None, rule, f"a tenth of the run is usual: {max(1, lengths.decay // unit // 10)}"
        elif lengths.wsd_decay > lengths.decay - lengths.warmup:
            rest = int((lengths.decay - lengths.warmup) // unit)
            rule = f"longer than the {rest} {word} between warm-up and end"
            yield name, getattr(optimizer, name), rule, f"at most {rest}"


@reads("params_dtype", "loss_scale", "initial_loss_scale", "min_loss_scale")
def loss_scales_are_ordered(c: Candidate) -> Iterator[Finding]:
    precision = c.config.precision
    if precision.params_dtype == "float16" and precision.min_loss_scale > precision.initial_loss_scale:
        rule = f"above --initial-loss-scale {precision.initial_loss_scale:g}"
        yield "min_loss_scale", precision.min_loss_scale, rule, f"at most {precision.initial_loss_scale:g}"


@reads("params_dtype", "adam_eps", "norm_epsilon")
def epsilons_are_not_zero(c: Candidate) -> Iterator[Finding]:
    given = {"adam_eps": c.config.optimizer.adam_eps, "norm_epsilon": c.config.model.norm_epsilon}
    for name, value in given.items():
        if c.config.precision.params_dtype != "float64" and value < FP32_SMALLEST:
            yield name, value, "is lost in fp32, which it is used in", f"at least {FP32_SMALLEST:.8g}"


@reads(
    *LENGTHS,
    *BATCH_SCHEDULES,
    *("eval_iters", "eval_interval", "global_batch_size", "micro_batch_size", "seq_length"),
)
def tokens_can_be_counted(c: Candidate) -> Iterator[Finding]:
    if c.batch_schedule() is None:
        return  # its own rule says it
    batch, seq = c.config.batch, c.config.model.seq_length
    training, validation, _ = split_sample_counts(c.config)
    by = "train_iters" if batch.train_samples is None else "train_samples"
    for name, value, samples in (
        (by, getattr(batch, by), training),
        ("eval_iters", c.config.evaluation.eval_iters, validation),
    ):
        if samples * seq > INT64_LARGEST:
            rule = f"{samples} samples of {seq} tokens in the whole run are too many to be counted in 64 bits"
            yield name, value, rule, f"at most {INT64_LARGEST // seq // (samples // value)}"


RULES = (
    length_is_given,
    run_has_a_step,
    batch_schedule_is_readable,
    tokens_can_be_counted,
    epsilons_are_not_zero,
    schedule_has_the_units_of_the_run,
    rates_are_ordered,
    schedule_fits,
    loss_scales_are_ordered,
)
