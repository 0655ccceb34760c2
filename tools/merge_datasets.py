#!/usr/bin/env python3
"""Joins binary datasets into one, in the order given, in constant memory.

    python tools/merge_datasets.py --input parts/corpus_00_text_document parts/corpus_01_text_document \\
        --output-prefix data/corpus
    python tools/merge_datasets.py --input parts --output-prefix data/corpus

A folder stands for all datasets in it, sorted by name, but for those of folders below it; where a dataset
has the same name, `parts/` is the folder.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.command import run_data_command
from megalite.flags import Once

PART_OF_DATASET = re.compile(r"(.+)\.(?:bin|idx)(?:\.partial)?", re.DOTALL)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    from megalite.data.settings import path_given

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--input",
        nargs="+",
        action=Once,
        type=path_given,
        required=True,
        help="Dataset prefixes, or folders of datasets (folders in them are not read).",
    )
    parser.add_argument("--output-prefix", type=path_given, required=True, help="Prefix of the whole.")
    return parser.parse_args(argv)


def find_datasets(given: Sequence[str]) -> list[str]:
    """Prefixes as they are; a folder becomes the datasets in it, sorted by name, also those of which it holds
    a part only, which cannot be opened. Raises DataError for those of several keys, and for what may be
    either.
    """
    from megalite.data.dataset_info import read_info
    from megalite.data.errors import DataError
    from megalite.data.folders import is_folder, mode_of

    found: list[str] = []
    for item in given:
        folder = is_folder(item)
        for file in (f"{item}.idx", f"{item}.bin"):
            if folder and not item.endswith("/") and mode_of(file):
                raise DataError(
                    f"--input {item}: is a folder, and {file} of a dataset; give {item}/ for those in the "
                    "folder, or rename one of the two"
                )
        names = [path.name for path in Path(item).iterdir()] if folder else []
        stems = {match[1] for match in map(PART_OF_DATASET.fullmatch, names) if match}
        inside = sorted(str(Path(item, stem)) for stem in stems)
        keys = sorted({info.key or "(several)" for prefix in inside if (info := read_info(prefix))})
        if len(keys) > 1:
            raise DataError(
                f"{item}: holds datasets of the keys {', '.join(keys)}, as runs with several make; "
                "give the prefixes of those that are to be one"
            )
        found.extend(inside or [item])
    return found


def _warn(text: str) -> None:
    print(f"merge_datasets: warning: {text}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    from megalite.data.errors import DataError
    from megalite.data.inputs import check_apart, repeats
    from megalite.data.merge import merge
    from megalite.data.progress import ReadingDisplay

    try:
        check_apart(args.input, args.output_prefix, "the prefixes in it")
        prefixes = find_datasets(args.input)
        if told := repeats([f"{prefix}.bin" for prefix in prefixes]):
            _warn(told)
        with ReadingDisplay("Merged") as display:
            state = merge(prefixes, args.output_prefix, display.show, _warn)
    except (DataError, OSError, MemoryError) as error:
        print(f"merge_datasets: error: {error}", file=sys.stderr)
        return 1
    print(
        f"{args.output_prefix}: {state.documents:,} documents, {state.sequences:,} sequences, "
        f"{state.tokens:,} tokens"
    )
    return 0


if __name__ == "__main__":
    run_data_command(main, "interrupted; the same command starts anew")
