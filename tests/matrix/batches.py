"""Global batches with uneven masks, the same wherever they are made, and each data-parallel rank's part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from megalite.data.batch import Batch
from megalite.data.build import Dataset, DocumentRules
from megalite.data.loader import StepLoader
from megalite.data.mock_dataset import MockDataset
from tests.matrix.cases import SAMPLES, SEQ, STEPS, VOCAB, Layout
from tests.reference.train import GlobalBatch


def global_batch(step: int, by_document: bool = False) -> GlobalBatch:
    """Token counts differ from sample to sample.

    Samples 4 to 7 have no valid token: a whole micro-batch of up to four, and all that some ranks get where
    dp is large. Sample 9 has one. In samples 2 and 11 the positions start again in the middle, and with
    `by_document` a document begins there.
    """
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ + 1), generator=generator)
    share = torch.linspace(0.2, 1.0, SAMPLES).unsqueeze(1)
    mask = (torch.rand(SAMPLES, SEQ, generator=generator) < share).to(torch.float32)
    mask[4:8] = 0
    mask[9] = 0
    mask[9, 3] = 1
    positions = torch.arange(SEQ).repeat(SAMPLES, 1)
    positions[[2, 11], 7:] -= 7
    documents = (positions == 0).cumsum(1) if by_document else None
    return GlobalBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, positions, documents)


def microbatches(
    step: int, layout: Layout, dp_rank: int, micro_batch_size: int, by_document: bool = False
) -> list[Batch]:
    """Of each run of micro x dp samples, data-parallel rank r takes the r-th part."""
    whole = global_batch(step, by_document)
    assert whole.positions is not None
    parts = []
    for start in range(dp_rank * micro_batch_size, SAMPLES, micro_batch_size * layout.data):
        rows = slice(start, start + micro_batch_size)
        starts = torch.nonzero(whole.positions[rows].flatten() == 0).flatten()
        boundaries = torch.cat((starts, torch.tensor([micro_batch_size * SEQ]))).to(torch.int32)
        parts.append(
            Batch(
                tokens=whole.tokens[rows],
                labels=whole.labels[rows],
                loss_mask=whole.loss_mask[rows],
                position_ids=whole.positions[rows],
                sample_index=torch.arange(start, start + micro_batch_size),
                cu_seqlens=boundaries if by_document else None,
                max_document_length=SEQ if by_document else None,
            )
        )
    return parts


class Samples(MockDataset):
    """The tokens of the global batches, one after another."""

    def read(self, samples: np.ndarray, out: np.ndarray) -> None:
        for row, sample in zip(out, samples.tolist(), strict=True):
            whole, place = global_batch(sample // SAMPLES), sample % SAMPLES
            row[:-1], row[-1] = whole.tokens[place].numpy(), whole.labels[place, -1]


def read_microbatches(
    layout: Layout, dp_rank: int, micro_batch_size: int, by_document: bool, workers: int
) -> Iterator[list[Batch]]:
    """`microbatches` of each step, with tokens that the loader read."""
    dataset = Dataset(Samples(VOCAB, SEQ, 0, STEPS * SAMPLES), DocumentRules(0))
    with StepLoader(
        dataset,
        micro_batch_size,
        SAMPLES,
        dp_rank,
        layout.data,
        0,
        torch.device("cpu"),
        VOCAB,
        workers,
    ) as loader:
        for step, read in enumerate(loader):
            made = microbatches(step, layout, dp_rank, micro_batch_size, by_document)
            yield [
                replace(one, tokens=tokens.tokens, labels=tokens.labels)
                for one, tokens in zip(made, read, strict=True)
            ]
