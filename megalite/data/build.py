"""Builds the training, validation and test datasets that a configuration names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megalite.config.blend import Blend, parse_blend, read_data_args
from megalite.data.data_order import DataOrder, order_samples
from megalite.data.dataset_info import info_of
from megalite.data.errors import DataError
from megalite.data.gpt_dataset import Piece
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.mock_dataset import MockDataset
from megalite.data.source_builder import SourceBuilder
from megalite.data.splits import SPLIT_NAMES, WHOLE, Share, split_shares
from megalite.data.stretches import DatasetPlace, OrderRecord

NO_EOD = -1  # no id: where documents do not matter the tokenizer need not have one


class DataSettings(Protocol):
    """The fields of the data configuration that decide what is read."""

    @property
    def data_path(self) -> Sequence[str]: ...
    @property
    def train_data_path(self) -> Sequence[str]: ...
    @property
    def valid_data_path(self) -> Sequence[str]: ...
    @property
    def test_data_path(self) -> Sequence[str]: ...
    @property
    def data_args_path(self) -> str | None: ...
    @property
    def split(self) -> str: ...
    @property
    def data_cache_path(self) -> str | None: ...
    @property
    def mock_data(self) -> bool: ...
    @property
    def reset_position_ids(self) -> bool: ...
    @property
    def reset_attention_mask(self) -> bool: ...
    @property
    def eod_mask_loss(self) -> bool: ...


class Vocabulary(Protocol):
    """What a dataset needs to know of the tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int: ...
    @property
    def identity(self) -> str | None: ...


class SampleSource(Protocol):
    """A finite list of samples of seq_length + 1 tokens, each a pure function of its number."""

    @property
    def seq_length(self) -> int: ...
    def __len__(self) -> int: ...
    def read(self, samples: np.ndarray, out: np.ndarray) -> None: ...
    def pieces(self, sample: int) -> list[Piece]: ...
    def consumed(self, samples: int) -> dict[str, int]: ...
    def places(self, samples: int) -> list[DatasetPlace]: ...


@dataclass(frozen=True)
class DocumentRules:
    """What the end-of-document token means inside a sample."""

    eod: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False


@dataclass(frozen=True)
class Dataset:
    """Samples together with the rules by which the loader turns them into batches."""

    samples: SampleSource
    rules: DocumentRules
    order: DataOrder | None = None
    """Of training samples that come from datasets: what a checkpoint keeps, so that a resume goes on."""

    def __len__(self) -> int:
        return len(self.samples)


