"""Scaled rotary frequencies equal those of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megalite.kernels import Llama3Scaling, YarnScaling, rotary_table
from tests.reference.hugging_face import NoSinglePrecision

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
YARN_ALL = {"factor": 40.0, "original_max_position_embeddings": 512, "beta_fast": 16.0, "beta_slow": 2.0}


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize(
    ("kind", "parameters", "scaling"),
    [
        ("llama3", LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ("llama3", {**LLAMA3, "factor": 32.0}, Llama3Scaling(32.0)),
        ("yarn", YARN, YarnScaling(4.0, 4096)),
        ("yarn", YARN_ALL, YarnScaling(40.0, 512, 16.0, 2.0)),
    ],
)
def test_scaling(
    kind: str, parameters: dict[str, Any], scaling: Llama3Scaling | YarnScaling, base: float
) -> None:
    """Held in fp64: Transformers itself computes frequencies in fp32."""
    rope = {"rope_type": kind, "rope_theta": base, **parameters}
    settings: dict[str, Any] = {"rope_theta": base, "rope_scaling": rope, "max_position_embeddings": 32768}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, **settings)
    with NoSinglePrecision():
        inverse, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    assert inverse.dtype == torch.float64
    positions = torch.tensor([0, 1, 17, 1000, 31000])
    angles = positions.double()[:, None] * inverse
    cos, sin = rotary_table(positions, 128, base, torch.float64, scaling)
    torch.testing.assert_close(cos, angles.cos() * magnitude, rtol=0, atol=1e-10)
    torch.testing.assert_close(sin, angles.sin() * magnitude, rtol=0, atol=1e-10)
    assert not torch.allclose(cos[3], rotary_table(positions, 128, base, torch.float64)[0][3])


def test_odd_dims_are_refused() -> None:
    with pytest.raises(ValueError, match="must be even"):
        rotary_table(torch.arange(4), 5)
