"""Bytes that a layer keeps in every mode of recompute, beside the published formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megalite.config import (
    BatchConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    replace,
)
from megalite.model.saved_bytes import layer_bytes

NOTHING = "nothing"
SELECTIVE = ("norm", "mlp_act", "norm mlp_act", "core_attn", "norm mlp_act core_attn", "attn", "mlp")
WITH_ROPE = ("norm mlp_act rope", "norm mlp_act rope core_attn")
FULL, DISTRIBUTED = "full", "full, distributed"

GPT = ModelConfig(
    num_layers=1,
    hidden_size=12288,
    num_attention_heads=96,
    seq_length=2048,
    max_position_embeddings=2048,
    vocab_size=50257,
)
LLAMA = ModelConfig(
    num_layers=1,
    hidden_size=4096,
    num_attention_heads=32,
    group_query_attention=True,
    num_query_groups=8,
    ffn_hidden_size=14336,
    seq_length=8192,
    max_position_embeddings=8192,
    vocab_size=128256,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
REFERENCES = {"GPT-3 175B": GPT, "Llama 3 8B": LLAMA}


@dataclass(frozen=True)
class Row:
    """One mode of one layout. `kept`: bytes of a layer and micro-batch on a rank.

    `per_sbh`: the same in units of seq x batch x hidden; `published`: Korthikanti et al. 2022 (arXiv
    2205.05198), in that unit, None where they have no formula. `extra_flops`: what is computed again, as a
    share of the layer's forward and backward.
    """

    mode: str
    tensor_parallel: int
    sequence_parallel: bool
    kept: int
    per_sbh: float
    published: float | None
    extra_flops: float


def reference_config(model: ModelConfig, tensor_parallel: int, sequence_parallel: bool) -> Config:
    """bf16, one sample a micro-batch."""
    return Config(
        model=model,
        batch=BatchConfig(micro_batch_size=1, global_batch_size=1, train_iters=1),
        optimizer=OptimizerConfig(lr=1e-4),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tensor_parallel, sequence_parallel=sequence_parallel
        ),
        precision=PrecisionConfig(params_dtype="bfloat16"),
    )


def rows_of(config: Config) -> Iterator[Row]:
    """Every mode on the layout of `config`, whose own recompute and offload do not count."""
    model, parallel = config.model, config.parallel
    tp, split = parallel.tensor_model_parallel_size, parallel.sequence_parallel
    sbh = model.seq_length * config.batch.micro_batch_size * model.hidden_size
    is_published = not model.swiglu and model.ffn_hidden_size == 4 * model.hidden_size
    is_published &= config.precision.params_dtype in ("bfloat16", "float16")
    plain = None
    for mode, changes in _modes(config):
        held = layer_bytes(replace(config, recompute_budget=None, cpu_offloading_num_layers=0, **changes))
        plain = plain or held
        published = published_per_sbh(mode, tp, split) if is_published else None
        extra = held.flops / plain.flops - 1
        yield Row(mode, tp, split, held.kept, held.kept / sbh, published, extra)


def _modes(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    yield NOTHING, {"recompute_granularity": None, "distribute_saved_activations": False}
    for parts in SELECTIVE + (WITH_ROPE if config.model.has_rotary_positions else ()):
        yield parts, {"recompute_granularity": "selective", "recompute_modules": tuple(parts.split())}
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    yield FULL, whole
    if config.parallel.tensor_model_parallel_size > 1 and not config.parallel.sequence_parallel:
        yield DISTRIBUTED, {**whole, "distribute_saved_activations": True}


def published_per_sbh(mode: str, tensor_parallel: int, sequence_parallel: bool) -> float | None:
    """Bytes a layer over seq x batch x hidden in 16 bits, from Korthikanti et al. 2022, table 2.

    Where nothing is recomputed theirs is the row without attention's scores, which are never stored here.
    """
    if mode == NOTHING:
        return 34 / tensor_parallel if sequence_parallel else 10 + 24 / tensor_parallel
    if mode == FULL:
        return 2 / tensor_parallel if sequence_parallel else 2
    return 2 / tensor_parallel if mode == DISTRIBUTED else None


def reference_table() -> Table:
    """Both reference layers with tensor parallelism 1, 2 and 4, with and without sequence parallelism."""
    table = _empty("layer", "TP", "SP")
    for name, model in REFERENCES.items():
        for tp, split in ((1, False), (2, False), (2, True), (4, False), (4, True)):
            for row in rows_of(reference_config(model, tp, split)):
                table.add_row(name, str(tp), "yes" if split else "", *_cells(row))
            table.add_section()
    return table


def table_of(config: Config) -> Table:
    """A layer of the configured run."""
    table = _empty()
    for row in rows_of(config):
        table.add_row(*_cells(row))
    return table


def _empty(*first: str) -> Table:
    table = Table(title="bytes a layer keeps for one micro-batch on one rank")
    for column in (*first, "recomputed", "bytes", "/ (s b h)", "published", "FLOPs"):
        table.add_column(column, justify="left" if column in ("layer", "recomputed") else "right")
    return table


def _cells(row: Row) -> tuple[str, ...]:
    published = "" if row.published is None else f"{row.published:g}"
    return row.mode, f"{row.kept:,}", f"{row.per_sbh:.3f}", published, f"{row.extra_flops:+.2%}"
