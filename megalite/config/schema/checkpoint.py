"""Saving and loading."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema.fields import setting


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints are written in PyTorch's distributed format and load on any layout."""

    save: str | None = setting(None, "Folder for checkpoints. Without it nothing is saved.")
    load: str | None = setting(
        None, "Folder to resume from; the latest complete checkpoint is taken. Usually the same as --save."
    )
    save_interval: int | None = setting(
        None,
        "Save after every so many steps. Default: only at the end of the run. An hour of training is a good "
        "distance.",
        minimum=1,
    )
    exit_on_missing_checkpoint: bool = setting(
        False,
        "Stop when --load holds no checkpoint. Megatron's default starts from scratch with a warning, a "
        "trap on long runs.",
    )
    finetune: bool = setting(
        False, "Load the weights only and start at step 0 with fresh data, schedule and optimizer."
    )
    no_load_optim: bool = setting(False, "Do not load the optimizer state.", negatable=False)
    no_save_optim: bool = setting(
        False, "Do not save the optimizer state; smaller, but cannot be resumed exactly.", negatable=False
    )
