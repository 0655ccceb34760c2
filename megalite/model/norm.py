"""RMSNorm and LayerNorm over the hidden dimension."""

from __future__ import annotations

import torch
from torch import nn

from megalite.config import ModelConfig
from megalite.kernels import add_rms_norm, rms_norm
from megalite.parallel.params import ParameterFactory


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` (Zhang and Sennrich 2019, arXiv 1910.07467); x (..., hidden)."""

    def __init__(self, config: ModelConfig, make: ParameterFactory):
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight = make.replicated("weight", (config.hidden_size,), constant=1.0, decay=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.epsilon)

    def after_adding(self, branch: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `x + branch`, and the sum itself, in one pass over memory."""
        normed, total = add_rms_norm(branch, x, self.weight, self.epsilon)
        return normed, total


class LayerNorm(nn.Module):
    """`(x - mean(x)) / std(x) * weight + bias` (Ba et al. 2016, arXiv 1607.06450); x (..., hidden)."""

    def __init__(self, config: ModelConfig, make: ParameterFactory):
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight = make.replicated("weight", (config.hidden_size,), constant=1.0, decay=False)
        self.bias = make.replicated("bias", (config.hidden_size,), decay=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)

    def after_adding(self, branch: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of `x + branch`, and the sum itself."""
        total = x + branch
        return self(total), total


def make_norm(config: ModelConfig, make: ParameterFactory) -> RMSNorm | LayerNorm:
    """The norm that the configuration names."""
    return RMSNorm(config, make) if config.normalization == "RMSNorm" else LayerNorm(config, make)
