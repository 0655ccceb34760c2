"""Hands each data-parallel rank its micro-batches, one global batch at a time, read ahead in a thread.

Global batch k is samples [k * global, (k + 1) * global) whatever the layout. It is cut into chunks of micro
* dp samples, of which rank r takes [r * micro, (r + 1) * micro):

    global 8, micro 2, dp 2:   step 0: rank 0 gets [0, 1] and [4, 5], rank 1 gets [2, 3] and [6, 7]

So the place in the data is one number, `consumed_samples`, valid for any other layout.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megalite import _C
from megalite.accelerator import pin, to_device
from megalite.data.batch import Batch
from megalite.data.build import Dataset, DocumentRules, SampleSource
from megalite.data.errors import DataError


def rank_samples(
    first: int, micro_batch_size: int, global_batch_size: int, dp_rank: int, dp_size: int
) -> np.ndarray:
    """int64 (micro_batches, micro_batch_size): the samples of one rank in the global batch that starts at
    `first`.
    """
    chunk = micro_batch_size * dp_size
    starts = first + dp_rank * micro_batch_size + np.arange(0, global_batch_size, chunk, dtype=np.int64)
    return starts[:, None] + np.arange(micro_batch_size, dtype=np.int64)


@dataclass(frozen=True)
class _HostBatches:
    """A rank's part of one global batch in (pinned) host memory; leading dim: micro-batch."""

    samples: torch.Tensor
    tokens: torch.Tensor
    loss_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    cu_seqlens: list[torch.Tensor] | None


def check_ids(source: SampleSource, samples: np.ndarray, tokens: np.ndarray, vocab_size: int) -> None:
    """Raises DataError when one of `tokens`, int64 (n, seq + 1), of `samples` (n,) is no id of the model.

    An embedding split over ranks takes such an id for one of another rank, and would give zeros.
    """
    ids = tokens.view(np.uint64)  # where negative ids are huge: one pass over the batch finds both
    if ids.max(initial=0) < vocab_size:
        return
    row, place = np.argwhere(ids >= vocab_size)[0]
    before = int(place)
    for piece in source.pieces(int(samples[row])):
        if before < piece.tokens:
            break
        before -= piece.tokens
    raise DataError(
        f"{piece.prefix}: document {piece.document} holds id {tokens[row, place]} at token "
        f"{piece.offset + before}, but the model's vocabulary is the {vocab_size} ids from 0; was the data "
        "made with another tokenizer?"
    )


def _read(dataset: Dataset, samples: np.ndarray, vocab_size: int | None) -> _HostBatches:
    """`samples`: int64 (micro_batches, micro_batch_size)."""
    rules, seq = dataset.rules, dataset.samples.seq_length
    count, micro = samples.shape
    tokens = pin(torch.empty(count, micro, seq + 1, dtype=torch.int64))
    flat = tokens.numpy().reshape(count * micro, seq + 1)
    dataset.samples.read(samples.reshape(-1), flat)
    if vocab_size is not None:
        check_ids(dataset.samples, samples.reshape(-1), flat, vocab_size)
    if not (rules.eod_mask_loss or rules.reset_position_ids or rules.reset_attention_mask):
        return _HostBatches(torch.from_numpy(samples), tokens, None, None, None)
    shape = (count, micro, seq)
    loss_mask = pin(torch.empty(shape, dtype=torch.float32)) if rules.eod_mask_loss else None
    position_ids = pin(torch.empty(shape, dtype=torch.int64)) if rules.reset_position_ids else None
    starts = []
    for i in range(count):
        positions = None if position_ids is None else position_ids[i].numpy()
        mask = None if loss_mask is None else loss_mask[i].numpy()
        starts.append(_C.mask_documents(tokens[i].numpy(), seq, rules.eod, positions, mask))
    cu_seqlens = [pin(torch.from_numpy(each)) for each in starts] if rules.reset_attention_mask else None
    return _HostBatches(torch.from_numpy(samples), tokens, loss_mask, position_ids, cu_seqlens)


