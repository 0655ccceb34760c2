"""RMSNorm and LayerNorm over the hidden dimension."""

from __future__ import annotations

import torch
from torch import nn

from megalite.config import ModelConfig
from megalite.kernels import add_rms_norm, rms_norm
from megalite.parallel.params import ParameterFactory


class RMSNorm(nn.Module):
    """`x / rms(x) * scale` (Zhang and Sennrich 2019, arXiv 1910.07467); x (..., hidden).

    The scale is the weight plus an offset: 0, or 1 where weights are stored as their distance from 1.
    """

    def __init__(self, config: ModelConfig, make: ParameterFactory):
        super().__init__()
        self.epsilon, self.offset = config.norm_epsilon, _offset(config)
        shape = (config.hidden_size,)
        self.weight = make.replicated("weight", shape, constant=1.0 - self.offset, decay=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.epsilon, weight_offset=self.offset)

    def after_adding(self, branch: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `x + branch`, and the sum itself, in one pass over memory."""
        normed, total = add_rms_norm(branch, x, self.weight, self.epsilon, weight_offset=self.offset)
        return normed, total


class LayerNorm(nn.Module):
    """`(x - mean(x)) / std(x) * scale + bias` (Ba et al. 2016, arXiv 1607.06450); x (..., hidden).

    The scale is as in RMSNorm.
    """

    def __init__(self, config: ModelConfig, make: ParameterFactory):
        super().__init__()
        self.epsilon, self.offset = config.norm_epsilon, _offset(config)
        shape = (config.hidden_size,)
        self.weight = make.replicated("weight", shape, constant=1.0 - self.offset, decay=False)
        self.bias = make.replicated("bias", shape, decay=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight + self.offset if self.offset else self.weight
        return nn.functional.layer_norm(x, scale.shape, scale, self.bias, self.epsilon)

    def after_adding(self, branch: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `x + branch`, and the sum itself."""
        total = x + branch
        return self(total), total


def _offset(config: ModelConfig) -> float:
    return 1.0 if config.apply_layernorm_1p else 0.0


def make_norm(config: ModelConfig, make: ParameterFactory) -> RMSNorm | LayerNorm:
    """The norm that the configuration names."""
    return RMSNorm(config, make) if config.normalization == "RMSNorm" else LayerNorm(config, make)
