"""Measures a format of the weights: bytes, speed, bits per character."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastlstm.errors import DataError, NonFiniteError, counted
from fastlstm.text.decoder import NOT_FINITE, Decoder
from fastlstm.text.evaluation import lanes_of, num_lanes
from fastlstm.text.sampling import Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastlstm.text.data.tokenizer import Tokenizer

_STEPS = 512
_SPEED_S = 0.2


@dataclass(frozen=True)
class WeightReport:
    """One format of a model's weights.

    One step of one stream reads `bytes_per_token`; the stream writes `tokens_per_s`.
    `bits_per_char` was measured on `num_tokens` tokens.
    """

    weight_format: str
    bytes_per_token: int
    tokens_per_s: float
    bits_per_char: float
    num_tokens: int

    def compared(self, other: WeightReport) -> str:
        """Describes the change from `other` to this format in one line."""
        change = 100 * (self.bits_per_char / other.bits_per_char - 1)
        return (
            f"{self.weight_format}: {self.bytes_per_token / 1e6:.2f} MB of weights a token instead"
            f" of {other.bytes_per_token / 1e6:.2f} ({other.weight_format}),"
            f" {self.tokens_per_s / other.tokens_per_s:.1f}x the speed, {change:+z.2f} % bits/char"
            f" ({other.bits_per_char:.4f} to {self.bits_per_char:.4f} on"
            f" {counted(self.num_tokens, 'token')})"
        )


def report_weights(decoder: Decoder, tokenizer: Tokenizer, ids: NDArray[Any]) -> WeightReport:
    """Measures a decoder on 1-d tokens, at least 2."""
    scores = score_tokens(decoder, ids)
    chars = float(tokenizer.token_chars[scores.targets].sum())
    bits = math.fsum(scores.nats) / math.log(2) / max(chars, 1.0)
    speed = writing_speed(decoder)
    return WeightReport(
        decoder.weight_format, decoder.bytes_per_token, speed, bits, len(scores.nats)
    )


class TokenScores(NamedTuple):
    """Scores of n tokens by the decoding kernels: `nats` are the negative log probabilities."""

    targets: NDArray[np.int64]
    nats: NDArray[np.float64]
    likeliest: NDArray[np.int64]


def score_tokens(decoder: Decoder, ids: NDArray[Any]) -> TokenScores:
    """Scores every token of the 1-d `ids` except the first, in the primed lanes of `evaluate`."""
    if len(ids) < 2:
        raise DataError(f"the text has {counted(len(ids), 'token')}, scoring needs at least 2")
    lanes = lanes_of(len(ids), num_lanes(len(ids)))
    starts = [0, *(lanes.start[1:] - 1 - lanes.prime)]
    parts = [ids[s:e] for s, e in zip(starts, lanes.start + lanes.length, strict=True)]
    streams = []
    for part in parts:
        stream = decoder.stream()
        stream.set(Sampling(0.0), num_top=1, scores_given=True)
        stream.feed(part)
        stream.begin(1)
        streams.append(stream)
    while any(stream.is_running for stream in streams):
        decoder.run(streams, _STEPS)
    nats, likeliest = [], []
    for stream, length in zip(streams, lanes.length, strict=True):
        stream.take()
        own = [scores[-1 - length : -1] for scores in stream.take_scores()[:2]]
        nats.append(-np.array(own[0], np.float64))
        likeliest.append(np.array(own[1], np.int64))
    targets = np.asarray(ids[1:], np.int64)
    scores = TokenScores(targets, np.concatenate(nats), np.concatenate(likeliest))
    if not np.isfinite(scores.nats).all():
        raise NonFiniteError(NOT_FINITE)
    return scores


def writing_speed(
    decoder: Decoder, num_streams: int = 1, threads: int | None = None, seconds: float | None = None
) -> float:
    """Returns the tokens per second that so many streams write together, measured for 0.2 s."""
    seconds = _SPEED_S if seconds is None else seconds
    streams = []
    for seed in range(num_streams):
        stream = decoder.stream()
        stream.set(Sampling(seed=seed))
        stream.feed([0])
        stream.begin(1 << 62)
        streams.append(stream)
    decoder.run(streams, 4, threads)
    steps, count, start_s = 8, 0, time.perf_counter()
    while (taken_s := time.perf_counter() - start_s) < seconds or count == 0:
        decoder.run(streams, steps, threads)
        count += steps * num_streams
        steps = min(2 * steps, 1024) if taken_s < seconds / 8 else steps
    for stream in streams:
        stream.take()
    return count / (time.perf_counter() - start_s)
