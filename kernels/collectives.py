"""Collectives of torch.distributed under the name that they have in the installed version.

torch 2.13 gave them new names and warns of the old ones, the only ones that 2.11 has.
"""

from __future__ import annotations

import torch.distributed as dist

all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
