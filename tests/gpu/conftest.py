"""What only a GPU can show; tests/gpu/run.sh runs it there."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
