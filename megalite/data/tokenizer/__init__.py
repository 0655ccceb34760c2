"""Tokenizers, each through its well-kept library, in batches and on several threads."""

from .base import Tokenizer
from .build import build_tokenizer

__all__ = ["Tokenizer", "build_tokenizer"]
