"""The feed-forward part of a block: SwiGLU or GELU."""

from __future__ import annotations

import torch
from torch import nn

from megalite.config import ModelConfig
from megalite.kernels import swiglu
from megalite.model.recompute import Parts
from megalite.parallel.linear import column_linear, row_linear
from megalite.parallel.params import ParameterFactory


class MLP(nn.Module):
    """`down(silu(gate x) * up x)`, or `down(gelu(up x))` with GPT-2's tanh form of GELU.

    SwiGLU: Shazeer 2020, arXiv 2002.05202. Gate and up are one weight (2, ffn, hidden), so that a
    tensor-parallel part is one block.
    """

    def __init__(self, config: ModelConfig, make: ParameterFactory, output_std: float, parts: Parts):
        super().__init__()
        self.parts = parts
        self.tensor_parallel = make.tensor_parallel
        self.gated = config.swiglu
        ffn, hidden = config.ffn_hidden_size, config.hidden_size
        first, down = make.within("gate_up" if self.gated else "up"), make.within("down")
        shape, split = ((2, ffn), 1) if self.gated else ((ffn,), 0)
        self.up_weight = first.sharded("weight", (*shape, hidden), split, std=config.init_method_std)
        self.up_bias = first.sharded("bias", shape, split, decay=False) if config.add_bias_linear else None
        self.down_weight = down.sharded("weight", (hidden, ffn), 1, std=output_std)
        self.down_bias = down.replicated("bias", (hidden,), decay=False) if config.add_bias_linear else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (seq, batch, hidden), a sequence shard with sequence parallelism; the same shape out."""
        inner = column_linear(x, self.up_weight, self.up_bias, self.tensor_parallel)
        activated = self._activate(inner)
        self.parts.discard("mlp_act", activated, self._activate, inner)
        return row_linear(activated, self.down_weight, self.down_bias, self.tensor_parallel)

    def _activate(self, inner: torch.Tensor) -> torch.Tensor:
        """(seq, batch, 2 * ffn / tp), or without a gate ffn / tp -> (seq, batch, ffn / tp)."""
        if self.gated:
            return swiglu(inner.unflatten(-1, (2, -1)))
        return nn.functional.gelu(inner, approximate="tanh")
