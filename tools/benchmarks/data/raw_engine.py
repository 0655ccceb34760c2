"""A tokenizer's engine alone on the text of JSON lines: CPU and wall seconds, from cold.

raw_engine.py ENGINE TOKENIZER_JSON CORPUS
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

BATCH = 1000  # documents


def encoder(engine: str, tokenizer_json: str) -> Callable[[Sequence[str]], Any]:
    """The fastest call of `engine` for a batch; text that spells a special token is text."""
    library: Any = importlib.import_module(engine)
    if engine == "gigatoken":
        return library.Tokenizer.from_json(Path(tokenizer_json).read_bytes()).encode_batch
    tokenizer = library.Tokenizer.from_file(tokenizer_json)
    if engine == "fastokens":
        return lambda batch: tokenizer.encode_batch_flat(batch, False, True)
    tokenizer.encode_special_tokens = True
    return tokenizer.encode_batch_fast


def main(engine: str, tokenizer_json: str, corpus: str) -> None:
    with open(corpus, "rb") as file:
        texts = [orjson.loads(line)["text"] for line in file]
    encode = encoder(engine, tokenizer_json)
    wall, start = time.perf_counter(), time.process_time()
    for i in range(0, len(texts), BATCH):
        encode(texts[i : i + BATCH])
    print(json.dumps([time.process_time() - start, time.perf_counter() - wall]))


if __name__ == "__main__":
    main(*sys.argv[1:])
