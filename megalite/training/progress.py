"""How far a run has come, and its way into and out of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from megalite.config import Config, to_dict
from megalite.config.settings import SETTINGS
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


# Settings that decide which samples come next: another value at a resume means other data than an
# uninterrupted run's. The order of a corpus also depends on how many samples the whole run wants.
_DECIDES_SAMPLES = ("seed", "seq_length", "mock_data")
_OF_A_CORPUS = ("data_path", "train_data_path", "data_args_path", "samples_of_the_run")
# Settings that decide which tensors a checkpoint has and of what shape.
_DECIDES_TENSORS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "normalization",
    "position_embedding_type",
    "vocab_size",
    "untie_embeddings_and_output_weights",
)
# Settings that decide what the numbers in those tensors mean. Rotary base and scaling are not among them:
# training on with a longer context changes them.
_DECIDES_MEANING = ("apply_layernorm_1p", "rotary_interleaved", "rotary_percent")


def save_progress(trainer: Trainer, progress: Progress, drawn: Drawn) -> str:
    """Write a checkpoint below `--save` and return a line about it. A collective."""
    config = trainer.config
    directory = config.checkpoint.save
    if directory is None:
        raise TrainingError("there is no --save folder to write a checkpoint to")
    state: dict[str, Any] = {
        "progress": asdict(progress),
        "samples_by_dataset": drawn.after(progress.consumed_samples),
        "data_order": drawn.order(progress.consumed_samples),
        "config": _as_saved(config),
    }
    with_optimizer = not config.checkpoint.no_save_optim
    if with_optimizer:
        state["optimizer"] = trainer.optimizer.scalars()
    path = save(directory, progress.iteration, trainer.blocks(with_optimizer), state)
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

    Without a checkpoint training starts anew, unless `--exit-on-missing-checkpoint` makes that a
    TrainingError. `--finetune` takes only the weights; without the optimizer's state they are converted to
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
        if config.checkpoint.exit_on_missing_checkpoint:
            raise TrainingError(f"{error}, and --exit-on-missing-checkpoint is set") from error
        return Resumed(Progress(), [f"{error}: starting from iteration 0"], {}, None)
    except CheckpointError as error:
        if reasons := _misfits(directory, config, with_optimizer):
            raise TrainingError("\n".join([f"{directory} does not fit this run:", *reasons])) from error
        raise
    if reasons := _changes(_DECIDES_MEANING, state["config"], _as_saved(config)):
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
        goes_on = state.get("data_order") is not None
        lines += [*drawn_lines(drawn or {}), *_differences(state["config"], config, goes_on)]
    return Resumed(progress, lines, drawn, state.get("data_order"))


def _as_saved(config: Config) -> dict[str, Any]:
    """The settings by name as they read in a checkpoint: JSON has no tuples."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in to_dict(config).items()
    }


def _misfits(directory: str, config: Config, with_optimizer: bool) -> list[str]:
    """Why the newest checkpoint cannot be loaded, by settings instead of by tensors; empty when it cannot be
    told.
    """
    try:
        found = latest_iteration(directory)
        state = {} if found is None else read_state(directory, found)
    except CheckpointError:
        return []
    if not state:
        return []
    saved, now = state["config"], _as_saved(config)
    decisive = [*_DECIDES_TENSORS, *(["params_dtype"] if with_optimizer else [])]
    reasons = _changes(decisive, saved, now)
    if with_optimizer and saved["params_dtype"] != now["params_dtype"]:
        reasons[-1] += "; --no-load-optim and --finetune convert the weights and start with a fresh optimizer"
    if with_optimizer and "optimizer" not in state:
        reasons.append("it has no optimizer state (--no-save-optim); --no-load-optim starts with a fresh one")
    return reasons


def _changes(names: Sequence[str], saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A setting that is missing in `saved` is younger than the checkpoint; its default was in force."""
    return [
        f"{name} was {before} when it was saved and is {now[name]} now"
        for name in names
        if (before := saved.get(name, SETTINGS[name].default)) != now[name]
    ]


def _differences(saved: dict[str, Any], config: Config, goes_on: bool) -> list[str]:
    """A warning for each setting by which the samples to come differ from those of the saved run.

    `goes_on`: the checkpoint keeps its order, so that another blend or length goes on where each dataset is,
    unless something else has made another order.
    """
    before, now = _with_length(saved), _with_length(_as_saved(config))
    mocked = before["mock_data"] and now["mock_data"]
    decisive = _DECIDES_SAMPLES if mocked else (*_DECIDES_SAMPLES, "split")
    names = (
        decisive if mocked or (goes_on and not _differ(before, now, decisive)) else (*decisive, *_OF_A_CORPUS)
    )
    return [
        f"warning: {name} was {before[name]} when the checkpoint was saved and is {now[name]} now: "
        "the samples still to come are not those that the saved run would have drawn"
        for name in names
        if before[name] != now[name]
    ]


def _differ(before: dict[str, Any], now: dict[str, Any], names: Sequence[str]) -> bool:
    return any(before[name] != now[name] for name in names)


def _with_length(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` and, in samples, how long a run they describe."""
    by_iterations = (settings["train_iters"] or 0) * settings["global_batch_size"]
    return {**settings, "samples_of_the_run": settings["train_samples"] or by_iterations}
