"""Ids, the end of document, and what text may not do."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers

from megalite.data import sample_corpus
from megalite.data.errors import DataError
from megalite.data.inputs import find_inputs
from megalite.data.preprocess import PreprocessPlan, preprocess
from megalite.data.sample_corpus import EOD_TOKEN, prepare_sample, train_tokenizer
from megalite.data.tokenizer import Tokenizer, build_tokenizer, tiktoken
from megalite.data.tokenizer.base import identity_of
from megalite.data.tokenizer.model_config import ModelConfig

SAMPLE = Path(__file__).parents[2] / "examples" / "data" / "sample.jsonl"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": f"the cat sat on mat {i % 7} naïve"}) + "\n" for i in range(50))
    )
    train_tokenizer(corpus, folder / "tokenizer.json", 300)
    return folder


def make(kind: str = "HuggingFaceTokenizer", vocab_size: int | None = None, **given: object) -> Tokenizer:
    options = {key: given.pop(key) for key in ("add_special_tokens", "allow_special_tokens") if key in given}
    names = ("tokenizer_model", "vocab_file", "merge_file", "null_tokenizer_eod_id", "eod_token")
    fields = dict.fromkeys(names) | given
    return build_tokenizer(SimpleNamespace(tokenizer_type=kind, **fields), vocab_size, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_tokenizer_json_or_its_folder(trained: Path, name: str) -> None:
    tokenizer = make(tokenizer_model=str(trained / name))
    texts = ["the cat naïve 🙂", "", " two  spaces\n"]
    ids = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(each) for each in ids] == texts
    flat, lengths = tokenizer.encode_flat(texts)
    assert flat.tolist() == [token for each in ids for token in each]
    assert lengths.tolist() == [len(each) for each in ids]
    assert flat.dtype == lengths.dtype == np.dtype(np.int32)
    assert tokenizer.vocab_size <= 300
    assert tokenizer.eod == tokenizer.vocab_size - 1


def test_spelled_special_tokens_are_text_unless_allowed(trained: Path) -> None:
    text = f"a{EOD_TOKEN}b"
    safe, megatron = (
        make(tokenizer_model=str(trained), allow_special_tokens=allow) for allow in (False, True)
    )
    assert safe.eod not in safe.encode_batch([text])[0]
    assert safe.decode(safe.encode_batch([text])[0]) == text
    assert megatron.eod in megatron.encode_batch([text])[0]
    assert safe.encode_batch(["a b"]) == megatron.encode_batch(["a b"])


def test_no_text_spells_the_end_of_a_document(trained: Path, tmp_path: Path) -> None:
    model = changed(trained, tmp_path, lambda content: content["added_tokens"][0].update(special=False))
    tokenizer = make(tokenizer_model=model)
    assert tokenizer.check_eod() not in tokenizer.encode_batch([f"a{EOD_TOKEN}b"])[0]
    spelled = make(tokenizer_model=model, allow_special_tokens=True)
    assert spelled.check_eod() in spelled.encode_batch([f"a{EOD_TOKEN}b"])[0]
    message = "token the: text can have its id, so that data could forge the end of a document"
    for token in ("the", "Ċ"):  # the second is a line's end
        with pytest.raises(DataError, match=message.replace("the", token, 1)):
            make(tokenizer_model=model, eod_token=token).check_eod()
    assert make(tokenizer_model=model, eod_token="the", allow_special_tokens=True).check_eod() < 300


def test_a_tokenizer_may_itself_add_the_end_of_a_document(trained: Path, tmp_path: Path) -> None:
    eod = make(tokenizer_model=str(trained)).eod
    tokenizer = make(tokenizer_model=changed(trained, tmp_path, setting("post_processor", templates(eod))))
    assert tokenizer.encode_batch([""]) == [[tokenizer.check_eod()]]


def test_what_is_unknown_does_not_end_a_document(tmp_path: Path) -> None:
    vocabulary = {token: i for i, token in enumerate([*"<end>", "<end>"])}
    Library(models.BPE(vocabulary, [], unk_token="<end>")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = make(tokenizer_model=str(tmp_path), eod_token="<end>")
    assert tokenizer.eod not in tokenizer.encode_batch(["<end>"])[0]
    with pytest.raises(DataError, match="token <end>: text can have its id"):
        tokenizer.check_eod()


def test_no_line_is_the_end_of_a_document(tmp_path: Path) -> None:
    """Where what is put before a text keeps the token from being found at its beginning only."""
    library = Library(models.WordLevel({token: i for i, token in enumerate(["</s>", "\n", "?"])}, "?"))
    library.normalizer = normalizers.Prepend("_")
    library.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = make(tokenizer_model=str(tmp_path), eod_token="</s>")
    assert [tokenizer.eod in ids for ids in tokenizer.encode_batch(["</s>", "x\n</s>\ny"])] == [False, True]
    with pytest.raises(DataError, match="token </s>: text can have its id"):
        tokenizer.check_eod()


def test_a_byte_that_is_unknown_does_not_end_a_document(trained: Path, tmp_path: Path) -> None:
    """Of a vocabulary trained without all bytes, as tutorials do; the other bytes are there."""

    def change(content: dict[str, Any]) -> None:
        content["model"]["unk_token"] = EOD_TOKEN
        vocabulary = content["model"]["vocab"]
        vocabulary[EOD_TOKEN] = content["added_tokens"][0]["id"]
        vocabulary["other"] = vocabulary.pop("\u0104")  # the symbol of byte 4

    tokenizer = make(tokenizer_model=changed(trained, tmp_path, change))
    assert tokenizer.eod in tokenizer.encode_batch(["a\x04"])[0]
    with pytest.raises(DataError, match="text can have its id"):
        tokenizer.check_eod()


def test_a_tokenizer_json_written_anew_is_the_same_tokenizer(trained: Path, tmp_path: Path) -> None:
    content = json.loads((trained / "tokenizer.json").read_text(encoding="utf-8"))
    first = make(tokenizer_model=str(trained)).identity
    for name, changed in (("anew", content), ("other", {**content, "normalizer": {"type": "NFC"}})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(dict(reversed(changed.items())), indent=3))
        assert (make(tokenizer_model=str(tmp_path / name)).identity == first) == (name == "anew")


def test_gpt2_bpe_equals_the_tokenizer_json(trained: Path, tmp_path: Path) -> None:
    model = json.loads((trained / "tokenizer.json").read_text())["model"]
    vocab = {**model["vocab"], EOD_TOKEN: len(model["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    tokenizer = make(
        "GPT2BPETokenizer", vocab_file=str(tmp_path / "vocab.json"), merge_file=str(tmp_path / "merges.txt")
    )
    reference = make(tokenizer_model=str(trained))
    texts = ["the cat sat naïve", f"on the{EOD_TOKEN} mat", "x" * 50]
    assert tokenizer.encode_batch(texts) == reference.encode_batch(texts)
    assert (tokenizer.eod, tokenizer.vocab_size) == (reference.eod, reference.vocab_size)


def without(symbol: str) -> Callable[[dict[str, Any]], None]:
    """Takes a token, and what is merged with it, out of a model's vocabulary."""

    def change(content: dict[str, Any]) -> None:
        model = content["model"]
        model["merges"] = [merge for merge in model["merges"] if symbol not in "".join(merge)]
        kept = [token for token in model["vocab"] if symbol not in token]
        model["vocab"] = {token: i for i, token in enumerate(kept)}

    return change


