"""megalite: 3D-parallel training of GPT models on CPU cores and GPU clusters."""

__version__ = "0.1.0"
