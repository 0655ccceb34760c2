"""A checkpoint's settings beside those of the run that loads it: what does not fit, which samples differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalite.checkpoint import CheckpointError, latest_iteration, read_state
from megalite.config import Config, to_dict
from megalite.config.settings import SETTINGS
from megalite.training.errors import TrainingError

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


def as_saved(config: Config) -> dict[str, Any]:
    """The settings by name as they read in a checkpoint: JSON has no tuples."""
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in to_dict(config).items()
    }


def misfits(directory: str, config: Config, with_optimizer: bool) -> list[str]:
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
    saved, now = state["config"], as_saved(config)
    decisive = [*_DECIDES_TENSORS, *(["params_dtype"] if with_optimizer else [])]
    reasons = _changes(decisive, saved, now)
    if with_optimizer and saved["params_dtype"] != now["params_dtype"]:
        reasons[-1] += "; --no-load-optim and --finetune convert the weights and start with a fresh optimizer"
    if with_optimizer and "optimizer" not in state:
        reasons.append("it has no optimizer state (--no-save-optim); --no-load-optim starts with a fresh one")
    return reasons


def changes_of_meaning(saved: Mapping[str, Any], config: Config) -> list[str]:
    """Why the tensors of a checkpoint with the settings `saved` would mean something else in this run."""
    return _changes(_DECIDES_MEANING, saved, as_saved(config))


def _changes(names: Sequence[str], saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A setting that is missing in `saved` is younger than the checkpoint; its default was in force."""
    return [
        f"{name} was {before} when it was saved and is {now[name]} now"
        for name in names
        if (before := saved.get(name, SETTINGS[name].default)) != now[name]
    ]


def check_kind_of_data(saved: Mapping[str, Any], config: Config, directory: str) -> None:
    """Raises TrainingError where made-up samples would follow on datasets, or the other way, in the run with
    the settings `saved`: the samples of a run are numbered from its beginning.
    """
    kinds = {True: "--mock-data", False: "datasets"}
    before, now = saved["mock_data"], config.data.mock_data
    if before != now:
        raise TrainingError(
            f"{directory}: was trained on {kinds[before]}, and {kinds[now]} cannot follow in the same run: "
            "its place in the data would be lost; give --load and --save other folders, or --finetune, "
            "which begins anew with its weights"
        )


def sample_warnings(saved: Mapping[str, Any], config: Config) -> list[str]:
    """A warning for each setting by which made-up samples to come differ from those of the saved run.

    Those of datasets are compared where their order is known, in `megalite.data.data_order`.
    """
    now = as_saved(config)
    return [
        f"warning: {name} was {saved[name]} when the checkpoint was saved and is {now[name]} now: "
        "the samples still to come are not those that the saved run would have drawn"
        for name in ("seed", "seq_length")
        if now["mock_data"] and saved[name] != now[name]
    ]
