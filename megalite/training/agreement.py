"""Whether all ranks read the same settings, and find nothing wrong with them: each takes them from its own
command line and files, which a node may have other copies of.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

from megalite.config import Config, ConfigError, ConfigErrors, parse_blend, read_data_args, to_dict
from megalite.config.errors import shown
from megalite.config.paths import open_regular
from megalite.config.schema.fields import flag_name
from megalite.data.stretches import last_name
from megalite.listing import LISTED, listing
from megalite.training.launcher import Place

if TYPE_CHECKING:
    from torch.distributed import Store

# Of these each rank may have one of its own; all other settings are the same everywhere.
OWN = (
    "data_cache_path",  # what is there is a function of the data
    "tokenizer_model",  # the content of these three is compared when the datasets are open
    "vocab_file",
    "merge_file",
    "metrics_file",  # these two are written by the last rank only
    "tensorboard_dir",
    "num_workers",  # nodes may have other numbers of cores
)
GIVEN = ("exit_duration_in_mins",)  # on all ranks or on none: the first to come to its end stops all
# Of datasets the folder may be another, as of copies on each node: what they hold is compared when they are
# open, but not the weights and the order.
BLENDS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
CONTENTS = ("data_args_path", "pipeline_schedule_csv")  # what such a file holds must be the same
LONGEST = 100  # characters of a value that are told
NOT_GIVEN = "not given"
ADVICE = "give every rank the same flags, and every node the same files of settings"


def settings_to_compare(config: Config) -> dict[str, str]:
    """What must be the same on every rank, by the names of the settings; as text of bounded length, equal
    where the values are.
    """
    texts = {
        name: _text(value)
        for name, value in to_dict(config).items()
        if name not in (*OWN, *GIVEN, *BLENDS, *CONTENTS)
    }
    texts |= {name: "given" for name in GIVEN if to_dict(config)[name] is not None}
    data, schedule = config.data, config.parallel.pipeline_schedule_csv
    if not data.mock_data:
        texts |= {name: _blend_text(getattr(data, name)) for name in BLENDS}
        if data.data_args_path is not None:
            texts["data_args_path"] = f"a file with {_blend_text(read_data_args(data.data_args_path))}"
    if schedule is not None:
        with open_regular(schedule) as file:
            texts["pipeline_schedule_csv"] = f"a file with hash {_hash(file.read())}"
    return texts


def check_errors(store: Store, place: Place, mine: ConfigErrors | None) -> None:
    """Say which configuration errors this rank has found, and hear of those of the others.

    Every rank calls it, before any process group exists. Raises ConfigErrors, the same on all ranks, with all
    that any has found.
    """
    errors = () if mine is None else mine.errors
    fields = [(e.flag, None if e.value is None else shown(e.value), e.rule, e.suggestion) for e in errors]
    _raise_together(store, place, "errors", fields, _with_ranks)


def check_agreement(store: Store, place: Place, mine: Mapping[str, str]) -> None:
    """Hold the settings of this rank against those of the others, before any process group exists.

    Every rank calls it. Raises ConfigErrors, the same on all ranks, with an error for each setting that is
    not the same on all.
    """
    if place.rank == 0:
        store.set("settings", json.dumps(mine))
    first: dict[str, str] = json.loads(store.get("settings"))
    other = {
        name: mine.get(name, NOT_GIVEN) for name in {**first, **mine} if mine.get(name) != first.get(name)
    }
    _raise_together(store, place, "other settings", other, lambda others: _differences(first, others))


def _raise_together(
    store: Store, place: Place, what: str, mine: Any, judge: Callable[[list[Any]], list[ConfigError]]
) -> None:
    """Raise ConfigErrors on every rank with what `judge` makes of what all have, on the first rank."""
    store.set(f"{what} of {place.rank}", json.dumps(mine))
    if place.rank == 0:
        everyones = [json.loads(store.get(f"{what} of {rank}")) for rank in range(place.world_size)]
        store.set(what, json.dumps([astuple(error) for error in judge(everyones)]))
    found = [ConfigError(*fields) for fields in json.loads(store.get(what))]
    if found:
        if store.add(f"told of {what}", 1) == place.world_size:
            store.set(f"all told of {what}", "")
        if place.rank == 0:
            store.wait([f"all told of {what}"])  # it may hold the store, which would end with it
        raise ConfigErrors(found)


def _with_ranks(everyones: Sequence[Sequence[Sequence[str]]]) -> list[ConfigError]:
    """Each error once, with the ranks that have found it where others have not."""
    ranks: dict[ConfigError, list[str]] = {}
    for rank, errors in enumerate(everyones):
        for error in errors:
            ranks.setdefault(ConfigError(*error), []).append(str(rank))
    return [
        error if len(who) == len(everyones) else replace(error, rule=f"on rank {listing(who)}: {error.rule}")
        for error, who in ranks.items()
    ]


def _differences(first: Mapping[str, str], others: Sequence[Mapping[str, str]]) -> list[ConfigError]:
    """An error for each setting that differs, with who has which; `others`: by rank what it has otherwise."""
    errors = []
    for name in sorted({name for each in others for name in each}):
        ranks: dict[str, list[str]] = {}
        for rank, each in enumerate(others):
            if name in each:
                ranks.setdefault(each[name], []).append(str(rank))
        groups = [f"{value} on rank {listing(who)}" for value, who in ranks.items()]
        more = f" and {len(groups) - LISTED} other values" if len(groups) > LISTED else ""
        told = " and ".join(groups[:LISTED]) + more
        rule = f"{first.get(name, NOT_GIVEN)} on rank 0, but {told}"
        errors.append(ConfigError(flag_name(name), None, rule, ADVICE))
    return errors


def _text(value: Any) -> str:
    if value in (None, ()):
        return NOT_GIVEN
    return _shortened(repr(value) if isinstance(value, float) else shown(value))


def _blend_text(items: Sequence[str]) -> str:
    """Weights and names, without the folders."""
    if not items:
        return NOT_GIVEN
    blend = parse_blend(items)
    names = [last_name(prefix) for prefix in blend.prefixes]
    if blend.weights is not None:
        names = [
            f"{repr(weight).removesuffix('.0')} {name}"
            for weight, name in zip(blend.weights, names, strict=True)
        ]
    return _shortened(" ".join(names))


def _shortened(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return (
        f"{text[:LONGEST]}... ({len(text)} characters, hash {_hash(text.encode('utf-8', 'surrogatepass'))})"
    )


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
