"""How far a run has come, and its way into and out of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from megalite.checkpoint import CheckpointNotFoundError, load, save
from megalite.config import Config, to_dict
from megalite.training.errors import TrainingError
from megalite.training.step import Trainer


@dataclass(frozen=True)
class Progress:
    """Counters from the start of training; with the seed they determine all samples still to be drawn."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0

    def after_step(self, samples: int) -> Progress:
        """One optimizer step later."""
        return replace(self, iteration=self.iteration + 1, consumed_samples=self.consumed_samples + samples)


# Settings that decide which samples come next: another value at a resume means other data than an
# uninterrupted run's.
_DECIDES_SAMPLES = (
    "seed",
    "seq_length",
    "split",
    "data_path",
    "train_data_path",
    "mock_data",
    "train_samples",
    "train_iters",
)


def save_progress(trainer: Trainer, progress: Progress) -> str:
    """Write a checkpoint below ``--save`` and return a line about it. A collective."""
    config = trainer.config
    directory = config.checkpoint.save
    if directory is None:
        raise TrainingError("there is no --save folder to write a checkpoint to")
    state: dict[str, Any] = {"progress": asdict(progress), "config": _as_saved(config)}
    with_optimizer = not config.checkpoint.no_save_optim
    if with_optimizer:
        state["optimizer"] = trainer.optimizer.scalars()
    path = save(directory, progress.iteration, trainer.blocks(with_optimizer), state)
    return f"saved checkpoint of iteration {progress.iteration} to {path}"


def load_progress(trainer: Trainer) -> tuple[Progress, list[str]]:
    """Fill the model, and unless told otherwise the optimizer, from the newest checkpoint below ``--load``. A
    collective.

    Returns where training goes on, and lines that say what was found. Without a checkpoint training starts
    anew, unless ``--exit-on-missing-checkpoint`` makes that a TrainingError. ``--finetune`` takes only the
    weights.
    """
    config = trainer.config
    directory = config.checkpoint.load
    if directory is None:
        return Progress(), []
    with_optimizer = not (config.checkpoint.no_load_optim or config.checkpoint.finetune)
    try:
        state = load(
            directory,
            trainer.blocks(with_optimizer),
            ignored_prefixes=() if with_optimizer else ("optimizer.",),
        )
    except CheckpointNotFoundError as error:
        if config.checkpoint.exit_on_missing_checkpoint:
            raise TrainingError(f"{error}, and --exit-on-missing-checkpoint is set") from error
        return Progress(), [f"{error}: starting from iteration 0"]
    if with_optimizer:
        if "optimizer" not in state:
            raise TrainingError(
                f"the checkpoint in {directory} has no optimizer state; --no-load-optim starts a fresh one"
            )
        trainer.optimizer.load_scalars(state["optimizer"])
    else:
        trainer.optimizer.copy_weights_to_master()
    if config.checkpoint.finetune:
        return Progress(), [
            f"loaded the weights of iteration {state['iteration']} from {directory}; training starts at 0"
        ]
    progress = Progress(**state["progress"])
    lines = [f"loaded checkpoint of iteration {progress.iteration} from {directory}"]
    return progress, lines + _differences(state["config"], _as_saved(config))


def _as_saved(config: Config) -> dict[str, Any]:
    """The settings by name as they read in a checkpoint: JSON has no tuples."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in to_dict(config).items()
    }


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A warning for each setting by which the samples to come differ from those of the saved run."""
    return [
        f"warning: {name} was {saved[name]} when the checkpoint was saved and is {now[name]} now: "
        "the samples still to come are not those that the saved run would have drawn"
        for name in _DECIDES_SAMPLES
        if name in saved and name in now and saved[name] != now[name]
    ]
