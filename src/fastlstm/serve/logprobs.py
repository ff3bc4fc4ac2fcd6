"""OpenAI's `logprobs` object of a completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.serve.row import Scored

_LOWEST = -9999.0
"""Stands for a probability of zero, as with OpenAI: JSON has no infinity."""


def logprobs_object(
    scores: Sequence[Scored], pieces: Sequence[bytes], base: int, num_top: int
) -> dict[str, Any]:
    """Returns tokens, their log probabilities, the likeliest beside them, and where they stand.

    Args:
        scores: of the tokens.
        pieces: the bytes of every token of the vocabulary.
        base: characters before the text that the scores' offsets count from.
        num_top: likeliest tokens per place; with 0 there is no list of them.
    """
    tops: list[dict[str, float] | None] = []
    for scored in scores:
        if scored.logprob is None:
            tops.append(None)
            continue
        top = {token_name(pieces[token]): max(logprob, _LOWEST) for token, logprob in scored.top}
        # The token itself is always among them, as OpenAI has it.
        top.setdefault(token_name(pieces[scored.token]), max(scored.logprob, _LOWEST))
        tops.append(top)
    return {
        "tokens": [token_name(pieces[scored.token]) for scored in scores],
        "token_logprobs": [
            None if scored.logprob is None else max(scored.logprob, _LOWEST) for scored in scores
        ],
        "top_logprobs": tops if num_top > 0 else None,
        "text_offset": [base + scored.offset for scored in scores],
    }


def token_name(piece: bytes) -> str:
    r"""Returns a token's text; bytes that are no text on their own as ``bytes:\xe2``."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
