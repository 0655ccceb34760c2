"""Causal self-attention with grouped queries, cut over the tensor-parallel ranks by heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from megalite.config import ModelConfig
from megalite.kernels import rope
from megalite.kernels.dropout import site_key
from megalite.model.attention_dropout import attention_with_dropout
from megalite.model.core_attention import Documents, causal_attention
from megalite.model.dropout import ATTENTION_WEIGHTS, dropout_site
from megalite.model.qkv import QKVProjection
from megalite.model.recompute import Parts
from megalite.parallel.linear import row_linear
from megalite.parallel.params import ParameterFactory

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Sequences:
    """What the blocks know of a micro-batch beside its hidden states.

    `samples`: int64 (batch,), the number of each sample in the whole run. `rotation`: cos and sin of each
    position, (seq, batch, rotary_dim / 2). `documents`: where documents lie, if attention stays inside
    them.
    """

    samples: torch.Tensor
    rotation: Rotation | None = None
    documents: Documents | None = None


class Attention(nn.Module):
    """`proj(softmax(q k^T / sqrt(d)) v)` over earlier positions only."""

    def __init__(
        self, config: ModelConfig, make: ParameterFactory, output_std: float, layer: int, parts: Parts
    ):
        super().__init__()
        self.parts = parts
        self.tensor_parallel, axis = make.tensor_parallel, make.topology.tp
        self.interleaved = config.rotary_interleaved
        width = config.num_attention_heads * config.kv_channels
        self.qkv, proj = QKVProjection(config, make.within("qkv")), make.within("proj")
        self.proj_weight = proj.sharded("weight", (config.hidden_size, width), 1, std=output_std)
        self.proj_bias = (
            proj.replicated("bias", (config.hidden_size,), decay=False) if config.add_bias_linear else None
        )
        self.heads = config.num_attention_heads
        self.first_head = axis.rank * self.heads // axis.size
        self.dropout = config.attention_dropout
        self.dropout_key = site_key(make.seed, dropout_site(layer, ATTENTION_WEIGHTS))

    def forward(self, x: torch.Tensor, sequences: Sequences) -> torch.Tensor:
        """x: (seq, batch, hidden), a sequence shard with sequence parallelism; the same shape out."""
        q, k, v = self.qkv(x)
        if sequences.rotation is not None:
            turn = partial(self._turn, sequences.rotation)
            turned = turn(q, k)
            self.parts.discard("rope", turned, turn, q, k)
            q, k = turned
        attend = partial(self._attend, sequences)
        context = self.parts.run("core_attn", attend, q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3))
        return row_linear(context, self.proj_weight, self.proj_bias, self.tensor_parallel)

    def _turn(
        self, rotation: Rotation, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rope(q, k, *rotation, interleaved=self.interleaved)

    def _attend(
        self, sequences: Sequences, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """q: (seq, batch, heads / tp, d), k and v with groups for heads -> (seq, batch, heads * d / tp)."""
        if not self.dropout or not self.training:
            return causal_attention(q, k, v, sequences.documents).flatten(2)
        mine = torch.arange(self.first_head, self.first_head + q.shape[2], device=q.device)
        heads = sequences.samples.unsqueeze(1) * self.heads + mine
        return attention_with_dropout(q, k, v, heads, self.dropout_key, self.dropout).flatten(2)
