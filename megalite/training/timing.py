"""Where the time of a step goes, on the rank that reports (`--timing-log-level`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megalite.parallel.traffic import Share, Timing

KINDS = {"reduction": "gradient reduction", "gathering": "gathering of weights"}


def timing_lines(
    timing: Timing, steps: int, seconds: float, data_wait: float, level: int, lengths: Sequence[int]
) -> Iterator[str]:
    """Lines about `steps` steps of `seconds` in all, `data_wait` of them waiting for samples.

    Level 1: the parts of a step, which add up to it, and what share of the traffic of gradients and weights
    was hidden behind computing. Level 2: also each bucket's; `lengths`: their elements.
    """
    optimizer = timing.parts.get("optimizer", 0.0)
    compute = seconds - data_wait - timing.exposed - timing.bubble - optimizer
    parts = {
        "data wait": data_wait,
        "compute": compute,
        "exposed communication": timing.exposed,
        "pipeline bubble": timing.bubble,
        "optimizer": optimizer,
    }
    shown = (f"{name}: {1e3 * value / steps:.1f} ({value / seconds:.0%})" for name, value in parts.items())
    yield f" time of a step (ms) | {' | '.join(shown)} |"
    for kind, title in KINDS.items():
        total = timing.of(kind)
        if total.seconds:
            yield f" {title} | {_shown(total, steps)} |"
        if level > 1:
            for (one, bucket), share in sorted(timing.shares.items()):
                if one == kind:
                    yield f"   bucket {bucket}, {lengths[bucket]:,} elements | {_shown(share, steps)} |"


def _shown(share: Share, steps: int) -> str:
    return f"time (ms): {1e3 * share.seconds / steps:.1f} | hidden: {share.ratio:.1%}"
