"""What would make a run fit into its memory: every lever with its saving and its cost, the cheapest first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.config import Config, ConfigErrors, replace, stage_layers, to_dict, validate, zero_stage
from megalite.config.rules.activations import WITHIN
from megalite.config.schema.activations import DEFAULT_PARTS, PARTS
from megalite.config.schema.fields import flag_name
from megalite.model.recompute_budget import Measured, least_share, within_budget
from megalite.model.saved_bytes import activation_bytes
from megalite.training.flops import flops_per_token
from megalite.training.memory.plan import plan_memory
from megalite.training.memory.table import shown

CHEAP_PARTS = ("norm", "mlp_act", "rope")  # next to nothing to compute again
MOST_TENSOR_PARALLEL = 8  # ranks that share a fast network, in most machines


@dataclass(frozen=True)
class Advice:
    """`flags` to add to the command; `needed`: bytes of the rank that then needs the most, `host`: in host
    memory; `saved`: on the device.
    """

    flags: str
    needed: int
    host: int
    saved: int
    cost: str

    def line(self, available: int) -> str:
        """For a reader."""
        verdict = "fits" if self.needed <= available else "does not fit alone"
        needs = shown(self.needed) + (f" and {shown(self.host)} of host memory" if self.host else "")
        return f"{self.flags}: saves {shown(self.saved)}, needs {needs}, {verdict}; {self.cost}"


@dataclass(frozen=True)
class Lever:
    """`changes`: settings by name; `flags`: the same, to be typed behind the flags that are there."""

    changes: dict[str, Any]
    flags: str
    cost: str


def advise(
    config: Config, world_size: int, available: int, host_is_device: bool, measured: Measured | None = None
) -> list[Advice]:
    """The levers that the rules of the configuration accept and that save anything, the cheapest first.

    Ends with the first that fits. If none fits alone, the last one is all of them together, from the first
    on, as far as needed, or without success. `host_is_device`: offloading to the host saves nothing.
    `measured`: what is known for --recompute-budget. Raises `ConfigErrors` where that cannot be met.
    """
    measured = measured or Measured()

    def needed(changed: Config) -> tuple[int, int] | None:
        """None where this layout cannot meet the budget, or breaks another rule."""
        if validate(changed, world_size):
            return None
        try:
            return _needed(changed, world_size, host_is_device, measured)
        except ConfigErrors:
            return None

    before, _ = _needed(config, world_size, host_is_device, measured)
    found: list[Advice] = []
    together: list[Lever] = []
    least, host = before, 0
    for lever in levers(config, world_size, host_is_device, measured):
        alone = needed(replace(config, **lever.changes))
        if alone is None or alone[0] >= before:
            continue
        found.append(Advice(lever.flags, *alone, before - alone[0], lever.cost))
        if alone[0] <= available:
            return found
        others = [each for each in together if not each.changes.keys() <= lever.changes.keys()]
        all_of_them = needed(replace(config, **_changes_of([*others, lever])))
        if all_of_them is not None and all_of_them[0] < least:
            together = [*others, lever]
            least, host = all_of_them
            if least <= available:
                break
    if len(together) > 1:
        flags, cost = _typed(config, _changes_of(together)), "; ".join(lever.cost for lever in together)
        found.append(Advice(flags, least, host, before - least, cost))
    return found


def _needed(config: Config, world_size: int, host_is_device: bool, measured: Measured) -> tuple[int, int]:
    """Bytes of the rank that needs the most, on the device and beside it in host memory."""
    chosen, _ = within_budget(config, measured)
    account = plan_memory(chosen, world_size, host_is_device).largest.account
    return (account.total + account.host, 0) if host_is_device else (account.total, account.host)


def _changes_of(together: Sequence[Lever]) -> dict[str, Any]:
    return {name: value for lever in together for name, value in lever.changes.items()}


def levers(
    config: Config, world_size: int, host_is_device: bool, measured: Measured | None = None
) -> Iterator[Lever]:
    """Those that the rules of the configuration accept, in the order of what they cost in time."""
    for changes, cost in _levers(config, world_size, host_is_device, measured or Measured()):
        changed = replace(config, **changes)
        if not validate(changed, world_size):
            yield Lever(changes, _typed(config, changes), cost if isinstance(cost, str) else cost(changed))


_Cost = str | Callable[[Config], str]  # of the changed configuration


def _levers(
    config: Config, world_size: int, host_is_device: bool, measured: Measured
) -> Iterator[tuple[dict[str, Any], _Cost]]:
    parallel, tensor = config.parallel, config.parallel.tensor_model_parallel_size
    pipeline, micro = parallel.pipeline_model_parallel_size, config.batch.micro_batch_size
    replicas, stage = config.data_parallel_size(world_size), zero_stage(config)
    if replicas > 1 and stage < 1:
        yield {"zero_stage": 1}, "no more traffic"
    if tensor > 1 and not parallel.sequence_parallel:
        yield {"sequence_parallel": True}, "no more traffic"
    if config.loss.cross_entropy_fusion_impl == "native":
        fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
        yield fused, "the same matrix products, in chunks"
    yield from _selective(config, CHEAP_PARTS)
    smaller = micro // 2
    while smaller:
        yield {"micro_batch_size": smaller}, "smaller matrix products, which run slower on a GPU"
        smaller //= 2
    yield from _selective(config, (*CHEAP_PARTS, "core_attn"))
    if replicas > 1 and stage < 2:
        yield {"zero_stage": 2}, "a reduction of the gradients for each micro-batch"
    yield from _budget(config, measured)
    if config.activations.recompute_granularity != "full":
        full = {
            "recompute_granularity": "full",
            "recompute_modules": DEFAULT_PARTS,
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
        yield full, _recompute_cost
    if not host_is_device:
        yield from _offload(config, measured)
    if replicas > 1 and stage < 3:
        yield {"zero_stage": 3}, "the weights are gathered twice for each micro-batch"
    larger = 2
    while replicas % larger == 0 and tensor * larger <= MOST_TENSOR_PARALLEL:
        shards: dict[str, Any] = {"tensor_model_parallel_size": larger * tensor}
        if config.model.seq_length % (larger * tensor) == 0:
            shards["sequence_parallel"] = True
        yield shards, "collectives among more ranks in every layer, and smaller matrix products"
        larger *= 2
    larger = 2
    while replicas % larger == 0:
        stages = {"pipeline_model_parallel_size": larger * pipeline}
        yield stages, "a larger pipeline bubble, unless there are more micro-batches a step"
        larger *= 2


def _selective(config: Config, parts: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], _Cost]]:
    """Recompute of `parts`, as far as the model has them, beside those that are chosen already."""
    chosen = config.activations
    if chosen.recompute_granularity == "full":
        return
    have = set(chosen.recompute_modules) if chosen.recompute_granularity == "selective" else set()
    without = {part for whole in have for part in WITHIN.get(whole, ())}
    without |= set() if config.model.has_rotary_positions else {"rope"}
    if more := set(parts) - have - without:
        names = tuple(part for part in PARTS if part in have | more)
        changes = {"recompute_granularity": "selective", "recompute_modules": names}
        yield changes, _recompute_cost


def _budget(config: Config, measured: Measured) -> Iterator[tuple[dict[str, Any], _Cost]]:
    """The lowest budget that can be met, where there is one: it chooses the parts instead of the others."""
    given = config.activations.recompute_budget
    if given is not None and (least := least_share(config, measured)) < given:
        yield {"recompute_budget": least}, "the most parts that can be computed again"


def _offload(config: Config, measured: Measured) -> Iterator[tuple[dict[str, Any], _Cost]]:
    """To host memory: activations of every layer, and the optimizer."""
    most = max(map(len, stage_layers(config)))
    if config.activations.cpu_offloading_num_layers < most:
        yield {"cpu_offloading_num_layers": most}, functools.partial(_transfer_cost, measured)
    if not config.optimizer.optimizer_cpu_offload:
        yield {"optimizer_cpu_offload": True}, "the update runs at the speed of the host's memory"


def _recompute_cost(changed: Config) -> str:
    counted = activation_bytes(changed)
    extra = sum(layer.extra_flops for layer in counted.layers) + counted.head.extra_flops
    tokens = changed.batch.micro_batch_size * changed.model.seq_length
    tensor = changed.parallel.tensor_model_parallel_size
    return f"{extra * tensor / (tokens * flops_per_token(changed.model, tensor)):.1%} more FLOPs"


def _transfer_cost(measured: Measured, changed: Config) -> str:
    chosen, _ = within_budget(changed, measured)
    on_host = sum(layer.on_host for layer in activation_bytes(chosen).layers)
    moved = shown(on_host / changed.parallel.pipeline_model_parallel_size)
    return f"{moved} to host memory and back for each micro-batch, beside the compute"


def _typed(config: Config, changes: dict[str, Any]) -> str:
    """As on a command line, behind what gave `config`."""
    before = to_dict(config)
    words = []
    for name, value in changes.items():
        if value == before[name]:
            continue
        words.append(flag_name(name))
        if value is not True:
            words += [str(one) for one in value] if isinstance(value, tuple) else [str(value)]
    return " ".join(words)
