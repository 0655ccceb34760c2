"""What is measured and where it is written: evaluation and logging."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema.fields import setting
from megalite.limits import INT32_LARGEST


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Validation during training, and the test at its end."""

    eval_iters: int = setting(
        100,
        "Global batches in one evaluation. Megatron's 100 can cost more than the training between two of "
        "them; 10 is often enough.",
        minimum=0,
        maximum=INT32_LARGEST,
    )
    eval_interval: int | None = setting(
        None,
        "Evaluate after every so many steps. Default: only at the end of the run, as recent Megatron.",
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The console line, TensorBoard, and the JSON-lines file."""

    log_interval: int = setting(
        100, "Print a line after every so many steps. 1 to 10 for short runs.", minimum=1
    )
    log_throughput: bool = setting(False, "Print TFLOP/s a GPU: every line has it here, given or not.")
    timing_log_level: int = setting(
        0,
        "How fine the timers are: 0 the step only; 1 its parts (data, computing, communication that was not "
        "hidden, pipeline bubble, optimizer) and the hidden share of reductions; 2 that of each bucket too.",
        minimum=0,
        maximum=2,
    )
    memory_report: bool = setting(
        True,
        "Print before training where the bytes of each rank will be, and after the first step what was "
        "measured. Takes a second or more at the start, most with many layers a rank; switch it off for many "
        "short runs. tools/plan.py memory tells the same without starting anything.",
    )
    tensorboard_dir: str | None = setting(None, "Folder for TensorBoard event files.")
    metrics_file: str | None = setting(
        None, "File that gets one JSON object for each logged step and evaluation."
    )
