"""Numbers that follow from the settings: pure functions, no torch, no files."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.config.batch_schedule import batch_schedule
from megalite.config.schema import BatchConfig, Config, ModelConfig, OptimizerConfig


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Rows of the embedding table: rounded up to a multiple of `divisible_by` x `tensor_parallel`."""
    multiple = divisible_by * tensor_parallel
    return math.ceil(vocab_size / multiple) * multiple


def kv_replicas(model: ModelConfig, tensor_parallel: int) -> int:
    """Tensor-parallel ranks that share a key/value head: 1 unless there are fewer heads than ranks."""
    return max(1, tensor_parallel // model.num_query_groups)


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model over its true vocabulary: no padded rows, tied weights once."""
    hidden, head = model.hidden_size, model.kv_channels
    norm = hidden * (2 if model.normalization == "LayerNorm" else 1)
    qkv = (model.num_attention_heads + 2 * model.num_query_groups) * head
    up = model.ffn_hidden_size * (2 if model.swiglu else 1)
    weights = (
        hidden * qkv
        + model.num_attention_heads * head * hidden
        + hidden * up
        + model.ffn_hidden_size * hidden
    )
    biases = qkv + hidden + up + hidden if model.add_bias_linear else qkv if model.add_qkv_bias else 0
    positions = (
        model.max_position_embeddings * hidden if model.position_embedding_type == "learned_absolute" else 0
    )
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    return (
        model.num_layers * (weights + biases + 2 * norm)
        + norm
        + tables * model.vocab_size * hidden
        + positions
    )


def zero_stage(config: Config) -> int:
    """What the data-parallel ranks share out: see `ParallelConfig.zero_stage`."""
    parallel = config.parallel
    if parallel.zero_stage is not None:
        return parallel.zero_stage
    return 1 if parallel.use_distributed_optimizer else 0


def train_iterations(config: Config) -> int:
    """Optimizer steps of the whole run; a rest of `train_samples` below one global batch is left out.

    Batches are as given, without what --decrease-batch-size-if-needed takes off. Raises ValueError for a
    batch schedule that cannot be read.
    """
    batch = config.batch
    if batch.train_samples is not None:
        return batch_schedule(batch, config.model.seq_length).advance(0, batch.train_samples)[0]
    return batch.train_iters or 0


def train_samples(config: Config) -> int:
    """Samples of the whole run, as the training dataset is asked for them."""
    batch = config.batch
    return batch.train_samples or (batch.train_iters or 0) * batch.global_batch_size


def split_sample_counts(config: Config) -> tuple[int, int, int]:
    """Samples wanted of the training, validation and test split, as in Megatron-LM; none for training that is
    skipped.

    Validation: one evaluation every `eval_interval` steps and one at the end.
    """
    evaluation = config.evaluation
    rounds = 1 + (train_iterations(config) // evaluation.eval_interval if evaluation.eval_interval else 0)
    one_evaluation = evaluation.eval_iters * config.batch.global_batch_size
    training = 0 if config.batch.skip_train else train_samples(config)
    return training, rounds * one_evaluation, one_evaluation


@dataclass(frozen=True)
class ScheduleSamples:
    """Lengths of the learning-rate schedule in samples. `wsd_decay` is 0 for other styles."""

    warmup: float
    decay: int
    wsd_decay: int


def schedule_samples(optimizer: OptimizerConfig, batch: BatchConfig) -> ScheduleSamples:
    """The schedule's lengths in samples, whether they were given in steps, samples or as a fraction.

    As in Megatron-LM the decay length includes the warm-up and defaults to the run, and a warm-up fraction is
    a share of the decay length, not rounded.
    """
    step = batch.global_batch_size
    if batch.train_samples is not None:
        decay = optimizer.lr_decay_samples or batch.train_samples
        warmup, wsd_decay = optimizer.lr_warmup_samples, optimizer.lr_wsd_decay_samples or 0
    else:
        decay = (optimizer.lr_decay_iters or batch.train_iters or 0) * step
        warmup, wsd_decay = optimizer.lr_warmup_iters * step, (optimizer.lr_wsd_decay_iters or 0) * step
    if optimizer.lr_warmup_fraction is not None:
        return ScheduleSamples(optimizer.lr_warmup_fraction * decay, decay, wsd_decay)
    return ScheduleSamples(float(warmup), decay, wsd_decay)
