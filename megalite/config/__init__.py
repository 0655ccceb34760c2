"""Settings of a run: typed dataclasses, the command line made from them, and every rule between them."""

from megalite.config.batch_schedule import BatchSchedule, running_batch_schedule
from megalite.config.blend import Blend, parse_blend, parse_split, read_data_args
from megalite.config.derived import (
    ScheduleSamples,
    kv_replicas,
    padded_vocab_size,
    parameter_count,
    schedule_samples,
    split_sample_counts,
    train_iterations,
    train_samples,
    zero_stage,
)
from megalite.config.errors import ConfigError, ConfigErrors, exit_with_errors
from megalite.config.parse import config_from_dict, parse, parse_command, parse_or_exit, validate
from megalite.config.pipeline_split import (
    pipeline_schedule,
    split_layers,
    stage_count,
    stage_layers,
    virtual_stages,
)
from megalite.config.schema import (
    ActivationConfig,
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)
from megalite.config.settings import replace, to_dict
from megalite.config.yaml_file import to_yaml

__all__ = [
    "ActivationConfig",
    "BatchConfig",
    "BatchSchedule",
    "Blend",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "ConfigErrors",
    "DataConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "ScheduleSamples",
    "config_from_dict",
    "exit_with_errors",
    "kv_replicas",
    "padded_vocab_size",
    "parameter_count",
    "parse",
    "parse_blend",
    "parse_command",
    "parse_or_exit",
    "parse_split",
    "pipeline_schedule",
    "read_data_args",
    "replace",
    "running_batch_schedule",
    "schedule_samples",
    "split_layers",
    "split_sample_counts",
    "stage_count",
    "stage_layers",
    "to_dict",
    "to_yaml",
    "train_iterations",
    "train_samples",
    "validate",
    "virtual_stages",
    "zero_stage",
]
