"""Texts that grow token by token: each token is a forward pass of the pipeline over all texts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megalite.generation.model import LoadedModel
from megalite.generation.sampling import Sampling, draw
from megalite.model.ends import Head
from megalite.parallel.mappings import all_reduce, finish, start_all_gather
from megalite.pipeline.executor import run_schedule
from megalite.pipeline.schedule import forward_only, one_f_one_b


@dataclass(frozen=True)
class Contexts:
    """Texts as the model reads them, (texts, length), filled up on the right, which no token before it sees.

    `last`: (texts,), the place of each text's last token. Nothing reads the labels.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    sample_index: torch.Tensor
    last: torch.Tensor
    cu_seqlens: None = None
    max_document_length: None = None


@torch.no_grad()
def generate(
    model: LoadedModel, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling
) -> list[list[int]]:
    """Up to `count` token ids that follow each prompt; a text ends with its end-of-document token.

    A collective; every rank gets all texts. They are the same on every layout but for rounding, and a text
    is the same whatever its neighbours are. The model sees the last `seq_length` tokens of a text. Raises
    ValueError without prompts, and for one that is empty or has ids outside the vocabulary.
    """
    vocabulary = model.config.vocab_size
    for prompt in prompts or [[]]:
        if not prompt or not all(0 <= token < vocabulary for token in prompt):
            raise ValueError(
                f"a prompt needs at least one token, each from 0 to {vocabulary - 1}; got {list(prompt[:20])}"
            )
    texts = [list(prompt) for prompt in prompts]
    ends = [len(text) + count for text in texts]
    growing = [number for number, text in enumerate(texts) if len(text) < ends[number]]
    while growing:
        for number, token in zip(growing, _next_tokens(model, texts, growing, sampling), strict=True):
            texts[number].append(token)
        growing = [n for n in growing if len(texts[n]) < ends[n] and texts[n][-1] != model.tokenizer.eod]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _next_tokens(
    model: LoadedModel, texts: Sequence[list[int]], growing: Sequence[int], sampling: Sampling
) -> list[int]:
    """The token that follows each of the texts numbered `growing`, on every rank."""
    pp, device = model.topology.pp, model.topology.device
    windows = [texts[number][-model.config.seq_length :] for number in growing]
    length, size = max(map(len, windows)), -(-len(windows) // min(pp.size, len(windows)))
    microbatches = [
        _contexts(windows[i : i + size], length, size, device) for i in range(0, len(windows), size)
    ]
    schedule = forward_only(one_f_one_b(pp.size, len(microbatches)))

    def stage(batch: Contexts, hidden: torch.Tensor | None) -> torch.Tensor:
        states = model.stage.hidden_states(batch, hidden)  # (length, texts, hidden)
        head = model.stage.head
        return states if head is None else _logits(model, head, states, batch.last)

    results = run_schedule(
        schedule[pp.rank],
        [stage],
        microbatches,
        model.links,
        hidden_shape=(length, size, model.config.hidden_size),
        hidden_dtype=model.dtype,
        device=device,
        sends_in_flight=schedule.sends_in_flight,
    )
    chosen = torch.zeros(len(growing), dtype=torch.int64, device=device)
    if results:
        rows = torch.cat(results)[: len(growing)]
        drawn = [
            draw(row, sampling, number, len(texts[number])) for row, number in zip(rows, growing, strict=True)
        ]
        chosen = torch.tensor(drawn, dtype=torch.int64, device=device)
    ids: list[int] = all_reduce(chosen, pp).tolist()  # only the last stage has any
    return ids


def _logits(model: LoadedModel, head: Head, states: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Logits (texts, vocab) of each text's last token, without the columns that pad the vocabulary."""
    ends = states[last, torch.arange(len(last), device=last.device)].unsqueeze(0)  # (1, texts, hidden)
    columns = head.logits(ends)[0].t()  # (vocab / tp, texts)
    whole = finish(start_all_gather(columns, model.topology.tp))
    return whole[: model.config.vocab_size].t()


def _contexts(windows: Sequence[list[int]], length: int, size: int, device: torch.device) -> Contexts:
    """`windows` filled up to `size` texts of `length` tokens."""
    rows = [*windows, *[[0]] * (size - len(windows))]
    tokens = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=device)
    places = torch.arange(length, device=device).expand(size, length)
    last = torch.tensor([len(row) - 1 for row in rows], device=device)
    samples = torch.zeros(size, dtype=torch.int64)
    return Contexts(tokens, places, tokens, torch.zeros_like(tokens), samples, last)
