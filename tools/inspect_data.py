#!/usr/bin/env python3
"""Looks into binary datasets, and at what a training run draws from them.

    python tools/inspect_data.py data/corpus_text_document --histogram-png lengths.png
    python tools/inspect_data.py data/corpus_text_document --verify
    python tools/inspect_data.py data/corpus_text_document --document 0 17 --tokenizer-model tokenizer.json
    python tools/inspect_data.py --data-path data/corpus_text_document --split 969,30,1 --seq-length 4096 \\
        --train-samples 100000 --dump samples.npz
    python tools/inspect_data.py --data-path ... --train-samples 1000000 --iteration 1200 \\
        --global-batch-size 256
    python tools/inspect_data.py --data-path ... --load checkpoints --iteration 1200 --global-batch-size 256
    python tools/inspect_data.py --data-path ... --train-samples 100000 --build-cache

The last four take the flags of the training run, of which --train-samples is iterations x global batch
size; a split whose size is not given is read once, one of 0 samples not at all. --iteration counts steps of
the run's batch sizes, which --rampup-batch-size or --step-batch-size-schedule may change on the way.
--build-cache makes the index arrays ahead of the run, on any machine that sees the data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.command import run_data_command
from megalite.flags import Once

if TYPE_CHECKING:
    from megalite.config.batch_schedule import BatchSchedule
    from megalite.data.build import SampleSource
    from megalite.data.indexed_dataset import IndexedDataset
    from megalite.data.inspect_samples import Pieces
    from megalite.data.length_histogram import Bin
    from megalite.data.source_builder import SourceBuilder
    from megalite.data.stretches import OrderRecord
    from megalite.data.tokenizer import Tokenizer


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    from megalite.config.schema.batch import MOST_SAMPLES_A_STEP
    from megalite.data.settings import add_data_flags, add_tokenizer_flags, path_given, whole_number
    from megalite.limits import INT32_LARGEST

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    files = parser.add_argument_group("datasets")
    files.add_argument(
        "prefix", nargs="*", type=path_given, help="Datasets to describe, without .bin or .idx."
    )
    files.add_argument(
        "--verify", action="store_true", help="Read everything: offsets, ids, counts, checksum."
    )
    files.add_argument(
        "--document",
        nargs="+",
        action=Once,
        type=whole_number(),
        default=[],
        metavar="N",
        help="Show these documents.",
    )
    files.add_argument(
        "--histogram-png",
        type=path_given,
        metavar="FILE",
        help="Picture of the lengths; of very many datasets the smallest together.",
    )
    run = parser.add_argument_group("what a run draws")
    add_data_flags(run)
    tokens, size = whole_number(1, INT32_LARGEST), whole_number(1, MOST_SAMPLES_A_STEP)
    run.add_argument("--seq-length", type=tokens, default=2048, help="Tokens a sample (default: 2048).")
    run.add_argument(
        "--seed",
        type=whole_number(0, 2**32 - 1),
        default=1234,
        help="Of the order of the samples (default: 1234).",
    )
    for split in ("train", "valid", "test"):
        run.add_argument(f"--{split}-samples", type=whole_number(), help="Default: one epoch; 0: none.")
    run.add_argument(
        "--dump", type=path_given, metavar="FILE.npz", help="Write index arrays and first samples."
    )
    run.add_argument("--build-cache", action="store_true", help="Only build the index arrays.")
    run.add_argument(
        "--iteration", type=whole_number(1), metavar="I", help="Show the documents of this step."
    )
    run.add_argument("--global-batch-size", type=size, help="Samples in one step of the run.")
    run.add_argument(
        "--rampup-batch-size",
        nargs=3,
        type=whole_number(1),
        default=[],
        metavar=("START", "INCREMENT", "SAMPLES"),
        help="Where that grew from START, by INCREMENT, over so many samples.",
    )
    run.add_argument(
        "--step-batch-size-schedule",
        metavar="TOKENS:SIZE ...",
        help="Where it followed a table, such as '0:768 250B:1536'.",
    )
    run.add_argument(
        "--decrease-batch-size-if-needed",
        action="store_true",
        help="Where sizes were rounded down to a multiple of what its ranks take at a time.",
    )
    run.add_argument("--micro-batch-size", type=size, help="Needed where batches are decreased.")
    run.add_argument("--data-parallel-size", type=size, help="The same: ranks that share a batch.")
    run.add_argument(
        "--load",
        type=path_given,
        metavar="FOLDER",
        help="Checkpoints of a run: show what it drew until the newest of them, and draws when it is resumed "
        "with these flags. Of a run that changed its batch size, give --iteration the size of then.",
    )
    add_tokenizer_flags(parser.add_argument_group("tokenizer"))
    args = parser.parse_args(argv)
    sources = (
        args.data_path,
        args.train_data_path,
        args.valid_data_path,
        args.test_data_path,
        args.data_args_path,
    )
    if not args.prefix and not any(sources):
        parser.error("give dataset prefixes to describe, or --data-path to see what a run draws")
    if not args.prefix and (args.verify or args.document or args.histogram_png):
        parser.error("--verify, --document and --histogram-png need the prefix of a dataset to describe")
    if not any(sources) and (args.dump or args.build_cache or args.iteration is not None or args.load):
        parser.error("--dump, --build-cache, --iteration and --load need --data-path")
    if args.dump is not None and not args.dump.endswith(".npz"):
        parser.error(f"--dump {args.dump}: what is written is an .npz; give it a name that ends so")
    if args.iteration is not None and args.global_batch_size is args.step_batch_size_schedule is None:
        parser.error("--iteration needs --global-batch-size")
    if args.decrease_batch_size_if_needed and not (args.micro_batch_size and args.data_parallel_size):
        parser.error("--decrease-batch-size-if-needed needs --micro-batch-size and --data-parallel-size")
    return args


def tokenizer_of(args: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer of the flags, or None when none was named."""
    from megalite.data.tokenizer import build_tokenizer

    named = args.tokenizer_model or args.vocab_file or args.tokenizer_type == "ByteLevelTokenizer"
    if not named and not (args.tokenizer_type == "NullTokenizer" and args.vocab_size):
        return None
    return build_tokenizer(args, args.vocab_size)


