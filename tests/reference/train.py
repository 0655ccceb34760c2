"""Training steps by definition: loss over the global batch, its gradients, their norm, clipping, AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.gpt import Architecture, Weights, token_losses


@dataclass(frozen=True)
class GlobalBatch:
    """All samples of one step: tokens, labels int64 (samples, seq), loss_mask (samples, seq) of 0 and 1.

    `positions`: int64 (samples, seq), by default 0 to seq - 1. `documents`: int64 (samples, seq), the number
    of each position's document, by default one a sample.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None


@dataclass(frozen=True)
class Recipe:
    """`clip_grad` 0 clips nothing. Biases and 1-D weights are exempt from decay. The rest is of the loss."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class Step:
    """One step: the loss, the gradients before clipping, their global norm, the weights after the update."""

    loss: float
    gradients: dict[str, Tensor]
    grad_norm: float
    weights: dict[str, Tensor]


def loss_and_gradients(
    weights: Weights, architecture: Architecture, batch: GlobalBatch, recipe: Recipe | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss is the sum over the batch's valid tokens divided by their count; 0 for a batch without any."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
    mask = batch.loss_mask.to(next(iter(leaves.values())).dtype)
    recipe = recipe or Recipe()
    losses = token_losses(
        leaves, architecture, batch.tokens, batch.labels, batch.positions, batch.documents,
        recipe.label_smoothing, recipe.z_loss,
    )  # fmt: skip
    total = (losses * mask).sum()
    loss = total / mask.sum().clamp(min=1)
    return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def train(
    weights: Weights,
    architecture: Architecture,
    batches: Sequence[GlobalBatch],
    learning_rates: Sequence[float],
    recipe: Recipe,
) -> list[Step]:
    """As many steps as there are batches; `weights` is left as it is."""
    steps: list[Step] = []
    current = {name: value.detach().clone() for name, value in weights.items()}
    first = {name: torch.zeros_like(value) for name, value in current.items()}
    second = {name: torch.zeros_like(value) for name, value in current.items()}
    for number, (batch, lr) in enumerate(zip(batches, learning_rates, strict=True), start=1):
        loss, gradients = loss_and_gradients(current, architecture, batch, recipe)
        norm = torch.stack([(gradient**2).sum() for gradient in gradients.values()]).sum().sqrt()
        clip = min(1.0, recipe.clip_grad / (norm.item() + 1e-6)) if recipe.clip_grad > 0 else 1.0
        for name, gradient in gradients.items():
            clipped = gradient * clip
            first[name] = recipe.adam_beta1 * first[name] + (1 - recipe.adam_beta1) * clipped
            second[name] = recipe.adam_beta2 * second[name] + (1 - recipe.adam_beta2) * clipped**2
            mean = first[name] / (1 - recipe.adam_beta1**number)
            spread = torch.sqrt(second[name] / (1 - recipe.adam_beta2**number))
            decay = 0.0 if exempt_from_decay(name, gradient) else recipe.weight_decay
            current[name] = (
                current[name] - lr * mean / (spread + recipe.adam_eps) - lr * decay * current[name]
            )
        steps.append(Step(loss.item(), gradients, norm.item(), dict(current)))
    return steps


def exempt_from_decay(name: str, value: Tensor) -> bool:
    return name.endswith(".bias") or value.dim() == 1
