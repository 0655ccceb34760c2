"""Settings of a run: typed dataclasses, the command line made from them, and every rule between them."""

from .schema import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
]
