"""How collectives are started and waited for: plainly, or with a record of when they ran and who waited.

A reduction is hidden while this process computes during it. What is not hidden is the time that the process,
or its device, spends starting it and waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch.distributed as dist

from megalite.accelerator import Clock, Mark


class Traffic:
    """Starts and waits, and measures nothing."""

    def start(self, kind: str, bucket: int, collective: Callable[[], dist.Work]) -> dist.Work:
        """Start a collective over dp for a bucket; `kind`: reduction or gathering."""
        return collective()

    def watched(self, axis: str, work: dist.Work) -> dist.Work:
        """`work` of a collective over an axis, whose wait is to be noted."""
        return work

    def waiting(self, axis: str) -> AbstractContextManager[None]:
        """Around a wait for other ranks of an axis."""
        return nullcontext()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Around a part of a step that is to be told apart from computing."""
        return nullcontext()

    def take(self) -> Timing | None:
        """What was measured since the last call, all devices being idle; None: nothing is measured."""
        return None


@dataclass(frozen=True)
class Span:
    """From `start` to `end`, seconds; `name`: an axis, or a part of a step."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Message:
    """A collective of a bucket: asked for at `start`, done at `end`, seconds."""

    kind: str
    bucket: int
    start: float
    end: float


@dataclass(frozen=True)
class Share:
    """Seconds that collectives took, and how much of that was hidden."""

    seconds: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: Share) -> Share:
        return Share(self.seconds + other.seconds, self.hidden + other.hidden)

    @property
    def ratio(self) -> float:
        """The hidden share; 1 where nothing was sent."""
        return self.hidden / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class Timing:
    """Seconds of this rank: waited for other ranks but not for stages, for stages, in named parts without
    their waits; and for each kind of collective and bucket its share.
    """

    exposed: float = 0.0
    bubble: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    shares: dict[tuple[str, int], Share] = field(default_factory=dict)

    def __add__(self, other: Timing) -> Timing:
        parts, shares = dict(self.parts), dict(self.shares)
        for name, seconds in other.parts.items():
            parts[name] = parts.get(name, 0.0) + seconds
        for key, share in other.shares.items():
            shares[key] = shares.get(key, Share()) + share
        return Timing(self.exposed + other.exposed, self.bubble + other.bubble, parts, shares)

    def of(self, kind: str) -> Share:
        """All buckets together."""
        return sum((share for (one, _), share in self.shares.items() if one == kind), Share())


def make_timing(messages: Sequence[Message], waits: Sequence[Span], parts: Sequence[Span]) -> Timing:
    """Add up. Messages are in the order of their start, in which they run one after another."""
    shares: dict[tuple[str, int], Share] = {}
    last = float("-inf")
    for message in messages:
        start, end = max(message.start, last), max(message.end, message.start, last)
        waited = sum(_overlap(start, end, wait) for wait in waits)
        key = (message.kind, message.bucket)
        shares[key] = shares.get(key, Share()) + Share(end - start, end - start - waited)
        last = end
    seconds: dict[str, float] = {}
    for part in parts:
        inside = sum(_overlap(part.start, part.end, wait) for wait in waits)
        seconds[part.name] = seconds.get(part.name, 0.0) + part.end - part.start - inside
    bubble = sum(wait.end - wait.start for wait in waits if wait.name == "pp")
    return Timing(sum(wait.end - wait.start for wait in waits) - bubble, bubble, seconds, shares)


def _overlap(start: float, end: float, span: Span) -> float:
    return max(0.0, min(end, span.end) - max(start, span.start))


class TimedTraffic(Traffic):
    """Notes every start, wait and end on a clock; waits must not nest."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._messages: list[tuple[str, int, Mark, Mark]] = []
        self._waits: list[tuple[str, Mark, Mark]] = []
        self._parts: list[tuple[str, Mark, Mark]] = []

    def start(self, kind: str, bucket: int, collective: Callable[[], dist.Work]) -> dist.Work:
        """Starting counts as waiting: some backends copy the message before they return."""
        asked = self._clock.now()
        work = collective()
        self._waits.append(("dp", asked, self._clock.now()))
        self._messages.append((kind, bucket, asked, self._clock.when_done(work)))
        return self.watched("dp", work)

    def watched(self, axis: str, work: dist.Work) -> dist.Work:
        """A stand-in for `work` that notes its wait."""
        return cast(dist.Work, _Watched(self, axis, work))

    @contextmanager
    def waiting(self, axis: str) -> Iterator[None]:
        """Note the time within."""
        start = self._clock.now()
        yield
        self._waits.append((axis, start, self._clock.now()))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note the time within."""
        start = self._clock.now()
        yield
        self._parts.append((name, start, self._clock.now()))

    def take(self) -> Timing | None:
        """Everything noted since the last call."""
        spans = [*self._waits, *self._parts]
        starts = [start for _, start, _ in spans]
        if not starts:
            return Timing()
        origin = starts[0]

        def seconds(mark: Mark) -> float:
            return self._clock.seconds(origin, mark)

        messages = [Message(kind, bucket, seconds(a), seconds(b)) for kind, bucket, a, b in self._messages]
        waits, parts = (
            [Span(name, seconds(a), seconds(b)) for name, a, b in spans]
            for spans in (self._waits, self._parts)
        )
        self._messages, self._waits, self._parts = [], [], []
        return make_timing(messages, waits, parts)


class _Watched:
    def __init__(self, traffic: TimedTraffic, axis: str, work: dist.Work):
        self._traffic, self._axis, self._work = traffic, axis, work

    def wait(self) -> None:
        with self._traffic.waiting(self._axis):
            self._work.wait()
