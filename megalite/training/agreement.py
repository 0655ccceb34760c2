"""Whether all ranks read the same settings: each takes them from its own command line and files, which a
node may have other copies of.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
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

# Of these paths each rank may have one of its own; all other settings are the same everywhere.
OWN_PATHS = (
    "data_cache_path",  # what is there is a function of the data
    "tokenizer_model",  # the content of these three is compared when the datasets are open
    "vocab_file",
    "merge_file",
    "metrics_file",  # these two are written by the last rank only
    "tensorboard_dir",
)
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
        if name not in (*OWN_PATHS, *BLENDS, *CONTENTS)
    }
    data, schedule = config.data, config.parallel.pipeline_schedule_csv
    if not data.mock_data:
        texts |= {name: _blend_text(getattr(data, name)) for name in BLENDS}
        if data.data_args_path is not None:
            texts["data_args_path"] = f"a file with {_blend_text(read_data_args(data.data_args_path))}"
    if schedule is not None:
        with open_regular(schedule) as file:
            texts["pipeline_schedule_csv"] = f"a file with hash {_hash(file.read())}"
    return texts


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
    store.set(f"settings of {place.rank}", json.dumps(other))
    if place.rank == 0:
        others = [json.loads(store.get(f"settings of {rank}")) for rank in range(place.world_size)]
        store.set("settings that differ", json.dumps(_differences(first, others)))
    found: list[tuple[str, str]] = json.loads(store.get("settings that differ"))
    if found:
        if store.add("told of settings", 1) == place.world_size:
            store.set("all told of settings", "")
        if place.rank == 0:
            store.wait(["all told of settings"])  # it may hold the store, which would end with it
        raise ConfigErrors([ConfigError(flag_name(name), None, rule, ADVICE) for name, rule in found])


def _differences(first: Mapping[str, str], others: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """The name of each setting that differs, and who has which; `others`: by rank what it has otherwise."""
    rules = []
    for name in sorted({name for each in others for name in each}):
        ranks: dict[str, list[str]] = {}
        for rank, each in enumerate(others):
            if name in each:
                ranks.setdefault(each[name], []).append(str(rank))
        groups = [f"{value} on rank {listing(who)}" for value, who in ranks.items()]
        more = f" and {len(groups) - LISTED} other values" if len(groups) > LISTED else ""
        told = " and ".join(groups[:LISTED]) + more
        rules.append((name, f"{first.get(name, NOT_GIVEN)} on rank 0, but {told}"))
    return rules


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
