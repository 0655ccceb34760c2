"""How the model is spread over processes."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema.fields import setting
from megalite.config.schema.model import MOST_LAYERS

MOST_RANKS = 2**20


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the parallel axes; data parallelism takes what is left: world size / (tensor x pipeline)."""

    tensor_model_parallel_size: int = setting(
        1,
        "Ranks that share each layer (TP). Keep it within one node (<= 8): every layer communicates twice "
        "forward and twice backward.",
        minimum=1,
        maximum=MOST_RANKS,
    )
    pipeline_model_parallel_size: int = setting(
        1,
        "Stages that the layers are cut into (PP). Idle share of a step is (PP-1)/(PP-1+micro-batches): use "
        "at least 4 x PP micro-batches a step.",
        minimum=1,
        maximum=MOST_RANKS,
    )
    pipeline_schedule: str | None = setting(
        None,
        "Order of the pipeline's work. gpipe holds the activations of all micro-batches; 1f1b (default) of "
        "at most PP; interleaved cuts each rank's layers into chunks and the bubble with them, for more "
        "communication; zb-h1 fills bubbles with weight gradients; zbv does so on two chunks a rank and has "
        "the smallest bubble.",
        choices=("gpipe", "1f1b", "interleaved", "zb-h1", "zbv"),
    )
    pipeline_schedule_csv: str | None = setting(
        None,
        "File with the order of the pipeline's work, in place of --pipeline-schedule: a line a rank, a cell "
        "<stage><F, B, I or W><micro-batch> an action, as tools/plan.py schedule --write-csv and torch's "
        "pipelining write them. It also places the stages on the ranks. Before the run starts it is proved "
        "complete and free of deadlocks. It holds for one number of micro-batches.",
    )
    pipeline_model_parallel_layout: str | None = setting(
        None,
        "What each stage holds, in the order of the forward pass: E embedding, t layer, L head and loss, | "
        "between stages; t*3 and (tt|)*3 repeat. 'Ett|(ttt|)*2tL' is 4 stages of 2, 3, 3 and 1 layers. With "
        "more stages than PP, chunks a rank follow and the schedule is interleaved (or --pipeline-schedule "
        "zbv, with two). In place of the other flags for uneven stages.",
    )
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None, "Layers in one chunk of the interleaved schedule, which this selects.", minimum=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = setting(
        None,
        "Chunks a rank in the interleaved schedule, which this selects. Default there: 2.",
        minimum=1,
        maximum=MOST_LAYERS,
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = setting(
        None,
        "Micro-batches that a rank takes through one chunk before it turns to the next (interleaved). "
        "Default, and least: PP.",
        minimum=1,
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None, "Layers of the first stage, when it should have fewer for the embedding's sake.", minimum=0
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None,
        "Layers of the last stage, when it should have fewer for the head's and the loss' sake.",
        minimum=0,
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False,
        "Count the embedding as a layer when layers are shared out, so that the first stage gets one less.",
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False,
        "Count head and loss as a layer when layers are shared out, so that the last stage gets one less.",
    )
    sequence_parallel: bool = setting(
        False,
        "Split norms, residuals and dropout along the sequence over the tensor-parallel ranks: less "
        "activation memory for the same communication volume. Needs TP > 1. Megatron's default leaves it "
        "off; with TP it is worth having.",
    )
    zero_stage: int | None = setting(
        None,
        "What the data-parallel ranks share out instead of each holding it: 0 nothing, 1 optimizer states "
        "(same traffic); 2 gradients too (a reduction each micro-batch); 3 weights too (and two gatherings "
        "each micro-batch). Default: 0, or 1 with --use-distributed-optimizer.",
        minimum=0,
        maximum=3,
    )
    zero_prefetch_layers: int = setting(
        1,
        "With --zero-stage 3: layers whose weights are gathered ahead of the one that computes. 1 suffices "
        "where a layer computes longer than its weights travel; more hides slower networks, for memory.",
        minimum=0,
        maximum=MOST_LAYERS,
    )
    use_distributed_optimizer: bool = setting(
        False, "Megatron's name of --zero-stage 1: optimizer states are shared out. Worth having with DP > 1."
    )
    tp_comm_overlap: bool = setting(
        False,
        "With --sequence-parallel: cut each gather and reduction of activations by the ranks' shards, so "
        "that one shard travels while another is multiplied. Same numbers, smaller matrix products. Unlike "
        "Megatron's, it needs no Transformer Engine.",
    )
    overlap_grad_reduce: bool = setting(
        False,
        "Reduce gradient buckets over the data-parallel ranks while the backward pass still runs. Same "
        "numbers.",
    )
    overlap_param_gather: bool = setting(
        False,
        "With --zero-stage 1 or 2: go on after an update while the other ranks' weights arrive; each layer "
        "waits for its own in the next forward pass. Same numbers.",
    )
    ddp_bucket_size: int | None = setting(
        None,
        "Elements in one gradient bucket. Default: max(40M, 1M x data-parallel size), as Megatron. Smaller "
        "buckets start earlier and use the network worse.",
        minimum=1,
    )
    ddp_num_buckets: int | None = setting(
        None,
        "Instead of --ddp-bucket-size: about so many gradient buckets a stage.",
        minimum=1,
    )
    grad_reduce_in_bf16: bool = setting(
        False,
        "Send gradients over the data-parallel ranks in bfloat16: half the traffic. They are accumulated and "
        "added up in fp32 (not so in Megatron). Needs --bf16; goes best with --zero-stage 1 to 3: without, "
        "the sums travel a second time, after the backward pass.",
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
        maximum=365 * 24 * 60,
    )
