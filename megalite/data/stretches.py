"""The order of a run's samples over resumes that change its blend or its length, as plain records.

A run is a row of stretches, each with a blend of its own. A dataset is read in rounds of whole epochs, one
after another: the first is that of a run which is never changed, and when a stretch needs more samples than
the rounds so far have, rounds of one epoch are added. A stretch takes up each dataset at the sample of its
rounds where the stretch before left it:

    2 rounds of A      0 1 2 3 4 5 6 7 8 9 | 0 1 2 3 4 5 6 7 8 9
    blend A            - - - - - -                                 samples 0 to 5 of the run
    blend A, B                     - - - -   - - -                 A's part of samples 6 to 19, B from its 0

So what is still to come is a function of blend, seed and places; rounds only ever grow, so that earlier
stretches can be shown as they were.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from megalite.config.blend import Blend
from megalite.data.splits import Share


class Round(NamedTuple):
    """Whole epochs of a dataset in an order of their own."""

    epochs: int
    separate_final_epoch: bool


@dataclass(frozen=True)
class DatasetPlace:
    """How far a dataset has been read."""

    prefix: str
    identity: str
    """Hash of the lengths and some tokens of its documents: other data of the same name is told from it."""
    rounds: tuple[Round, ...]
    place: int
    """The next sample, counted over all rounds."""


@dataclass(frozen=True)
class Stretch:
    """Samples of a run under one blend, from `first_sample` until the next stretch."""

    first_sample: int
    weights: tuple[float, ...] | None
    """One for each of `datasets`; None: by what each has left, and once, or a single dataset that repeats."""
    left: tuple[int, ...] | None
    """Samples that each has left at the beginning, where they decide the mixture."""
    datasets: tuple[DatasetPlace, ...]
    """With their places at the beginning."""

    def has_blend(self, blend: Blend) -> bool:
        """Whether `blend` asks for what this stretch is, by the last names of the datasets: their folders may
        be others, on each node and after each move.
        """
        names = [last_name(place.prefix) for place in self.datasets]
        return self.weights == blend.weights and names == [last_name(prefix) for prefix in blend.prefixes]

    def identity(self) -> str:
        """Hash of what decides the samples: the same on every rank, whatever their folders are."""
        names = [last_name(place.prefix) for place in self.datasets]
        return hashlib.sha256(repr(self.moved_to(names)).encode("utf-8", "surrogatepass")).hexdigest()

    def moved_to(self, prefixes: Sequence[str]) -> Stretch:
        """The same with its datasets under `prefixes`."""
        places = zip(self.datasets, prefixes, strict=True)
        return replace(self, datasets=tuple(replace(place, prefix=prefix) for place, prefix in places))


@dataclass(frozen=True)
class OrderKey:
    """What every order depends on beside the data: with other values no place can be taken over."""

    seq_length: int
    seed: int
    share: Share

    def changes(self, now: OrderKey) -> list[str]:
        """What is another one in `now`, in words. Shares that only rounding tells apart, as those of splits
        `969,30,1` and `0.969,0.03,0.001`, are the same.
        """
        pairs = zip(self.share, now.share, strict=True)
        same_share = all(math.isclose(a, b, rel_tol=0, abs_tol=1e-12) for a, b in pairs)
        values = [
            ("sequence length", str(self.seq_length), str(now.seq_length), self.seq_length == now.seq_length),
            ("seed", str(self.seed), str(now.seed), self.seed == now.seed),
            ("training's share of the documents", _span(self.share), _span(now.share), same_share),
        ]
        return [f"{name} was {before} and is {after} now" for name, before, after, same in values if not same]


@dataclass(frozen=True)
class OrderRecord:
    """What a checkpoint keeps of the order of the training samples."""

    key: OrderKey
    samples: int
    """How many the run wants in all."""
    consumed_samples: int
    stretches: tuple[Stretch, ...]
    read: tuple[DatasetPlace, ...]
    """Where every dataset is that the run has ever read."""
    earlier: OrderRecord | None = None
    """Of the samples before its `consumed_samples`, if those were drawn with another key."""

    def begins_at(self) -> int:
        """The first sample that was or will be drawn from the last stretch."""
        earlier = 0 if self.earlier is None else self.earlier.consumed_samples
        return max(earlier, self.stretches[-1].first_sample)

    def to_json(self) -> dict[str, Any]:
        """As values that JSON has."""
        return asdict(self)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> OrderRecord:
        """What `to_json` gave, also after a way through JSON."""
        key = content["key"]
        low, high = key["share"]
        return OrderRecord(
            OrderKey(key["seq_length"], key["seed"], (low, high)),
            content["samples"],
            content["consumed_samples"],
            tuple(_stretch(each) for each in content["stretches"]),
            tuple(_place(each) for each in content["read"]),
            OrderRecord.from_json(earlier) if (earlier := content.get("earlier")) is not None else None,
        )


def _span(share: Share) -> str:
    return f"{share[0]:.12g} to {share[1]:.12g}"


def _stretch(content: Mapping[str, Any]) -> Stretch:
    weights, left = content["weights"], content["left"]
    return Stretch(
        content["first_sample"],
        None if weights is None else tuple(weights),
        None if left is None else tuple(left),
        tuple(_place(each) for each in content["datasets"]),
    )


def _place(content: Mapping[str, Any]) -> DatasetPlace:
    return DatasetPlace(
        content["prefix"],
        content["identity"],
        tuple(Round(*each) for each in content["rounds"]),
        content["place"],
    )


def normal(prefix: str) -> str:
    """One spelling for `./corpus`, `corpus`, `/data/corpus` and `//data/corpus`."""
    path = os.path.abspath(prefix)
    path = path[1:] if path.startswith("//") else path
    folder, name = os.path.split(prefix)
    if os.pardir in folder.split(os.sep):
        real = os.path.realpath(folder)
        if real != os.path.realpath(os.path.dirname(path)):  # `..` behind a link
            return os.path.join(real, name)
    return path


def last_name(prefix: str) -> str:
    """By which a dataset is known that was moved."""
    return os.path.basename(normal(prefix))


def without_repeats(blend: Blend) -> Blend:
    """The same with each dataset once: two entries of one dataset would read the same samples twice."""
    first: dict[str, str] = {}
    weights: dict[str, float] = {}
    for prefix, weight in zip(blend.prefixes, blend.weights or [0.0] * len(blend.prefixes), strict=True):
        name = normal(prefix)
        first.setdefault(name, prefix)
        weights[name] = weights.get(name, 0.0) + weight
    return Blend(tuple(first.values()), None if blend.weights is None else tuple(weights.values()))


def furthest(*places: Iterable[DatasetPlace]) -> tuple[DatasetPlace, ...]:
    """Each dataset once, by its absolute name and content, where it was read furthest."""
    found: dict[tuple[str, str], DatasetPlace] = {}
    for place in (place for each in places for place in each):
        name = normal(place.prefix)
        _keep_furthest(found, (name, place.identity), replace(place, prefix=name))
    return tuple(found.values())


def moved(read: Iterable[DatasetPlace], now: Iterable[DatasetPlace]) -> dict[str, str]:
    """Absolute prefixes in `read` all of whose datasets, one after the other, are among `now` under others,
    read at least as far, with those: where each job copies the data into a folder of its own, they would be
    more with every job.
    """
    names: set[str] = set()
    here: dict[tuple[str, str], DatasetPlace] = {}
    for place in now:
        names.add(normal(place.prefix))
        _keep_furthest(here, (last_name(place.prefix), place.identity), place)
    found: dict[str, str] = {}
    for place in read:
        name, present = normal(place.prefix), here.get((last_name(place.prefix), place.identity))
        if present is not None and place.place <= present.place:
            found[name] = normal(present.prefix)
        else:
            names.add(name)
    return {name: now_at for name, now_at in found.items() if name not in names}


class ReadBefore:
    """Where the datasets that a run has read were left, to be asked for those of its next blend."""

    def __init__(self, read: Iterable[DatasetPlace], identities: Mapping[str, str]) -> None:
        """`identities`: of the datasets that the next blend asks for, by their prefixes."""
        present = {normal(prefix): identity for prefix, identity in identities.items()}
        self._names: set[str] = set()
        self._here: dict[tuple[str, str], DatasetPlace] = {}
        self._moved: dict[tuple[str, str], DatasetPlace] = {}
        for place in read:
            name = normal(place.prefix)
            self._names.add(name)
            if present.get(name) == place.identity:
                _keep_furthest(self._here, (name, place.identity), place)
            else:
                _keep_furthest(self._moved, (last_name(name), place.identity), place)

    def has_name(self, prefix: str) -> bool:
        """Whether a dataset of this name was read, whatever it held."""
        return normal(prefix) in self._names

    def take_up(self, prefix: str, identity: str) -> DatasetPlace | None:
        """Where the dataset `prefix` was left; None when it, or what it holds now, was not read before.

        A dataset that was moved, however often, is known by its last name and content, also where others
        have taken its place; where it was under several names, what was read furthest counts.
        """
        name = normal(prefix)
        found = [
            place
            for place in (
                self._here.get((name, identity)),
                self._moved.get((last_name(name), identity)),
            )
            if place is not None
        ]
        furthest_read = max(found, key=lambda place: place.place, default=None)
        return None if furthest_read is None else replace(furthest_read, prefix=prefix)


def _keep_furthest(
    found: dict[tuple[str, str], DatasetPlace], key: tuple[str, str], place: DatasetPlace
) -> None:
    if key not in found or place.place >= found[key].place:
        found[key] = place
