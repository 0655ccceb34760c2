"""The data settings as tools read them from their flags; training has the same names in its configuration."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

from megalite.flags import Once, is_address
from megalite.limits import INT32_LARGEST, INT64_LARGEST, MOST_SPECIAL_TOKENS


@dataclass(frozen=True)
class DataFlags:
    """Which datasets, and how documents count inside samples."""

    data_path: tuple[str, ...] = ()
    train_data_path: tuple[str, ...] = ()
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()
    data_args_path: str | None = None
    split: str = "969, 30, 1"
    data_cache_path: str | None = None
    mock_data: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    @staticmethod
    def of(args: argparse.Namespace) -> DataFlags:
        """From the flags that `add_data_flags` added."""
        return DataFlags(
            tuple(args.data_path),
            tuple(args.train_data_path),
            tuple(args.valid_data_path),
            tuple(args.test_data_path),
            args.data_args_path,
            args.split,
            args.data_cache_path,
            reset_position_ids=args.reset_position_ids,
            reset_attention_mask=args.reset_attention_mask,
            eod_mask_loss=args.eod_mask_loss,
        )


def whole_number(least: int = 0, most: int = INT64_LARGEST) -> Callable[[str], int]:
    """The argparse type of a whole number from `least` to `most`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            given = text if len(text) <= 40 else f"{text[:37]}..."
            raise argparse.ArgumentTypeError(f"{given}: expected a whole number from {least} to {most}")
        return value

    return number


def path_given(text: str) -> str:
    """The argparse type of a path: as an empty one, the working folder would be read, or written to, and as
    an address such as s3://... a folder s3: in it.
    """
    if not text:
        raise argparse.ArgumentTypeError('"": expected a path; is a variable of the shell not set?')
    if is_address(text):
        raise argparse.ArgumentTypeError(f"{text}: expected a path of a file system; mount it, or copy it")
    return text


def utf8_text(text: str) -> str:
    """The argparse type of text that is compared with text of the data, or written down."""
    if not text:
        raise argparse.ArgumentTypeError('"": expected text; is a variable of the shell not set?')
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(text).decode("utf-8", errors="backslashreplace")
        raise argparse.ArgumentTypeError(
            f"{shown}: expected UTF-8 (LC_ALL=C.UTF-8 where the system's locale is not)"
        ) from None
    return text


def add_data_flags(parser: argparse._ActionsContainer) -> None:
    """The flags of DataFlags but for mock data."""
    parser.add_argument(
        "--data-path",
        nargs="+",
        action=Once,
        type=path_given,
        default=[],
        help="PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ...",
    )
    for split in ("train", "valid", "test"):
        parser.add_argument(
            f"--{split}-data-path",
            nargs="+",
            action=Once,
            type=path_given,
            default=[],
            help="Like --data-path, for one split.",
        )
    parser.add_argument(
        "--data-args-path", type=path_given, help="File that holds what would follow --data-path."
    )
    parser.add_argument(
        "--split", default=DataFlags.split, help="Shares of the documents (default: %(default)s)."
    )
    parser.add_argument(
        "--data-cache-path",
        type=path_given,
        help="Folder of the index arrays (default: beside each dataset).",
    )
    parser.add_argument(
        "--reset-position-ids", action="store_true", help="Restart positions after each document."
    )
    parser.add_argument(
        "--reset-attention-mask", action="store_true", help="Keep attention inside documents."
    )
    parser.add_argument(
        "--eod-mask-loss", action="store_true", help="No loss where the input is an end of document."
    )


def add_tokenizer_flags(parser: argparse._ActionsContainer) -> None:
    """The flags that name a tokenizer."""
    parser.add_argument(
        "--tokenizer-type",
        default="HuggingFaceTokenizer",
        help="HuggingFaceTokenizer, GPT2BPETokenizer, SentencePieceTokenizer, TikTokenizer, "
        "ByteLevelTokenizer or NullTokenizer (text is ids separated by spaces). Default: %(default)s.",
    )
    parser.add_argument(
        "--tokenizer-model",
        type=path_given,
        help="tokenizer.json or its folder, a SentencePiece .model, or a tiktoken file.",
    )
    parser.add_argument("--vocab-file", type=path_given, help="vocab.json of GPT2BPETokenizer.")
    parser.add_argument("--merge-file", type=path_given, help="merges.txt of GPT2BPETokenizer.")
    parser.add_argument(
        "--vocab-size",
        type=whole_number(1, INT32_LARGEST),
        help="NullTokenizer: vocabulary, its end of document included.",
    )
    parser.add_argument(
        "--null-tokenizer-eod-id",
        type=whole_number(0, INT32_LARGEST),
        help="NullTokenizer: default the last id.",
    )
    parser.add_argument(
        "--tiktoken-pattern", choices=["v1", "v2"], help="TikTokenizer with a .json vocabulary."
    )
    parser.add_argument(
        "--tiktoken-num-special-tokens",
        type=whole_number(7, MOST_SPECIAL_TOKENS),
        default=1000,
        help="TikTokenizer with a .json vocabulary.",
    )
    parser.add_argument(
        "--eod-token",
        type=utf8_text,
        help="The end-of-document token, where the tokenizer does not say; a special one.",
    )
    parser.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="Leave out what the tokenizer adds to each text, such as a beginning-of-sequence token.",
    )
    parser.add_argument(
        "--allow-special-tokens",
        action="store_true",
        help="Text that spells a special token, such as <|endoftext|>, becomes that token, as in "
        "Megatron-LM with Hugging Face tokenizers. By default it is text like any other, and an --eod-token "
        "that text can have, a word or the unknown, is refused: data cannot forge a document's end.",
    )
