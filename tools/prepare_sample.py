#!/usr/bin/env python3
"""The sample corpus, with a small byte-level BPE tokenizer trained on it.

    python tools/prepare_sample.py --output runs/sample
    python tools/prepare_sample.py --entropy runs/sample/corpus_text_document

makes runs/sample/corpus.jsonl and runs/sample/tokenizer.json; what is already there is kept, and nothing is
replaced that this tool has not made, as runs/sample/prepare_sample.json tells.

--entropy prints the unigram entropy of a binary dataset in nats a token: the loss of a model that has only
learned how frequent each token is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.command import run_data_command

SAMPLE = Path(__file__).resolve().parent.parent / "examples" / "data" / "sample.jsonl"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    from megalite.data.settings import path_given

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=path_given, help="Folder to fill.")
    what.add_argument(
        "--entropy", type=path_given, metavar="PREFIX", help="Dataset whose unigram entropy is printed."
    )
    parser.add_argument(
        "--input",
        type=path_given,
        default=SAMPLE,
        help="JSON lines with a text each, also as .gz or .zst (default: the sample corpus).",
    )
    parser.add_argument("--vocab-size", type=int, default=4096, help="Ids of the tokenizer (default 4096).")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    from megalite.data.errors import DataError
    from megalite.data.indexed_dataset import open_dataset, unigram_entropy
    from megalite.data.sample_corpus import prepare_sample

    try:
        if args.entropy is not None:
            print(f"{unigram_entropy(open_dataset(args.entropy)):.4f}")
            return 0
        made = prepare_sample(Path(args.input), Path(args.output), args.vocab_size)
    except (DataError, OSError, MemoryError) as error:
        print(f"prepare_sample: error: {str(error) or 'out of memory'}", file=sys.stderr)
        return 1
    print(f"{args.output}: {', '.join(made)} made" if made else f"{args.output}: complete, nothing to do")
    return 0


if __name__ == "__main__":
    run_data_command(main, "interrupted; the same command continues")
