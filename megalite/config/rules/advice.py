"""Warnings: settings that change nothing, and what a user would want to know before a long run."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.batch_schedule import running_batch_schedule
from megalite.config.derived import padded_vocab_size, zero_stage
from megalite.config.rules.rule import Candidate, multiples_around
from megalite.config.schema.fields import flag_name

ROTARY = ("rotary_base", "rotary_percent", "rotary_interleaved")
YARN = (
    "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
)
DYNAMIC_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
BUCKETS = ("ddp_bucket_size", "ddp_num_buckets")
WSD = ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")

ROW_MULTIPLE = 16  # elements: what Triton must know of a row's length to read 16 bytes a thread


def warnings(c: Candidate) -> Iterator[str]:
    """Lines for the first rank to print. `c` has passed the rules."""
    config, batch = c.config, c.config.batch
    positions = config.model.position_embedding_type
    fp16, constant_scale = config.precision.params_dtype == "float16", config.precision.loss_scale is not None
    idle = [
        (ROTARY, not config.model.has_rotary_positions, "--position-embedding-type rope"),
        (("use_rope_scaling",), positions != "rope", "--position-embedding-type rope"),
        (("rope_scaling_factor",), not config.model.use_rope_scaling, "--use-rope-scaling"),
        (YARN, positions != "yarn", "--position-embedding-type yarn"),
        (DYNAMIC_SCALE, not fp16, "--fp16"),
        (DYNAMIC_SCALE, fp16 and constant_scale, "dynamic scaling, which --loss-scale replaces"),
        (BUCKETS, zero_stage(config) == 3, "--zero-stage below 3: at 3 a bucket is a layer"),
        (("zero_prefetch_layers",), zero_stage(config) != 3, "--zero-stage 3"),
        (WSD, config.optimizer.lr_decay_style != "WSD", "--lr-decay-style WSD"),
        (
            ("cross_entropy_chunk_mib",),
            config.loss.cross_entropy_fusion_impl != "linear",
            "--cross-entropy-fusion-impl linear",
        ),
        (
            ("optimizer_offload_fraction",),
            not config.optimizer.optimizer_cpu_offload,
            "--optimizer-cpu-offload",
        ),
        (
            ("store_param_remainders",),
            not (
                config.precision.use_precision_aware_optimizer and config.precision.params_dtype == "bfloat16"
            ),
            "--use-precision-aware-optimizer and --bf16",
        ),
        (("no_save_optim",), config.checkpoint.save is None, "--save"),
    ]
    for names, without, needed in idle:
        given = [flag_name(name) for name in names if name in c.given]
        if without and given:
            yield f"{', '.join(given)} has no effect without {needed}"
    # A recipe holds both intervals for whoever saves and evaluates.
    if config.checkpoint.save is None and config.checkpoint.save_interval and not batch.skip_train:
        yield "nothing will be saved: give --save FOLDER to keep what is trained"
    if config.evaluation.eval_iters == 0 and "eval_interval" in c.typed:
        yield "--eval-interval has no effect without --eval-iters above 0"
    slowest = 1 - 2.0**-8  # a slower change of a bf16 number is rounded away
    if config.precision.exp_avg_sq_dtype == "bf16" and config.optimizer.adam_beta2 > slowest:
        yield (
            f"--exp-avg-sq-dtype bf16 with --adam-beta2 {config.optimizer.adam_beta2:g}: the second moment "
            "hardly changes, as bf16 rounds changes below 1/256 away; 0.95 is usual"
        )
    yield from _unaligned(c)
    schedule = running_batch_schedule(config, config.data_parallel_size(c.world_size))
    taken = schedule.advance(0, batch.train_samples or 0)[1]
    rest = (batch.train_samples or 0) - taken
    if rest:
        yield f"the last {rest} of {batch.train_samples} samples fill no global batch and are not trained on"
    if schedule.sizes[-1] != batch.global_batch_size:
        yield (
            f"the global batch of {batch.global_batch_size} is decreased to {schedule.sizes[-1]}: another "
            "number of processes may train otherwise"
        )
    microbatches = config.num_microbatches(c.world_size)
    if microbatches < c.pp:
        yield (
            f"{microbatches} micro-batches a step keep {c.pp} pipeline stages idle most of the time; "
            "raise --global-batch-size"
        )


def _unaligned(c: Candidate) -> Iterator[str]:
    """Row lengths that no kernel can read 16 bytes a thread at a time."""
    model = c.config.model
    if c.config.precision.params_dtype == "float64":
        return
    vocabulary = padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, c.tp)
    rows = {
        "hidden_size": (model.hidden_size, 1),
        "ffn_hidden_size": (model.ffn_hidden_size, c.tp),
        "make_vocab_size_divisible_by": (vocabulary, c.tp),
    }
    for name, (length, parts) in rows.items():
        if length // parts % ROW_MULTIPLE:
            value = getattr(model, name)
            nearest = multiples_around(value, ROW_MULTIPLE * (1 if name.startswith("make") else parts))
            yield (
                f"{flag_name(name)} {value} makes rows of {length // parts} on a rank, no multiple of "
                f"{ROW_MULTIPLE}: kernels of a GPU read them element by element, several times slower; "
                f"nearest: {nearest}"
            )