class StepLoader(Iterator[list[Batch]]):
    """Iterates over global batches; each is a list of this rank's micro-batches, on `device`.

    Ends when less than one global batch is left. Close it, or use it in a `with` block, when it is not
    read to the end.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_size: int,
        consumed_samples: int,
        device: torch.device,
        prefetch: int = 2,
        vocab_size: int | None = None,
    ) -> None:
        """`prefetch`: global batches read ahead. `vocab_size`: of the model; a batch with another id
        raises DataError. Raises DataError when the dataset ends before `consumed_samples`.
        """
        if global_batch_size % (micro_batch_size * dp_size):
            raise DataError(
                f"global batch {global_batch_size} is not a multiple of micro-batch {micro_batch_size} x "
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
        self._rules: DocumentRules = dataset.rules
        seq = dataset.samples.seq_length
        self._positions = torch.arange(seq, device=device).expand(micro_batch_size, seq)
        self._ones = torch.ones((), device=device).expand(micro_batch_size, seq)
        steps = range(consumed_samples, len(dataset) - global_batch_size + 1, global_batch_size)
        plan = (rank_samples(first, micro_batch_size, global_batch_size, dp_rank, dp_size) for first in steps)
        self._queue: queue.Queue[_HostBatches | BaseException | None] = queue.Queue(max(1, prefetch))
        self._stop = threading.Event()
        self._finished = False
        # The thread holds no reference to the loader, so that a forgotten loader is collected and its thread
        # ends.
        self._thread = threading.Thread(
            target=_prefetch,
            args=(dataset, plan, vocab_size, self._queue, self._stop),
            name="megalite-data",
            daemon=True,
        )
        weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __next__(self) -> list[Batch]:
        if self._finished:
            raise StopIteration
        start = time.perf_counter()
        item = self._queue.get()
        self.wait_seconds = time.perf_counter() - start
        if isinstance(item, _HostBatches):
            return self._batches(item)
        self._finished = True
        if item is None:
            raise StopIteration
        raise item

    def _batches(self, host: _HostBatches) -> list[Batch]:
        tokens = to_device(host.tokens, self._device)
        loss_mask = None if host.loss_mask is None else to_device(host.loss_mask, self._device)
        position_ids = None if host.position_ids is None else to_device(host.position_ids, self._device)
        batches = []
        for i in range(len(tokens)):
            starts = None if host.cu_seqlens is None else host.cu_seqlens[i]
            batches.append(
                Batch(
                    tokens=tokens[i, :, :-1],
                    labels=tokens[i, :, 1:],
                    loss_mask=self._ones if loss_mask is None else loss_mask[i],
                    position_ids=self._positions if position_ids is None else position_ids[i],
                    sample_index=host.samples[i],
                    cu_seqlens=None if starts is None else to_device(starts, self._device),
                    max_document_length=None if starts is None else int(starts.diff().max()),
                )
            )
        return batches

    def close(self) -> None:
        """Stop reading ahead."""
        self._finished = True
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _prefetch(
    dataset: Dataset,
    plan: Iterator[np.ndarray],
    vocab_size: int | None,
    results: queue.Queue[_HostBatches | BaseException | None],
    stop: threading.Event,
) -> None:
    """Read every step of `plan`; then None, or the exception that ended it."""
    last: BaseException | None = None
    try:
        for samples in plan:
            if not _put(results, _read(dataset, samples, vocab_size), stop):
                return
    except BaseException as error:
        last = error
    _put(results, last, stop)


def _put(
    results: queue.Queue[_HostBatches | BaseException | None],
    item: _HostBatches | BaseException | None,
    stop: threading.Event,
) -> bool:
    """Hand `item` over; False when nobody wants it any more."""
    while not stop.is_set():
        try:
            results.put(item, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False
