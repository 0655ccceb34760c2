"""What may be merged: datasets, folders of them, and the shares of one corpus."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.data.dataset_info import read_info
from megalite.data.errors import DataError
from megalite.data.inputs import Part, corpus_hash, find_inputs, take_partition
from megalite.data.merge import merge
from megalite.data.preprocess import PreprocessPlan, preprocess
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from tests.data.corpora import lines, run, write_dataset


def test_a_merge_does_not_eat_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset(Path("a"), [3, 4])
    before = Path("a.bin").read_bytes()
    for name in ("./a", str(tmp_path / "a")):
        with pytest.raises(DataError, match="the output is one of the inputs"):
            merge(["a"], name)
    for suffix in ("bin", "idx"):
        Path("other").mkdir(exist_ok=True)
        Path(f"other/link.{suffix}").symlink_to(f"../a.{suffix}")
    Path("folder").symlink_to(".")
    for inputs, name in ((["other/link"], "a"), (["a"], "other/link"), (["a"], "folder/a")):
        with pytest.raises(DataError, match=f"{name}: the output is one of the inputs, {inputs[0]}"):
            merge(inputs, name)
    assert Path("a.bin").read_bytes() == before
    lines(Path("corpus.json"))
    with pytest.raises(DataError, match=r"corpus\.json: cannot be read as a dataset's description"):
        merge(["a"], "corpus")
    assert not Path("corpus.idx").exists()


def both_keys(path: Path) -> list[Part]:
    path.write_text('{"a": "x", "b": "y"}\n' * 8)
    return find_inputs([str(path)])


def test_a_folder_is_merged_whole_or_not_at_all(tmp_path: Path) -> None:
    from tools.merge_datasets import find_datasets

    inputs, folder = both_keys(tmp_path / "in.jsonl"), tmp_path / "parts"
    run(inputs, folder / "x", json_keys=["a"])
    run(inputs, folder / "y", json_keys=["a"])
    before = [f"{folder}/x_a_document", f"{folder}/y_a_document"]
    assert find_datasets([str(folder)]) == before
    for name in ("z.bin", "z.bin.partial", "z.idx.partial"):  # of a copy or a run that has not ended
        (folder / name).touch()
        with pytest.raises(DataError, match=r"parts/z\.idx does not exist; a dataset is a pair of files"):
            merge(find_datasets([str(folder)]), str(tmp_path / "whole"))
        (folder / name).unlink()
    run(inputs, folder / "line\nend", json_keys=["a"])
    assert find_datasets([str(folder)]) == [f"{folder}/line\nend_a_document", *before]
    run(inputs, folder / "x", json_keys=["b"])
    with pytest.raises(DataError, match="parts: holds datasets of the keys a, b"):
        find_datasets([str(folder)])
    assert find_datasets([*before, f"{folder}/x_b_document"])[2] == f"{folder}/x_b_document"


def test_a_part_that_is_not_what_its_description_says(tmp_path: Path) -> None:
    parts = [f"{tmp_path}/{name}_text_document" for name in "ab"]
    for part, texts in zip(parts, (["one", "two"], ["three"]), strict=True):
        run(find_inputs([lines(tmp_path / "in.jsonl", texts)]), Path(part.removesuffix("_text_document")))
    (tmp_path / "twice.skipped.jsonl").write_text("{}\n")  # of a dataset that was there before
    merge([parts[0], parts[0]], str(tmp_path / "twice"))
    assert (tmp_path / "twice.json").is_file()
    assert not (tmp_path / "twice.skipped.jsonl").exists()
    description, other = (Path(f"{part}.json") for part in parts)
    before = description.read_bytes()
    description.write_bytes(other.read_bytes())
    with pytest.raises(DataError, match=r"a_text_document: documents: .*\.json says 1, found 2"):
        merge(parts, str(tmp_path / "whole"))
    description.write_bytes(before)
    with open(f"{parts[0]}.bin", "r+b") as file:
        file.write(b"?")
    with pytest.raises(DataError, match=r"a_text_document: crc32: .*\.json says "):
        merge(parts, str(tmp_path / "whole"))
    assert not Path(f"{tmp_path}/whole.idx").exists()


@pytest.mark.parametrize("described", [True, False])
def test_shares_are_not_merged_with_their_whole(tmp_path: Path, described: bool) -> None:
    inputs = both_keys(tmp_path / "in.jsonl")
    prefixes = [str(tmp_path / f"x_part0000{i}of00002_a_document") for i in range(2)]
    for i in range(2):
        run(take_partition(inputs, i, 2), tmp_path / "x", json_keys=["a"], partition=(i, 2), corpus="c")
    merge(prefixes, str(tmp_path / "whole"))
    if not described:  # as by a program that is not ours
        (tmp_path / "whole.json").unlink()
    with pytest.raises(DataError, match=r"whole: is no share of a corpus, as .* is; merge the shares by"):
        merge([*prefixes, str(tmp_path / "whole")], str(tmp_path / "other"))
    for twice in ([prefixes[0], *prefixes], [*prefixes, prefixes[1]], prefixes * 2):
        with pytest.raises(DataError, match="must all be given in order; in another order, or some twice"):
            merge(twice, str(tmp_path / "other"))
    assert not (tmp_path / "other.idx").exists()


def test_shares_of_a_run_with_another_number_of_them_lie_beside(tmp_path: Path) -> None:
    inputs = both_keys(tmp_path / "in.jsonl")
    for index, of in ((0, 2), (1, 2), (0, 3), (1, 3), (2, 3)):
        run(take_partition(inputs, index, of), tmp_path / "x", json_keys=["a"], partition=(index, of))
    with pytest.raises(DataError, match=r"x_part00000of00003_a_document: a share of 3, but .* is one of 2; "):
        merge(sorted(str(path)[:-4] for path in tmp_path.glob("*.idx")), str(tmp_path / "whole"))


def test_a_folder_beside_a_dataset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.merge_datasets import find_datasets

    monkeypatch.chdir(tmp_path)
    Path("data/x").mkdir(parents=True)
    write_dataset(Path("data/x/part"), [3])
    assert find_datasets(["data/x"]) == find_datasets(["data/x/"]) == ["data/x/part"]
    write_dataset(Path("data/x"), [4])
    for suffix in ("idx", "bin"):
        with pytest.raises(DataError, match=rf"^--input data/x: is a folder, and data/x\.{suffix} of a d"):
            find_datasets(["data/x"])
        Path(f"data/x.{suffix}").unlink()
        write_dataset(Path("data/y"), [4])
        Path("data/y.bin").rename("data/x.bin")
    assert find_datasets(["data/x/"]) == ["data/x/part"]


def test_a_share_of_very_many_is_refused_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    work = PreprocessPlan(
        find_inputs([str(tmp_path / "in.jsonl")]), str(tmp_path / "out"), partition=(3, 10**6), corpus="c"
    )
    preprocess(work, ByteLevelTokenizer())
    tracemalloc.start()
    with pytest.raises(DataError, match=r"one of 1000000 partitions .*; missing: 0, 1, 2, 4, 5"):
        merge([work.prefix("text")], str(tmp_path / "whole"))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20  # a list of them all has 100 MB


def test_shares_of_inputs_that_changed_are_not_merged(tmp_path: Path) -> None:
    path = lines(tmp_path / "in.jsonl", ["a"] * 100)
    for index in range(2):
        whole = find_inputs([path])
        work = PreprocessPlan(
            take_partition(whole, index, 2),
            str(tmp_path / "out"),
            partition=(index, 2),
            corpus=corpus_hash(whole),
        )
        preprocess(work, ByteLevelTokenizer())
        lines(Path(path), ["a"] * 140)  # the second share begins 20 documents later than the first has ended
    shares = [str(tmp_path / f"out_part0000{index}of00002_text_document") for index in range(2)]
    with pytest.raises(DataError, match="shares of two corpora do not make one"):
        merge(shares, str(tmp_path / "whole"))
    assert not list(tmp_path.glob("whole*"))


def test_shares_by_two_versions_of_a_library_are_not_merged(tmp_path: Path) -> None:
    path = lines(tmp_path / "in.jsonl", ["a"] * 100)
    tokenizer = ByteLevelTokenizer()
    shares = []
    for index, packages in enumerate([("numpy",), ("numpy", "orjson")]):
        tokenizer.packages = packages
        shares.append(share(path, tmp_path, index, tokenizer))
    with pytest.raises(DataError, match=r"made by numpy .*, orjson .*, but .* by numpy .*, which may give"):
        merge(shares, str(tmp_path / "whole"))
    tokenizer.packages = ("numpy",)
    merge([shares[0], share(path, tmp_path, 1, tokenizer)], str(tmp_path / "whole"))


def test_shares_of_a_file_that_was_shuffled_are_not_merged(tmp_path: Path) -> None:
    """By what stands at its ends and where it is cut: size, name and format are the same."""
    texts = [str(i) * 9 for i in range(10, 90)]
    path = lines(tmp_path / "in.jsonl", texts)
    first, second = (share(path, tmp_path, index, ByteLevelTokenizer()) for index in range(2))
    merge([first, second], str(tmp_path / "whole"))
    lines(Path(path), texts[::-1])
    share(path, tmp_path, 1, ByteLevelTokenizer())
    with pytest.raises(
        DataError, match=r"in\.jsonl, inside which it begins, is not what it was when .*part00000"
    ):
        merge([first, second], str(tmp_path / "whole"))
    share(path, tmp_path, 0, ByteLevelTokenizer())
    merge([first, second], str(tmp_path / "whole"))


class WithOptions(ByteLevelTokenizer):
    options = "special tokens allowed"


def share(path: str, folder: Path, index: int, tokenizer: ByteLevelTokenizer, key: str = "text") -> str:
    whole = find_inputs([path])
    work = PreprocessPlan(
        take_partition(whole, index, 2),
        str(folder / "out"),
        json_keys=(key,),
        partition=(index, 2),
        corpus=corpus_hash(whole),
    )
    preprocess(work, tokenizer)
    return work.prefix(key)


@pytest.mark.parametrize("what", ["key", "tokenizer options"])
def test_shares_of_different_runs_are_not_merged(tmp_path: Path, what: str) -> None:
    path = str(tmp_path / "in.jsonl")
    Path(path).write_text('{"text": "a", "title": "b"}\n' * 10)
    first = share(path, tmp_path, 0, ByteLevelTokenizer())
    key = "title" if what == "key" else "text"
    second = share(path, tmp_path, 1, WithOptions() if key == "text" else ByteLevelTokenizer(), key)
    with pytest.raises(DataError, match=f"its {what} is .*; shares of two runs do not make one"):
        merge([first, second], str(tmp_path / "whole"))
    assert not list(tmp_path.glob("whole*"))


@pytest.mark.parametrize(("field", "what"), [("key", "key"), ("options", "tokenizer options")])
def test_the_whole_says_of_its_parts_what_they_have_in_common(tmp_path: Path, field: str, what: str) -> None:
    path = str(tmp_path / "in.jsonl")
    Path(path).write_text('{"text": "a", "title": "b"}\n')
    works = [PreprocessPlan(find_inputs([path]), str(tmp_path / name)) for name in "abc"]
    if field == "key":
        works[1] = replace(works[1], json_keys=("title",))
    for work in works:
        other = field == "options" and work is works[1]
        preprocess(work, WithOptions() if other else ByteLevelTokenizer())
    prefixes = [work.prefix(*work.json_keys) for work in works]
    told: list[str] = []
    merge(prefixes, str(tmp_path / "whole"), warn=told.append)
    assert len(told) == 1
    assert told[0].startswith(f"{prefixes[1]}: its {what} is ")
    whole, first = read_info(str(tmp_path / "whole")), read_info(prefixes[0])
    assert whole is not None
    assert first is not None
    common = {"key": first.key, "options": first.options, field: None}
    assert (whole.key, whole.options) == (common["key"], common["options"])
    again = str(tmp_path / "again")
    merge([str(tmp_path / "whole"), prefixes[0]], again, warn=told.append)
    assert len(told) == 2
    merge([prefixes[0], prefixes[2]], again, warn=told.append)
    assert len(told) == 2
