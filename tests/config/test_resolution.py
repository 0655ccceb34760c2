"""What is derived: sizes, batches, schedules, vocabulary, parameter counts."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram

from megalite.config import (
    ModelConfig,
    ScheduleSamples,
    padded_vocab_size,
    parameter_count,
    parse_blend,
    parse_split,
    schedule_samples,
    split_sample_counts,
    train_iterations,
)
from megalite.config.vocabulary import TIKTOKEN_JSON, TIKTOKEN_RANKS
from megalite.data.tokenizer import build_tokenizer
from megalite.data.tokenizer.byte_level import ByteLevelTokenizer
from megalite.data.tokenizer.tiktoken import JSON_VOCABULARY, RANK_FILES

from .minimal import errors_of, minimal, parsed


def test_sizes_of_the_model() -> None:
    model = parsed().model
    assert (model.ffn_hidden_size, model.kv_channels, model.num_query_groups) == (192, 4, 12)
    llama = parsed("--swiglu --hidden-size 768 --group-query-attention").model
    assert (llama.ffn_hidden_size, llama.kv_channels, llama.num_query_groups) == (2048, 64, 1)
    assert parsed("--kv-channels 8 --ffn-hidden-size 100").model.kv_channels == 8


def test_swiglu_width_is_megatrons() -> None:
    # int(4 x 4096 x 2/3 / 64) x 64, which is not Llama's 11008
    assert parsed("--swiglu --hidden-size 4096 --num-attention-heads 32").model.ffn_hidden_size == 10880


def test_global_batch_defaults_to_one_micro_batch_a_replica() -> None:
    config = parsed("--tensor-model-parallel-size 2", world_size=8)
    assert config.data_parallel_size(8) == 4
    assert config.batch.global_batch_size == 8
    assert config.num_microbatches(8) == 1
    assert parsed("--global-batch-size 24", world_size=4).num_microbatches(4) == 3


@pytest.mark.parametrize(
    ("flags", "without", "lengths"),
    [
        ("", "", ScheduleSamples(0, 40, 0)),
        ("--lr-decay-iters 8 --lr-warmup-iters 2", "", ScheduleSamples(8, 32, 0)),
        ("--lr-warmup-fraction 0.25", "", ScheduleSamples(10, 40, 0)),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 3", "", ScheduleSamples(0, 40, 12)),
        ("--train-samples 50 --lr-warmup-samples 7", "--train-iters", ScheduleSamples(7, 50, 0)),
        (
            "--train-samples 50 --lr-decay-samples 30 --lr-warmup-fraction 0.5",
            "--train-iters",
            ScheduleSamples(15, 30, 0),
        ),
    ],
)
def test_schedule_in_samples(flags: str, without: str, lengths: ScheduleSamples) -> None:
    config = parsed(f"--global-batch-size 4 {flags}", without=without)
    assert schedule_samples(config.optimizer, config.batch) == lengths


def test_samples_of_the_splits() -> None:
    config = parsed("--global-batch-size 4 --eval-iters 5 --eval-interval 3")
    assert split_sample_counts(config) == (40, (10 // 3 + 1) * 5 * 4, 20)
    assert split_sample_counts(parsed("--global-batch-size 4 --eval-iters 5")) == (40, 20, 20)
    by_samples = parsed(
        "--global-batch-size 4 --train-samples 42 --eval-interval 3 --eval-iters 1", without="--train-iters"
    )
    assert train_iterations(by_samples) == 10
    assert split_sample_counts(by_samples) == (42, 16, 4)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("", "float32"), ("--bf16", "bfloat16"), ("--fp16", "float16"), ("--params-dtype float64", "float64")],
)
def test_dtype(flags: str, dtype: str) -> None:
    assert parsed(flags).precision.params_dtype == dtype


@pytest.mark.parametrize(
    ("vocab", "divisible_by", "tp", "rows"),
    [
        (50257, 128, 1, 50304),
        (50257, 128, 8, 51200),
        (257, 1, 2, 258),
        (151936, 128, 2, 152064),
        (128, 128, 1, 128),
    ],
)
def test_padded_vocabulary(vocab: int, divisible_by: int, tp: int, rows: int) -> None:
    assert padded_vocab_size(vocab, divisible_by, tp) == rows
    assert padded_vocab_size(rows, divisible_by, tp) == rows  # padding twice changes nothing


GPT2 = ModelConfig(
    num_layers=12,
    hidden_size=768,
    num_attention_heads=12,
    seq_length=1024,
    max_position_embeddings=1024,
    vocab_size=50257,
)
LLAMA2_7B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_attention_heads=32,
    seq_length=4096,
    max_position_embeddings=4096,
    vocab_size=32000,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
LLAMA32_1B = ModelConfig(
    num_layers=16,
    hidden_size=2048,
    ffn_hidden_size=8192,
    num_attention_heads=32,
    group_query_attention=True,
    num_query_groups=8,
    seq_length=4096,
    max_position_embeddings=4096,
    vocab_size=128256,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
)
QWEN2_0_5B = ModelConfig(
    num_layers=24,
    hidden_size=896,
    ffn_hidden_size=4864,
    num_attention_heads=14,
    group_query_attention=True,
    num_query_groups=2,
    seq_length=4096,
    max_position_embeddings=4096,
    vocab_size=151936,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    add_qkv_bias=True,
)


@pytest.mark.parametrize(
    ("model", "published"),
    [(GPT2, 124_439_808), (LLAMA2_7B, 6_738_415_616), (LLAMA32_1B, 1_235_814_400), (QWEN2_0_5B, 494_032_768)],
    ids=["gpt2", "llama-2-7b", "llama-3.2-1b", "qwen2-0.5b"],
)
def test_parameter_counts_are_the_published_ones(model: ModelConfig, published: int) -> None:
    assert parameter_count(model) == published


def test_blends() -> None:
    assert parse_blend(["a", "b"]).weights is None
    assert parse_blend(["1", "a", "2"]).prefixes == (
        "1",
        "a",
        "2",
    )  # an odd number: prefixes, whatever they look like
    blend = parse_blend(["0.3", "a", "7", "b"])
    assert (blend.prefixes, blend.weights) == (("a", "b"), (0.3, 7.0))


def test_splits() -> None:
    assert parse_split("969, 30, 1") == (0.969, 0.03, 0.001)
    assert parse_split("1") == (1, 0, 0)
    assert parse_split("8,2") == (0.8, 0.2, 0)


def test_null_tokenizer_has_the_vocabulary_that_is_given() -> None:
    assert parsed().model.vocab_size == 100


def test_vocabulary_of_gpt2_files(tmp_path: Path) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps({"a": 0, "b": 1, "<|endoftext|>": 2}))
    merges.touch()
    files = f"--tokenizer-type GPT2BPETokenizer --vocab-file {vocab} --merge-file {merges}"
    assert parsed(files, without="--vocab-size --tokenizer-type").model.vocab_size == 3
    vocab.write_text("not json")
    found = errors_of(minimal(files, without="--vocab-size --tokenizer-type"))
    assert [f"--vocab-file {vocab}: is not a tokenizer's vocabulary" in error for error in found] == [True]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_vocabulary_of_a_tokenizer_json(tmp_path: Path, kind: str) -> None:
    model = BPE({"a": 0, "b": 1}, []) if kind == "bpe" else Unigram([("a", -1.0), ("b", -2.0)], 0, False)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<eod>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        files = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {given}"
        size = parsed(files, without="--vocab-size --tokenizer-type").model.vocab_size
        assert size == tokenizer.get_vocab_size() == 3
        assert (
            parsed(f"{files} --vocab-size 8", without="--vocab-size --tokenizer-type").model.vocab_size == 8
        )
    found = errors_of(minimal(f"{files} --vocab-size 2", without="--vocab-size --tokenizer-type"))
    assert found == ["--vocab-size 2: smaller than the tokenizer's 3 tokens; leave it out, or give 3 or more"]


def vocabulary(flags: str) -> int:
    return parsed(flags, without="--vocab-size --tokenizer-type").model.vocab_size


def test_bytes_are_257_ids() -> None:
    assert vocabulary("--tokenizer-type ByteLevelTokenizer") == ByteLevelTokenizer.vocab_size == 257


@pytest.mark.parametrize("name", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_vocabulary_of_a_sentencepiece_model(tmp_path: Path, name: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    with (tmp_path / "m.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat sat on the mat"] * 9),
            model_writer=model,
            vocab_size=15,
            minloglevel=2,
        )
    flags = f"--tokenizer-type {name} --tokenizer-model {tmp_path / 'm.model'}"
    assert vocabulary(flags) == 15
    assert build_tokenizer(parsed(flags, without="--vocab-size --tokenizer-type").data).vocab_size == 15
    (tmp_path / "m.model").write_text("damaged")
    found = errors_of(minimal(flags, without="--vocab-size --tokenizer-type"))
    assert ["is not a tokenizer's vocabulary" in error for error in found] == [True]


def rank_file(path: Path, ranks: int) -> None:
    tokens = (str(i).encode() for i in range(ranks))
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)))


def test_the_known_rank_files_are_those_of_the_data_tools() -> None:
    assert TIKTOKEN_JSON == JSON_VOCABULARY
    expected = {ranks: max(ranks, *special.values()) + 1 for ranks, (_, special) in RANK_FILES.items()}
    assert expected == TIKTOKEN_RANKS


def test_vocabulary_of_a_rank_file(tmp_path: Path) -> None:
    flags = f"--tokenizer-type TikTokenizer --tokenizer-model {tmp_path / 'r.tiktoken'}"
    rank_file(tmp_path / "r.tiktoken", 50256)
    assert vocabulary(flags) == 50257
    rank_file(tmp_path / "r.tiktoken", 300)
    found = errors_of(minimal(flags, without="--vocab-size --tokenizer-type"))
    assert len(found) == 1
    assert "300 ranks, but the known vocabularies have 50,256, " in found[0]


def test_vocabulary_of_a_tiktoken_json_is_the_part_that_is_wanted(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    entries = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]
    (tmp_path / "v.json").write_text(json.dumps(entries))
    flags = f"--tokenizer-type TikTokenizer --tokenizer-model {tmp_path / 'v.json'}"
    assert vocabulary(flags) == 131072
    config = parsed(
        f"{flags} --vocab-size 266 --tiktoken-num-special-tokens 10 --tiktoken-pattern v1",
        without="--vocab-size --tokenizer-type",
    )
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    assert config.model.vocab_size == tokenizer.vocab_size == 266
    assert tokenizer.encode_batch(["\0"]) == [[10]]


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (
            "--tokenizer-type HuggingFaceTokenizer",
            ["--tokenizer-model: is required with HuggingFaceTokenizer"],
        ),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere",
            ["--tokenizer-model nowhere: no such file or folder"],
        ),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tests",
            ["--tokenizer-model tests: the folder has no tokenizer.json"],
        ),
        ("--tokenizer-type TikTokenizer", ["--tokenizer-model: is required with TikTokenizer; give a rank"]),
        (
            "--tokenizer-type Llama2Tokenizer --tokenizer-model nowhere",
            ["--tokenizer-model nowhere: no such file; give a .model file"],
        ),
        ("", ["--merge-file: is required", "--vocab-file: is required"]),
        (
            "--vocab-file nowhere.json --merge-file nowhere.txt",
            ["--merge-file nowhere.txt: no such file", "--vocab-file nowhere.json: no such file"],
        ),
    ],
)
def test_missing_tokenizer_files_are_named(flags: str, messages: list[str]) -> None:
    found = errors_of(minimal(flags, without="--vocab-size --tokenizer-type"))
    assert len(found) == len(messages)
    assert all(message in error for message, error in zip(messages, found, strict=True)), found