def describe(args: argparse.Namespace, prefix: str) -> list[Bin]:
    """Print it; returns the lengths of its sequences."""
    from megalite.data.dataset_files import DatasetFiles
    from megalite.data.dataset_info import info_of
    from megalite.data.length_histogram import draw_text, length_histogram
    from megalite.data.progress import ReadingDisplay
    from megalite.data.verify import verify

    with DatasetFiles(prefix) as files:
        dataset = files.dataset
        bins = length_histogram(files.lengths())
    print(
        f"{prefix}: {dataset.documents:,} documents, {dataset.sequences:,} sequences, {dataset.tokens:,} "
        f"tokens of {dataset.dtype}"
    )
    info = info_of(dataset)
    if info is not None:
        print(
            f"  made by megalite {info.megalite} from "
            f"{', '.join(info.sources[:3])}{' ...' if len(info.sources) > 3 else ''}"
        )
        print(
            f"  tokenizer {info.tokenizer or 'NullTokenizer'}, vocabulary {info.vocab_size:,}, end of "
            f"document {info.eod}"
        )
    if args.verify:
        with ReadingDisplay("Verified") as display:
            summary = verify(prefix, args.vocab_size, display.show)
        print(f"  verified: largest id {summary.largest_id}, crc32 {summary.crc32:08x}")
    print("  tokens in a sequence           sequences")
    print(draw_text(bins))
    if args.document:
        show_documents(args, dataset)
    return bins


def show_documents(args: argparse.Namespace, dataset: IndexedDataset) -> None:
    from megalite.data.build import NO_EOD, DocumentRules, check_tokenizer

    tokenizer = tokenizer_of(args)
    if tokenizer is not None:
        check_tokenizer(dataset, tokenizer, DocumentRules(NO_EOD))
    for document in args.document:
        show_document(dataset, document, tokenizer)


