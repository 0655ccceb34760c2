"""SentencePiece models, as Llama 2 and Mistral have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megalite.data.errors import DataError, lacks_package
from megalite.data.tokenizer.base import Tokenizer, identity_of, library_errors


class SentencePieceTokenizer(Tokenizer):
    """A `.model` file; pieces that are control symbols, such as `</s>`, are never made from text."""

    packages = ("sentencepiece",)
    memory_per_byte = 64  # of one letter repeated 56, with the BPE of sentencepiece 0.2.3

    def __init__(self, model: str, eod_token: str | None, allow_special_tokens: bool) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise lacks_package("SentencePieceTokenizer", "sentencepiece", error) from None
        if not Path(model).is_file():
            raise DataError(f"--tokenizer-model {model}: expected a SentencePiece .model file")
        content = Path(model).read_bytes()
        with library_errors(f"{model}: cannot be read as a SentencePiece model"):
            self._library = SentencePieceProcessor(model_proto=content)
        self.identity = identity_of("sentencepiece", [content])
        self.vocab_size = self._library.get_piece_size()
        self.eod_token = eod_token
        self.spells_special_tokens = allow_special_tokens

    @property
    def eod(self) -> int:
        if self.eod_token is None:
            found = int(self._library.eos_id())
            if found < 0:
                raise DataError(
                    "the SentencePiece model has no end-of-sequence piece; name one: --eod-token PIECE"
                )
            return found
        found = int(self._library.piece_to_id(self.eod_token))
        if self._library.id_to_piece(found) != self.eod_token:
            raise DataError(f"--eod-token {self.eod_token}: not among the {self.vocab_size} pieces")
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # Text by text in this thread (without the interpreter's lock since 0.2.2): a list starts threads of
        # its own, and what those cannot have, another thread or more memory, ends the process.
        return [self._library.encode(text, out_type=int) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids))

    def _text_has_eod(self) -> bool:
        return not (self._library.is_control(self.eod) or self._library.is_unused(self.eod))
