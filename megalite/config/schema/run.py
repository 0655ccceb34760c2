"""What belongs to the run as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema.fields import setting


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Seed and safety."""

    seed: int = setting(
        1234,
        "Seed of weights and sample order. Both are functions of it alone, not of the layout: the same seed "
        "gives the same run on any number of GPUs.",
        minimum=0,
        maximum=2**32 - 1,
    )
    check_for_nan_in_loss_and_grad: bool = setting(
        True, "Stop when loss or gradient norm is not finite (fp16 overflow excepted)."
    )
    check_weight_hash_across_dp_replicas_interval: int | None = setting(
        None,
        "Compare a hash of the weights' bits between all ranks that should hold the same after every so many "
        "steps, and end the run when one differs. Cheap: one pass over the weights; 100 or more. Compares "
        "tensor-parallel replicas and tied embeddings too, which Megatron's does not.",
        minimum=1,
    )
