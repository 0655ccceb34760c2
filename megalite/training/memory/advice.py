"""What would make a run fit into its memory: every lever with its saving and its cost, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalite.config import Config, replace, validate, zero_stage
from megalite.config.schema.fields import flag_name
from megalite.model.saved_bytes import activation_bytes
from megalite.training.flops import flops_per_token
from megalite.training.memory.plan import plan_memory
from megalite.training.memory.table import shown

CHEAP_PARTS = ("norm", "mlp_act")  # next to nothing to compute again


@dataclass(frozen=True)
class Advice:
    """`flags` to add to the command; `needed`: bytes of the rank that then needs the most."""

    flags: str
    needed: int
    saved: int
    cost: str

    def line(self, available: int) -> str:
        """For a reader."""
        verdict = "fits" if self.needed <= available else "does not fit alone"
        return f"{self.flags}: saves {shown(self.saved)}, needs {shown(self.needed)}, {verdict}; {self.cost}"


@dataclass(frozen=True)
class _Lever:
    changes: dict[str, Any]
    cost: str


def advise(config: Config, world_size: int, available: int, host_is_device: bool) -> list[Advice]:
    """The levers that the rules of the configuration accept and that save anything, the cheapest first.

    Ends with the first that fits. If none fits alone, the last one is all of them together, from the first
    on, as far as needed, or without success. `host_is_device`: offloading to the host saves nothing.
    """

    def needed(changed: Config) -> int:
        account = plan_memory(changed, world_size).largest.account
        return account.total + (account.host if host_is_device else 0)

    before = needed(config)
    found: list[Advice] = []
    together, together_needed, flags, costs = config, before, [], []
    for lever in _levers(config, world_size, host_is_device):
        alone = replace(config, **lever.changes)
        if validate(alone, world_size):
            continue
        need = needed(alone)
        if need >= before:
            continue
        found.append(Advice(_typed(lever.changes), need, before - need, lever.cost))
        if need <= available:
            return found
        with_it = replace(together, **lever.changes)
        if not validate(with_it, world_size) and (need := needed(with_it)) < together_needed:
            together, together_needed = with_it, need
            flags.append(_typed(lever.changes))
            costs.append(lever.cost)
            if need <= available:
                break
    if len(flags) > 1:
        found.append(Advice(" ".join(flags), together_needed, before - together_needed, "; ".join(costs)))
    return found


def _levers(config: Config, world_size: int, host_is_device: bool) -> Iterator[_Lever]:
    """In the order of what they cost in time."""
    parallel, tensor = config.parallel, config.parallel.tensor_model_parallel_size
    pipeline, micro = parallel.pipeline_model_parallel_size, config.batch.micro_batch_size
    replicas, stage = config.data_parallel_size(world_size), zero_stage(config)
    if replicas > 1 and stage < 1:
        yield _Lever({"zero_stage": 1}, "no more traffic")
    if tensor > 1 and not parallel.sequence_parallel:
        yield _Lever({"sequence_parallel": True}, "no more traffic")
    if config.loss.cross_entropy_fusion_impl == "native":
        fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
        yield _Lever(fused, "the same matrix products, in chunks")
    if config.activations.recompute_granularity is None:
        selective = {"recompute_granularity": "selective", "recompute_modules": CHEAP_PARTS}
        yield _Lever(selective, _recompute_cost(config, selective))
    smaller = micro // 2
    while smaller:
        yield _Lever({"micro_batch_size": smaller}, "smaller matrix products, which run slower on a GPU")
        smaller //= 2
    if replicas > 1 and stage < 2:
        yield _Lever({"zero_stage": 2}, "a reduction of the gradients for each micro-batch")
    if config.activations.recompute_granularity != "full":
        full = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
        yield _Lever(full, _recompute_cost(config, full))
    if replicas > 1 and stage < 3:
        yield _Lever({"zero_stage": 3}, "the weights are gathered twice for each micro-batch")
    if not config.optimizer.optimizer_cpu_offload and not host_is_device:
        yield _Lever({"optimizer_cpu_offload": True}, "the update runs at the speed of the host's memory")
    if replicas % 2 == 0:
        yield _Lever({"tensor_model_parallel_size": 2 * tensor}, "two more collectives a layer each way")
        stages = {"pipeline_model_parallel_size": 2 * pipeline}
        yield _Lever(stages, "a larger pipeline bubble, unless there are more micro-batches a step")


def _recompute_cost(config: Config, changes: dict[str, Any]) -> str:
    changed = replace(config, **changes)
    counted = activation_bytes(changed)
    extra = sum(layer.extra_flops for layer in counted.layers) + counted.head.extra_flops
    tokens = config.batch.micro_batch_size * config.model.seq_length
    tensor = config.parallel.tensor_model_parallel_size
    return f"{extra * tensor / (tokens * flops_per_token(config.model, tensor)):.1%} more FLOPs"


def _typed(changes: dict[str, Any]) -> str:
    """As on a command line."""
    words = []
    for name, value in changes.items():
        words.append(flag_name(name))
        if value is not True:
            words += [str(one) for one in value] if isinstance(value, tuple) else [str(value)]
    return " ".join(words)
