"""What is trained on which layout: model variants, layouts, and which options each pair is run with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalite.config import (
    ActivationConfig,
    BatchConfig,
    Config,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)
from tests.matrix.tables import stages_of_a_table, table_file
from tests.reference.gpt import Architecture
from tests.reference.train import Recipe

SAMPLES = 16  # of a global batch
SEQ = 16
VOCAB = 61
STEPS = 3
SEED = 1234
LEARNING_RATES = (3e-3, 1e-3, 2e-3)
RECIPE = Recipe(adam_beta2=0.95, weight_decay=0.1, clip_grad=1.0)

GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=8,
    seq_length=SEQ,
    max_position_embeddings=SEQ + 3,
    vocab_size=VOCAB,
    make_vocab_size_divisible_by=4,  # padded to 64; on 8 ranks the last one has 5 of its 8 rows
)
LLAMA = replace(
    GPT2,
    num_attention_heads=16,
    group_query_attention=True,
    num_query_groups=8,
    kv_channels=4,
    ffn_hidden_size=48,
    position_embedding_type="rope",
    rotary_base=100.0,
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    make_vocab_size_divisible_by=16,  # padded to 64 and 128; on 8 ranks half of them hold nothing but padding
)
MODELS = {
    "gpt2": GPT2,
    "gpt2-untied": replace(
        GPT2,
        untie_embeddings_and_output_weights=True,
        make_vocab_size_divisible_by=1,
        apply_layernorm_1p=True,
    ),
    "llama": replace(
        LLAMA,
        untie_embeddings_and_output_weights=True,
        rotary_base=1e6,  # with 4 channels one pair is left alone, the other blended
        use_rope_scaling=True,
    ),
    "llama-tied": replace(
        LLAMA,
        num_query_groups=1,  # multi-query: one key and value for all ranks
        position_embedding_type="yarn",
        yarn_rotary_scaling_factor=4.0,
        yarn_original_max_position_embeddings=SEQ,
    ),
    "mixed": replace(
        LLAMA,
        num_query_groups=2,
        swiglu=False,
        add_qkv_bias=True,
        rotary_percent=0.5,
        rotary_interleaved=True,
        apply_layernorm_1p=True,
    ),
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; ranks are numbered tp fastest, then dp, then pp."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp, pp, dp) of a rank."""
        return rank % self.tensor, rank // (self.tensor * self.data), rank // self.tensor % self.data

    def __str__(self) -> str:
        return f"tp{self.tensor}-pp{self.pipeline}-dp{self.data}"


@dataclass(frozen=True)
class Options:
    """What must not change a number."""

    micro_batch_size: int
    sequence_parallel: bool = False
    overlap_grad_reduce: bool = False
    ddp_bucket_size: int | None = None
    pipeline_schedule: str | None = None
    by_document: bool = False
    dropout: bool = False
    gradient_accumulation_fusion: bool = True
    tp_comm_overlap: bool = False
    linear_cross_entropy: bool = False
    regularised_loss: bool = False
    pipeline_table: bool = False
    zero_stage: int = 0
    overlap_param_gather: bool = False
    recompute: str = ""
    offloaded_layers: int = 0
    offload_fraction: float | None = None
    num_workers: int = 0


SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "gpipe")
RECOMPUTE = (
    "full uniform 1",
    "selective norm mlp_act rope",
    "",
    "selective core_attn",
    "full block 1 distributed",
    "selective attn mlp_act logits",
    "full uniform 1 distributed",
    "selective norm mlp core_attn",
    "full uniform 2",
    "selective norm attn mlp",
    "selective norm mlp_act rope core_attn logits",
)
SIZES = (1, 2, 4, 8)
LAYOUTS = sorted(
    (Layout(t, p, d) for t in SIZES for p in SIZES for d in SIZES if t * p * d <= 8),
    key=lambda layout: layout.ranks,
)


