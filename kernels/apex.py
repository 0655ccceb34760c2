"""Whether NVIDIA's apex is installed; the unrelated PyPI package of that name is never imported."""

from __future__ import annotations

import importlib.util


def has_apex() -> bool:
    """True for NVIDIA's apex built with its CUDA extensions: only that one brings the module `amp_C`.

    `find_spec` on a submodule imports the parent, so the question about `apex` itself comes last.
    """
    return (
        importlib.util.find_spec("amp_C") is not None
        and importlib.util.find_spec("apex") is not None
        and importlib.util.find_spec("apex.multi_tensor_apply") is not None
    )
