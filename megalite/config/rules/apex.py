"""Rules of what NVIDIA's apex computes when it is asked for; it is looked for and never imported."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec

from megalite.config.errors import ConfigError, ConfigErrors
from megalite.config.rules.rule import Candidate, Finding, reads
from megalite.config.schema import Config
from megalite.config.schema.fields import flag_name

WEIGHT_GRADIENT = (
    "fused_weight_gradient_mlp_cuda"  # an extension of its own, which apex is built with or without
)


def has_fused_adam() -> bool:
    """True for NVIDIA's apex built with its CUDA extensions: only that one brings the module `amp_C`.

    PyPI's `apex` is another project, without `multi_tensor_apply`.
    """
    package = find_spec("apex")
    if find_spec("amp_C") is None or package is None:
        return False
    folders = package.submodule_search_locations
    return PathFinder.find_spec("apex.multi_tensor_apply", folders) is not None


def check_device(config: Config, device_type: str) -> None:
    """Raise ConfigErrors if apex is asked for where the device is no GPU of NVIDIA's ("cuda")."""
    if config.optimizer.optimizer_impl == "apex" and device_type != "cuda":
        rule = "works on NVIDIA GPUs only, and this machine has none"
        raise ConfigErrors([ConfigError("--optimizer-impl", "apex", rule, "auto")])


@reads("optimizer_impl", "use_precision_aware_optimizer", "optimizer_cpu_offload", "params_dtype")
def optimizer_can_be_apex(c: Candidate) -> Iterator[Finding]:
    optimizer, precision, name = c.config.optimizer, c.config.precision, "optimizer_impl"
    if optimizer.optimizer_impl != "apex":
        return
    if not has_fused_adam():
        rule = "NVIDIA's apex with its CUDA extensions is not installed (no module amp_C)"
        yield name, "apex", rule, "auto, or build apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"
    for other in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if getattr(optimizer, other, False) or getattr(precision, other, False):
            yield name, "apex", f"does not go with {flag_name(other)}", "auto"
    if precision.params_dtype == "float64":
        yield name, "apex", "does not compute in fp64", "auto"


@reads("gradient_accumulation_fusion", "gradient_accumulation_fusion_impl")
def accumulation_can_be_apex(c: Candidate) -> Iterator[Finding]:
    precision, name = c.config.precision, "gradient_accumulation_fusion_impl"
    if precision.gradient_accumulation_fusion_impl != "apex":
        return
    if not precision.gradient_accumulation_fusion:
        yield name, "apex", "is switched off by --no-gradient-accumulation-fusion", "leave one of the two out"
    elif find_spec(WEIGHT_GRADIENT) is None:
        yield name, "apex", f"NVIDIA apex's module {WEIGHT_GRADIENT} is not installed", "native"


RULES = (optimizer_can_be_apex, accumulation_can_be_apex)
