"""Faster engines for tokenizers of the Hugging Face library."""

from __future__ import annotations

import importlib
import re
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy
from itertools import groupby
from types import ModuleType

import numpy as np

from megalite.data.errors import DataError, lacks_package
from megalite.data.tokenizer.base import Tokenizer, installed_version, library_errors
from megalite.data.tokenizer.huggingface import HuggingFaceTokenizer


class Engine(Tokenizer):
    """Encodes as `reference` does, which does the texts itself where that is not sure or the engine fails;
    everything else is the reference's own.
    """

    packages = HuggingFaceTokenizer.packages  # which say what ids a text has

    def __init__(self, reference: HuggingFaceTokenizer) -> None:
        self._reference = copy(reference)
        self._reference.longer_texts = self.longer_texts  # that of the library is to use an engine
        self.vocab_size = reference.vocab_size
        self.identity = reference.identity
        self.options = reference.options
        self.eod_token = reference.eod_token
        self.added_tokens = reference.added_tokens
        self.spells_special_tokens = reference.spells_special_tokens
        self.warning = reference.warning
        self.failure: str | None = None
        """Why the engine failed on text that the reference encoded, the last time that it did."""

    def check_encodes(self) -> None:
        self._reference.check_encodes()

    @property
    def eod(self) -> int:
        return self._reference.eod

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids, lengths = self.encode_flat(texts)
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if texts else []

    def _encode_part(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        self._reference.check_texts(texts)
        if all(self._is_sure(text) for text in texts if not text.isascii()):
            return self._encode_sure(list(texts))
        parts = [
            (self._encode_sure if sure else self._reference.encode_flat)(list(group))
            for sure, group in groupby(texts, key=self._is_sure)
        ]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([lengths for _, lengths in parts])

    def _encode_sure(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """By the engine, unless it fails: its patterns have other limits, e.g. of white space in a row."""
        try:
            with library_errors("the engine"):
                return self._encode(texts)
        except DataError as error:
            if len(texts) > 1:
                parts = [self._encode_sure([text]) for text in texts]
                return np.concatenate([ids for ids, _ in parts]), np.concatenate(
                    [count for _, count in parts]
                )
            found = self._reference.encode_flat(texts)
            self.failure = str(error)
            return found

    @abstractmethod
    def _is_sure(self, text: str) -> bool:
        """Whether the engine is known to give the ids of the reference for `text`, as for all of ASCII."""

    @abstractmethod
    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """As `encode_flat`, by the engine."""

    def decode(self, ids: Sequence[int]) -> str:
        return self._reference.decode(ids)


def library_of(
    name: str, compared: tuple[int, ...], reference: Tokenizer
) -> tuple[ModuleType, HuggingFaceTokenizer]:
    """The module of an engine, and `reference` if engines work for it. Raises DataError, also for a version
    older than the one that was `compared` with the library.
    """
    if not isinstance(reference, HuggingFaceTokenizer):
        raise DataError(f"--engine {name}: works with HuggingFaceTokenizer and GPT2BPETokenizer only")
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise lacks_package(f"--engine {name}", name, error) from None
    installed = installed_version(name)
    if not installed[:1].isdigit():
        raise DataError(f"--engine {name}: its version is not known; install it with pip")
    if tuple(map(int, re.findall(r"\d+", installed)[: len(compared)])) < compared:
        least = ".".join(map(str, compared))
        raise DataError(
            f"--engine {name}: version {installed} is older than {least}, whose ids were compared: "
            f"pip install -U {name}"
        )
    return library, reference


def refusing_tokenizer(name: str) -> AbstractContextManager[None]:
    """Around the making of an engine: says that it does not take a tokenizer."""
    return library_errors(f"--engine {name}: it cannot use this tokenizer")
