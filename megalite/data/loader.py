"""Hands each data-parallel rank its micro-batches, one global batch at a time, read ahead.

Global batches follow each other in the samples, whatever the layout: the one after n consumed samples is
[n, n + global), where its size may depend on n. It is cut into chunks of micro * dp samples, of which rank r
takes [r * micro, (r + 1) * micro):

    global 8, micro 2, dp 2:   step 0: rank 0 gets [0, 1] and [4, 5], rank 1 gets [2, 3] and [6, 7]

So the place in the data is one number, `consumed_samples`, valid for any other layout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from megalite.accelerator import to_device
from megalite.config.batch_schedule import BatchSchedule
from megalite.data.batch import Batch
from megalite.data.build import Dataset
from megalite.data.errors import DataError
from megalite.data.host_batches import HostBatches
from megalite.data.read_ahead import Reader, Steps, ThreadReader
from megalite.data.reading_processes import ProcessReader


def rank_samples(
    first: int, micro_batch_size: int, global_batch_size: int, dp_rank: int, dp_size: int
) -> np.ndarray:
    """int64 (micro_batches, micro_batch_size): the samples of one rank in the global batch that starts at
    `first`.
    """
    chunk = micro_batch_size * dp_size
    starts = first + dp_rank * micro_batch_size + np.arange(0, global_batch_size, chunk, dtype=np.int64)
    return starts[:, None] + np.arange(micro_batch_size, dtype=np.int64)


class StepLoader(Iterator[list[Batch]]):
    """Iterates over global batches; each is a list of this rank's micro-batches, on `device`.

    Ends when less than one global batch is left. Close it, or use it in a `with` block, when it is not
    read to the end.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        global_batch_size: int | BatchSchedule,
        dp_rank: int,
        dp_size: int,
        consumed_samples: int,
        device: torch.device,
        vocab_size: int | None = None,
        workers: int = 0,
    ) -> None:
        """`global_batch_size`: in samples, or as it changes with the samples consumed. `vocab_size`: of the
        model; a batch with another id raises DataError. `workers`: processes that read; with 0 a thread of
        this one does. The samples and their order are the same.

        Raises DataError when the dataset ends before `consumed_samples`, RuntimeError for `workers` outside
        the main thread.
        """
        sizes = (
            BatchSchedule((0,), (global_batch_size,))
            if isinstance(global_batch_size, int)
            else global_batch_size
        )
        for size in sizes.sizes:
            if size % (micro_batch_size * dp_size):
                raise DataError(
                    f"global batch {size} is not a multiple of micro-batch {micro_batch_size} x "
                    f"data parallel {dp_size}"
                )
        if consumed_samples > len(dataset):
            raise DataError(
                f"{consumed_samples} samples are already consumed, but the dataset has {len(dataset)}; "
                "was the run resumed with other data or another length?"
            )
        self.wait_seconds = 0.0
        """How long the last step waited for its data."""
        self._device = device
        seq = dataset.samples.seq_length
        self._positions = torch.arange(seq, device=device).expand(micro_batch_size, seq)
        self._ones = torch.ones((), device=device).expand(micro_batch_size, seq)
        steps = Steps(
            [
                (firsts, rank_samples(0, micro_batch_size, size, dp_rank, dp_size))
                for firsts, size in sizes.batches(consumed_samples, len(dataset))
            ]
        )
        self._finished = False
        self._interrupted = False
        self._reader: Reader = (
            ProcessReader(dataset, steps, vocab_size, workers)
            if workers
            else ThreadReader(dataset, steps, vocab_size)
        )

    def __next__(self) -> list[Batch]:
        if self._interrupted:
            raise RuntimeError("this loader was interrupted: make a new one at the sample that comes next")
        if self._finished:
            raise StopIteration
        start = time.perf_counter()
        try:
            host = next(self._reader)
            self.wait_seconds = time.perf_counter() - start
            return self._batches(host)
        except KeyboardInterrupt:  # a step may be lost
            self._interrupted = True
            raise
        except BaseException:
            self._finished = True
            raise

    def _batches(self, host: HostBatches) -> list[Batch]:
        tokens = to_device(host.tokens, self._device)
        loss_mask = None if host.loss_mask is None else to_device(host.loss_mask, self._device)
        position_ids = None if host.position_ids is None else to_device(host.position_ids, self._device)
        starts = None
        if host.cu_seqlens is not None and host.boundaries is not None:
            starts = host.cu_seqlens.split(host.boundaries)
        batches = []
        for i in range(len(tokens)):
            batches.append(
                Batch(
                    tokens=tokens[i, :, :-1],
                    labels=tokens[i, :, 1:],
                    loss_mask=self._ones if loss_mask is None else loss_mask[i],
                    position_ids=self._positions if position_ids is None else position_ids[i],
                    sample_index=host.samples[i],
                    cu_seqlens=None if starts is None else to_device(starts[i], self._device),
                    max_document_length=None if host.longest is None else host.longest[i],
                )
            )
        return batches

    def close(self) -> None:
        """Stop reading ahead."""
        self._finished = True
        self._reader.close()

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
