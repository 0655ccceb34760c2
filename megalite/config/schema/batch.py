"""How much is trained: batch sizes, length of the run, when to stop."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema.fields import REQUIRED, setting
from megalite.limits import INT32_LARGEST

MOST_SAMPLES_A_STEP = 2**24  # their numbers are listed before each step


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch sizes in samples (sequences). Exactly one of `train_iters` and `train_samples` is given."""

    micro_batch_size: int = setting(
        REQUIRED,
        "Samples in one forward pass of one data-parallel rank. The largest that fits in memory; 1 to 8.",
        minimum=1,
        maximum=MOST_SAMPLES_A_STEP,
    )
    global_batch_size: int = setting(
        None,
        "Samples in one optimizer step, over all ranks; a multiple of micro-batch x data-parallel size, the "
        "quotient being the micro-batches a step. Default, as Megatron's trap: micro-batch x data-parallel "
        "size, so that adding GPUs changes the batch and with it the training. Give it. 4M tokens a step is "
        "usual for large models.",
        minimum=1,
        maximum=MOST_SAMPLES_A_STEP,
    )
    rampup_batch_size: tuple[int, ...] = setting(
        (),
        "START INCREMENT SAMPLES: the global batch grows from START to --global-batch-size by INCREMENT, "
        "evenly over the first SAMPLES samples. Small batches learn more a sample early on. Needs "
        "--train-samples. Recent Megatron reads it and ignores it.",
    )
    step_batch_size_schedule: str | None = setting(
        None,
        "Global batch sizes with the tokens from which each holds, such as '0:768 250B:1536 500B:3072' (K, "
        "M, B and T are powers of a thousand). The last is --global-batch-size, which can be left out. Needs "
        "--train-samples.",
    )
    decrease_batch_size_if_needed: bool = setting(
        False,
        "Round each global batch down to a multiple of micro-batch x data-parallel size, instead of refusing "
        "it. The trap: the training then depends on the number of GPUs.",
    )
    train_iters: int | None = setting(
        None,
        "Length of the run in optimizer steps; this or --train-samples.",
        minimum=1,
        maximum=INT32_LARGEST,
    )
    train_samples: int | None = setting(
        None, "Length of the run in samples; this or --train-iters.", minimum=1
    )
    exit_interval: int | None = setting(
        None,
        "Save and leave after the step whose number is divisible by this; the learning rate still follows "
        "the whole run.",
        minimum=1,
    )
    exit_duration_in_mins: int | None = setting(
        None,
        "Save and leave once the job has run for so many minutes, also from an evaluation. Set it below the "
        "cluster's time limit.",
        minimum=1,
    )
    exit_signal_handler: bool = setting(
        False, "On SIGTERM finish the step or the batch of an evaluation, save and leave, instead of dying."
    )
    skip_train: bool = setting(False, "Load, evaluate on validation and test, and leave.")

    def __post_init__(self) -> None:
        if (
            self.global_batch_size is None
        ):  # one data-parallel rank; `parse` knows the real number and gives it
            object.__setattr__(self, "global_batch_size", self.micro_batch_size)
