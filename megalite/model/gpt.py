"""A decoder-only transformer, from GPT-2 style to Llama style, as the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from megalite.accelerator import to_device
from megalite.config import ActivationConfig, LossConfig, ModelConfig
from megalite.kernels import Llama3Scaling, YarnScaling, rotary_table
from megalite.model.attention import Attention, Rotation, Sequences
from megalite.model.core_attention import Documents
from megalite.model.dropout import ATTENTION_BRANCH, MLP_BRANCH, Dropout, dropout_site
from megalite.model.ends import Embedding, Head, VocabularyTables, vocabulary_tables
from megalite.model.mlp import MLP
from megalite.model.norm import make_norm
from megalite.model.recompute import ChunkRecompute, Parts
from megalite.parallel.gathering import Unit
from megalite.parallel.params import ParameterFactory


class Tokens(Protocol):
    """What the model reads of a micro-batch.

    `tokens`, `labels`, `position_ids`: int64 (batch, seq). `loss_mask`: (batch, seq), 0 where a label
    does not count. `sample_index`: int64 (batch,), the number of each sample in the whole run.
    `cu_seqlens`, `max_document_length`: as in `Documents`, None where attention crosses documents.
    """

    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def labels(self) -> torch.Tensor: ...
    @property
    def loss_mask(self) -> torch.Tensor: ...
    @property
    def position_ids(self) -> torch.Tensor: ...
    @property
    def sample_index(self) -> torch.Tensor: ...
    @property
    def cu_seqlens(self) -> torch.Tensor | None: ...
    @property
    def max_document_length(self) -> int | None: ...


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: ModelConfig, make: ParameterFactory, layer: int, parts: Parts):
        super().__init__()
        self.parts = parts
        output_std = config.init_method_std / math.sqrt(2 * config.num_layers)
        self.attention_norm = make_norm(config, make.within("attention_norm"))
        self.attention = Attention(config, make.within("attention"), output_std, layer, parts)
        self.mlp_norm = make_norm(config, make.within("mlp_norm"))
        self.mlp = MLP(config, make.within("mlp"), output_std, parts)
        self.attention_dropout, self.mlp_dropout = (
            Dropout(config.hidden_dropout, dropout_site(layer, part), config.seq_length, make)
            for part in (ATTENTION_BRANCH, MLP_BRANCH)
        )

    def forward(self, x: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """x: (seq, batch, hidden), a sequence shard with sequence parallelism; the same shape out."""
        samples, parts = sequences.samples, self.parts
        with parts.watching(self, x):
            normed = self.attention_norm(x)
            parts.discard("norm", normed, self.attention_norm, x)
            attended = parts.run("attn", partial(self.attention, sequences=sequences), normed)
            normed, x = self.mlp_norm.after_adding(self.attention_dropout(attended, samples), x)
            parts.discard("norm", normed, self.mlp_norm, x)
            added: torch.Tensor = self.mlp_dropout(parts.run("mlp", self.mlp, normed), samples, residual=x)
            return added


@dataclass(frozen=True)
class StagePlace:
    """What one stage of the pipeline holds: which blocks, and whether the embedding or the head."""

    layers: range
    first: bool = True
    last: bool = True


class GPTStage(nn.Module):
    """Consecutive blocks, with the embedding on the first stage and the head on the last.

    Called with a micro-batch and the hidden states of the stage before (None on the first stage), it returns
    hidden states (seq, batch, hidden), or on the last stage the loss summed over the positions that count: a
    scalar, fp32 (fp64 for fp64 models).
    """

    def __init__(
        self,
        config: ModelConfig,
        make: ParameterFactory,
        place: StagePlace,
        tables: VocabularyTables,
        loss: LossConfig,
        activations: ActivationConfig,
    ):
        super().__init__()
        self.embedding = (
            Embedding(config, make, tables.tokens) if place.first and tables.tokens is not None else None
        )
        self.recompute = ChunkRecompute(activations, len(place.layers), make.topology)
        self.layers = nn.ModuleList(
            Block(config, make.within(f"layers.{index}"), index, parts)
            for index, parts in zip(place.layers, self.recompute.parts, strict=True)
        )
        self.head = Head(config, make, tables.head, loss) if place.last and tables.head is not None else None
        self._rotary: Rotation | None = None
        if config.has_rotary_positions:
            rotary_dim = int(config.kv_channels * config.rotary_percent)
            positions = torch.arange(config.max_position_embeddings, device=make.topology.device)
            wide = torch.promote_types(make.dtype, torch.float32)
            self._rotary = rotary_table(
                positions, rotary_dim, config.rotary_base, wide, _rotary_scaling(config)
            )

    def forward(
        self, batch: Tokens, hidden: torch.Tensor | None, loss_grad: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`loss_grad`: the gradient that the returned loss will get, a scalar, if it is known by now."""
        x = self.hidden_states(batch, hidden)
        return x if self.head is None else self.loss(x, batch, loss_grad)

    def units(self) -> list[Unit]:
        """The modules that a training step calls, one after another."""
        first = [] if self.embedding is None else [Unit(self.embedding, weights_in_backward=False)]
        last = [] if self.head is None else [Unit(self.head)]
        return [*first, *(Unit(layer) for layer in self.layers), *last]

    def hidden_states(self, batch: Tokens, hidden: torch.Tensor | None) -> torch.Tensor:
        """Output of this stage's blocks, (seq, batch, hidden) or its sequence shard."""
        sequences = self.sequences(batch)
        x = hidden
        if self.embedding is not None:
            x = self.embedding(batch.tokens, batch.position_ids, sequences.samples)
        assert x is not None  # every stage but the first is given hidden states
        return self.through_layers(x, sequences)

    def through_layers(self, x: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """x: (seq, batch, hidden) or its sequence shard; the same shape out."""
        self.recompute.start_forward()
        for group in self.recompute.groups:
            layers = self.layers[group.layers.start : group.layers.stop]
            x = group.run(partial(_through, layers, sequences), x)
        return x

    def loss(self, x: torch.Tensor, batch: Tokens, loss_grad: torch.Tensor | None = None) -> torch.Tensor:
        """Last stage only: the loss after the last block's output `x`; `loss_grad` as in `forward`."""
        if self.head is None:
            raise ValueError("this stage has no head; ask the last one for the loss")
        loss = partial(self.head, labels=batch.labels, loss_mask=batch.loss_mask, loss_grad=loss_grad)
        with self.recompute.head.watching(self.head, x):
            return self.recompute.head.run("logits", loss, x)

    def sequences(self, batch: Tokens) -> Sequences:
        """What all blocks know of the micro-batch."""
        rotation = documents = None
        if self._rotary is not None:
            places = batch.position_ids.t()  # (seq, batch)
            rotation = self._rotary[0][places], self._rotary[1][places]
        if batch.cu_seqlens is not None and batch.max_document_length is not None:
            documents = Documents(batch.cu_seqlens, batch.max_document_length)
        return Sequences(to_device(batch.sample_index, batch.tokens.device), rotation, documents)


def _rotary_scaling(config: ModelConfig) -> Llama3Scaling | YarnScaling | None:
    if config.position_embedding_type == "yarn":
        return YarnScaling(
            config.yarn_rotary_scaling_factor,
            config.yarn_original_max_position_embeddings,
            config.yarn_beta_fast,
            config.yarn_beta_slow,
        )
    return Llama3Scaling(config.rope_scaling_factor) if config.use_rope_scaling else None


def _through(layers: Iterable[nn.Module], sequences: Sequences, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x, sequences)
    return x


def build_stages(
    config: ModelConfig,
    make: ParameterFactory,
    places: Sequence[StagePlace],
    loss: LossConfig | None = None,
    activations: ActivationConfig | None = None,
) -> list[GPTStage]:
    """The stages that this process holds, in the order of the pipeline."""
    tables = vocabulary_tables(config, make, any(p.first for p in places), any(p.last for p in places))
    chosen = loss or LossConfig(), activations or ActivationConfig()
    return [GPTStage(config, make, place, tables, *chosen) for place in places]
