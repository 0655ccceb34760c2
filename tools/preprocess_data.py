#!/usr/bin/env python3
"""Text to a binary dataset for training: PREFIX_KEY_document.bin and .idx for each JSON key.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --workers 8

Train on it with --data-path data/corpus_text_document. A run that was killed is continued by the same
command, to the same bytes. On many machines: --partitions 64 --partition-index I on each, then
tools/merge_datasets.py.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from megalite.command import run_data_command
from megalite.flags import Once

KEPT_BYTES = 64 << 20  # memory that batches leave to the next; new pages cost zeros each time
NOT_HERE = {
    "--split-sentences": 'give each document as a list of sentences: {"text": ["...", "..."]}',
    "--find-optimal-num-workers": "--workers is the number of tokenizer threads; all cores is best",
    "--chat-template": "apply it to the text before",
    "--trust-remote-code": "no code of a tokenizer is run here",
    "--tokenizer-hf-no-use-fast": "convert the tokenizer to a tokenizer.json",
}
MOST_PARTITIONS = 100_000  # whose numbers have five digits, so that names are in their order
MOST_WORKERS = 1024  # with 5,000 on two cores the tokenizers library took minutes over a second's work


class _Refuse(argparse.Action):
    """A flag of Megatron-LM that does not exist here: says what to do instead."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        flag = self.option_strings[0]
        parser.error(f"{flag} does not exist here: {NOT_HERE[flag]}")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    from megalite.data.settings import add_tokenizer_flags, path_given, utf8_text, whole_number

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    data = parser.add_argument_group("input and output")
    data.add_argument(
        "--input",
        nargs="+",
        action=Once,
        type=path_given,
        required=True,
        help="Files, folders (all in them but hidden files and backup copies), globs, or - for standard "
        "input: JSON lines, text (.txt) or Parquet (.parquet); JSON and text also as .gz or .zst.",
    )
    data.add_argument(
        "--input-format",
        choices=["json", "text", "parquet"],
        help="What the files hold, where their names do not say.",
    )
    data.add_argument(
        "--text-documents",
        choices=["file", "paragraph"],
        default="file",
        help="A document of a text file: the file (default), or what stands between blank lines.",
    )
    data.add_argument(
        "--output-prefix", type=path_given, required=True, help="The datasets are named PREFIX_KEY_document."
    )
    data.add_argument(
        "--json-keys",
        nargs="+",
        action=Once,
        type=utf8_text,
        default=["text"],
        help="Keys or columns to read, a dataset each; outer.inner for nested ones (default: text).",
    )
    data.add_argument(
        "--append-eod", action="store_true", help="End each document with the end-of-document token."
    )
    data.add_argument(
        "--dtype",
        choices=["megatron", "uint16", "int32"],
        default="megatron",
        help="Type of the stored ids. megatron (default): uint16 for vocabularies below 65,500 ids, int32 "
        "above, the same bytes as Megatron-LM; uint16 holds up to 65,536 ids.",
    )
    data.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="At a document that cannot be used: stop (default), or leave it out and list it in "
        "PREFIX_KEY_document.skipped.jsonl (KEY: the first of several).",
    )
    work = parser.add_argument_group("work")
    work.add_argument(
        "--workers",
        type=whole_number(1, MOST_WORKERS),
        help="Tokenizer threads (default: all cores that this process may use, which is best).",
    )
    work.add_argument(
        "--engine",
        choices=["auto", "library", "fastokens", "gigatoken"],
        default="auto",
        help="What encodes: the tokenizer's own library, or fastokens or gigatoken, which are faster, after "
        "its ids were found equal on hard text and on the first documents; where they are not, the run stops "
        "before it writes. auto (default): fastokens where it is installed, equal, and the input larger than "
        "64 MiB, else the library.",
    )
    work.add_argument(
        "--partitions",
        type=whole_number(1, MOST_PARTITIONS),
        help="Do one share of the inputs, of as many bytes as the others.",
    )
    work.add_argument(
        "--partition-index",
        type=whole_number(0, MOST_PARTITIONS - 1),
        help="Which share, from 0. Default: the number of the task of a SLURM array. Without either all is "
        "done here.",
    )
    work.add_argument(
        "--log-interval",
        type=whole_number(1),
        default=1000,
        metavar="DOCUMENTS",
        help="A progress line after so many documents, at most one a second, where there is no terminal.",
    )
    work.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="Accepted: the order of the input is always kept.",
    )
    add_tokenizer_flags(parser.add_argument_group("tokenizer"))
    for flag in NOT_HERE:
        parser.add_argument(flag, action=_Refuse, nargs="?", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def partition_of(args: argparse.Namespace) -> tuple[int, int] | None:
    """(index, partitions) of this process, or None for the whole."""
    from megalite.data.errors import DataError

    if args.partitions is None:
        if args.partition_index is not None:
            raise DataError("--partition-index needs --partitions")
        return None
    index, task = args.partition_index, os.environ.get("SLURM_ARRAY_TASK_ID")
    if index is None and task is not None:
        last = os.environ.get("SLURM_ARRAY_TASK_MAX", task)
        if not all(text.isdecimal() and len(text) < 20 for text in (task, last)):
            raise DataError(
                f"SLURM_ARRAY_TASK_ID {task!r:.40}, SLURM_ARRAY_TASK_MAX {last!r:.40}: expected numbers"
            )
        if int(last) >= args.partitions:
            raise DataError(
                f"--partitions {args.partitions}: the SLURM array has a task {last}, but the tasks are the "
                f"shares: --array=0-{args.partitions - 1}, or those of them that are to be done again"
            )
        index = int(task)
    return None if index is None else (index, args.partitions)


def _warn(text: str) -> None:
    print(f"preprocess_data: warning: {text}", file=sys.stderr)


def usable_cores() -> int:
    """Cores that this process may use, fewer than the machine has in a job of SLURM or a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # read when a library in Rust starts
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")  # a batch; as many batches as workers at a time
    from megalite import _C
    from megalite.data.errors import DataError
    from megalite.data.inputs import check_apart, corpus_hash, find_inputs, take_partition
    from megalite.data.preprocess import PreprocessPlan, preprocess
    from megalite.data.progress import ProgressDisplay
    from megalite.data.tokenizer import build_tokenizer

    _C.keep_freed_memory(KEPT_BYTES)
    gc.freeze()  # what was imported is not looked through again with the texts of each batch
    try:
        tokenizer = build_tokenizer(
            args,
            args.vocab_size,
            add_special_tokens=not args.tokenizer_hf_no_include_special_tokens,
            allow_special_tokens=args.allow_special_tokens,
        )
        if tokenizer.warning is not None:
            _warn(tokenizer.warning)
        text_format = "text" if args.text_documents == "file" else "paragraphs"
        forced = text_format if args.input_format == "text" else args.input_format
        check_apart(args.input, args.output_prefix)
        inputs = find_inputs(args.input, text_format, forced, args.output_prefix, _warn)
        partition = partition_of(args)
        corpus, whole = None, inputs
        if partition is not None:
            corpus = corpus_hash(whole)
            inputs = take_partition(whole, *partition)
        if args.engine != "library":
            from megalite.data.engine_check import choose_engine

            tokenizer, engine = choose_engine(args.engine, tokenizer, inputs, args.json_keys)
            if engine != "library":
                print(f"engine: {engine}, equal to the library on what was checked", file=sys.stderr)
        plan = PreprocessPlan(
            inputs,
            args.output_prefix,
            args.json_keys,
            args.append_eod,
            args.workers or min(usable_cores(), MOST_WORKERS),
            dtype=None if args.dtype == "megatron" else args.dtype,
            skip_errors=args.on_error == "skip",
            partition=partition,
            corpus=corpus,
            whole=() if partition is None else whole,
        )
        with ProgressDisplay(plan.inputs, args.log_interval) as display:
            infos = preprocess(plan, tokenizer, display.show, display.read_back, _warn)
    except (DataError, OSError, MemoryError) as error:
        print(f"preprocess_data: error: {str(error) or 'out of memory'}", file=sys.stderr)
        return 1
    for key, info in zip(args.json_keys, infos, strict=True):
        print(f"{plan.prefix(key)}: {info.documents:,} documents, {info.tokens:,} tokens of {info.dtype}")
    if display.skipped:
        print(
            f"{display.skipped:,} documents were skipped; {plan.first_prefix}.skipped.jsonl lists them",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    run_data_command(main, "interrupted; the same command continues, or starts anew where it reads a pipe")
