"""The typed settings, one file a concern."""

from .batch import BatchConfig
from .checkpoint import CheckpointConfig
from .config import Config
from .data import DataConfig
from .model import ModelConfig
from .optimizer import OptimizerConfig
from .parallel import ParallelConfig
from .precision import PrecisionConfig
from .reporting import EvaluationConfig, LoggingConfig
from .run import RunConfig

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
