"""The ends of the model: the embedding of its tokens, and norm, logits and loss behind its last block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from megalite.config import LossConfig, ModelConfig, padded_vocab_size
from megalite.kernels import linear_cross_entropy, vocab_parallel_cross_entropy
from megalite.model.dropout import EMBEDDING_SITE, Dropout
from megalite.model.norm import make_norm
from megalite.parallel.embedding import vocab_parallel_embedding
from megalite.parallel.linear import column_linear
from megalite.parallel.params import ParameterFactory, record_of, sink_of

IGNORED = -100  # label of a position that is out of the loss


class Embedding(nn.Module):
    """Token embedding, plus learned positions where the model has them."""

    def __init__(self, config: ModelConfig, make: ParameterFactory, tokens: nn.Parameter):
        super().__init__()
        self.axis, self.sequence_parallel = make.topology.tp, make.sequence_parallel
        self.dropout = Dropout(config.hidden_dropout, EMBEDDING_SITE, config.seq_length, make)
        self.tokens = tokens
        learned = config.position_embedding_type == "learned_absolute"
        shape = (config.max_position_embeddings, config.hidden_size)
        self.positions = (
            make.within("embedding.positions").replicated("weight", shape, std=config.init_method_std)
            if learned
            else None
        )

    def forward(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, samples: torch.Tensor
    ) -> torch.Tensor:
        """tokens, position_ids: (batch, seq) -> (seq, batch, hidden), or its sequence shard."""
        start = record_of(self.tokens).offsets[0]
        x = vocab_parallel_embedding(tokens.t(), self.tokens, start, self.axis, self.sequence_parallel)
        if self.positions is not None:
            places = position_ids.t()
            if self.sequence_parallel:
                places = places.chunk(self.axis.size)[self.axis.rank]  # (seq / tp, batch)
            x = x + nn.functional.embedding(places, self.positions)
        dropped: torch.Tensor = self.dropout(x, samples)
        return dropped


class Head(nn.Module):
    """Final norm, then logits over the vocabulary."""

    def __init__(
        self, config: ModelConfig, make: ParameterFactory, weight: nn.Parameter, loss_config: LossConfig
    ):
        super().__init__()
        self.axis, self.sequence_parallel = make.topology.tp, make.sequence_parallel
        self.tensor_parallel = make.tensor_parallel
        self.vocab_size = config.vocab_size
        self.norm = make_norm(config, make.within("final_norm"))
        self.weight = weight
        self.loss_config = loss_config

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x: (seq, batch, hidden) or its sequence shard -> this rank's columns, (seq, batch, vocab / tp)."""
        return column_linear(self.norm(x), self.weight, None, self.tensor_parallel)

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor,
        loss_mask: torch.Tensor,
        loss_grad: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Cross-entropy summed over the positions whose mask is not 0; labels and mask (batch, seq).

        In training with label smoothing and z-loss. `loss_grad`: what backward will hand in, if known.
        """
        config = self.loss_config
        target = labels.masked_fill(loss_mask == 0, IGNORED).t()  # (seq, batch)
        place = (target, record_of(self.weight).offsets[0], self.vocab_size, self.axis.group, IGNORED)
        smoothing, z_loss = (config.label_smoothing, config.z_loss_coeff) if self.training else (0.0, 0.0)
        if config.cross_entropy_fusion_impl == "native":
            losses = vocab_parallel_cross_entropy(
                self.logits(x), *place, label_smoothing=smoothing, z_loss=z_loss, inplace=True
            )
            return losses.sum()
        sink = None if loss_grad is None else sink_of(self.weight)
        return linear_cross_entropy(
            self.norm(x),
            self.weight,
            *place,
            sequence_parallel=self.sequence_parallel,
            label_smoothing=smoothing,
            z_loss=z_loss,
            budget=max(1, int(config.cross_entropy_chunk_mib * 2**20)),
            loss_grad=None if sink is None else loss_grad,
            sink=sink,
        )


@dataclass(frozen=True)
class VocabularyTables:
    """A process's (vocab, hidden) tables, cut over tp; one parameter where tied ends share the process."""

    tokens: nn.Parameter | None
    head: nn.Parameter | None


def vocabulary_tables(
    config: ModelConfig, make: ParameterFactory, first: bool, last: bool
) -> VocabularyTables:
    """Tied tables are one parameter, or a copy on each of the two processes that hold the ends."""
    tied = not config.untie_embeddings_and_output_weights
    table = partial(
        make.sharded,
        shape=(config.vocab_size, config.hidden_size),
        split_dim=0,
        std=config.init_method_std,
        padded=padded_vocab_size(
            config.vocab_size, config.make_vocab_size_divisible_by, make.topology.tp.size
        ),
    )
    if not tied:
        return VocabularyTables(
            table("embedding.tokens.weight") if first else None, table("head.weight") if last else None
        )
    if first and last:
        shared = table("embedding.tokens.weight", uses=2)
        return VocabularyTables(shared, shared)
    if not (first or last):
        return VocabularyTables(None, None)
    ends = ("embedding",)
    copy = table("embedding.tokens.weight", replicated_over=ends, sum_grad_over=ends)
    return VocabularyTables(copy if first else None, copy if last else None)
