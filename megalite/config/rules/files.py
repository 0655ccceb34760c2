"""Rules of what must exist on disk: datasets, checkpoints, folders to write into."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from megalite.config.blend import parse_blend, parse_split, read_data_args
from megalite.config.paths import why_no_file, why_unseen
from megalite.config.rules.rule import Candidate, Finding, reads
from megalite.config.schema.fields import flag_name
from megalite.flags import is_address

PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
PATHS = ("data_path", *PER_SPLIT)


@reads("mock_data", "data_args_path", *PATHS)
def data_is_given(c: Candidate) -> Iterator[Finding]:
    data = c.config.data
    if any(getattr(data, name) for name in PER_SPLIT) and not data.train_data_path:
        yield "train_data_path", None, "is missing beside the other splits' paths", "give it too"
    elif not (data.mock_data or data.data_path or data.data_args_path or data.train_data_path):
        yield "data_path", None, "there is no data to train on", "give --data-path PREFIX, or --mock-data"


@reads("mock_data", "data_args_path", *PATHS)
def datasets_exist(c: Candidate) -> Iterator[Finding]:
    data = c.config.data
    if data.mock_data:
        return
    for name in PATHS:
        yield from _blend_findings(name, getattr(data, name))
    if data.data_args_path is not None:
        try:
            items = read_data_args(data.data_args_path)
        except UnicodeDecodeError:
            yield "data_args_path", data.data_args_path, "is no text file", "give a text file"
            return
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            yield "data_args_path", data.data_args_path, f"cannot be read: {reason}", "give a text file"
            return
        if not items:
            yield "data_args_path", data.data_args_path, "the file is empty", "put dataset prefixes into it"
        yield from _blend_findings("data_args_path", items)


def _blend_findings(name: str, items: Sequence[str]) -> Iterator[Finding]:
    if not items:
        return
    try:
        prefixes = parse_blend(items).prefixes
    except ValueError as error:
        yield name, items, str(error), "give PREFIX ... or WEIGHT PREFIX WEIGHT PREFIX ..."
        return
    for prefix in dict.fromkeys(prefixes):
        reasons = {file: why_no_file(file) for file in (f"{prefix}.idx", f"{prefix}.bin")}
        missing = [file for file, reason in reasons.items() if reason is not None]
        if missing:
            yield name, prefix, f"{reasons[missing[0]]}: {' and '.join(missing)}", _prefix_advice(prefix)


def _prefix_advice(prefix: str) -> str:
    bare = prefix.removesuffix(".bin").removesuffix(".idx")
    if bare != prefix:
        return f"leave the suffix out: {bare}"
    folder = Path(prefix).parent
    if not os.access(folder, os.R_OK | os.X_OK):
        gone = why_unseen(folder) is None and not folder.exists()
        return f"the folder {folder} {'does not exist' if gone else 'cannot be read'}"
    there = sorted(path.with_suffix("").name for path in folder.glob("*.idx"))[:3]
    return f"in {folder} there is {', '.join(there)}" if there else f"{folder} holds no .idx file"


@reads("split")
def split_is_readable(c: Candidate) -> Iterator[Finding]:
    try:
        train, _, _ = parse_split(c.config.data.split)
    except ValueError as error:
        text = str(error) if "could not convert" not in str(error) else "not numbers with commas between"
        yield "split", c.config.data.split, text, "three shares, e.g. 969, 30, 1"
        return
    uses_split = not (c.config.data.train_data_path or c.config.data.mock_data)
    if train == 0 and uses_split and not c.config.batch.skip_train:
        yield "split", c.config.data.split, "the training share is 0", "three shares, e.g. 969, 30, 1"


@reads("load", "finetune", "no_load_optim", "exit_on_missing_checkpoint")
def checkpoint_can_be_loaded(c: Candidate) -> Iterator[Finding]:
    checkpoint = c.config.checkpoint
    needs_one = [n for n in ("finetune", "exit_on_missing_checkpoint") if getattr(checkpoint, n)]
    if checkpoint.load is None:
        for name in (*needs_one, *(["no_load_optim"] if checkpoint.no_load_optim else [])):
            yield name, None, "there is nothing to load without --load", "give --load FOLDER, or leave it out"
        return
    folder = checkpoint.load
    if unseen := why_unseen(folder):
        yield "load", folder, unseen, "give the folder that --save was given"
    elif os.path.exists(folder) and not os.path.isdir(folder):
        yield "load", folder, "is a file", "give the folder that --save was given"
    elif os.path.isfile(os.path.join(folder, "manifest.json")) and not any(Path(folder).glob("iter_*")):
        parent = os.path.dirname(os.path.abspath(folder))
        yield "load", folder, "is a checkpoint itself", f"give its folder, {parent}"
    elif needs_one and not _has_checkpoints(Path(folder)):
        rule = f"holds no checkpoint, which {flag_name(needs_one[0])} needs"
        yield "load", checkpoint.load, rule, "give the folder that --save was given"


def _has_checkpoints(folder: Path) -> bool:
    """Whether one is recorded or there: a copy, or a run killed in its first save, may lack the record."""
    recorded = why_no_file(folder / "latest_checkpointed_iteration.txt") is None
    return recorded or any(folder.glob("iter_*"))


@reads("save", "save_interval")
def saving_has_a_place(c: Candidate) -> Iterator[Finding]:
    # A recipe file may hold an interval for whoever saves; typed without --save it loses the run.
    interval = c.config.checkpoint.save_interval
    if c.config.checkpoint.save is None and interval is not None and "save_interval" in c.typed:
        yield "save_interval", interval, "nothing is saved without --save", "give --save FOLDER"


@reads("save", "tensorboard_dir", "data_cache_path", "metrics_file")
def places_can_be_written(c: Candidate) -> Iterator[Finding]:
    config = c.config
    folders = {
        "save": config.checkpoint.save,
        "tensorboard_dir": config.logging.tensorboard_dir,
        "data_cache_path": config.data.data_cache_path,
    }
    for name, place in {**folders, "metrics_file": config.logging.metrics_file}.items():
        if place is not None and is_address(place):
            yield name, place, "is an address", "give a path of a file system: mount it"
            return
    for name, folder in folders.items():
        if name == "data_cache_path" and folder is not None and os.path.isdir(folder):
            continue  # arrays that are there are read where none can be added, which a warning tells
        if folder is not None and (problem := _unusable(Path(folder))):
            yield name, folder, problem, "give a folder that can be made and written to"
    metrics = config.logging.metrics_file
    if metrics is None:
        return
    if os.path.isdir(metrics):
        yield "metrics_file", metrics, "is a folder", f"give a file, e.g. {Path(metrics) / 'metrics.jsonl'}"
    elif problem := why_unseen(metrics) or _unusable(Path(metrics).parent):
        yield "metrics_file", metrics, problem, "give a file in a folder that can be made and written to"
    elif Path(metrics).is_fifo() and not _is_read(metrics):
        yield "metrics_file", metrics, "is a pipe that nobody reads", "give a file, or read it first"


def _is_read(pipe: str) -> bool:
    """Whether it need not be waited for until the pipe has a reader."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno != errno.ENXIO
    return True


def _unusable(folder: Path) -> str | None:
    """Why a folder cannot be made or written to, or None. It is made when it is first needed."""
    if unseen := why_unseen(folder):
        return unseen
    existing = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    if not existing.is_dir():
        return f"{existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable"
    return None


@reads("tensorboard_dir")
def tensorboard_is_installed(c: Candidate) -> Iterator[Finding]:
    folder = c.config.logging.tensorboard_dir
    if folder is None:
        return
    package = find_spec("tensorboard")  # without importing it
    if package is None or package.origin is None:  # no origin: a mere folder of that name, maybe this one
        yield "tensorboard_dir", folder, "the tensorboard package is not installed", "pip install tensorboard"


RULES = (
    data_is_given,
    datasets_exist,
    split_is_readable,
    checkpoint_can_be_loaded,
    saving_has_a_place,
    places_can_be_written,
    tensorboard_is_installed,
)
