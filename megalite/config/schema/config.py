"""`Config`: all groups of settings, and the numbers that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from megalite.config.schema.activations import ActivationConfig
from megalite.config.schema.batch import BatchConfig
from megalite.config.schema.checkpoint import CheckpointConfig
from megalite.config.schema.data import DataConfig
from megalite.config.schema.loss import LossConfig
from megalite.config.schema.model import ModelConfig
from megalite.config.schema.optimizer import OptimizerConfig
from megalite.config.schema.parallel import ParallelConfig
from megalite.config.schema.precision import PrecisionConfig
from megalite.config.schema.reporting import EvaluationConfig, LoggingConfig
from megalite.config.schema.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. Groups without a default hold something that every run must give."""

    model: ModelConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    loss: LossConfig = field(default_factory=LossConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas of the model: world size / (tensor x pipeline)."""
        return world_size // (
            self.parallel.tensor_model_parallel_size * self.parallel.pipeline_model_parallel_size
        )

    def num_microbatches(self, world_size: int) -> int:
        """Forward passes of one data-parallel rank in one optimizer step."""
        return self.batch.global_batch_size // (
            self.batch.micro_batch_size * self.data_parallel_size(world_size)
        )