class Splits(NamedTuple):
    """A dataset for each purpose; None where the split has no width or nothing is wanted of it."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    warning: str | None = None
    """What a user should know of how they were built."""


def build_datasets(
    data: DataSettings,
    tokenizer: Vocabulary,
    seq_length: int,
    seed: int,
    sample_counts: Sequence[int],
    saved: OrderRecord | None = None,
) -> Splits:
    """The datasets for (train, valid, test) with at least `sample_counts` samples each.

    `saved`: of the checkpoint that the run goes on from; the training samples follow on those before it.
    Raises DataError, before any training, for missing, malformed, empty or too small data.
    """
    by_document = data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss
    rules = DocumentRules(
        tokenizer.eod if by_document else NO_EOD,
        data.reset_position_ids,
        data.reset_attention_mask,
        data.eod_mask_loss,
    )
    if data.mock_data:
        mock = [
            MockDataset(tokenizer.vocab_size, seq_length, seed + i, n) for i, n in enumerate(sample_counts)
        ]
        train, valid, test = (Dataset(source, rules) if len(source) else None for source in mock)
        return Splits(train, valid, test)
    wanted = [name for name, count in zip(SPLIT_NAMES, sample_counts, strict=True) if count]
    builder = sample_builder(data, seq_length, seed)
    order = training_order(builder, data, sample_counts[0], saved) if "train" in wanted else None
    others = [name for name in wanted if name != "train"]
    sources = build_sample_sources(builder, data, sample_counts, others)
    sources[0] = None if order is None else order.source
    check_tokenizers(builder, [source for source in sources if source is not None], tokenizer, rules)
    for name, source, count in zip(SPLIT_NAMES, sources, sample_counts, strict=True):
        if source is not None and len(source) < count:
            fewer = "--train-iters or --train-samples" if name == "train" else "--eval-iters"
            raise DataError(
                f"{name} split: {count} samples are wanted, but datasets without weights are read once, "
                f"which gives {len(source)}; lower {fewer}, or give each dataset a weight (1 A 1 B), so that "
                "they repeat"
            )
    orders = (order, None, None)
    train, valid, test = (
        None if source is None else Dataset(source, rules, each)
        for source, each in zip(sources, orders, strict=True)
    )
    return Splits(train, valid, test, builder.not_kept())


def training_order(
    builder: SourceBuilder, data: DataSettings, samples: int, saved: OrderRecord | None
) -> DataOrder | None:
    """The training samples of a run from its beginning, or from `saved` on; None where the split has no
    width.
    """
    blend, share = _blends(data)[0], _shares(data)[0]
    if blend is None or share is None:
        return None
    return order_samples(builder, "train", blend, share, samples, saved)


def sample_builder(data: DataSettings, seq_length: int, seed: int) -> SourceBuilder:
    """Builds the samples of datasets under `data_cache_path`."""
    return SourceBuilder(seq_length, seed, Path(data.data_cache_path) if data.data_cache_path else None)


def build_sample_sources(
    builder: SourceBuilder,
    data: DataSettings,
    sizes: Sequence[int | None],
    wanted: Sequence[str] = SPLIT_NAMES,
) -> list[SampleSource | None]:
    """The samples of each split in `wanted` that has a width: at least `sizes` of them, or one epoch
    for None.
    """
    sources: list[SampleSource | None] = []
    for name, blend, share, size in zip(SPLIT_NAMES, _blends(data), _shares(data), sizes, strict=True):
        if blend is None or share is None or name not in wanted:
            sources.append(None)
        else:
            sources.append(builder.build(name, blend, share, size))
    return sources


def check_tokenizers(
    builder: SourceBuilder, sources: Iterable[SampleSource], tokenizer: Vocabulary, rules: DocumentRules
) -> None:
    """`check_tokenizer` for each dataset of `sources`, which `builder` has made. Raises DataError."""
    for prefix in sorted({prefix for source in sources for prefix in source.consumed(0)}):
        check_tokenizer(builder.open(prefix), tokenizer, rules)


def check_tokenizer(dataset: IndexedDataset, tokenizer: Vocabulary, rules: DocumentRules) -> None:
    """Compare `tokenizer` with the one that `dataset` was made with, where its description says.

    A tokenizer without an identity (NullTokenizer, of numbers) is taken at its word. Raises DataError.
    """
    info, prefix = info_of(dataset), dataset.prefix
    if info is None:
        return
    beside = f"{prefix}.json says so; remove that file to go on nevertheless"
    if None not in (tokenizer.identity, info.tokenizer) and info.tokenizer != tokenizer.identity:
        raise DataError(
            f"{prefix}: made with another tokenizer ({info.tokenizer}, not {tokenizer.identity}): {beside}"
        )
    if info.vocab_size > tokenizer.vocab_size:
        raise DataError(
            f"{prefix}: made with a vocabulary of {info.vocab_size} ids, but the tokenizer has "
            f"{tokenizer.vocab_size}: {beside}"
        )
    if rules.eod != NO_EOD and info.eod is None:
        raise DataError(
            f"{prefix}: made without --append-eod, so that --reset-position-ids, --reset-attention-mask and "
            "--eod-mask-loss find no end of a document: leave them out, or make the data again with it"
        )
    if rules.eod != NO_EOD and info.eod != rules.eod:
        raise DataError(
            f"{prefix}: documents end with id {info.eod}, but the tokenizer's end of document is "
            f"{rules.eod}: {beside}"
        )


def _blends(data: DataSettings) -> list[Blend | None]:
    """The blend of each split."""
    per_split = [
        ("--train-data-path", data.train_data_path),
        ("--valid-data-path", data.valid_data_path),
        ("--test-data-path", data.test_data_path),
    ]
    if any(values for _, values in per_split):
        blends = [_blend(flag, values) if values else None for flag, values in per_split]
        # As in Megatron-LM: here, but not under --data-path, the weight of a single dataset means nothing.
        return [Blend(b.prefixes, None) if b is not None and len(b.prefixes) == 1 else b for b in blends]
    if data.data_args_path is not None:
        flag = f"--data-args-path {data.data_args_path}"
        try:
            values: Sequence[str] = read_data_args(data.data_args_path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{flag}: cannot be read: {reason}") from None
        blend = _blend(flag, values)
    else:
        blend = _blend("--data-path", data.data_path)
    return [blend] * 3


def _blend(flag: str, values: Sequence[str]) -> Blend:
    if not values:
        raise DataError(f"{flag}: no data; give --data-path PREFIX (of a .bin and .idx pair), or --mock-data")
    try:
        return parse_blend(values)
    except ValueError as error:
        raise DataError(f"{flag}: {error}; expected PREFIX ... or WEIGHT PREFIX WEIGHT PREFIX ...") from None


def _shares(data: DataSettings) -> Sequence[Share | None]:
    """The documents of each split, as fractions of a dataset."""
    if data.train_data_path or data.valid_data_path or data.test_data_path:
        return [WHOLE] * 3
    return split_shares(data.split)
