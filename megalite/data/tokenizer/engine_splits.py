"""Which patterns, by which text is normalized or split, mean the same to fastokens as to the library."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

# Libraries for regular expressions mean other characters by \w, \b, [[:alpha:]] or \p{Han}. By these they
# mean the same: compared character by character, of fastokens 0.3.5 and tokenizers 0.23.
EQUAL_CLASSES = {
    *("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No"),
    *("P", "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "S", "Sm", "Sc", "So", "Sk"),
    *("Z", "Zs", "Zl", "Zp", "Cc", "Cf"),
}
EQUAL_ESCAPES = "dDsSrntfx"  # and what is no letter or digit
_ESCAPE = re.compile(r"\\(?:[pP]\{(\w+)\}|x\{\w+\}|.)|\[:\^?\w+:\]", re.DOTALL)
_CHARACTERS = re.compile(r"\[\^?(?:[^\[\]&]|&(?!&))+\]")
# In Ruby's syntax, which the library has, {1,3}+ repeats, elsewhere it is possessive; ^ and $ are of lines or
# of the text; where case is ignored some take a long s for an s. The usual contractions are known.
_UNLIKE = re.compile(r"\{[\d,]*\}[+?]|\{,|[\^$\[\]]|\(\?(?![:=!>]|<[=!]).?")
_CONTRACTIONS = re.compile(r"\(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)|'\(\?i:\[sdmt\]\|ll\|ve\|re\)")


def unlike_split(patterns: Sequence[str]) -> str | None:
    """What in `patterns` may mean something else in an engine; None if nothing does."""
    for pattern in patterns:
        for escape in _ESCAPE.finditer(pattern):
            found, name = escape.group(), escape.group(1)
            same = name in EQUAL_CLASSES if name else found[1] in EQUAL_ESCAPES or not found[1].isalnum()
            if found[0] == "[" or not same:
                return f"the pattern of the tokenizer has {found}"
        rest = _CHARACTERS.sub("", _ESCAPE.sub("_", _CONTRACTIONS.sub("", pattern)))
        if (unlike := _UNLIKE.search(rest)) is not None:
            return f"the pattern of the tokenizer has {unlike.group()}"
    return None


def patterns_of(library: Library) -> list[str]:
    """The regular expressions of its normalizer and pre-tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    parts = Tokenizer(BPE())  # without the vocabulary, which takes long to write and to read
    if library.normalizer is not None:
        parts.normalizer = library.normalizer
    if library.pre_tokenizer is not None:
        parts.pre_tokenizer = library.pre_tokenizer
    content = orjson.loads(parts.to_str())
    return list(_regexes([content["normalizer"], content["pre_tokenizer"]]))


def _regexes(content: Any) -> Iterator[str]:
    if isinstance(content, list):
        for each in content:
            yield from _regexes(each)
    elif isinstance(content, dict):
        for key, value in content.items():
            if key == "Regex":
                yield value
            else:
                yield from _regexes(value)
