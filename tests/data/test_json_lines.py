"""The fast way through JSON lines: what it takes it reads as the libraries do, and the usual it takes."""

from __future__ import annotations

import io
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.data import records
from megalite.data.documents import Lines, parse_document, parse_strings
from megalite.data.errors import DataError
from megalite.data.inputs import Part
from megalite.data.records import read_records

LETTERS = [
    *'ab "\\/\n\t\x00\x1f\x7f',
    "\u00e9",
    "\u20ac",
    "\U0001f600",
    "\ud800",
    "{",
    "}",
    ",",
    ":",
    "x" * 40,
]
PLAIN = '{"id": 7, "text": "some text", "meta": {"a": [1, -2.5e-3, true, null, "\\u00e9"], "b": {}}}'


def value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 7:
        return {text(draw): value(draw, depth + 1) for _ in range(draw.randrange(4))}
    return [text(draw), text(draw), draw.randint(-(10**20), 10**20), draw.gauss(0, 1e30), None, True][kind]


def text(draw: random.Random) -> str:
    return "".join(draw.choices(LETTERS, k=draw.choice([0, 1, 3, 10, 40])))


def line(draw: random.Random) -> bytes:
    names = draw.sample(["text", "more", "", "a.b", "t\u00e9"], draw.randrange(5))
    record = {name: text(draw) if draw.random() < 0.7 else value(draw) for name in names}
    gaps = draw.choice([(",", ":"), (", ", ": "), (" ,\t", " :\r ")])
    written = json.dumps(record, ensure_ascii=draw.random() < 0.5, separators=gaps)
    return written.encode(errors="surrogatepass")


def damaged(draw: random.Random, content: bytes) -> bytes:
    place = draw.randrange(len(content) + 1)
    other = draw.choice(
        [b"", b"\\", b'"', b"\xc3", b"\xed\xa0\x80", b"0", b"-", b".", b"e", b"\\u12", b" ", b"]"]
    )
    return content[:place] + other + content[place + draw.randrange(3) :]


def lines_of_all_kinds(count: int) -> Iterator[bytes]:
    draw = random.Random(0)
    for _ in range(count):
        content = line(draw)
        yield content if draw.random() < 0.5 else damaged(draw, content)


def careful(content: bytes, keys: list[str]) -> list[list[str]] | None:
    """By the libraries: the texts under each key, or None."""
    try:
        return parse_document(content, "json", keys)
    except DataError:
        return None


@pytest.mark.parametrize("keys", [["text"], ["more", "text"], ["a.b", "t\u00e9", ""]])
def test_what_is_taken_is_what_the_libraries_read(keys: list[str]) -> None:
    taken = 0
    for content in lines_of_all_kinds(20_000):
        found = parse_strings(Lines(content + b"\n", 1), keys)
        if found is not None:
            taken += 1
            assert found == careful(content, keys), content
    assert taken > 100


