"""Scaled rotary frequencies equal those of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megalite.kernels import Llama3Scaling, YarnScaling, rotary_table

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("kind", "parameters", "scaling"),
    [
        ("llama3", LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ("yarn", YARN, YarnScaling(4.0, 4096)),
    ],
)
def test_scaling(kind: str, parameters: dict[str, Any], scaling: Llama3Scaling | YarnScaling) -> None:
    rope = {"rope_type": kind, "rope_theta": 500000.0, **parameters}
    settings: dict[str, Any] = {
        "rope_theta": 500000.0,
        "rope_scaling": rope,
        "max_position_embeddings": 32768,
    }
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, **settings)
    inverse, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    positions = torch.tensor([0, 1, 17, 1000])
    angles = positions.double()[:, None] * inverse.double()
    cos, sin = rotary_table(positions, 128, 500000.0, torch.float64, scaling)
    torch.testing.assert_close(cos, angles.cos() * magnitude, rtol=0, atol=2e-4)
    torch.testing.assert_close(sin, angles.sin() * magnitude, rtol=0, atol=2e-4)
    torch.testing.assert_close(cos[:2], (angles.cos() * magnitude)[:2], rtol=0, atol=1e-6)


def test_odd_dims_are_refused() -> None:
    with pytest.raises(ValueError, match="must be even"):
        rotary_table(torch.arange(4), 5)
