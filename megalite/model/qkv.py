"""The projection of hidden states to queries, keys and values, cut by heads."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from megalite.config import ModelConfig
from megalite.parallel.linear import column_linears
from megalite.parallel.params import ParameterFactory


class QKVProjection(nn.Module):
    """Queries, keys and values of this rank's heads from one fused weight.

    Group g of the global weight `(groups, queries_per_group + 2, head_dim, hidden)` holds its queries, then
    one key and one value. A rank has whole groups of it, one block; or, where there are fewer groups than
    tensor-parallel ranks, a block with a part of one group's queries and another with its key and value,
    which all ranks of the `kv` axis hold and whose gradient is the sum over them.
    """

    def __init__(self, config: ModelConfig, make: ParameterFactory):
        super().__init__()
        tp, kv = make.topology.tp, make.topology.kv
        self.tensor_parallel = make.tensor_parallel
        groups, self.head_dim = config.num_query_groups, config.kv_channels
        per_group = config.num_attention_heads // groups
        self.queries = per_group // kv.size  # of each group that this rank has a part in
        shape = (groups, per_group + 2, config.kv_channels)
        width, std = (config.hidden_size,), config.init_method_std
        biased = config.add_bias_linear or config.add_qkv_bias
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        if kv.size == 1:
            self.weights.append(make.sharded("weight", shape + width, 0, std=std))
            if biased:
                self.biases.append(make.sharded("bias", shape, 0, decay=False))
            return
        group = tp.rank // kv.size
        mine = make.part, (group, kv.rank * self.queries, 0), (1, self.queries, config.kv_channels)
        shared = partial(make.part, replicated_over=("kv",), sum_grad_over=("kv",))
        for part, offsets, sizes in (mine, (shared, (group, per_group, 0), (1, 2, config.kv_channels))):
            self.weights.append(part("weight", shape + width, (*offsets, 0), sizes + width, std=std))
            if biased:
                self.biases.append(part("bias", shape, offsets, sizes, decay=False))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: (seq, batch, hidden), a sequence shard with sequence parallelism.

        Returns q (seq, batch, groups, queries, head_dim), k and v (seq, batch, groups, 1, head_dim), with
        this rank's groups and of each as many queries as this rank has.
        """
        parts = column_linears(x, self.weights, self.biases, self.tensor_parallel)
        if len(parts) == 1:
            fused = parts[0].unflatten(-1, (-1, self.queries + 2, self.head_dim))
            q, k, v = fused.split((self.queries, 1, 1), -2)
        else:
            q, (k, v) = parts[0], parts[1].split(self.head_dim, -1)
            q, k, v = (part.unflatten(-1, (1, -1, self.head_dim)) for part in (q, k, v))
        return q, k, v