def test_of_what_is_valid_only_the_unusual_is_declined() -> None:
    """A string under the key, no half of a surrogate pair."""
    draw, taken = random.Random(1), 0
    for _ in range(5_000):
        record = {"id": value(draw), "text": text(draw), "meta": value(draw)}
        content = json.dumps(record, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass")
        if b"\\ud800" in content or b"\xed\xa0\x80" in content:
            continue
        taken += 1
        assert parse_strings(Lines(content, 1), ["text"]) == [[record["text"]]], content
    assert taken > 1_000


@pytest.mark.parametrize(
    "content",
    [
        # no object, or not one a line
        *("", "\n", "{}", "[]", "null", '"text"', PLAIN[:-1], PLAIN + "}", PLAIN + PLAIN),
        # no string under the key
        *(PLAIN.replace("text", "t"), '{"text": 1}', '{"text": null}', '{"text": ["a"]}'),
        '{"text": "a", "text": 1}',
        # damaged strings
        *('{"text": "a\tb"}', '{"text": "\\x"}', '{"text": "\\u12"}', '{"text": "a', '{"text": "a\\'),
        *('{"text": "\\ud800"}', '{"text": "\\udc00"}', '{"text": "\\ud800\\u0041"}'),
        # other values
        *(f'{{"text": "a", "b": {value}}}' for value in ("", "01", "1.", "+1", "NaN", "tru", "9" * 5000)),
        f'{{"text": "a", "b": {"[" * 100}{"]" * 100}}}',
        # what stands between
        *('{"text": "a",}', '{"text": "a" "b": 1}', '{"text":\n"a"}', '{"text": "a", b: 1}', "{'text': 'a'}"),
    ],
)
def test_anything_else_is_left_to_the_libraries(content: str) -> None:
    usual = (PLAIN + "\n").encode()
    assert parse_strings(Lines(usual, 1), ["text"]) == [["some text"]]
    block = usual + content.encode() + b"\n" + usual
    assert parse_strings(Lines(block, 3), ["text"]) is None


def test_the_last_of_two_equal_keys_counts_whatever_their_spelling() -> None:
    block = b'{"text": "a", "t\\u0065xt": "b"}\r\n{"text": "\xc3\xa9\\n\\ud83d\\ude00"}'
    assert parse_strings(Lines(block, 2), ["text"]) == [["b", "\u00e9\n\U0001f600"]]


@pytest.mark.parametrize("read", [2, 7, 64, 1 << 20])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_lines_in_groups_are_the_lines_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: int, end: bytes
) -> None:
    """Whatever is read at a time, for every share, and from every place where a run may go on."""
    draw = random.Random(read)
    whole = [b"x" * draw.choice([0, 1, 5, 90]) + b"\n" for _ in range(40)]
    content = b"\xef\xbb\xbf" + b"".join(whole)[:-1] + end
    (tmp_path / "in.jsonl").write_bytes(content)
    expected = content[3:].splitlines(keepends=True)
    monkeypatch.setattr(records, "READ_BYTES", read)
    path = str(tmp_path / "in.jsonl")
    for cut in range(1, len(content), 5):
        shares = [Part(path, "json", 0, cut), Part(path, "json", cut, len(content))]
        found = [
            content for part in shares for each in read_records(part, [], 64, 3) for content in each.contents
        ]
        assert found == expected
    groups = list(read_records(Part(path, "json"), [], 64, 3))
    assert sum(len(group.contents) for group in groups) == groups[-1].number == len(expected)
    assert all(len(group.contents) <= 3 for group in groups)
    for group in groups:
        rest = read_records(Part(path, "json"), [], 64, 3, group.number, group.offset)
        assert [content for each in rest for content in each.contents] == expected[group.number :]


def test_lines_before_an_error_come_before_it() -> None:
    pieces = [b"a\nb", b"c\nd"]

    class Broken(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            if not pieces:
                raise OSError("broken")
            piece = pieces.pop(0)
            buffer[: len(piece)] = piece
            return len(piece)

    blocks = records._blocks(io.BufferedReader(Broken()), 100)
    assert bytes(next(blocks)) == b"a\nbc\n"
    with pytest.raises(OSError, match="broken"):
        next(blocks)


def test_nothing_of_a_line_is_handed_on_whose_last_piece_makes_it_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "LONGEST_RECORD", 1000)
    blocks = records._blocks(io.BufferedReader(io.BytesIO(b"x" * 1050 + b"\n")), 100)
    with pytest.raises(DataError, match="the line that follows has more than 1,000 bytes"):
        next(blocks)


def test_what_stands_behind_a_share_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST_RECORD", 1000)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"short\n" * 10 + b"x" * 2000 + b"\n")
    for end in (59, 60):
        groups = read_records(Part(str(path), "json", 0, end), [], 200)
        assert [content for group in groups for content in group.contents] == [b"short\n"] * 10


def test_a_long_line_comes_by_itself(tmp_path: Path) -> None:
    long = b"x" * (8 << 20) + b"\n"
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"short\n" * 10 + long + b"short\n" * 5)
    groups = read_records(Part(str(path), "json"), [], 1 << 20)
    tracemalloc.start()
    counts = [len(group.contents) for group in groups]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts == [10, 1, 5]
    assert peak < 2.6 * len(long)  # as it was read, and in one piece


def test_groups_have_the_size_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes((b"x" * 99 + b"\n") * 50_000)
    sizes = [group.size for group in read_records(Part(str(path), "json"), [], 1 << 20, 1 << 30)]
    assert sum(sizes) == 5_000_000
    assert max(sizes) <= (1 << 20) + 99
