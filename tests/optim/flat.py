"""Small parameters with records in real buckets, and AdamW written out in fp64 for one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megalite.config import OptimizerConfig, PrecisionConfig
from megalite.optim import Optimizer
from megalite.parallel.buckets import BucketOptions, GradientBuckets, main_grad
from megalite.parallel.params import ParamRecord, record_of
from megalite.parallel.topology import Axis, build_topology

CPU = torch.device("cpu")
SHAPES = ((5,), (300, 3), (7,), (130,), (4, 4, 4))


def make_buckets(
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    counted: Sequence[bool] | None = None,
    device: torch.device = CPU,
    main_grads: torch.dtype | None = None,
) -> GradientBuckets:
    """Random parameters, matrices decayed, in buckets of some 500 elements, with random main gradients."""
    generator = torch.Generator().manual_seed(3)
    params = []
    for index, shape in enumerate(shapes):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        param = nn.Parameter(values.to(device, dtype))
        is_counted = counted is None or counted[index]
        param._record = ParamRecord(f"p{index}", shape, counted=is_counted, decay=len(shape) > 1)  # type: ignore[attr-defined]
        params.append(param)
    buckets = GradientBuckets(params, build_topology(1, 1, device), BucketOptions(500, main_grads=main_grads))
    draw_gradients(buckets, 4)
    return buckets


def draw_gradients(buckets: GradientBuckets, seed: int) -> None:
    """Set every main gradient to numbers that depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    for param in buckets.parameters:
        main_grad(param).copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))


def make_optimizer(buckets: GradientBuckets, **settings: Any) -> Optimizer:
    """On one rank; `settings` are fields of OptimizerConfig or PrecisionConfig."""
    precision = {
        name: settings.pop(name) for name in list(settings) if name in PrecisionConfig.__dataclass_fields__
    }
    dtype = str(buckets.parameters[0].dtype).removeprefix("torch.")
    config = OptimizerConfig(
        **{"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0, "adam_beta2": 0.95, **settings}
    )
    device = buckets.parameters[0].device
    return Optimizer(
        buckets.buckets, config, PrecisionConfig(params_dtype=dtype, **precision), Axis("model"), device
    )


class HandAdamW:
    """The update of one tensor in fp64, as written in the textbook; decays what the record says."""

    def __init__(self, param: nn.Parameter, config: OptimizerConfig):
        self.w = param.detach().double().clone()
        self.m, self.v, self.t = torch.zeros_like(self.w), torch.zeros_like(self.w), 0
        self.config = config
        self.weight_decay = config.weight_decay if record_of(param).decay else 0.0

    def step(self, grad: torch.Tensor, lr: float) -> torch.Tensor:
        b1, b2 = self.config.adam_beta1, self.config.adam_beta2
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * grad.double()
        self.v = b2 * self.v + (1 - b2) * grad.double() ** 2
        m_hat, v_hat = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        step = lr * m_hat / (v_hat.sqrt() + self.config.adam_eps) + lr * self.weight_decay * self.w
        self.w = self.w - step
        return self.w
