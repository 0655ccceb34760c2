"""A model to generate with: the weights of a checkpoint, spread over the processes that there are."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

from megalite.checkpoint import (
    CheckpointNotFoundError,
    latest_iteration,
    load,
    parameter_blocks,
    read_state,
)
from megalite.config import ModelConfig, config_from_dict, kv_replicas
from megalite.data.tokenizer import Tokenizer, build_tokenizer
from megalite.model.gpt import GPTStage, StagePlace, build_stages
from megalite.parallel.params import ParameterFactory
from megalite.parallel.topology import Topology, axis_ranks, build_topology
from megalite.pipeline.links import ChunkLinks, build_links
from megalite.pipeline.schedule import one_f_one_b

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class LoadedModel:
    """This process's stage of a model, in evaluation mode, with its neighbours."""

    stage: GPTStage
    links: list[ChunkLinks]
    config: ModelConfig
    dtype: torch.dtype
    tokenizer: Tokenizer
    topology: Topology


def load_model(
    directory: str, device: torch.device, tensor: int = 1, pipeline: int = 1, iteration: int | None = None
) -> LoadedModel:
    """The model of a checkpoint folder on `tensor` x `pipeline` processes, which are all there are.

    A collective. Layers that do not come out even are spread as evenly as they can. Raises CheckpointError
    when there is no usable checkpoint, DataError when the tokenizer's files are gone, ValueError for a layout
    that the model does not fit.
    """
    found = latest_iteration(directory) if iteration is None else iteration
    if found is None:
        raise CheckpointNotFoundError(f"{directory} has no checkpoint")
    config = config_from_dict(read_state(directory, found)["config"])
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    _check_layout(config.model, tensor, pipeline)
    topology = build_topology(tensor, pipeline, device, TIMEOUT, kv_replicas(config.model, tensor))
    dtype: torch.dtype = getattr(torch, config.precision.params_dtype)
    rank, layers = topology.pp.rank, config.model.num_layers
    mine = range(rank * layers // pipeline, (rank + 1) * layers // pipeline)
    place = StagePlace(mine, first=rank == 0, last=rank == pipeline - 1)
    (stage,) = build_stages(config.model, ParameterFactory(topology, dtype, config.run.seed), [place])
    blocks = [
        block
        for param in stage.parameters()
        for block in parameter_blocks("model", param, param.detach().view(-1))
    ]
    stage.eval()
    load(directory, blocks, found, ignored_prefixes=("optimizer.",))
    pipelines = axis_ranks(topology.world_size, tensor, pipeline)["pp"]
    links = build_links(one_f_one_b(pipeline, 1), pipelines, device, TIMEOUT)
    return LoadedModel(stage, links, config.model, dtype, tokenizer, topology)


def _check_layout(model: ModelConfig, tensor: int, pipeline: int) -> None:
    sizes = {"heads": model.num_attention_heads, "MLP channels": model.ffn_hidden_size}
    for name, size in sizes.items():
        if size % tensor:
            raise ValueError(f"{size} {name} not divisible by tensor-parallel size {tensor}")
    if pipeline > model.num_layers:
        raise ValueError(f"{model.num_layers} layers are fewer than pipeline-parallel size {pipeline}")
