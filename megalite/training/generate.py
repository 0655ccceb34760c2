"""Text from trained weights: loads a checkpoint of any layout into one process and samples token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megalite.accelerator import local_device
from megalite.checkpoint import CheckpointNotFoundError, latest_iteration, load, read_state
from megalite.config import ModelConfig, config_from_dict
from megalite.data.tokenizer import Tokenizer, build_tokenizer
from megalite.model.gpt import GPTStage, StagePlace, build_stages
from megalite.parallel.params import ParameterFactory
from megalite.parallel.topology import build_topology
from megalite.training.step import parameter_blocks


@dataclass(frozen=True)
class Context:
    """Tokens so far, as the model reads them: (1, length) each. Nothing reads the labels."""

    tokens: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    sample_index: torch.Tensor
    cu_seqlens: None = None
    max_document_length: None = None


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: `temperature` 0 takes the likeliest, `top_k` 0 keeps the whole vocabulary."""

    temperature: float = 0.8
    top_k: int = 50
    seed: int = 1234


@dataclass(frozen=True)
class LoadedModel:
    """A whole model in one process."""

    stage: GPTStage
    config: ModelConfig
    tokenizer: Tokenizer
    device: torch.device


def load_model(directory: str, iteration: int | None = None) -> LoadedModel:
    """The model and its tokenizer from a checkpoint folder.

    Raises CheckpointError when there is no usable checkpoint, DataError when the tokenizer's files are gone.
    """
    found = latest_iteration(directory) if iteration is None else iteration
    if found is None:
        raise CheckpointNotFoundError(f"{directory} has no checkpoint")
    config = config_from_dict(read_state(directory, found)["config"])
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    topology = build_topology(1, 1, local_device())
    make = ParameterFactory(topology, getattr(torch, config.precision.params_dtype), config.run.seed)
    (stage,) = build_stages(config.model, make, [StagePlace(range(config.model.num_layers))])
    blocks = [
        block
        for param in stage.parameters()
        for block in parameter_blocks("model", param, param.detach().view(-1))
    ]
    stage.eval()
    load(directory, blocks, found, ignored_prefixes=("optimizer.",))
    return LoadedModel(stage, config.model, tokenizer, topology.device)


@torch.no_grad()
def generate(model: LoadedModel, prompt: list[int], count: int, sampling: Sampling) -> Iterator[int]:
    """Up to `count` token ids that follow `prompt`, one by one; ends after the end-of-document token.

    Every token is a forward pass over the last `seq_length` tokens. Raises ValueError for an empty prompt
    or one with ids outside the vocabulary.
    """
    vocabulary = model.config.vocab_size
    if not prompt or not all(0 <= token < vocabulary for token in prompt):
        raise ValueError(
            f"a prompt needs at least one token, each from 0 to {vocabulary - 1}; got {prompt[:20]}"
        )
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(count):
        logits = model.stage.logits(_context(tokens[-model.config.seq_length :], model.device), None)
        tokens.append(_draw(logits[-1, 0, :vocabulary].float().cpu(), sampling, generator))
        yield tokens[-1]
        if tokens[-1] == model.tokenizer.eod:
            return


def _context(tokens: list[int], device: torch.device) -> Context:
    ids = torch.tensor([tokens], device=device)
    places = torch.arange(len(tokens), device=device).unsqueeze(0)
    return Context(ids, places, ids, torch.zeros_like(ids), torch.zeros(1, dtype=torch.int64))


def _draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from logits (vocab,)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = torch.softmax(logits / sampling.temperature, -1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
