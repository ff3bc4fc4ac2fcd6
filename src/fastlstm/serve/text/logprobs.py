"""OpenAI's `logprobs` object of a completion, as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.serve.text.generation import Scored

_LOWEST = -9999.0
"""Stands for a probability of zero, as with OpenAI: JSON has no infinity."""
_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_SLICE = 256
"""Tokens that are written at a time: nobody else has the interpreter meanwhile."""


class Logprobs:
    """Tokens, their log probabilities, the likeliest beside them, and where they stand.

    What was added is kept as JSON, which takes a tenth of the room that the objects took.

    Args:
        pieces: the bytes of every token of the vocabulary.
        num_top: likeliest tokens per place; with 0 there is no list of them.
    """

    def __init__(self, pieces: Sequence[bytes], num_top: int) -> None:
        self._pieces, self._num_top = pieces, num_top
        self._lists = {name: bytearray() for name in _FIELDS}

    def add(self, scores: Sequence[Scored], base: int) -> None:
        """Adds tokens.

        Args:
            scores: of the tokens.
            base: characters before the text that the scores' offsets count from.
        """
        for first in range(0, len(scores), _SLICE):
            part = scores[first : first + _SLICE]
            own = [None if one.logprob is None else max(one.logprob, _LOWEST) for one in part]
            self._grow("tokens", [token_name(self._pieces[one.token]) for one in part])
            self._grow("token_logprobs", own)
            if self._num_top > 0:
                self._grow("top_logprobs", [self._top(one) for one in part])
            self._grow("text_offset", [base + one.offset for one in part])

    def _top(self, scored: Scored) -> dict[str, float] | None:
        if scored.logprob is None:
            return None
        names = ((token_name(self._pieces[token]), lp) for token, lp in scored.top)
        top = {name: max(logprob, _LOWEST) for name, logprob in names}
        # The token itself is always among them, as OpenAI has it.
        top.setdefault(token_name(self._pieces[scored.token]), max(scored.logprob, _LOWEST))
        return top

    def _grow(self, name: str, values: list[Any]) -> None:
        text = json.dumps(values, separators=(",", ":"), allow_nan=False)
        found = self._lists[name]
        found += b"," if found else b""
        found += text[1:-1].encode("ascii")

    def parts(self, before: Logprobs | None) -> list[bytes | bytearray]:
        """Returns the JSON object in parts, with what stands `before` at its beginning."""
        found: list[bytes | bytearray] = []
        for name in _FIELDS:
            found.append(b'%s"%s":' % (b"," if found else b"{", name.encode()))
            if name == "top_logprobs" and self._num_top == 0:
                found.append(b"null")
                continue
            lists = [one._lists[name] for one in (before, self) if one is not None]
            filled = [one for one in lists if one]
            found += [b"[", *filled[:1], *(x for one in filled[1:] for x in (b",", one)), b"]"]
        return [*found, b"}"]


def token_name(piece: bytes) -> str:
    r"""Returns a token's text; bytes that are no text on their own as ``bytes:\xe2``."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
