"""The cheapest set of parts to recompute within a budget of activation bytes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megalite.config import Config, ConfigError, ConfigErrors, replace
from megalite.model.saved_bytes import embedding_bytes, head_bytes, layer_bytes

# Which parts of one half of a layer go together; a part that holds others stands alone.
ATTENTION = ((), ("core_attn",), ("rope",), ("core_attn", "rope"), ("attn",))
MLP = ((), ("mlp_act",), ("mlp",))
NORMS = ((), ("norm",))
HEAD = ((), ("logits",))


@dataclass(frozen=True)
class Choice:
    """A set of parts, what it keeps of a micro-batch's bytes and what it costs.

    `kept`: bytes of all layers, embedding and head on a rank; `share`: of what is kept without recompute.
    `extra_flops`: what is computed again, as a share of the FLOPs of forward and backward.
    """

    parts: tuple[str, ...]
    kept: int
    share: float
    extra_flops: float

    def __str__(self) -> str:
        return (
            f"recompute of {' '.join(self.parts) or 'nothing'}: keeps {self.share:.1%} of the activation "
            f"bytes ({self.kept / 2**20:.1f} MiB a micro-batch) for {self.extra_flops:.2%} more FLOPs"
        )


class Measured:
    """The choices of configurations: measured once for all that differ in nothing that choices depend on.

    A measurement takes seconds.
    """

    def __init__(self) -> None:
        self._of = functools.cache(measured_choices)

    def of(self, config: Config) -> Sequence[Choice]:
        """See `measured_choices`."""
        return self._of(_deciding(config))


def within_budget(config: Config, measured: Measured | None = None) -> tuple[Config, Choice | None]:
    """`config` with the parts that `--recompute-budget` chooses; as it is, and None, without a budget.

    `measured`: what is known already. Raises `ConfigErrors` when no set of parts keeps so little.
    """
    budget = config.activations.recompute_budget
    if budget is None:
        return config, None
    best = cheapest((measured or Measured()).of(config), budget)
    return replace(_with_parts(config, best.parts), recompute_budget=None), best


def cheapest(choices: Sequence[Choice], budget: float) -> Choice:
    """The choice of the least FLOPs, then bytes, whose share is within `budget`; else `ConfigErrors`."""
    affordable = [choice for choice in choices if choice.share <= budget]
    if not affordable:
        least = min(choice.share for choice in choices)
        rule = f"no set of parts keeps so little; the lowest reachable share is {least:.4f}"
        advice = f"at least {_rounded_up(least):.3f}, or --recompute-granularity full"
        raise ConfigErrors([ConfigError("--recompute-budget", budget, rule, advice)])
    return min(affordable, key=lambda choice: (choice.extra_flops, choice.kept))


def least_share(config: Config, measured: Measured) -> float:
    """The lowest budget that can be met, to three digits."""
    return _rounded_up(min(choice.share for choice in measured.of(config)))


def _rounded_up(share: float) -> float:
    return math.ceil(share * 1000) / 1000


def measured_choices(config: Config) -> list[Choice]:
    """Every set of parts that the model has, measured on one layer, to which all others are equal.

    What two parts save together is not the sum of what each saves, and the sets are few: all are measured.
    """
    plain = _deciding(config)
    embedding = embedding_bytes(plain)
    heads = {parts: head_bytes(_with_parts(plain, parts)) for parts in _heads(config)}
    choices: list[Choice] = []
    for inner in _layer_sets(config):
        layer = layer_bytes(_with_parts(plain, inner))
        for outer, head in heads.items():
            kept = embedding.kept + config.model.num_layers * layer.kept + head.kept
            flops = embedding.flops + config.model.num_layers * layer.flops + head.flops
            choices.append(Choice(inner + outer, kept, float(kept), float(flops)))
    all_kept = choices[0]  # of no part
    return [
        Choice(one.parts, one.kept, one.kept / all_kept.kept, one.extra_flops / all_kept.extra_flops - 1)
        for one in choices
    ]


def _deciding(config: Config) -> Config:
    """`config` without settings of memory that change no choice, so that those that share one are equal."""
    return replace(
        _with_parts(config, ()),
        recompute_budget=None,
        cpu_offloading_num_layers=0,
        optimizer_cpu_offload=False,
        pipeline_model_parallel_size=1,
        zero_stage=0,
    )


def _layer_sets(config: Config) -> Iterator[tuple[str, ...]]:
    """The sets of parts of a layer that are not nested, the empty one first."""
    for sets in itertools.product(NORMS, MLP, ATTENTION):
        parts = tuple(itertools.chain.from_iterable(sets))
        if "rope" not in parts or config.model.has_rotary_positions:
            yield parts


def _heads(config: Config) -> tuple[tuple[str, ...], ...]:
    return HEAD[:1] if config.loss.cross_entropy_fusion_impl == "linear" else HEAD


def _with_parts(config: Config, parts: tuple[str, ...]) -> Config:
    if not parts:
        return replace(config, recompute_granularity=None)
    return replace(config, recompute_granularity="selective", recompute_modules=parts)
