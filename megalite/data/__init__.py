"""From text to batches: preprocessing, indexed datasets, the order of samples, blends, the loader.

Only `loader` and `batch` import torch, so that the preprocessing tools start quickly.
"""
