"""The typed settings, one file a concern."""

from megalite.config.schema.activations import ActivationConfig
from megalite.config.schema.batch import BatchConfig
from megalite.config.schema.checkpoint import CheckpointConfig
from megalite.config.schema.config import Config
from megalite.config.schema.data import DataConfig
from megalite.config.schema.loss import LossConfig
from megalite.config.schema.model import ModelConfig
from megalite.config.schema.optimizer import OptimizerConfig
from megalite.config.schema.parallel import ParallelConfig
from megalite.config.schema.precision import PrecisionConfig
from megalite.config.schema.reporting import EvaluationConfig, LoggingConfig
from megalite.config.schema.run import RunConfig

__all__ = [
    "ActivationConfig",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
]
