"""One contender of the training benchmark: trains the same Llama-style model and prints its rates.

Started by tools/benchmarks/train.py, alone or under torchrun: `contender.py NAME --steps N`. The last line
that rank 0 prints is one JSON object: seconds of each timed step, peak resident memory of the largest
process.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megalite.config import ActivationConfig, ModelConfig

LAYERS, HIDDEN, HEADS, FFN, VOCAB, SEQ, MICRO = 8, 512, 8, 1408, 32000, 512, 4
LEARNING_RATE = 3e-4
# Of pp 2: a head of 32,000 x 512 has the matrix products of 5 layers, and takes the time of some 4.
LAST_STAGE = 2


KEEP_ALL = ActivationConfig()
CHEAP_PARTS = ActivationConfig(
    recompute_granularity="selective", recompute_modules=("norm", "mlp_act", "rope")
)
WHOLE_LAYERS = ActivationConfig(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)


@dataclass(frozen=True)
class Side:
    """`step()` does one optimizer step over `microbatches` micro-batches a rank."""

    step: Callable[[], None]


def _tokens(count: int, rank: int) -> torch.Tensor:
    """(count, micro-batch, seq + 1) random ids, the same in every run."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(VOCAB, (count, MICRO, SEQ + 1), generator=generator)


def model_config() -> ModelConfig:
    """The model as megalite's settings: Llama-style, 60M parameters."""
    return ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        seq_length=SEQ,
        max_position_embeddings=SEQ,
        vocab_size=VOCAB,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    )


def megalite(microbatches: int, activations: ActivationConfig = KEEP_ALL, **layout: Any) -> Side:
    """megalite in bf16 with fp32 master weights, on as many ranks as were started.

    `layout`: settings of `ParallelConfig`.
    """
    from megalite.config import BatchConfig, Config, OptimizerConfig, ParallelConfig, PrecisionConfig
    from megalite.data.batch import Batch
    from megalite.parallel.topology import build_topology
    from megalite.training.step import Trainer

    parallel = ParallelConfig(overlap_grad_reduce=True, **layout)
    topology = build_topology(
        parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, torch.device("cpu")
    )
    config = Config(
        model=model_config(),
        batch=BatchConfig(
            micro_batch_size=MICRO,
            global_batch_size=MICRO * microbatches * topology.dp.size,
            train_iters=1000,
        ),
        optimizer=OptimizerConfig(lr=LEARNING_RATE, weight_decay=0.1, adam_beta2=0.95),
        parallel=parallel,
        activations=activations,
        precision=PrecisionConfig(params_dtype="bfloat16"),
    )
    trainer = Trainer(config, topology)
    tokens = _tokens(microbatches, topology.dp.rank)
    batches = [
        Batch(
            tokens=ids[:, :-1],
            labels=ids[:, 1:],
            loss_mask=torch.ones(MICRO, SEQ),
            position_ids=torch.arange(SEQ).expand(MICRO, SEQ),
            sample_index=torch.arange(MICRO),
        )
        for ids in tokens
    ]

    def step() -> None:
        trainer.train_step(batches, LEARNING_RATE)

    return Side(step)


def hugging_face(microbatches: int, parallel: bool) -> Side:
    """A Transformers training loop: autocast to bf16, fused AdamW, clipping; `parallel`: in torch's DDP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=SEQ,
        tie_word_embeddings=False,
        use_cache=False,
    )
    plain = LlamaForCausalLM(config)
    model = torch.nn.parallel.DistributedDataParallel(plain) if parallel else plain
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens = _tokens(microbatches, dist.get_rank() if parallel else 0)

    def step() -> None:
        for index, ids in enumerate(tokens):
            if isinstance(model, torch.nn.parallel.DistributedDataParallel):
                model.require_backward_grad_sync = index == len(tokens) - 1
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids[:, :-1]).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            (loss / len(tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Side(step)


CONTENDERS: dict[str, Callable[[int], Side]] = {
    "megalite": megalite,
    "megalite, norm mlp_act rope recomputed": partial(megalite, activations=CHEAP_PARTS),
    "megalite, layers recomputed": partial(megalite, activations=WHOLE_LAYERS),
    "megalite tp 2": partial(megalite, tensor_model_parallel_size=2),
    "megalite tp 2, sp": partial(megalite, tensor_model_parallel_size=2, sequence_parallel=True),
    "megalite tp 2, sp, overlap": partial(
        megalite, tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True
    ),
    "megalite pp 2": partial(
        megalite, pipeline_model_parallel_size=2, decoder_last_pipeline_num_layers=LAST_STAGE
    ),
    "megalite dp 2": megalite,
    "transformers": partial(hugging_face, parallel=False),
    "transformers ddp 2": partial(hugging_face, parallel=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=1, help="micro-batches a rank and step")
    parser.add_argument("--threads", type=int, default=2)
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    from megalite.accelerator import peak_memory_bytes

    side = CONTENDERS[flags.name](flags.microbatches)
    side.step()  # warm-up: allocation, lazily created state
    seconds = []
    for _ in range(flags.steps):
        start = time.perf_counter()
        side.step()
        seconds.append(time.perf_counter() - start)
    peak = torch.tensor(peak_memory_bytes(torch.device("cpu")))
    if dist.is_initialized():
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "peak_bytes": int(peak)}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
