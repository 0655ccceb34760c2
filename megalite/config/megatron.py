"""What Megatron-LM's command line has and megalite's has not: refused, accepted, or accepted at one value.

A migrant's flag is never ignored silently. Flags that share a fate share a row of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.config.errors import ConfigError, shown

# Parts that megalite will have and this version has not. The advice says what to do without.
NOT_YET = {
    "--rotary-seq-len-interpolation-factor": (
        "use --use-rope-scaling, --position-embedding-type yarn or a larger --rotary-base"
    ),
    "--ckpt-step": (
        "the latest complete checkpoint is loaded; write another step's number into "
        "latest_checkpointed_iteration.txt"
    ),
    "--async-save --save-retain-interval": "the training processes write checkpoints, and all are kept",
    "--manual-gc --train-sync-interval --log-straggler": "leave it out",
    "--use-gigatoken": "text is encoded before training: tools/preprocess_data.py --engine gigatoken",
}

# Parts that megalite does not have, with its own way.
ABSENT = {
    "--batch-size": "use --micro-batch-size",
    "--warmup": "use --lr-warmup-fraction",
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--checkpoint-activations": "use --recompute-granularity",
    "--squared-relu --openai-gelu --quick-geglu": "the MLP has GELU, or SwiGLU with --swiglu",
    "--qk-layernorm --qk-l2-norm": "use --normalization LayerNorm or RMSNorm",
    "--window-size": "attention sees the whole causal context",
    "--spec": "the model is megalite/model/gpt.py; change it there",
    "--embedding-init-method-std --init-method-xavier-uniform": "use --init-method-std for all weights",
    "--fp32-residual-connection --apply-residual-connection-post-layernorm": (
        "residuals are in the weights' type and skip the norm"
    ),
    "--iterations-to-skip": "take another --seed for other samples, or a blend without the bad dataset",
    "--decoupled-lr --decoupled-min-lr": "one --lr holds for all layers",
    "--start-weight-decay --end-weight-decay": "use one --weight-decay for the whole run",
    "--use-checkpoint-opt-param-scheduler --use-checkpoint-opt_param-scheduler": (
        "the schedule always follows the flags; give those of the first run, from the config.yaml beside its "
        "checkpoints"
    ),
    "--use-checkpoint-args": "give --config with the config.yaml that lies beside the checkpoints",
    "--offload-optimizer-states": "use --optimizer-cpu-offload, which keeps them in host memory",
    "--fp16-lm-cross-entropy": "the loss is always computed in fp32",
    "--fp8-format": "use --bf16",
    "--ddp-pad-buckets-for-high-nccl-busbw": "leave it out",
    "--use-tp-pp-dp-mapping": "ranks are ordered tensor, data, pipeline, the first fastest",
    "--per-split-data-args-path": "use --train-data-path, --valid-data-path and --test-data-path",
    "--no-mmap-bin-files": "datasets are always memory-mapped",
    "--full-validation": "set --eval-iters to the length of the validation data",
    "--padded-vocab-size --no-pad-vocab-size": "use --vocab-size and --make-vocab-size-divisible-by",
    "--tokenizer-metadata --tokenizer-special-tokens --chat-template": "put it into the tokenizer.json",
    "--tokenizer-sentencepiece-legacy "
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": "convert the tokenizer to a tokenizer.json",
    "--tokenizer-hf-no-use-fast": "only fast tokenizers (tokenizer.json) are read",
    "--trust-remote-code": "no code from a tokenizer's folder is ever run; use its tokenizer.json",
    "--log-params-norm --log-num-zeros-in-grad --log-memory-to-tensorboard --log-memory-interval "
    "--log-progress --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard": (
        "leave it out; --metrics-file and --tensorboard-dir hold everything that is measured"
    ),
    "--wandb-project --wandb-exp-name --wandb-save-dir": "use --tensorboard-dir or --metrics-file",
    "--profile --profile-step-start --profile-step-end --profile-ranks --use-pytorch-profiler "
    "--record-memory-history": "run the training command under a profiler",
    "--dist-ckpt-strictness": "a checkpoint must hold exactly the parameters of the model",
    "--pretrained-checkpoint": "use --load FOLDER --finetune",
    "--data-parallel-random-init": "initial weights are a function of the seed, equal on every replica",
    "--deterministic-mode": "leave it out: on a CPU runs are always bit-identical",
    "--check-for-spiky-loss --check-for-large-grads": (
        "--clip-grad bounds every step; watch the gradient norm in --metrics-file"
    ),
}

# What megalite does anyway: accepted without a word.
ALWAYS = (
    "--calculate-per-token-loss",
    "--accumulate-allreduce-grads-in-fp32",
    "--attention-softmax-in-fp32",
    "--override-opt-param-scheduler",
    "--override-opt_param-scheduler",
    "--no-create-attention-mask-in-dataloader",
    "--overlap-cpu-optimizer-d2h-h2d",
    "--no-save-rng",  # there is no generator state to save
    "--no-load-rng",
    "--dist-ckpt-optim-fully-reshardable",
    "--auto-detect-ckpt-format",
)

# Flags without a meaning here: accepted, with one warning for all of them.
WITHOUT_EFFECT = {
    "--use-mcore-models --transformer-impl": "there is one model",
    "--use-flash-attn --attention-backend --apply-query-key-layer-scaling": (
        "attention is always torch's fused one"
    ),
    "--use-torch-optimizer-for-cpu-offload --no-pin-cpu-grads --no-pin-cpu-params": (
        "the host's updates are computed by megalite's C++, what is copied is pinned"
    ),
    "--use-cpu-initialization": "initial weights are the same on every device",
    "--use-dist-ckpt --dist-ckpt-format --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save "
    "--ckpt-fully-parallel-load": "there is one checkpoint format",
    "--local-rank": "torchrun's environment tells the rank",
    "--no-overlap-p2p-communication --no-align-param-gather": "belongs to interleaved schedules",
    "--ddp-average-in-collective": "gradients are summed, the loss being divided by the global token count",
    "--cp-comm-type": "there is no context parallelism",
    "--no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--no-persist-layer-norm": "kernels are chosen by the device",
    "--num-dataset-builder-threads": "index building chooses its threads",
    "--tokenizer-hf-no-include-special-tokens": "text is encoded before training",
    "--tensorboard-queue-size --timing-log-option": "not needed",
}

# Flags that are accepted at the value megalite works with.
ONLY_AT = {
    "--context-parallel-size": (("1",), "use --sequence-parallel to split activations"),
    "--expert-model-parallel-size": (("1",), "the model is dense"),
    "--dataloader-type": (("single",), "samples are shuffled by the dataset's index"),
    "--mid-level-dataset-surplus": (("0.005",), "leave it out"),
    "--weight-decay-incr-style": (("constant",), "use one --weight-decay for the whole run"),
    "--manual-gc-interval": (("0",), "leave it out"),
    "--empty-unused-memory-level": (("0",), "leave it out"),
    "--vocab-extra-ids": (("0",), "add the tokens to the tokenizer"),
    "--null-tokenizer-pad-id": (("-1",), "samples are cut from one stream and never padded"),
    "--ckpt-format": (("torch_dist",), "checkpoints are in PyTorch's distributed format"),
    "--rerun-mode": (("disabled",), "steps are not run twice"),
    "--tensorboard-log-interval": (("1",), "what --log-interval prints is written"),
}


@dataclass(frozen=True)
class Shorthand:
    """A flag without a value that stands for a setting at a value."""

    name: str
    value: str
    help: str
    deprecated: bool = False


SHORTHANDS = {
    "bf16": Shorthand(
        "params_dtype", "bfloat16", "Train in bfloat16: the right choice on GPUs since Ampere."
    ),
    "fp16": Shorthand(
        "params_dtype", "float16", "Train in float16 with loss scaling, for GPUs without bfloat16."
    ),
    "recompute_activations": Shorthand(
        "recompute_granularity", "selective", "The same as --recompute-granularity selective."
    ),
    "use_rotary_position_embeddings": Shorthand(
        "position_embedding_type", "rope", "Old spelling of --position-embedding-type rope.", deprecated=True
    ),
}


def _by_flag(rows: dict[str, str]) -> dict[str, str]:
    return {flag: text for flags, text in rows.items() for flag in flags.split()}


NOT_YET_BY_FLAG = _by_flag(NOT_YET)
ABSENT_BY_FLAG = _by_flag(ABSENT)
WITHOUT_EFFECT_BY_FLAG = _by_flag(WITHOUT_EFFECT)
FOREIGN_FLAGS = (*NOT_YET_BY_FLAG, *ABSENT_BY_FLAG, *ALWAYS, *WITHOUT_EFFECT_BY_FLAG, *ONLY_AT)


def refusal(flag: str, values: Sequence[object]) -> ConfigError | None:
    """The error for one of `FOREIGN_FLAGS` given with `values`, or None where it is accepted."""
    given = shown(values) if values else None
    if flag in NOT_YET_BY_FLAG:
        return ConfigError(flag, given, "is not available in this version", NOT_YET_BY_FLAG[flag])
    if flag in ABSENT_BY_FLAG:
        return ConfigError(flag, given, "does not exist in megalite", ABSENT_BY_FLAG[flag])
    if flag in ONLY_AT:
        allowed, advice = ONLY_AT[flag]
        if given not in allowed:
            return ConfigError(flag, given, f"only {' or '.join(allowed)} is supported", advice)
    return None
