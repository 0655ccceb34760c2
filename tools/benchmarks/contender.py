"""One contender of the training benchmark: trains the model of llama_60m.yaml and prints its rates.

Started by tools/benchmarks/train.py, alone or under torchrun: `contender.py megalite --steps N [flags of the
training run]`. The last line that rank 0 prints is one JSON object: seconds of each timed step, peak resident
memory of the largest process.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.config import Config, kv_replicas, parse_or_exit

RECIPE = Path(__file__).with_name("llama_60m.yaml")
Step = Callable[[], object]  # one optimizer step


def with_recipe(flags: Sequence[str]) -> list[str]:
    """`flags` of training over the benchmark's recipe."""
    return ["--config", str(RECIPE), *flags]


def _tokens(config: Config, world_size: int, rank: int) -> torch.Tensor:
    """(micro-batches, micro-batch, seq + 1) random ids, the same in every run."""
    generator = torch.Generator().manual_seed(rank)
    shape = (config.num_microbatches(world_size), config.batch.micro_batch_size, config.model.seq_length + 1)
    return torch.randint(config.model.vocab_size, shape, generator=generator)


def megalite(config: Config, world_size: int) -> Step:
    """megalite as configured, on as many ranks as were started."""
    from megalite.data.batch import Batch
    from megalite.model.recompute_budget import within_budget
    from megalite.parallel.topology import build_topology
    from megalite.training.step import Trainer

    config, _ = within_budget(config)
    tensor = config.parallel.tensor_model_parallel_size
    topology = build_topology(
        tensor,
        config.parallel.pipeline_model_parallel_size,
        torch.device("cpu"),
        kv_replicas=kv_replicas(config.model, tensor),
    )
    trainer = Trainer(config, topology)
    micro, seq = config.batch.micro_batch_size, config.model.seq_length
    batches = [
        Batch(
            tokens=ids[:, :-1],
            labels=ids[:, 1:],
            loss_mask=torch.ones(micro, seq),
            position_ids=torch.arange(seq).expand(micro, seq),
            sample_index=torch.arange(micro),
        )
        for ids in _tokens(config, world_size, topology.dp.rank)
    ]
    return lambda: trainer.train_step(batches, config.optimizer.lr)


def hugging_face(config: Config, world_size: int) -> Step:
    """A Transformers training loop: autocast to bf16, fused AdamW, clipping; in torch's DDP if there are
    several ranks.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    parallel, shape = world_size > 1, config.model
    plain = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.ffn_hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_attention_heads,
            max_position_embeddings=shape.max_position_embeddings,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )
    model = torch.nn.parallel.DistributedDataParallel(plain) if parallel else plain
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    tokens = _tokens(config, world_size, dist.get_rank() if parallel else 0)

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

    return step


CONTENDERS = {"megalite": megalite, "transformers": hugging_face}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("kind", choices=CONTENDERS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    flags, training = parser.parse_known_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(1)
    world_size, rank = (
        int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0))
    )
    config = parse_or_exit(with_recipe(training), world_size, rank)
    if world_size > 1:
        dist.init_process_group("gloo")
    from megalite.accelerator import peak_memory_bytes

    step = CONTENDERS[flags.kind](config, world_size)
    step()  # warm-up: allocation, lazily created state
    seconds = []
    for _ in range(flags.steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    peak = torch.tensor(peak_memory_bytes(torch.device("cpu")))
    if dist.is_initialized():
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"seconds": seconds, "peak_bytes": int(peak)}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
