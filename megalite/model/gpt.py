"""One pipeline stage of a decoder-only transformer, from GPT-2 style to Llama style."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import nn

from megalite.config import ModelConfig, padded_vocab_size
from megalite.kernels import rotary_table, vocab_parallel_cross_entropy
from megalite.model.attention import Attention, Rotation
from megalite.model.mlp import MLP
from megalite.model.norm import make_norm
from megalite.parallel.embedding import vocab_parallel_embedding
from megalite.parallel.linear import column_linear
from megalite.parallel.params import ParameterFactory, record_of
from megalite.parallel.topology import Topology

IGNORED = -100  # label of a position that is out of the loss


class Tokens(Protocol):
    """What the model reads of a micro-batch: int64 ids and positions, and a mask of the labels that count,
    each (batch, seq).
    """

    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def labels(self) -> torch.Tensor: ...
    @property
    def loss_mask(self) -> torch.Tensor: ...
    @property
    def position_ids(self) -> torch.Tensor: ...


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: ModelConfig, make: ParameterFactory):
        super().__init__()
        output_std = config.init_method_std / math.sqrt(2 * config.num_layers)
        self.attention_norm = make_norm(config, make.within("attention_norm"))
        self.attention = Attention(config, make.within("attention"), output_std)
        self.mlp_norm = make_norm(config, make.within("mlp_norm"))
        self.mlp = MLP(config, make.within("mlp"), output_std)

    def forward(self, x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        """x: (seq, batch, hidden), a sequence shard with sequence parallelism; the same shape out."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Module):
    """Token embedding, plus learned positions where the model has them."""

    def __init__(self, config: ModelConfig, make: ParameterFactory, tokens: nn.Parameter):
        super().__init__()
        self.axis, self.sequence_parallel = make.topology.tp, make.sequence_parallel
        self.tokens = tokens
        learned = config.position_embedding_type == "learned_absolute"
        shape = (config.max_position_embeddings, config.hidden_size)
        self.positions = (
            make.within("embedding.positions").replicated("weight", shape, std=config.init_method_std)
            if learned
            else None
        )

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """tokens, position_ids: (batch, seq) -> (seq, batch, hidden), or its sequence shard."""
        start = record_of(self.tokens).offset
        x = vocab_parallel_embedding(tokens.t(), self.tokens, start, self.axis, self.sequence_parallel)
        if self.positions is None:
            return x
        places = position_ids.t()
        if self.sequence_parallel:
            places = places.chunk(self.axis.size)[self.axis.rank]  # (seq / tp, batch)
        return x + nn.functional.embedding(places, self.positions)


class GPTStage(nn.Module):
    """The consecutive blocks of one pipeline stage, with the embedding on the first and the head on the last.

    Called with a micro-batch and the hidden states of the stage before (None on the first stage), it returns
    hidden states (seq, batch, hidden), or on the last stage the loss summed over the positions that count: a
    scalar, fp32 (fp64 for fp64 models)."""

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        dtype: torch.dtype,
        seed: int,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        self.config, self.topology, self.dtype = config, topology, dtype
        self.sequence_parallel = sequence_parallel
        make = ParameterFactory(topology, dtype, seed, sequence_parallel)
        first, last = topology.is_first_stage, topology.is_last_stage
        tied = not config.untie_embeddings_and_output_weights
        table = (
            self._vocabulary_table(make, "embedding.tokens.weight", tied)
            if first or (tied and last)
            else None
        )
        self.embedding = Embedding(config, make, table) if first and table is not None else None
        self.layers = nn.ModuleList(
            Block(config, make.within(f"layers.{index}"))
            for index in stage_layers(config.num_layers, topology)
        )
        self.final_norm = make_norm(config, make.within("final_norm")) if last else None
        self.head: nn.Parameter | None = None
        if last:
            self.head = table if tied else self._vocabulary_table(make, "head.weight", tied)
        self._rotary: Rotation | None = None
        if config.position_embedding_type == "rope":
            rotary_dim = int(config.kv_channels * config.rotary_percent)
            positions = torch.arange(config.max_position_embeddings, device=topology.device)
            wide = torch.promote_types(dtype, torch.float32)
            self._rotary = rotary_table(positions, rotary_dim, config.rotary_base, wide)

    def _vocabulary_table(self, make: ParameterFactory, name: str, tied: bool) -> nn.Parameter:
        """A (vocab, hidden) table cut over tp; a tied one lives on both the first and the last stage and is
        counted once.
        """
        config, topology = self.config, self.topology
        across_stages = tied and topology.pp.size > 1
        return make.sharded(
            name,
            (config.vocab_size, config.hidden_size),
            0,
            std=config.init_method_std,
            padded=padded_vocab_size(
                config.vocab_size, config.make_vocab_size_divisible_by, topology.tp.size
            ),
            sum_grad_over=("embedding",) if across_stages else (),
            counted=topology.is_first_stage or not tied,
            uses=2 if tied and not across_stages else 1,
        )

    def forward(self, batch: Tokens, hidden: torch.Tensor | None) -> torch.Tensor:
        if not self.topology.is_last_stage:
            return self.hidden_states(batch, hidden)
        target = batch.labels.masked_fill(batch.loss_mask == 0, IGNORED).t()  # (seq, batch)
        assert self.head is not None  # the last stage has one
        losses = vocab_parallel_cross_entropy(
            self.logits(batch, hidden),
            target,
            record_of(self.head).offset,
            self.config.vocab_size,
            self.topology.tp.group,
            IGNORED,
        )
        return losses.sum()

    def hidden_states(self, batch: Tokens, hidden: torch.Tensor | None) -> torch.Tensor:
        """Output of this stage's blocks, (seq, batch, hidden) or its sequence shard."""
        x = hidden if self.embedding is None else self.embedding(batch.tokens, batch.position_ids)
        rotation = self._rotation(batch.position_ids)
        for layer in self.layers:
            x = layer(x, rotation)
        assert x is not None  # every stage but the first is given hidden states
        return x

    def logits(self, batch: Tokens, hidden: torch.Tensor | None) -> torch.Tensor:
        """Last stage only: this rank's columns of the logits, (seq, batch, padded vocab / tp)."""
        if self.final_norm is None or self.head is None:
            raise ValueError(
                f"stage {self.topology.pp.rank} of {self.topology.pp.size} has no head; ask the last one"
            )
        x = self.final_norm(self.hidden_states(batch, hidden))
        return column_linear(x, self.head, None, self.topology.tp, self.sequence_parallel)

    def _rotation(self, position_ids: torch.Tensor) -> Rotation | None:
        """cos and sin of each position, (seq, batch, rotary_dim / 2)."""
        if self._rotary is None:
            return None
        places = position_ids.t()
        return self._rotary[0][places], self._rotary[1][places]

    def hidden_shape(self, micro_batch_size: int) -> tuple[int, int, int]:
        """Shape of the hidden states that pass between stages."""
        shards = self.topology.tp.size if self.sequence_parallel else 1
        return (self.config.seq_length // shards, micro_batch_size, self.config.hidden_size)


def stage_layers(num_layers: int, topology: Topology) -> range:
    """Global indices of the blocks of this stage. Raises ValueError when the stages cannot be equal."""
    stages = topology.pp.size
    if num_layers % stages:
        raise ValueError(f"{num_layers} layers are not divisible by {stages} pipeline stages")
    count = num_layers // stages
    return range(topology.pp.rank * count, (topology.pp.rank + 1) * count)
