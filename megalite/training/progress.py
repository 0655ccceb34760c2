"""How far a run has come, and its way into and out of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from megalite.checkpoint import (
    CheckpointError,
    CheckpointNotFoundError,
    latest_iteration,
    load,
    read_state,
    save,
)
from megalite.checkpoint.collective import on_first_rank
from megalite.config import Config
from megalite.training.compatibility import (
    as_saved,
    changes_of_meaning,
    check_kind_of_data,
    misfits,
    sample_warnings,
)
from megalite.training.drawn import Drawn, drawn_lines
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


def save_progress(
    trainer: Trainer, progress: Progress, drawn: Drawn, first: bool, check: Callable[[], None]
) -> str:
    """Write a checkpoint below `--save` and return a line about it. A collective.

    `first`, `check`: as `save` has them.
    """
    config = trainer.config
    directory = config.checkpoint.save
    if directory is None:
        raise TrainingError("there is no --save folder to write a checkpoint to")
    state: dict[str, Any] = {
        "progress": asdict(progress),
        "samples_by_dataset": drawn.after(progress.consumed_samples),
        "data_order": drawn.order(progress.consumed_samples),
        "config": as_saved(config),
    }
    with_optimizer = not config.checkpoint.no_save_optim
    if with_optimizer:
        state["optimizer"] = trainer.optimizer.scalars()
    blocks = trainer.blocks(with_optimizer)
    path = save(directory, progress.iteration, blocks, state, first=first, check=check)
    return f"saved checkpoint of iteration {progress.iteration} to {path}"


class Resumed(NamedTuple):
    """Where training goes on."""

    progress: Progress
    lines: list[str]
    """What was found."""
    drawn: dict[str, int] | None
    """Training samples by dataset until then; None when the checkpoint does not say."""
    order: dict[str, Any] | None
    """Of the training samples, as saved; None when the checkpoint does not say."""


def goes_on_in_its_folder(config: Config, progress: Progress) -> bool:
    """Whether the run that has come to `progress` when it was loaded is the one that `--save` holds."""
    load_from, save_to = config.checkpoint.load, config.checkpoint.save
    if progress.iteration == 0 or load_from is None or save_to is None:
        return False
    return os.path.realpath(load_from) == os.path.realpath(save_to)


def how_to_resume(config: Config) -> str:
    """Which command goes on with what this run has saved."""
    given = config.checkpoint
    weights_alone = given.no_save_optim
    without = ["--finetune"] if given.finetune else []
    without += ["--no-load-optim"] if given.no_load_optim and not weights_alone else []
    added = ["--no-load-optim"] if weights_alone and not given.no_load_optim else []
    added += [] if given.load == given.save else [f"--load {given.save}"]
    changes = [f"without {' and '.join(without)}"] if without else []
    changes += [f"with {' and '.join(added)}"] if added else []
    return " ".join(["give the same command again", " and ".join(changes)]).strip()


def after_interrupt(config: Config) -> str:
    """What is told of a run that was interrupted. Not collective."""
    save = None if config.batch.skip_train else config.checkpoint.save
    if save is None:
        return "interrupted"
    try:
        saved = latest_iteration(save)
    except CheckpointError:  # told when it is loaded
        return "interrupted"
    if saved is None:
        return f"interrupted; nothing was saved in {save} yet"
    return (
        f"interrupted; {save} holds a run up to iteration {saved}; to go on with it, {how_to_resume(config)}"
    )


def overwriting(config: Config, progress: Progress, directory: str | None) -> list[str]:
    """A warning for a run that begins at `progress` where `directory` holds another already. A collective."""

    def read() -> int | None:
        try:
            if directory is None or goes_on_in_its_folder(config, progress):
                return None
            return latest_iteration(directory)
        except CheckpointError:  # told when it is loaded
            return None

    held = on_first_rank(read, None)
    if not held:
        return []
    load = config.checkpoint.load
    begins = f"at iteration {progress.iteration} of {load}" if progress.iteration else "anew"
    return [
        f"warning: {directory} holds a run up to iteration {held}, and this one begins {begins} and will "
        f"write over it; to go on with that one, {how_to_resume(config)}"
    ]


def saved_order(config: Config) -> dict[str, Any] | None:
    """The order of the training samples in the checkpoint that `load_progress` will most likely find. A
    collective.

    None where the run begins anew. Nothing that is wrong with the checkpoint is told here.
    """
    directory = config.checkpoint.load
    if directory is None or config.checkpoint.finetune:
        return None

    def read() -> dict[str, Any] | None:
        try:
            found = latest_iteration(directory)
            return None if found is None else read_state(directory, found).get("data_order")
        except CheckpointError:
            return None

    return on_first_rank(read, None)


def load_progress(trainer: Trainer) -> Resumed:
    """Fill the model, and unless told otherwise the optimizer, from the newest checkpoint below `--load`. A
    collective.

    Without a checkpoint training starts anew, unless `--exit-on-missing-checkpoint` or `--finetune` make that
    a TrainingError. `--finetune` takes only the weights; without the optimizer's state they are converted to
    this run's dtype.
    """
    config = trainer.config
    directory = config.checkpoint.load
    if directory is None:
        return Resumed(Progress(), [], {}, None)
    with_optimizer = not (config.checkpoint.no_load_optim or config.checkpoint.finetune)
    try:
        with trainer.loading(with_optimizer) as blocks:
            state = load(
                directory,
                blocks,
                ignored_prefixes=() if with_optimizer else ("optimizer.",),
                convert_dtype=not with_optimizer,
            )
    except CheckpointNotFoundError as error:
        if config.checkpoint.exit_on_missing_checkpoint or config.checkpoint.finetune:
            flag = "finetune" if config.checkpoint.finetune else "exit-on-missing-checkpoint"
            raise TrainingError(f"{error}, and --{flag} is set") from error
        return Resumed(Progress(), [f"{error}: starting from iteration 0"], {}, None)
    except CheckpointError as error:
        if reasons := misfits(directory, config, with_optimizer):
            raise TrainingError("\n".join([f"{directory} does not fit this run:", *reasons])) from error
        raise
    if reasons := changes_of_meaning(state["config"], config):
        raise TrainingError("\n".join([f"{directory} does not fit this run:", *reasons]))
    if with_optimizer:
        trainer.optimizer.load_scalars(state["optimizer"])
    if config.checkpoint.finetune:
        line = f"loaded the weights of iteration {state['iteration']} from {directory}; training starts at 0"
        return Resumed(Progress(), [line], {}, None)
    progress = Progress(**state["progress"])
    lines = [f"loaded checkpoint of iteration {progress.iteration} from {directory}"]
    drawn = state.get("samples_by_dataset")
    if not config.batch.skip_train:
        check_kind_of_data(state["config"], config, directory)
        lines += [*drawn_lines(drawn or {}), *sample_warnings(state["config"], config)]
    return Resumed(progress, lines, drawn, state.get("data_order"))
