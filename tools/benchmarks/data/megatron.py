"""megatron-core's datasets, as its own training builds them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np

from tools.benchmarks.data.corpora import EOD, SEED, SEQ


def is_installed() -> bool:
    """Without importing it, which takes seconds."""
    return importlib.util.find_spec("megatron") is not None


def helpers() -> Any:
    """Its compiled part."""
    return importlib.import_module("megatron.core.datasets.helpers_cpp")


class _Words:
    """What its datasets ask a tokenizer."""

    unique_identifiers = {"class": "Words"}  # noqa: RUF012 - its name for it
    eod, pad, vocab_size = EOD, 0, 65000


class Corpus:
    """The dataset `prefix`, from which GPTDatasets are made."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._datasets = importlib.import_module("megatron.core.datasets.gpt_dataset")
        self._split = importlib.import_module("megatron.core.datasets.utils").Split.train
        indexed = importlib.import_module("megatron.core.datasets.indexed_dataset")
        self.tokens = indexed.IndexedDataset(prefix)

    def samples(self, cache: str, wanted: int | None, resets: bool = False, dense_mask: bool = False) -> Any:
        """A GPTDataset of `wanted` samples, or of one epoch; `resets`: positions and loss begin anew at each
        document.
        """
        config = self._datasets.GPTDatasetConfig(
            random_seed=SEED,
            sequence_length=SEQ,
            blend=([self._prefix], None),
            split="1,0,0",
            path_to_cache=cache,
            tokenizer=_Words(),
            reset_position_ids=resets,
            reset_attention_mask=resets,
            eod_mask_loss=resets,
            create_attention_mask=dense_mask,
        )
        documents = np.arange(len(self.tokens.sequence_lengths), dtype=np.int32)
        return self._datasets.GPTDataset(self.tokens, self._prefix, documents, wanted, self._split, config)