def show_document(dataset: IndexedDataset, document: int, tokenizer: Tokenizer | None) -> None:
    from megalite.data.errors import DataError
    from megalite.data.tokenizer.base import library_errors

    if not 0 <= document < dataset.documents:
        there = f"documents 0 to {dataset.documents - 1}" if dataset.documents else "no documents"
        raise DataError(f"--document {document}: {dataset.prefix} has {there}")
    for sequence in range(dataset.boundaries[document], dataset.boundaries[document + 1]):
        ids = dataset.sequence(sequence).tolist()
        print(f"--- document {document}, sequence {sequence}: {len(ids)} tokens")
        if tokenizer is None:
            print(" ".join(map(str, ids)))
            continue
        if (largest := max(ids, default=0)) >= tokenizer.vocab_size:
            raise DataError(
                f"{dataset.prefix}: document {document} holds id {largest}, but the tokenizer has "
                f"{tokenizer.vocab_size} ids: it is not that of the data"
            )
        with library_errors(f"{dataset.prefix}: document {document}: cannot be decoded"):
            text = tokenizer.decode(ids)
        print(text)


def show_run(args: argparse.Namespace) -> None:
    from megalite.data.build import build_sample_sources, sample_builder, training_order
    from megalite.data.data_order import RunHistory
    from megalite.data.errors import DataError
    from megalite.data.inspect_samples import named
    from megalite.data.settings import DataFlags
    from megalite.data.splits import SPLIT_NAMES

    flags = DataFlags.of(args)
    sizes = [args.train_samples, args.valid_samples, args.test_samples]
    shown = SPLIT_NAMES if args.iteration is None or args.dump or args.build_cache else ("train",)
    wanted = [name for name, size in zip(SPLIT_NAMES, sizes, strict=True) if name in shown and size != 0]
    builder = sample_builder(flags, args.seq_length, args.seed)
    saved = None if args.load is None else saved_order(args.load)
    order = None
    if saved is not None:
        if args.train_samples is not None and args.train_samples < saved.consumed_samples:
            raise DataError(
                f"--train-samples {args.train_samples}: the run has drawn {saved.consumed_samples} already; "
                f"give as many or more, or leave it out for the {saved.samples} that it was to draw"
            )
        order = training_order(builder, flags, args.train_samples or saved.samples, saved)
    others = [name for name in wanted if order is None or name != "train"]
    sources = named(build_sample_sources(builder, flags, sizes, others))
    if order is not None:
        sources = {"train": order.source, **sources}
        for line in order.lines:
            print(line)
    for name, source in sources.items():
        text = f"{name}: {len(source):,} samples of {args.seq_length} tokens"
        if sizes[SPLIT_NAMES.index(name)] is None and name in others:
            text += f", one epoch; a longer run has another order: give --{name}-samples"
        print(text)
        for prefix, count in source.consumed(len(source)).items():
            print(f"  {count:>12,} from {prefix}")
    if args.build_cache:
        if told := builder.not_kept():
            raise DataError(f"--build-cache: {told}")
        print("the index arrays are in place")
    elif told := builder.not_kept():
        print(f"inspect_data: warning: {told}", file=sys.stderr)
    if args.iteration is not None:
        history = None if order is None else RunHistory(builder, order)
        show_step(args, history or sources.get("train"))
    if args.dump is not None:
        if order is not None and (changed := order.before.begins_at()):
            raise DataError(
                f"--dump: this run has its present order only from sample {changed:,} on; --iteration shows "
                "its steps, and --dump without --load what a new run draws first"
            )
        dump_run(args, builder, sources)


def saved_order(folder: str) -> OrderRecord:
    """Of the newest checkpoint below `folder`."""
    from megalite.checkpoint import CheckpointError, latest_iteration, read_state
    from megalite.data.errors import DataError
    from megalite.data.stretches import OrderRecord

    try:
        newest = latest_iteration(folder)
        order = None if newest is None else read_state(folder, newest).get("data_order")
    except CheckpointError as error:
        raise DataError(f"--load {folder}: {error}") from None
    if order is None:
        raise DataError(f"--load {folder}: holds no checkpoint that says which samples were drawn")
    return OrderRecord.from_json(order)


