"""A schedule as a picture: one row a rank, time to the right."""

from __future__ import annotations

from pathlib import Path

from megalite.pipeline.schedule import Kind
from megalite.pipeline.simulation import Timeline

# Two shades a kind: the first for chunk 0, the second for later chunks, which the eye must tell apart.
COLOURS = {
    Kind.F: ("#4c78a8", "#9ecae9"),
    Kind.B: ("#54a24b", "#88d27a"),
    Kind.I: ("#54a24b", "#88d27a"),
    Kind.W: ("#b79a20", "#f2cf5b"),
}
NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}


def draw_png(timeline: Timeline, path: Path) -> None:
    """Write the timeline to `path`. Needs matplotlib, which is an optional dependency."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    width = min(24.0, max(8.0, 0.3 * timeline.makespan))
    figure = Figure(figsize=(width, 1.2 + 0.5 * len(schedule)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            colour = COLOURS[span.action.kind][min(span.action.chunk, 1)]
            length = span.finish - span.start
            axes.barh(
                rank, length, left=span.start, height=0.92, color=colour, edgecolor="white", linewidth=0.5
            )
            axes.text(
                span.start + length / 2,
                rank,
                str(span.action.microbatch),
                ha="center",
                va="center",
                fontsize=7,
            )
    axes.set_yticks(range(len(schedule)), [f"rank {rank}" for rank in range(len(schedule))])
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.makespan)
    axes.set_xlabel("time")
    axes.set_title(
        f"{schedule.name}, pp {len(schedule)}, {schedule.microbatches} micro-batches: "
        f"bubble {float(timeline.bubble_fraction):.1%}"
    )
    used = dict.fromkeys(span.action.kind for spans in timeline.spans for span in spans)
    handles = [Patch(color=COLOURS[kind][0], label=NAMES[kind]) for kind in used]
    title = None if schedule.num_stages == len(schedule) else "pale: later chunks"
    axes.legend(handles=handles, title=title, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=120)
