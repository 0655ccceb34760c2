"""Tokenizers, each through its well-kept library, in batches and on several threads."""

from megalite.data.tokenizer.base import Tokenizer
from megalite.data.tokenizer.build import build_tokenizer

__all__ = ["Tokenizer", "build_tokenizer"]
