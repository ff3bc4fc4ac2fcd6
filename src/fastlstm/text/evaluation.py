"""How well a model predicts a text: nats, bits per character and byte, perplexity."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from fastlstm.errors import ConfigError, DataError, Setting, Stopped, counted
from fastlstm.system.fields import is_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastlstm.text.model import LanguageModel, State

AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
WINDOW_BATCH = 128
_UNICODE = 0x110000 - 0x800
"""Characters that Unicode can hold: its code points without the surrogates."""


class TokenSizes(Protocol):
    """What evaluation needs of a tokenizer."""

    @property
    def token_chars(self) -> NDArray[np.float64]:
        """Characters per token, `(V,)`."""

    @property
    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes per token, `(V,)`."""


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`, over the tokens that were scored.

    Attributes:
        nats_per_token: mean cross-entropy.
        bits_per_char: the same text's bits over its characters, comparable across vocabularies.
        bits_per_byte: over its UTF-8 bytes.
        perplexity: `exp(nats_per_token)`.
        num_tokens: tokens scored; the first of a text (or window) has no context and is not.
        num_chars: characters in them.
        num_bytes: UTF-8 bytes in them.
        seconds: wall clock.
        num_unknown: characters of the text that the vocabulary does not hold. They are left out of
            the context and of the figures above.
        unknown_share: of the characters of the text.
        first_unknown: up to ten of them, with the first place of each.
        bits_per_char_with_unknown: bits per character of the whole text, see `with_unknown`; the
            same as `bits_per_char` where no character is unknown.
    """

    nats_per_token: float
    bits_per_char: float
    bits_per_byte: float
    perplexity: float
    num_tokens: int
    num_chars: int
    num_bytes: int
    seconds: float
    num_unknown: int = 0
    unknown_share: float = 0.0
    first_unknown: tuple[tuple[str, int], ...] = ()
    bits_per_char_with_unknown: float | None = None


def with_unknown(
    result: Evaluation,
    num_unknown: int,
    num_chars: int,
    first: Sequence[tuple[str, int]],
    vocab_size: int,
) -> Evaluation:
    """Returns an evaluation that tells of the characters which were left out.

    A character model gives them no probability at all. `bits_per_char_with_unknown` is what the
    text costs when every character is first told to be known or not, by a code that knows the
    share u of unknown ones, and an unknown one is then any other character of Unicode, all
    equally likely: ``(1 - u) bits_per_char + H(u) + u log2(1,112,064 - V)``, with
    ``H(u) = -u log2(u) - (1 - u) log2(1 - u)``.

    Args:
        result: of the characters that are known.
        num_unknown: characters that were left out.
        num_chars: characters of the text, those included.
        first: some of them, with the first place of each.
        vocab_size: V.
    """
    bits, share = result.bits_per_char, num_unknown / num_chars
    if share > 0:
        entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
        bits = (1 - share) * bits + entropy + share * unknown_bits(vocab_size)
    return replace(
        result,
        num_unknown=num_unknown,
        unknown_share=share,
        first_unknown=tuple(first),
        bits_per_char_with_unknown=bits,
    )


def unknown_bits(vocab_size: int) -> float:
    """Returns the bits that say which character of Unicode one beside V known ones is."""
    return math.log2(_UNICODE - vocab_size)


def evaluate(
    model: LanguageModel,
    ids: NDArray[Any],
    tokenizer: TokenSizes,
    *,
    lanes: int = 32,
    prime: int = 256,
    chunk: int = 256,
    zero_state_window: int | None = None,
    max_tokens: int | None = None,
    should_stop: Callable[[], bool] | None = None,
    precision: str = "fp32",
    watch: Callable[[int, int], object] | None = None,
) -> Evaluation:
    """Scores every token of `ids` but the first, with the state carried through the text.

    Args:
        model: put into evaluation mode meanwhile; its mode is restored. No randomness is used.
        ids: 1-d token ids; a memory map is read piece by piece.
        tokenizer: characters and bytes per token.
        lanes: contiguous parts evaluated side by side; 1 is exact. Fewer are taken when the text
            has fewer than `prime` tokens per lane.
        prime: tokens before each lane but the first that warm its state, unscored.
        chunk: steps per forward pass.
        zero_state_window: instead, cut the text into windows of this many predictions, each from
            a zero state, without the remainder: how stateless peers are judged.
        max_tokens: score at most this many.
        should_stop: polled between forward passes.
        precision: fp32, or bf16, fp16 under autocast.
        watch: called after every forward pass with the tokens scored so far and in all.

    Returns:
        The figures over all scored tokens.

    Raises:
        DataError: too few tokens.
        ConfigError: a setting out of range.
        Stopped: `should_stop()` said so.

    Numerics:
        Sums in float64. With 16 lanes and 256 tokens of priming the result is within 1e-3 bits of
        one lane: an LSTM forgets its start within some hundred tokens.
    """
    _check(lanes, prime, chunk, zero_state_window, max_tokens, precision)
    started = time.perf_counter()
    if max_tokens is not None:
        ids = ids[: max_tokens + 1]
    if len(ids) < 2:
        raise DataError(f"the text has {counted(len(ids), 'token')}; evaluation needs at least 2")
    if zero_state_window is not None:
        pieces = _windows(len(ids), zero_state_window)
    else:
        pieces = _lanes(len(ids), lanes, prime)
    tally = _Tally(model.config.vocab_size)
    total = sum(int(piece.length.sum()) for piece in pieces)
    with _evaluating(model, precision):
        for piece in pieces:
            for _ in _score(model, ids, piece, chunk, tally, should_stop):
                if watch is not None:
                    watch(tally.num_tokens, total)
    return tally.result(tokenizer, time.perf_counter() - started)


@dataclass(frozen=True)
class _Piece:
    """Lanes to run side by side: lane `k` predicts `length[k]` tokens from index `start[k]`.

    `prime` tokens before each `start` warm the state, of every lane but the first.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    prime: int = 0


def _lanes(num_ids: int, lanes: int, prime: int) -> list[_Piece]:
    targets = num_ids - 1
    lanes = max(1, min(lanes, targets // max(prime, 1)))
    length = np.full(lanes, targets // lanes, dtype=np.int64)
    length[: targets % lanes] += 1
    start = 1 + np.concatenate([[0], np.cumsum(length)[:-1]])
    return [_Piece(start, length, prime if lanes > 1 else 0)]


def _windows(num_ids: int, window: int) -> list[_Piece]:
    num_windows = num_ids // (window + 1)
    if num_windows == 0:
        raise DataError(
            f"the text has {counted(num_ids, 'token')}, fewer than one window of {window + 1}; give"
            " a longer text or a smaller ",
            Setting("zero_state_window"),
        )
    starts = 1 + np.arange(num_windows, dtype=np.int64) * (window + 1)
    parts = [starts[k : k + WINDOW_BATCH] for k in range(0, num_windows, WINDOW_BATCH)]
    return [_Piece(part, np.full(len(part), window, dtype=np.int64)) for part in parts]


class _Tally:
    """Sums nats and counts which tokens were scored."""

    def __init__(self, vocab_size: int) -> None:
        self._nats = 0.0
        self._counts = np.zeros(vocab_size, dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self._counts.sum())

    def add(self, nats: torch.Tensor, tokens: NDArray[np.int64], scored: NDArray[np.bool_]) -> None:
        self._nats += float(nats.double().cpu().numpy()[scored].sum())
        self._counts += np.bincount(tokens[scored], minlength=len(self._counts))

    def result(self, tokenizer: TokenSizes, seconds: float) -> Evaluation:
        num_tokens = self.num_tokens
        num_chars = round(float(self._counts @ tokenizer.token_chars))
        num_bytes = int(self._counts @ tokenizer.token_bytes)
        bits = self._nats / math.log(2)
        nats_per_token = self._nats / num_tokens
        return Evaluation(
            nats_per_token=nats_per_token,
            bits_per_char=bits / num_chars if num_chars else math.nan,
            bits_per_byte=bits / num_bytes if num_bytes else math.nan,
            perplexity=math.exp(nats_per_token) if nats_per_token < 700 else math.inf,
            num_tokens=num_tokens,
            num_chars=num_chars,
            num_bytes=num_bytes,
            seconds=seconds,
        )


def _score(
    model: LanguageModel,
    ids: NDArray[Any],
    piece: _Piece,
    chunk: int,
    tally: _Tally,
    should_stop: Callable[[], bool] | None,
) -> Iterator[None]:
    """Scores a piece; yields after every forward pass."""
    state = _primed_state(model, ids, piece, chunk, should_stop)
    longest = int(piece.length.max())
    for offset in range(0, longest, chunk):
        _poll(should_stop)
        steps = min(chunk, longest - offset)
        scored = (offset + np.arange(steps))[:, None] < piece.length
        targets = _gather(ids, piece.start + offset, steps)
        tokens = _gather(ids, piece.start + offset - 1, steps)
        nats, state = model.token_nats(_to(model, tokens), _to(model, targets), state)
        tally.add(nats, targets, scored)
        yield


def _primed_state(
    model: LanguageModel,
    ids: NDArray[Any],
    piece: _Piece,
    chunk: int,
    should_stop: Callable[[], bool] | None,
) -> State:
    """Returns the state of every lane before its first token; the first lane's is zero."""
    state = model.initial_state(len(piece.start))
    if piece.prime == 0:
        return state
    h, c = state[0][:, 1:], state[1][:, 1:]
    begin = piece.start[1:] - 1 - piece.prime
    for offset in range(0, piece.prime, chunk):
        _poll(should_stop)
        tokens = _gather(ids, begin + offset, min(chunk, piece.prime - offset))
        with torch.no_grad():
            _, (h, c) = model.features(_to(model, tokens), (h, c))
    return torch.cat([state[0][:, :1], h], 1), torch.cat([state[1][:, :1], c], 1)


def _gather(ids: NDArray[Any], starts: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
    """Returns `(steps, lanes)` ids from each start on; past the end, the last id (unscored)."""
    out = np.empty((steps, len(starts)), dtype=np.int64)
    for lane, start in enumerate(starts):
        part = np.asarray(ids[start : start + steps])
        out[: len(part), lane] = part
        out[len(part) :, lane] = ids[-1]
    return out


def _to(model: LanguageModel, tokens: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(tokens).to(model.output.bias.device)


def _poll(should_stop: Callable[[], bool] | None) -> None:
    if should_stop is not None and should_stop():
        raise Stopped("evaluation was asked to stop")


@contextmanager
def _evaluating(model: LanguageModel, precision: str) -> Iterator[None]:
    was_training = model.training
    dtype, device = AUTOCAST[precision], model.output.bias.device.type
    model.eval()
    try:
        with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
            yield
    finally:
        model.train(was_training)


def _check(
    lanes: int, prime: int, chunk: int, window: int | None, limit: int | None, precision: str
) -> None:
    least = {"lanes": (lanes, 1), "prime": (prime, 0), "chunk": (chunk, 1)}
    least["zero_state_window"] = (1 if window is None else window, 1)
    least["max_tokens"] = (1 if limit is None else limit, 1)
    for name, (value, low) in least.items():
        if not is_whole(value):
            raise ConfigError(Setting(name), f" is {value!r}, expected a whole number")
        if value < low:
            raise ConfigError(Setting(name), f" is {value}, expected at least {low}")
    if precision not in list(AUTOCAST):
        raise ConfigError(
            Setting("precision"), f" is {precision!r}, expected one of {', '.join(AUTOCAST)}"
        )