def setting(place: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *sections, name = place.split(".")
        for section in sections:
            content = content[section]
        content[name] = value

    return change


def templates(number: int) -> dict[str, Any]:
    """A post-processor that adds this id to each text."""
    first, second = ({"Sequence": {"id": which, "type_id": 0}} for which in "AB")
    added = {"SpecialToken": {"id": "x", "type_id": 0}}
    tokens = {"x": {"id": "x", "ids": [number], "tokens": ["x"]}}
    return {
        "type": "TemplateProcessing",
        "single": [added, first],
        "pair": [first, second],
        "special_tokens": tokens,
    }


def changed(trained: Path, folder: Path, *changes: Callable[[dict[str, Any]], None]) -> str:
    content = json.loads((trained / "tokenizer.json").read_text())
    for change in changes:
        change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder / "tokenizer.json")


GPT2_FILES = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([setting("model.vocab.a", 66)], "the tokens 'a' and 'c' have one id, 66; added tokens are numbered"),
        (
            [lambda content: content["model"]["vocab"].pop("Z")],
            r"the tokens '<\|endoftext\|>' and '.+' have one",
        ),
        (
            [setting("model.vocab.a", 2**32 - 1)],
            "the token 'a' has the id 4294967295: a dataset holds ids up to",
        ),
        (
            [setting("post_processor", templates(999))],
            r"post_processor adds the id 999: outside the vocabulary",
        ),
    ],
)
def test_a_tokenizer_json_whose_ids_mean_two_things(
    trained: Path, tmp_path: Path, changes: list[Callable[[dict[str, Any]], None]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        make(tokenizer_model=changed(trained, tmp_path, *changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([setting("pre_tokenizer", None)], "has neither bytes as symbols nor a byte_fallback with all"),
        (
            [setting("pre_tokenizer", None), setting("model.byte_fallback", True)],
            "has neither bytes as symbols nor a byte_fallback with all",
        ),
        ([setting("model.dropout", 0.1)], r"model\.dropout is 0\.1.*: ids would be drawn at random"),
    ],
)
def test_a_tokenizer_json_that_may_only_decode(
    trained: Path, tmp_path: Path, changes: list[Callable[[dict[str, Any]], None]], message: str
) -> None:
    model = changed(trained, tmp_path, *changes)
    tokenizer = make(tokenizer_model=model)
    assert tokenizer.decode([tokenizer.eod]) == EOD_TOKEN
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    plan = PreprocessPlan(find_inputs([str(tmp_path / "in.jsonl")]), str(tmp_path / "out"), skip_errors=True)
    with pytest.raises(DataError, match=message):
        preprocess(plan, tokenizer)
    assert not list(tmp_path.glob("out*"))  # told before work


@pytest.mark.parametrize(
    ("changes", "kept", "lost"),
    [
        ([without("Ã")], "aж", "é"),  # é is C3 A9
        ([without("ċ")], "a\té", "a\x0b"),
        (
            [without("ċ"), setting("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True})],
            "a\x0b",
            "a\x0ba",
        ),
        (
            [without("ċ"), setting("normalizer", {"type": "ByteLevel"}), setting("pre_tokenizer", None)],
            "aé",
            "a\x0b",
        ),
        ([setting("model.end_of_word_suffix", "</w>")], "", "a"),
    ],
)
def test_text_with_a_byte_that_the_vocabulary_lacks(
    trained: Path, tmp_path: Path, changes: list[Callable[[dict[str, Any]], None]], kept: str, lost: str
) -> None:
    tokenizer = make(tokenizer_model=changed(trained, tmp_path, *changes))
    tokenizer.check_encodes()
    assert len(tokenizer.encode_batch([kept])[0]) > 0 or not kept
    for encode in (tokenizer.encode_batch, tokenizer.encode_flat):
        with pytest.raises(
            DataError, match=r"the vocabulary lacks ..+., the symbol of a byte that would be lost"
        ):
            encode(["a" if kept else "", lost])


@pytest.mark.parametrize(
    "changes",
    [
        [without("õ")],  # the symbol of 0xF5, a byte that UTF-8 does not have
        [without("Ã"), setting("model.unk_token", "a")],
        [setting("post_processor", templates(1))],
        [setting("normalizer", {"type": "ByteLevel"}), setting("pre_tokenizer", None)],
    ],
)
def test_a_tokenizer_json_that_loses_nothing(
    trained: Path, tmp_path: Path, changes: list[Callable[[dict[str, Any]], None]]
) -> None:
    tokenizer = make(tokenizer_model=changed(trained, tmp_path, *changes))
    assert tokenizer.encode_batch(["aé"])[0]


@pytest.mark.parametrize(
    ("model", "ids"),
    [
        (models.WordPiece({"[UNK]": 0, "a": 1}), [1, 0]),
        (models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"), [1, 0]),
        (models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0), [1, 0]),
        (models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>"), [1, 0]),
        (models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True), [97, 98]),
    ],
)
def test_models_with_a_token_for_the_unknown(tmp_path: Path, model: Any, ids: list[int]) -> None:
    library = Library(model)
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "tokenizer.json"))
    assert make(tokenizer_model=str(tmp_path)).encode_batch(["a b"]) == [ids]


def test_a_gpt2_vocabulary_with_which_text_is_lost(trained: Path, tmp_path: Path) -> None:
    model = json.loads((trained / "tokenizer.json").read_text())["model"]
    files: dict[str, Any] = {name: str(tmp_path / path) for name, path in GPT2_FILES.items()}
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    one_lost = {token: number for token, number in model["vocab"].items() if token != "Ã"}
    for vocabulary, message in (
        (one_lost, "the vocabulary lacks 'Ã'"),
        ({**model["vocab"], "a": 66}, r"--vocab-file .*vocab\.json: .*have one id, 66"),
    ):
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        with pytest.raises(DataError, match=message):
            make("GPT2BPETokenizer", **files).encode_batch(["é"])


def test_eod_must_exist(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--eod-token <end>: not in the vocabulary .*<\|endoftext\|>"):
        _ = make(tokenizer_model=str(trained), eod_token="<end>").eod
    content = json.loads((trained / "tokenizer.json").read_text())
    content["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="does not say which token ends a document; name it: --eod-token"):
        _ = make(tokenizer_model=str(tmp_path)).eod
    deepseek = "<\N{FULLWIDTH VERTICAL LINE}end▁of▁sentence\N{FULLWIDTH VERTICAL LINE}>"
    renamed = (trained / "tokenizer.json").read_text().replace("<|endoftext|>", deepseek)
    (tmp_path / "tokenizer.json").write_text(renamed)
    assert make(tokenizer_model=str(tmp_path)).eod_token == deepseek
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "the"}}))
    content["model"]["vocab"]["the"] = 290
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert make(tokenizer_model=str(tmp_path)).eod == 290
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    with pytest.raises(DataError, match=r"tokenizer_config\.json: eos_token <end>: not in the vocabulary"):
        _ = make(tokenizer_model=str(tmp_path)).eod


