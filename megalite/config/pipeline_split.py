"""Which layers a pipeline stage holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megalite.config.pipeline_layout import layers_of_stages
from megalite.config.schedule_file import read_schedule_file
from megalite.config.schema import Config


def split_layers(
    num_layers: int,
    stages: int,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding_is_layer: bool = False,
    loss_is_layer: bool = False,
) -> list[range]:
    """The layers of each stage, in order; stages are equal but for what is asked of the first and the last.

    `first`, `last`: their numbers of layers. `embedding_is_layer`, `loss_is_layer`: the first (last) stage
    gets a layer less, for its embedding (head and loss). Raises ValueError, with the sum that does not come
    out, when no such split exists.
    """
    counts: list[int | None] = [None] * stages
    surplus = [0] * stages
    surplus[0] += embedding_is_layer
    surplus[-1] += loss_is_layer
    for place, fixed in ((0, first), (stages - 1, last)):
        if fixed is not None:
            counts[place] = fixed
    open_stages = [place for place in range(stages) if counts[place] is None]
    left = num_layers - sum(count for count in counts if count is not None)
    share, rest = divmod(left + sum(surplus[place] for place in open_stages), max(len(open_stages), 1))
    sizes = [share - surplus[place] if count is None else count for place, count in enumerate(counts)]
    if rest or min(sizes) < 0 or sum(sizes) != num_layers:
        raise ValueError(f"{num_layers} layers do not come out even over {stages} stages")
    return _ranges(sizes)


def virtual_stages(config: Config) -> int:
    """Model chunks that each pipeline rank holds. Raises ValueError for a layout that cannot be read."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_layout is not None:
        stages = len(layers_of_stages(parallel.pipeline_model_parallel_layout))
        return max(stages // parallel.pipeline_model_parallel_size, 1)
    if pipeline_schedule(config) == "zbv":
        return 2
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        layers = parallel.pipeline_model_parallel_size * parallel.num_layers_per_virtual_pipeline_stage
        return max(config.model.num_layers // layers, 1)
    return 2 if parallel.pipeline_schedule == "interleaved" else 1


def pipeline_schedule(config: Config) -> str:
    """The schedule that was named, or the one that the flags of virtual stages select, or 1F1B."""
    parallel = config.parallel
    if parallel.pipeline_schedule is not None:
        return parallel.pipeline_schedule
    if parallel.pipeline_model_parallel_layout is not None:
        return "1f1b" if virtual_stages(config) == 1 else "interleaved"
    virtual = (parallel.num_virtual_stages_per_pipeline_rank, parallel.num_layers_per_virtual_pipeline_stage)
    return "1f1b" if virtual == (None, None) else "interleaved"


def stage_count(config: Config) -> int:
    """Stages of the whole pipeline. Raises ValueError for a layout or table that cannot be read."""
    parallel = config.parallel
    if parallel.pipeline_schedule_csv is not None:
        return read_schedule_file(parallel.pipeline_schedule_csv).num_stages
    return parallel.pipeline_model_parallel_size * virtual_stages(config)


def stage_layers(config: Config) -> list[range]:
    """The layers of every stage, in the order of the forward pass.

    Raises ValueError when they do not come out even, and for a layout or table that cannot be read.
    """
    parallel = config.parallel
    if parallel.pipeline_model_parallel_layout is not None:
        return _ranges(layers_of_stages(parallel.pipeline_model_parallel_layout))
    return split_layers(
        config.model.num_layers,
        stage_count(config),
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
        embedding_is_layer=parallel.account_for_embedding_in_pipeline_split,
        loss_is_layer=parallel.account_for_loss_in_pipeline_split,
    )


def _ranges(sizes: Sequence[int]) -> list[range]:
    """[2, 3] -> [range(0, 2), range(2, 5)]."""
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
