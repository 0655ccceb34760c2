"""Dropout of hidden states, the same on every layout."""

from __future__ import annotations

import torch
from torch import nn

from megalite.kernels.dropout import dropout, site_key
from megalite.parallel.params import ParameterFactory

EMBEDDING_SITE = 0
ATTENTION_WEIGHTS, ATTENTION_BRANCH, MLP_BRANCH = range(3)  # the parts of a layer


def dropout_site(layer: int, part: int) -> int:
    """Number of the place in the model where this part of a layer is dropped."""
    return 1 + 3 * layer + part


class Dropout(nn.Module):
    """Drops channels of hidden states; does nothing at rate 0 or in evaluation. `site`: its own number."""

    def __init__(self, rate: float, site: int, seq_length: int, make: ParameterFactory):
        super().__init__()
        self.rate, self.key, self.seq_length = rate, site_key(make.seed, site), seq_length
        self.shard = make.topology.tp.rank if make.sequence_parallel else 0

    def forward(
        self, x: torch.Tensor, samples: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: (seq, batch, hidden), a sequence shard with sequence parallelism; samples: int64 (batch,).

        `residual`, of x's shape, is added to the result.
        """
        rate = self.rate if self.training else 0.0
        first = self.shard * x.shape[0]
        return dropout(x, samples, self.key, rate, first, self.seq_length, residual=residual)
