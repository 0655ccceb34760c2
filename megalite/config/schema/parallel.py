"""How the model is spread over processes."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import setting


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel axes; data parallelism takes what is left: world size / (tensor x pipeline)."""

    tensor_model_parallel_size: int = setting(
        1,
        "Ranks that share each layer (TP). Keep it within one node (<= 8): every layer communicates twice "
        "forward and twice backward.",
        minimum=1,
    )
    pipeline_model_parallel_size: int = setting(
        1,
        "Stages that the layers are cut into (PP). Idle share of a step is (PP-1)/(PP-1+micro-batches): use "
        "at least 4 x PP micro-batches a step.",
        minimum=1,
    )
    sequence_parallel: bool = setting(
        False,
        "Split norms, residuals and dropout along the sequence over the tensor-parallel ranks: less "
        "activation memory for the same communication volume. Needs TP > 1. Megatron's default leaves it "
        "off; with TP it is worth having.",
    )
    overlap_grad_reduce: bool = setting(
        False,
        "Reduce gradient buckets over the data-parallel ranks while the backward pass still runs. Same "
        "numbers.",
    )
    ddp_bucket_size: int | None = setting(
        None,
        "Elements in one gradient bucket. Default: max(40M, 1M x data-parallel size), as Megatron. Smaller "
        "buckets start earlier and use the network worse.",
        minimum=1,
    )
    distributed_backend: str = setting(
        "auto",
        "Library for collectives. auto: nccl where there is an accelerator, gloo on CPUs. Differs from "
        "Megatron (nccl), which has no CPU mode.",
        choices=("auto", "nccl", "gloo"),
    )
    distributed_timeout_minutes: int = setting(
        10,
        "Minutes that a collective may take before the job is ended as hung. Raise it for slow file systems.",
        minimum=1,
    )
