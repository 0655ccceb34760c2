"""Which files are read, which part of them, and how: the inputs of the preprocessing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megalite.data.errors import DataError
from megalite.data.folders import SALVAGED, below, is_folder, matches, mode_of
from megalite.data.temporary_names import is_shortened
from megalite.listing import listing

STDIN = "-"
COMPRESSED = (".gz", ".zst", ".zstd")
NO_DATA = re.compile(  # of Spark, Delta, dask: what is unfinished, or of the other files
    r"_(SUCCESS|temporary|(common_|spark_)?metadata|delta_log|(committed|started)_.*)", re.DOTALL
)
NOT_READ = {  # with what writes their content to a pipe
    ".bz2": "bzip2 -dc",
    ".lz4": "lz4 -dc",
    ".xz": "xz -dc",
    ".tar": "tar -xOf",
    ".tgz": "tar -xOf",
    ".zip": "unzip -p",
}
PRODUCT = re.compile(  # what stands behind the output's prefix in the names of files that a run makes
    r"(_part\d{5,}of\d{5,})?_.*_document\."
    r"((bin|idx|boundaries|json|skipped\.jsonl|progress\.json)(\.partial(\.[^/]+\.partial)?)?|cache/.*)",
    re.DOTALL,
)


class Part(NamedTuple):
    """The documents of one file that begin in bytes [start, end); end -1 is the end of the file."""

    path: str
    format: str
    """json, text, paragraphs or parquet."""
    start: int = 0
    end: int = -1


def printable(path: str) -> str:
    """`path`, with bytes of it that are no UTF-8 as escapes."""
    return os.fsencode(path).decode("utf-8", errors="backslashreplace")


def is_compressed(path: str) -> bool:
    """Whether `path` is decompressed while it is read, by its name."""
    return path.lower().endswith(COMPRESSED)


def read_once(path: str) -> bool:
    """Whether what is read from `path` is gone: standard input, a pipe."""
    return path == STDIN or stat.S_ISFIFO(mode_of(path))


def find_inputs(
    patterns: Sequence[str],
    text_format: str = "text",
    forced: str | None = None,
    output_prefix: str | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> list[Part]:
    """The files that `patterns` name: files, folders (all files in them) and globs, sorted inside each;
    `-` is standard input.

    The format goes by the name, .txt and .parquet or else JSON lines, unless it is `forced`;
    `text_format` is what .txt means. `warn` is told what a user may not expect: what of a folder is left out,
    as what `output_prefix` has been given, and files that are read several times.
    """
    is_product = _product_of(output_prefix)
    files = _find_files(patterns, warn, is_product)
    if products := [file for file in files if is_product(file)]:
        if len(products) == len(files):
            raise DataError(f"--input: all inputs are output of this command: {_listed(products)}")
        warn(f"left out, as output of this command: {_listed(products)}")
        left_out = set(products)
        files = [path for path in files if path not in left_out]
    parts = [Part(path, forced or _format(path, text_format)) for path in files]
    once = [part.path for part in parts if read_once(part.path)]
    if twice := [path for path in once if once.count(path) > 1]:
        what = "standard input" if twice[0] == STDIN else "a pipe"
        raise DataError(f"--input {twice[0]}: {what} can be read only once")
    if piped := [part.path for part in parts if part.format == "parquet" and read_once(part.path)]:
        raise DataError(f"--input {piped[0]}: Parquet is read from files only, as its index is their end")
    if told := repeats([part.path for part in parts]):
        warn(told)
    return parts


def _format(path: str, text_format: str) -> str:
    """That of the file, by its name. Raises DataError for one that is not read."""
    name = _uncompressed(path)
    if unread := [end for end in NOT_READ if name.endswith(end)]:
        raise DataError(
            f"--input {path}: {unread[0]} is not read; recompress with zstd or gzip, or pipe it: "
            f"{NOT_READ[unread[0]]} {path} | preprocess_data.py --input -"
        )
    return text_format if name.endswith(".txt") else "parquet" if name.endswith(".parquet") else "json"


def _uncompressed(path: str) -> str:
    """The name in small letters, without the ends of compressed files."""
    name = path.lower()
    while name.endswith(COMPRESSED):
        name = name.rsplit(".", 1)[0]
    return name


def says_format(path: str) -> bool:
    """Whether the name of an input says that it is one."""
    return _uncompressed(path).endswith((".json", ".jsonl", ".ndjson", ".txt", ".parquet"))


def _product_of(output_prefix: str | None) -> Callable[[str], bool]:
    """Of a file, whether a run with this prefix, of whatever keys and share, has written it, by the name."""
    prefix = None if output_prefix is None else os.path.realpath(output_prefix)

    def is_product(file: str) -> bool:
        path = os.path.realpath(file)
        if prefix is None:
            return False
        (folder, name), (in_folder, beginning) = os.path.split(path), os.path.split(prefix)
        if folder == in_folder and is_shortened(name, beginning):
            return True
        if not path.startswith(prefix) or not PRODUCT.fullmatch(path[len(prefix) :]):
            return False
        corpus = path.endswith("_document.json") and not mode_of(f"{path[: -len('json')]}idx")
        return not (corpus and mode_of(path))  # a run that publishes takes descriptions away

    return is_product


def _find_files(
    patterns: Sequence[str], warn: Callable[[str], None], is_product: Callable[[str], bool]
) -> list[str]:
    found: list[str] = []
    for pattern in patterns:
        mode = 0 if pattern == STDIN else mode_of(pattern)
        if pattern == STDIN or stat.S_ISREG(mode) or stat.S_ISFIFO(mode):
            found.append(pattern)
        elif stat.S_ISDIR(mode):
            found.extend(_files_in(pattern, warn, is_product))
        elif mode:
            raise DataError(f"--input {pattern}: a socket or a device; give - for standard input")
        elif matched := _files_matching(pattern, warn, is_product):
            found.extend(matched)
        else:
            raise DataError(f"--input {pattern}: no such file, folder or match")
    return found


def _files_matching(
    pattern: str, warn: Callable[[str], None], is_product: Callable[[str], bool]
) -> list[str]:
    """The files that `pattern` matches, and those in the folders that it matches, each once, but for NO_DATA
    that it does not name.
    """
    folder, name = os.path.split(pattern)
    # What is in a folder that matches is matched itself.
    all_matched = name == "**" or (name == "*" and os.path.basename(folder) == "**")
    found: list[str] = []
    named, left_out = {*pattern.split(os.sep)}, []
    for match in filter(None, matches(pattern)):
        if any(map(NO_DATA.fullmatch, {*match.split(os.sep)} - named)):
            left_out.append(match)
            continue
        mode = mode_of(match)
        if not mode and is_product(match):
            continue  # of a share that had it a moment ago, beside this one
        if not stat.S_ISDIR(mode):
            if not _is_file(match, mode):
                raise DataError(f"--input {match}: a pipe, socket or device; give a pipe by its name")
            found.append(match)
        elif not all_matched and os.path.basename(match) != SALVAGED:
            found.extend(_files_in(match, warn, is_product))
    if left_out:
        warn(f"left out, as no data: {_listed(left_out)}")
    return [*dict.fromkeys(found)]


def _files_in(folder: str, warn: Callable[[str], None], is_product: Callable[[str], bool]) -> list[str]:
    """All files in `folder`, at any depth and behind links, sorted, but for hidden ones, backup copies
    and NO_DATA. Raises DataError for what would be left out otherwise: folders that cannot be read, links to
    nothing.
    """
    left_out: list[str] = []

    def shown(path: str) -> bool:
        name = os.path.basename(path)
        unread = name.startswith(".") or name.endswith("~") or NO_DATA.fullmatch(name)
        if unread or (name == SALVAGED and is_folder(path)):
            left_out.append(path)
            return False
        return True

    files = [
        path
        for path, mode in below(folder, shown)
        if not stat.S_ISDIR(mode) and (mode or not is_product(path)) and _is_file(path, mode)
    ]
    if left_out:
        warn(f"left out, as hidden, a backup copy or no data: {_listed(left_out)}")
    if not files:
        raise DataError(f"--input {folder}: the folder holds no file")
    return sorted(files)


def _is_file(path: str, mode: int) -> bool:
    """Whether what was found as `path` is no pipe, socket or device. Raises DataError for a link to nothing,
    whose data would be missing.
    """
    if not mode:
        raise DataError(f"--input {path}: a link to {os.path.realpath(path)}, which is not there")
    return stat.S_ISREG(mode)


def repeats(paths: Sequence[str]) -> str | None:
    """What a user should know who gives a file several times, under whatever names, as to weigh it more; None
    where that is not so. Files that do not exist are left to who opens them.
    """
    first: dict[tuple[int, int], str] = {}
    again = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)
            place = (status.st_dev, status.st_ino)
            if place in first:
                again.append(f"{path} (the same as {first[place]})")
            first.setdefault(place, path)
    given = {*paths}
    for path in paths:
        unpacked = next((path[: -len(end)] for end in COMPRESSED if path.lower().endswith(end)), None)
        if unpacked in given:
            again.append(f"{path} (compressed what {unpacked} is, by its name)")
    if not again:
        return None
    return f"read again, so that documents come several times: {_listed(again)}"


def _listed(items: Sequence[str]) -> str:
    return listing([*map(printable, items)])


def check_apart(patterns: Sequence[str], output_prefix: str, instead: str = "--input a glob") -> None:
    """Raises DataError when the output would lie in a folder that is read: the same command would find other
    inputs when it is given again. `instead` is what of the folder may be given.
    """
    output = Path(os.path.realpath(output_prefix))
    for pattern in patterns:
        if Path(pattern).is_dir() and output.is_relative_to(os.path.realpath(pattern)):
            raise DataError(
                f"--output-prefix {output_prefix}: lies in the folder {pattern}, all of which is read; give "
                f"another, or {instead}"
            )


def corpus_hash(parts: Sequence[Part]) -> str:
    """Of what decides the shares of `take_partition`: sizes and formats of all files, and their names from
    the deepest folder on that holds them all, which may lie anywhere.
    """
    _check_sizes_known(parts)
    digest = hashlib.blake2b(digest_size=16)
    paths = [os.path.abspath(part.path) for part in parts]
    root = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    for path, part in zip(paths, parts, strict=True):
        name, size = os.path.relpath(path, root), os.path.getsize(path)
        digest.update(os.fsencode(f"{name}\0{size}\0{part.format}\0"))
    return digest.hexdigest()


def _check_sizes_known(parts: Sequence[Part]) -> None:
    if once := [part.path for part in parts if read_once(part.path)]:
        raise DataError(f"--partitions: standard input and pipes cannot be read in parts: {once[0]}")


def take_partition(parts: Sequence[Part], index: int, partitions: int) -> list[Part]:
    """The share `index` of `partitions` of whole files: consecutive bytes, so that the shares in order
    are the whole.

    Plain JSON lines are cut inside; any other file belongs to the share in which it begins.
    """
    if not 0 <= index < partitions:
        raise DataError(f"--partition-index {index}: expected 0 to {partitions - 1}")
    _check_sizes_known(parts)
    sizes = [os.path.getsize(part.path) for part in parts]
    total = sum(sizes)
    low, high = total * index // partitions, total * (index + 1) // partitions
    taken, position = [], 0
    for part, size in zip(parts, sizes, strict=True):
        start, end = max(0, low - position), min(size, high - position)
        if part.format == "json" and not is_compressed(part.path):
            if start < end:
                taken.append(part._replace(start=start, end=end))
        elif low <= position < high or (position == total and index == partitions - 1):
            taken.append(part)  # at the very end stand empty files, which may be documents
        position += size
    return taken