def test_padding_and_truncation_of_the_file_are_ignored(trained: Path, tmp_path: Path) -> None:
    content = json.loads((trained / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    text = "the cat sat on the mat " * 5
    given, without = make(tokenizer_model=str(tmp_path)), make(tokenizer_model=str(trained))
    assert given.encode_batch([text]) == without.encode_batch([text])
    assert given.identity == without.identity


def test_missing_or_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read"):
        make(tokenizer_model=str(tmp_path))
    with pytest.raises(DataError, match=r"--tokenizer-model .*nowhere"):
        make(tokenizer_model=str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="--tokenizer-model"):
        make()
    with pytest.raises(DataError, match="--merge-file"):
        make("GPT2BPETokenizer", vocab_file=str(tmp_path / "tokenizer.json"))


def test_an_end_of_document_token_that_changes_ids_is_told_by_the_options(
    trained: Path, tmp_path: Path
) -> None:
    def add(content: dict[str, Any]) -> None:
        number = len(content["model"]["vocab"]) + 1
        content["added_tokens"].append(
            {**content["added_tokens"][0], "id": number, "content": "<end>", "special": False}
        )

    model = changed(trained, tmp_path, add)
    options = "add_special_tokens=True allow_special_tokens=False"
    by_itself, end, word = (make(tokenizer_model=model, eod_token=given) for given in (None, "<end>", "the"))
    assert (by_itself.options, end.options, word.options) == (options, f"{options} eod_token=<end>", options)
    text = ["a<end>the"]
    assert by_itself.encode_batch(text) == word.encode_batch(text) != end.encode_batch(text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    assert make(tokenizer_model=model, eod_token="<end>").options == options  # as without it


@pytest.mark.parametrize("allow", [False, True])
def test_an_end_of_document_token_of_a_gpt2_vocabulary(trained: Path, tmp_path: Path, allow: bool) -> None:
    model = json.loads((trained / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    files: dict[str, Any] = {name: str(tmp_path / path) for name, path in GPT2_FILES.items()}
    by_itself, given = (
        make("GPT2BPETokenizer", **files, eod_token=token, allow_special_tokens=allow)
        for token in (None, "the")
    )
    same_ids = by_itself.encode_batch(["bathe"]) == given.encode_batch(["bathe"])
    assert same_ids == (by_itself.options == given.options) == (not allow)


def test_a_tiktoken_vocabulary_that_is_cut_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tiktoken")
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab", b"cd"]
    entries = [{"rank": i, "token_bytes": b64encode(token).decode()} for i, token in enumerate(tokens)]
    (tmp_path / "vocab.json").write_text(json.dumps(entries))
    monkeypatch.setattr(tiktoken, "JSON_VOCABULARY", 100 + 257)

    def identity(vocab_size: int | None) -> str | None:
        settings = {"tokenizer_model": str(tmp_path / "vocab.json"), "tiktoken_num_special_tokens": 100}
        return make("TikTokenizer", vocab_size, **settings).identity

    special = repr(sorted(tiktoken._json_special(100).items())).encode()
    known = identity_of("tiktoken", [(tmp_path / "vocab.json").read_bytes(), tiktoken.V2.encode(), special])
    assert identity(None) == identity(357) == known
    assert len({identity(size) for size in (356, 357, 358)}) == 3


def test_a_text_that_is_too_long_for_the_pattern_of_tiktoken(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    entries = [{"rank": byte, "token_bytes": b64encode(bytes([byte])).decode()} for byte in range(256)]
    (tmp_path / "vocab.json").write_text(json.dumps(entries))
    for allow in (False, True):
        tokenizer = make(
            "TikTokenizer", 1256, tokenizer_model=str(tmp_path / "vocab.json"), allow_special_tokens=allow
        )
        with pytest.raises(DataError, match="a run of spaces or of letters is too long for tiktoken"):
            tokenizer.encode_flat([" " * 8_000_000])


def test_versions_of_what_encodes(trained: Path) -> None:
    assert make(tokenizer_model=str(trained)).versions == [f"tokenizers {version('tokenizers')}"]
    assert make("NullTokenizer", 9).versions == []


def test_null_tokenizer() -> None:
    tokenizer = make("NullTokenizer", 50257)
    assert tokenizer.encode_batch(["1 2  50256", ""]) == [[1, 2, 50256], []]
    assert (tokenizer.eod, tokenizer.vocab_size) == (50256, 50257)
    assert make("NullTokenizer", 32000, null_tokenizer_eod_id=2).eod == 2
    with pytest.raises(DataError, match="end-of-document id 9: outside the vocabulary of 9"):
        make("NullTokenizer", 9, null_tokenizer_eod_id=9).check_eod()
    with pytest.raises(DataError, match="--vocab-size None"):
        make("NullTokenizer")


def test_a_corpus_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mine.jsonl: no such file$"):
        prepare_sample(tmp_path / "mine.jsonl", tmp_path / "a", 300)


def test_sample_is_made_once_and_the_same(trained: Path, tmp_path: Path) -> None:
    source = trained / "corpus.jsonl"
    assert prepare_sample(source, tmp_path / "a", 270) == ["corpus.jsonl", "tokenizer.json"]
    assert prepare_sample(source, tmp_path / "b", 270) == ["corpus.jsonl", "tokenizer.json"]
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (
        tmp_path / "b" / "tokenizer.json"
    ).read_bytes()


def test_a_sample_goes_on_after_a_kill(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, killed = trained / "corpus.jsonl", [tmp_path / str(i) for i in range(6)]
    rename, moments = Path.rename, iter(killed)

    def noted(path: Path, target: Path) -> Path:
        shutil.copytree(path.parent, next(moments))
        renamed = rename(path, target)
        shutil.copytree(path.parent, next(moments))
        return renamed

    ended = subprocess.Popen(["true"])
    ended.wait()
    with monkeypatch.context() as context:
        context.setattr(os, "getpid", lambda: ended.pid)
        context.setattr(Path, "rename", noted)
        prepare_sample(source, tmp_path / "made", 100_000)  # more than the corpus has pairs for
    assert next(moments, None) is None
    for folder in killed:
        prepare_sample(source, folder, 100_000)
        assert not prepare_sample(source, folder, 100_000)
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["corpus.jsonl", "prepare_sample.json", "tokenizer.json"]


def test_a_sample_of_another_corpus_goes_on_after_a_kill(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other = trained / "corpus.jsonl", tmp_path / "other.jsonl"
    killed = [tmp_path / "0", tmp_path / "1"]
    other.write_text('{"text": "other words of another corpus"}\n' * 9)
    prepare_sample(source, tmp_path / "made", 270)
    rename, moments = Path.rename, iter(killed)

    def noted(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if target.name != "tokenizer.json":
            shutil.copytree(path.parent, next(moments))
        return renamed

    with monkeypatch.context() as context:
        context.setattr(Path, "rename", noted)
        prepare_sample(other, tmp_path / "made", 270)
    assert next(moments, None) is None
    for folder in killed:
        prepare_sample(other, folder, 270)
        assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "made/tokenizer.json").read_bytes()


def test_a_corpus_that_was_there_before_is_not_replaced(trained: Path, tmp_path: Path) -> None:
    own = tmp_path / "corpus.jsonl"
    own.write_text('{"text": "words of my own"}\n')
    assert "tokenizer.json" in prepare_sample(own, tmp_path, 258)[0]
    for size in (258, 260):
        prepare_sample(own, tmp_path, size)
        with pytest.raises(DataError, match=r"corpus\.jsonl: was not made by this tool"):
            prepare_sample(trained / "corpus.jsonl", tmp_path, 258)
    assert own.read_text() == '{"text": "words of my own"}\n'


def test_a_corpus_that_is_only_read_need_not_be_replaceable(trained: Path, tmp_path: Path) -> None:
    source = tmp_path / f"{'x' * 245}.jsonl"  # beside which no temporary file can be
    shutil.copy(trained / "corpus.jsonl", source)
    assert len(prepare_sample(source, tmp_path / "made", 270)) == 2


def test_a_sample_that_another_process_makes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, look = tmp_path / "in.jsonl", sample_corpus._read_made
    source.write_text('{"text": "abc"}\n')
    assert "only 259 ids" in prepare_sample(source, tmp_path / "made", 300)[1]
    not_yet: list[dict[str, object]] = [{}]
    monkeypatch.setattr(sample_corpus, "_read_made", lambda path: not_yet.pop() if not_yet else look(path))
    assert prepare_sample(source, tmp_path / "made", 300) == []


def test_a_sample_takes_nothing_elses_place(trained: Path, tmp_path: Path) -> None:
    source, folder = trained / "corpus.jsonl", tmp_path / "data"
    folder.mkdir()
    for name in ("corpus.jsonl", "tokenizer.json"):
        (folder / name).write_text('{"text": "my precious"}\n')
        with pytest.raises(DataError, match=f"{name}: was not made by this tool"):
            prepare_sample(source, folder, 270)
        assert [path.name for path in folder.iterdir()] == [name]
        (folder / name).unlink()
    assert prepare_sample(source, folder, 270) == ["corpus.jsonl", "tokenizer.json"]
    (tmp_path / "other.jsonl").write_text('{"text": "abc"}\n')
    made = prepare_sample(tmp_path / "other.jsonl", folder, 270)  # its own files it replaces
    assert made == ["corpus.jsonl", "tokenizer.json with only 259 ids (the corpus has no pairs for 270)"]
    assert prepare_sample(tmp_path / "other.jsonl", folder, 270) == []
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="or has changed since"):
        prepare_sample(tmp_path / "other.jsonl", folder, 270)


def test_a_sample_of_compressed_and_of_bad_text(tmp_path: Path) -> None:
    text = b'{"text": "abc"}\n{"body": 1}\n'
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(text[:16]))
    prepare_sample(tmp_path / "c.jsonl.gz", tmp_path / "a", 300)
    assert (tmp_path / "a" / "corpus.jsonl").read_bytes() == text[:16]
    (tmp_path / "bad.jsonl").write_bytes(text)
    with pytest.raises(DataError, match=r"bad\.jsonl:2: no key 'text'; the keys are 'body'"):
        prepare_sample(tmp_path / "bad.jsonl", tmp_path / "b", 300)
    assert not list((tmp_path / "b").iterdir())


def test_sample_holds_no_text_of_utf8_read_as_latin1() -> None:
    lead_then_continuation = re.compile(r"[\u0080-\u009f]|[\u00c2-\u00f4]([\u00a0-\u00bf]|$)")
    texts = [json.loads(line)["text"] for line in SAMPLE.read_bytes().splitlines()]
    assert any("naïve" in text for text in texts)
    assert [text for text in texts if lead_then_continuation.search(text)] == []


@pytest.mark.parametrize(
    ("ids", "told"),
    [((0, 1), None), ((1, 0), ("<tool>", 1, 0)), ((0, 10), ("<call>", 10, 1))],
)
def test_an_added_token_that_the_library_gives_another_id_is_told(
    trained: Path, tmp_path: Path, ids: tuple[int, int], told: tuple[str, int, int] | None
) -> None:
    first = train_tokenizer(trained / "corpus.jsonl", tmp_path / "tokenizer.json", 300)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] += [
        {**content["added_tokens"][0], "content": name, "id": first + given}
        for name, given in zip(("<tool>", "<call>"), ids, strict=True)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    warning = make(tokenizer_model=str(tmp_path)).warning
    if told is None:
        assert warning is None
        return
    token, given, found = told
    assert warning is not None
    assert f"'{token}' has the id {first + given} there, but {first + found} in the library" in warning


def test_an_end_of_document_token_that_is_no_text(tmp_path: Path) -> None:
    for wrong in (5, ["</s>"], {"content": 5}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": wrong}))
        with pytest.raises(DataError, match=r"tokenizer_config\.json: eos_token: expected a string, found"):
            ModelConfig(tmp_path).eos_token()


@pytest.mark.parametrize(
    ("config", "special", "eos"),
    [
        ({}, {"eos_token": "cat"}, "cat"),
        ({"eos_token": "mat"}, {"eos_token": {"content": "cat"}}, "cat"),
        ({"eos_token": "mat"}, {"eos_token": None, "pad_token": "cat"}, "mat"),
        ({"eos_token": "mat", "added_tokens_decoder": {}}, {"eos_token": "cat"}, "mat"),
    ],
)
def test_older_folders_name_the_end_in_another_file(
    tmp_path: Path, config: dict[str, Any], special: dict[str, Any], eos: str
) -> None:
    """In the order of transformers 4.57 and 5.24."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    assert ModelConfig(tmp_path).eos_token() == eos


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        ({"add_bos_token": True, "bos_token": {"content": EOD_TOKEN}}, "add_bos_token"),
        ({"add_eos_token": True, "eos_token": EOD_TOKEN}, "add_eos_token"),
        ({"add_bos_token": False, "bos_token": EOD_TOKEN, "add_eos_token": None}, None),
        ({"add_bos_token": True, "bos_token": None, "unk_token": ""}, None),
        ({"add_prefix_space": True}, "add_prefix_space"),
        ({"pad_token": "<pad>"}, "the tokens <pad>"),
        ({"extra_special_tokens": ["<x>"]}, "the tokens <x>"),
        ({"extra_special_tokens": {"image_token": "<y>"}}, "the tokens <y>"),
        (
            {
                "additional_special_tokens": ["<x>", EOD_TOKEN],
                "added_tokens_decoder": {"9": {"content": "<y>"}},
            },
            "the tokens <x>, <y>",
        ),
    ],
)
def test_what_of_a_models_configuration_is_not_followed(
    trained: Path, tmp_path: Path, config: dict[str, Any], warned: str | None
) -> None:
    shutil.copy(trained / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    warning = make(tokenizer_model=str(tmp_path)).warning
    if warned is None:
        assert warning is None
    else:
        assert f"special_tokens_map.json asks for {warned}: tokenizer.json does not do so" in str(warning)


def test_gpt2s_files_name_their_type() -> None:
    with pytest.raises(DataError, match="--merge-file are of --tokenizer-type GPT2BPETokenizer"):
        make(vocab_file="vocab.json", merge_file="merges.txt")


def test_a_vocabulary_of_numbers_has_a_configuration_too(tmp_path: Path) -> None:
    Library(models.WordLevel({"1": 0, "2": 1}, "?")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": True}))
    assert make(tokenizer_model=str(tmp_path)).warning is None


def test_a_template_does_what_the_configuration_asks_for(trained: Path, tmp_path: Path) -> None:
    changed(trained, tmp_path, setting("post_processor", templates(0)))
    token = next(
        text
        for text, number in json.loads((trained / "tokenizer.json").read_text())["model"]["vocab"].items()
        if number == 0
    )
    config = {"add_bos_token": True, "bos_token": token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert make(tokenizer_model=str(tmp_path)).warning is None
