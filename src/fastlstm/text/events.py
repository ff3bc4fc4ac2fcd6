"""A text's evaluation as an event; docs/architecture.md lists every event and its keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastlstm.errors import CorruptFileError
from fastlstm.text.data.tokenizer import Ids, Tokenizer
from fastlstm.text.evaluation import Evaluation

_SAMPLE_TOKENS = 65_536


def tokens_per_char(ids: Ids, tokenizer: Tokenizer) -> float:
    """Returns tokens per character of a text, from its first 65,536 tokens."""
    counts = np.bincount(np.asarray(ids[:_SAMPLE_TOKENS]), minlength=tokenizer.vocab_size)
    if len(counts) > tokenizer.vocab_size:
        raise CorruptFileError(
            f"the encoded text holds token {len(counts) - 1}, its vocabulary has"
            f" {tokenizer.vocab_size}; delete the cache directory"
        )
    return float(counts.sum()) / max(float(counts @ tokenizer.token_chars), 1.0)


def eval_event(result: Evaluation, step: int, is_best: bool, elapsed_s: float) -> dict[str, Any]:
    """Returns the event of an evaluation of the validation split."""
    return {
        "event": "eval",
        "step": step,
        "split": "valid",
        "loss": result.nats_per_token,
        "bits_per_char": result.bits_per_char,
        "bits_per_byte": result.bits_per_byte,
        "perplexity": result.perplexity,
        "num_tokens": result.num_tokens,
        "seconds": result.seconds,
        "is_best": is_best,
        "elapsed_s": elapsed_s,
    }