def options(layout: Layout) -> dict[str, Options]:
    """For each model variant the options to use on `layout`.

    Sequence parallelism and overlap come in all four combinations on each layout that has both axes, and with
    each variant; schedules and the other options rotate. Where an axis has one rank its option is off.
    """
    axes = (layout.tensor > 1, layout.data > 1)
    turn = [one for one in LAYOUTS if (one.tensor > 1, one.data > 1) == axes].index(layout)
    numbers = [number for number in (8, 4, 2, 1) if SAMPLES % (number * layout.data) == 0]
    most = 16 // layout.tensor  # collectives of many ranks take long on few cores
    chosen = {}
    for place, variant in enumerate(MODELS, start=turn):
        microbatches = min(numbers[place % len(numbers)], most)
        own = place - turn + LAYOUTS.index(layout)
        zero_stage = own % (4 if layout.pipeline == 1 else 2) if axes[1] else 0
        chosen[variant] = Options(
            micro_batch_size=SAMPLES // (microbatches * layout.data),
            sequence_parallel=axes[0] and place % 2 == 0,
            overlap_grad_reduce=axes[1] and place // 2 % 2 == 0,
            ddp_bucket_size=(None, 2000, 1)[place % 3],
            pipeline_schedule=SCHEDULES[place % len(SCHEDULES)] if layout.pipeline > 1 else None,
            by_document=place % 3 == 1,
            dropout=place % 3 == 2,
            gradient_accumulation_fusion=place % 7 != 4,
            tp_comm_overlap=axes[0] and place % 4 == 2,
            linear_cross_entropy=(own // 3 + place) % 2 == 0,
            regularised_loss=own % 3 == 1,
            zero_stage=zero_stage,
            overlap_param_gather=zero_stage in (1, 2) and place % 3 > 0,
            recompute=RECOMPUTE[(len(MODELS) * LAYOUTS.index(layout) + place - turn) % len(RECOMPUTE)],
            offloaded_layers=int((own + place // 2) % 4 == 0),
            offload_fraction=(None, 1.0, 0.4)[(own // 2) % 3],
            num_workers=(0, 1, 0, 2)[own // 3 % 4],
        )
    return chosen


def model_for(variant: str, layout: Layout, chosen: Options) -> ModelConfig:
    """The variant with the smallest number of layers, at least 2, that the layout's stages can share."""
    chunks = 2 if chosen.pipeline_schedule in ("interleaved", "zbv") else 1
    stages = stages_of_a_table(layout.pipeline) if chosen.pipeline_table else layout.pipeline * chunks
    rates = (0.2, 0.1) if chosen.dropout else (0.0, 0.0)
    return replace(
        MODELS[variant],
        num_layers=max(2, stages),
        hidden_dropout=rates[0],
        attention_dropout=rates[1],
    )


def make_config(
    model: ModelConfig, layout: Layout, options: Options, params_dtype: str = "float64"
) -> Config:
    loss = recipe(options)
    return Config(
        model=model,
        batch=BatchConfig(
            micro_batch_size=options.micro_batch_size, global_batch_size=SAMPLES, train_iters=STEPS
        ),
        optimizer=OptimizerConfig(
            lr=max(LEARNING_RATES),
            weight_decay=RECIPE.weight_decay,
            clip_grad=RECIPE.clip_grad,
            adam_beta1=RECIPE.adam_beta1,
            adam_beta2=RECIPE.adam_beta2,
            adam_eps=RECIPE.adam_eps,
            optimizer_cpu_offload=options.offload_fraction is not None,
            optimizer_offload_fraction=1.0 if options.offload_fraction is None else options.offload_fraction,
        ),
        loss=LossConfig(
            label_smoothing=loss.label_smoothing,
            z_loss_coeff=loss.z_loss,
            cross_entropy_loss_fusion=options.linear_cross_entropy,
            cross_entropy_fusion_impl="linear" if options.linear_cross_entropy else "native",
            cross_entropy_chunk_mib=0.004,  # 8 tokens on one rank: one or more chunks, uneven ones too
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            sequence_parallel=options.sequence_parallel,
            tp_comm_overlap=options.tp_comm_overlap,
            overlap_grad_reduce=options.overlap_grad_reduce,
            ddp_bucket_size=options.ddp_bucket_size,
            pipeline_schedule=options.pipeline_schedule,
            pipeline_schedule_csv=table_of(layout, options) if options.pipeline_table else None,
            zero_stage=options.zero_stage,
            overlap_param_gather=options.overlap_param_gather,
        ),
        activations=activations(model, layout, options),
        precision=PrecisionConfig(
            params_dtype=params_dtype, gradient_accumulation_fusion=options.gradient_accumulation_fusion
        ),
        data=DataConfig(
            mock_data=True, reset_attention_mask=options.by_document, num_workers=options.num_workers
        ),
        run=RunConfig(seed=SEED),
    )


def activations(model: ModelConfig, layout: Layout, options: Options) -> ActivationConfig:
    """The mode that `options.recompute` names, as far as the model and the layout have what it is about."""
    granularity, *rest = options.recompute.split() or [""]
    offloaded = options.offloaded_layers
    if granularity == "full":
        cut = "distributed" in rest and layout.tensor > 1 and not options.sequence_parallel  # twice cut else
        number = int(rest[1]) if layout.pipeline == 1 else 1  # else a chunk has no more layers
        return ActivationConfig(
            recompute_granularity="full",
            recompute_method=rest[0],
            recompute_num_layers=number,
            distribute_saved_activations=cut,
            cpu_offloading_num_layers=offloaded,
        )
    missing = {"rope"} - ({"rope"} if model.has_rotary_positions else set())
    missing |= {"logits"} if options.linear_cross_entropy else set()
    parts = tuple(part for part in rest if part not in missing)
    if not parts:
        return ActivationConfig(cpu_offloading_num_layers=offloaded)
    return ActivationConfig(
        recompute_granularity="selective", recompute_modules=parts, cpu_offloading_num_layers=offloaded
    )


def recipe(options: Options) -> Recipe:
    return replace(RECIPE, label_smoothing=0.1, z_loss=0.01) if options.regularised_loss else RECIPE


def table_of(layout: Layout, options: Options) -> str:
    microbatches = max(1, SAMPLES // (options.micro_batch_size * layout.data))
    return table_file(layout.pipeline, microbatches)


def architecture(model: ModelConfig) -> Architecture:
    return Architecture(
        num_layers=model.num_layers,
        normalization=model.normalization,
        norm_epsilon=model.norm_epsilon,
        norm_offset=1.0 if model.apply_layernorm_1p else 0.0,
        swiglu=model.swiglu,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
        rotary_percent=model.rotary_percent,
        rotary_interleaved=model.rotary_interleaved,
        llama3_factor=model.rope_scaling_factor if model.use_rope_scaling else None,
        yarn=(model.yarn_rotary_scaling_factor, model.yarn_original_max_position_embeddings),
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        seed=SEED,
    )
