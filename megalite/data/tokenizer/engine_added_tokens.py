"""Which added tokens the engines find as the library does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


def other_added_tokens(library: Library) -> str | None:
    """What of the added tokens engines find in another way; None if nothing is known.

    The library looks for those that are not `normalized` first, and for no special ones where their text is
    text; engines look for all at once.
    """
    found: dict[tuple[bool, bool], set[str]] = {}  # by kind
    for token in library.get_added_tokens_decoder().values():
        dormant = token.special and library.encode_special_tokens
        if not dormant and (token.single_word or token.lstrip or token.rstrip):
            return f"the added token {token.content!r} is a whole word or takes the spaces beside it"
        found.setdefault((token.normalized, dormant), set()).add(token.content)
    for (_, dormant), tokens in found.items():
        others = [each for kind, each in found.items() if each is not tokens and not (dormant and kind[1])]
        if pair := _overlap(tokens, set().union(*others)):
            return "the added tokens {!r} and {!r} overlap, but are of two kinds".format(*pair)
    return None


def _overlap(tokens: Iterable[str], others: Iterable[str]) -> tuple[str, str] | None:
    """The first of `tokens` of which the end is the beginning of one of `others`, or which has one inside."""
    whole = {token: token for token in others}
    begins = {token[:size]: token for token in others for size in range(1, len(token))} | whole
    for token in tokens:
        ends = (token[start:] for start in range(len(token)))
        inside = (token[i:j] for i in range(len(token)) for j in range(i + 1, len(token) + 1))
        other = next((begins[end] for end in ends if end in begins), None)
        if other or (other := next((part for part in inside if part in whole), None)):
            return token, other
    return None