def show_step(args: argparse.Namespace, source: Pieces | None) -> None:
    from megalite.data.errors import DataError
    from megalite.training.run_steps import START, marks_around, samples_of_step

    if source is None:
        raise DataError("--iteration: the training split is empty")
    before, after = (START, None) if args.load is None else marks_around(args.load, args.iteration)
    for sample in samples_of_step(schedule_of(args), args.iteration, len(source), before, after):
        print(f"sample {sample}")
        for piece in source.pieces(sample):
            print(
                f"  {piece.prefix}: document {piece.document}, tokens {piece.offset} to "
                f"{piece.offset + piece.tokens}"
            )


def schedule_of(args: argparse.Namespace) -> BatchSchedule:
    """The batch sizes of the run. Raises DataError."""
    from megalite.config.batch_schedule import batch_schedule
    from megalite.config.schema.batch import BatchConfig
    from megalite.data.errors import DataError

    micro = args.micro_batch_size or 1
    batch = BatchConfig(
        micro_batch_size=micro,
        global_batch_size=args.global_batch_size,
        rampup_batch_size=tuple(args.rampup_batch_size),
        step_batch_size_schedule=args.step_batch_size_schedule,
    )
    multiple = micro * args.data_parallel_size if args.decrease_batch_size_if_needed else 1
    try:
        schedule = batch_schedule(batch, args.seq_length, multiple)
    except ValueError as error:
        flag = "--rampup-batch-size" if args.rampup_batch_size else "--step-batch-size-schedule"
        raise DataError(f"{flag}: {error}") from None
    if min(schedule.sizes) < 1:
        raise DataError(f"a batch of {min(schedule.sizes)} samples: every size must be {multiple} or more")
    return schedule


def dump_run(args: argparse.Namespace, builder: SourceBuilder, sources: Mapping[str, SampleSource]) -> None:
    from megalite.data.build import NO_EOD, Dataset, DocumentRules, check_tokenizers
    from megalite.data.continued_blend import ContinuedBlend
    from megalite.data.errors import DataError
    from megalite.data.inspect_samples import dump

    tokenizer = tokenizer_of(args)
    by_document = args.reset_position_ids or args.reset_attention_mask or args.eod_mask_loss
    if tokenizer is None and by_document:
        raise DataError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need the tokenizer's flags for "
            "its end of document"
        )
    eod = tokenizer.eod if tokenizer is not None and by_document else NO_EOD
    rules = DocumentRules(eod, args.reset_position_ids, args.reset_attention_mask, args.eod_mask_loss)
    if tokenizer is not None:
        check_tokenizers(builder, sources.values(), tokenizer, rules)
    names = dump(Path(args.dump), {name: Dataset(source, rules) for name, source in sources.items()})
    for name, source in sources.items():
        if isinstance(source, ContinuedBlend):
            print(
                f"inspect_data: warning: {name} has been extended: each of its rounds has index arrays of "
                "its own, which are left out",
                file=sys.stderr,
            )
    print(f"{args.dump}: {len(names)} arrays written")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    from megalite.data.errors import DataError
    from megalite.data.length_histogram import check_picture, draw_png

    try:
        if args.histogram_png is not None:
            check_picture(Path(args.histogram_png))
        histograms = {prefix: describe(args, prefix) for prefix in args.prefix}
        if args.histogram_png is not None:
            draw_png(histograms, Path(args.histogram_png))
            print(f"{args.histogram_png} written")
        if (
            args.data_path
            or args.train_data_path
            or args.valid_data_path
            or args.test_data_path
            or args.data_args_path
        ):
            show_run(args)
    except (DataError, OSError, MemoryError) as error:
        print(f"inspect_data: error: {str(error) or 'out of memory'}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_data_command(main, "interrupted")
