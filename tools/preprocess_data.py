#!/usr/bin/env python3
"""Text to a binary dataset for training: PREFIX_KEY_document.bin and .idx for each JSON key.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus --append-eod \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --workers 8

Train on it with --data-path data/corpus_text_document. A run that was killed is continued by the same
command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    data = parser.add_argument_group("input and output")
    data.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="Files, folders, globs, or - for standard input: JSON lines, plain or compressed (.gz, .zst).",
    )
    data.add_argument("--output-prefix", required=True, help="The datasets are named PREFIX_KEY_document.")
    data.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="Keys to read, a dataset each; outer.inner for nested ones.",
    )
    data.add_argument(
        "--append-eod", action="store_true", help="End each document with the end-of-document token."
    )
    data.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="Tokenizer threads (default: all cores)."
    )
    data.add_argument(
        "--log-interval",
        type=float,
        default=10.0,
        help="Seconds between progress lines where there is no terminal.",
    )
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument(
        "--tokenizer-type",
        default="HuggingFaceTokenizer",
        choices=["HuggingFaceTokenizer", "GPT2BPETokenizer", "NullTokenizer"],
    )
    tokenizer.add_argument(
        "--tokenizer-model", help="tokenizer.json or the folder that holds it; nothing is downloaded."
    )
    tokenizer.add_argument("--vocab-file", help="vocab.json of GPT2BPETokenizer.")
    tokenizer.add_argument("--merge-file", help="merges.txt of GPT2BPETokenizer.")
    tokenizer.add_argument(
        "--vocab-size", type=int, help="Vocabulary of NullTokenizer, its end of document included."
    )
    tokenizer.add_argument("--null-tokenizer-eod-id", type=int, help="Default: the last id.")
    tokenizer.add_argument(
        "--eod-token", help="Text of the end-of-document token, where the tokenizer does not say."
    )
    tokenizer.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="Leave out what the tokenizer adds to each text, such as a beginning-of-sequence token.",
    )
    tokenizer.add_argument(
        "--allow-special-tokens",
        action="store_true",
        help="Text that spells a special token, such as <|endoftext|>, becomes that token, as in Megatron-LM "
        "with Hugging Face tokenizers. By default it is text like any other: data cannot forge a document "
        "end.",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    os.environ.setdefault("RAYON_NUM_THREADS", str(args.workers))  # read when the tokenizers library starts
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from megalite.data.errors import DataError
    from megalite.data.inputs import find_inputs
    from megalite.data.preprocess import PreprocessPlan, preprocess
    from megalite.data.progress import ProgressDisplay
    from megalite.data.tokenizer import build_tokenizer

    try:
        if args.workers < 1:
            raise DataError(f"--workers {args.workers}: expected 1 or more")
        tokenizer = build_tokenizer(
            args,
            args.vocab_size,
            eod_token=args.eod_token,
            add_special_tokens=not args.tokenizer_hf_no_include_special_tokens,
            allow_special_tokens=args.allow_special_tokens,
        )
        plan = PreprocessPlan(
            find_inputs(args.input), args.output_prefix, args.json_keys, args.append_eod, args.workers
        )
        with ProgressDisplay(plan.inputs, args.log_interval) as display:
            infos = preprocess(plan, tokenizer, display.show)
    except DataError as error:
        print(f"preprocess_data: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("preprocess_data: interrupted; the same command continues", file=sys.stderr)
        return 130
    for key, info in zip(args.json_keys, infos, strict=True):
        print(f"{plan.prefix(key)}: {info.documents:,} documents, {info.tokens:,} tokens of {info.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
