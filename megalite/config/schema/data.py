"""Where the tokens come from."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema.fields import setting
from megalite.limits import INT32_LARGEST, MOST_SPECIAL_TOKENS

TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
)
OTHER_TOKENIZERS = {"MultimodalTokenizer": "megalite trains on text;"}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Datasets, their split, and the tokenizer. A dataset is named by the prefix of its .bin and .idx."""

    data_path: tuple[str, ...] = setting(
        (),
        "Dataset prefix, or several, or weight prefix weight prefix ...; weights are shares of the training "
        "samples.",
    )
    train_data_path: tuple[str, ...] = setting(
        (), "Like --data-path, for training only; replaces --data-path and --split."
    )
    valid_data_path: tuple[str, ...] = setting((), "Like --data-path, for validation only.")
    test_data_path: tuple[str, ...] = setting((), "Like --data-path, for the final test only.")
    data_args_path: str | None = setting(
        None, "A file that holds what would follow --data-path; for long blends."
    )
    split: str = setting(
        "969, 30, 1",
        "Shares of the documents for training, validation and test, e.g. 99,1,0. Shares of documents, not "
        "tokens: a corpus of few long documents may leave validation empty.",
    )
    data_cache_path: str | None = setting(
        None, "Folder for the index files. Default: beside the dataset, which must then be writable."
    )
    mock_data: bool = setting(
        False,
        "Random tokens instead of a dataset, for timing and tests: there is nothing to learn, the loss stays "
        "near the logarithm of the vocabulary size.",
    )
    num_workers: int = setting(
        0,
        "Processes of each rank that read its training data. Differs from Megatron (2): with 0 a thread of "
        "the rank reads ahead, and handing over between processes costs more than it hides; give some where "
        "one reader cannot keep up, as on a slow network file system. The samples are the same.",
        minimum=0,
        maximum=1024,
    )
    tokenizer_type: str = setting(
        "GPT2BPETokenizer",
        "GPT2BPETokenizer (--vocab-file, --merge-file); with --tokenizer-model HuggingFaceTokenizer (a "
        "tokenizer.json or the folder that holds it), SentencePieceTokenizer (a .model; also as "
        "GPTSentencePieceTokenizer and Llama2Tokenizer) or TikTokenizer (a rank file or JSON "
        "vocabulary); ByteLevelTokenizer (257 ids); NullTokenizer (tokens are numbers; --vocab-size). Gives "
        "vocabulary and end of document.",
        choices=TOKENIZER_TYPES,
        elsewhere=OTHER_TOKENIZERS,
    )
    tokenizer_model: str | None = setting(
        None,
        "tokenizer.json or the folder that holds it, a SentencePiece .model, or a tiktoken file. Read from "
        "disk, never downloaded.",
    )
    vocab_file: str | None = setting(None, "vocab.json of GPT2BPETokenizer.")
    merge_file: str | None = setting(None, "merges.txt of GPT2BPETokenizer.")
    tiktoken_pattern: str | None = setting(
        None,
        "How TikTokenizer with a JSON vocabulary splits text, as the data was prepared. Default: v2.",
        choices=("v1", "v2"),
    )
    tiktoken_num_special_tokens: int = setting(
        1000,
        "Ids that TikTokenizer with a JSON vocabulary keeps for special tokens, before all others.",
        minimum=7,
        maximum=MOST_SPECIAL_TOKENS,
    )
    null_tokenizer_eod_id: int | None = setting(
        None,
        "End-of-document id of NullTokenizer. Default, as in recent Megatron: vocabulary size - 1.",
        minimum=0,
        maximum=INT32_LARGEST,
    )
    eod_token: str | None = setting(
        None,
        "The end-of-document token of a tokenizer that does not say which it is, as given to "
        "tools/preprocess_data.py; of use with --eod-mask-loss and --reset-*.",
    )
    reset_position_ids: bool = setting(False, "Restart positions after each end of document.")
    reset_attention_mask: bool = setting(False, "Do not attend across an end of document.")
    eod_mask_loss: bool = setting(
        False, "Leave positions whose input is the end of document out of the loss."
    )
