"""The figures that events carry; docs/architecture.md lists every event and its keys."""

from __future__ import annotations

import resource
import sys
from typing import Any

import numpy as np
import torch

from fastlstm.data.tokenizer import Ids, Tokenizer
from fastlstm.nn.evaluation import Evaluation

_SAMPLE_TOKENS = 65_536


def tokens_per_char(ids: Ids, tokenizer: Tokenizer) -> float:
    """Returns tokens per character of a text, from its first 65,536 tokens."""
    counts = np.bincount(np.asarray(ids[:_SAMPLE_TOKENS]), minlength=tokenizer.vocab_size)
    return float(counts.sum()) / max(float(counts @ tokenizer.token_chars), 1.0)


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most memory used so far: the GPU's allocations, or the process' resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
