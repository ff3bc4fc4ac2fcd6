"""How well a model predicts a text: nats, bits per character and byte, perplexity."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fastlstm.errors import ConfigError, DataError, Stopped, counted
from fastlstm.report.html import InNotebook
from fastlstm.report.terminal import short_count
from fastlstm.system.fields import Device, is_whole
from fastlstm.system.hardware import check_device, has_gpu
from fastlstm.text.data.text import token_counts
from fastlstm.text.data.tokenizer import shown_characters
from fastlstm.training.precision import allow_tf32, tf32_kept

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastlstm.text.data.tokenizer import Tokenizer
    from fastlstm.text.model import LanguageModel, State

PRIME = 256
"""Tokens that warm the state of a lane before its first score; an LSTM forgets its start."""
LANES, LANES_ON_GPU, CHUNK = 32, 256, 256
_WINDOWS_AT_ONCE = 128
_FEWEST_STEPS = 8
_UNICODE = 0x110000 - 0x800
"""Characters that Unicode can hold: its code points without the surrogates."""


class ScoredLanes(NamedTuple):
    """Lanes to run side by side: lane `k` predicts `length[k]` tokens from index `start[k]`.

    The `prime` tokens before a lane warm its state, except at the start of the text.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    prime: int = 0


def num_lanes(num_ids: int, lanes: int = LANES) -> int:
    """Returns how many lanes a text of so many tokens is evaluated in, at most `lanes`."""
    return max(1, min(lanes, (num_ids - 1) // PRIME))


def lanes_of(num_ids: int, lanes: int) -> ScoredLanes:
    """Returns lanes that score every token of a text but the first."""
    targets = num_ids - 1
    length = np.full(lanes, targets // lanes, dtype=np.int64)
    length[: targets % lanes] += 1
    start = 1 + np.concatenate([[0], np.cumsum(length)[:-1]])
    return ScoredLanes(start, length, PRIME if lanes > 1 else 0)


@dataclass(frozen=True)
class Evaluation(InNotebook):
    """Result of `evaluate`, over the tokens that were scored.

    Attributes:
        nats_per_token: mean cross-entropy.
        bits_per_char: bits of the scored text per character, comparable across vocabularies.
        bits_per_byte: bits of the scored text per UTF-8 byte.
        perplexity: `exp(nats_per_token)`.
        num_tokens: tokens scored. The first token of a text (or window) has no context and is not
            scored.
        num_chars: characters in these tokens.
        num_bytes: UTF-8 bytes in these tokens.
        seconds: wall clock.
        num_unknown: characters of the text that are not in the vocabulary. They are left out of
            the context and of the figures above.
        unknown_share: `num_unknown` over all characters of the text.
        first_unknown: up to ten unknown characters, with the first position of each.
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

    def _rows(self) -> list[tuple[str, str]]:
        rate = self.num_tokens / self.seconds if self.seconds > 0 else 0.0
        unknown = (
            f"{counted(self.num_unknown, 'character')} ({self.unknown_share:.2%} of the text)"
            f" outside the vocabulary, not scored above: {shown_characters(self.first_unknown)}"
        )
        whole = (
            f"{self.bits_per_char_with_unknown or 0.0:.4f} bits/char, where an unknown character"
            " may be any other of Unicode"
        )
        return [
            ("bits/char", f"{self.bits_per_char:.4f}"),
            ("bits/byte", f"{self.bits_per_byte:.4f}"),
            ("perplexity", f"{self.perplexity:.4f}"),
            ("nats/token", f"{self.nats_per_token:.4f}"),
            (
                "scored",
                f"{counted(self.num_tokens, 'token')}, {counted(self.num_chars, 'character')},"
                f" {counted(self.num_bytes, 'byte')}",
            ),
            *([("unknown", unknown), ("with unknown", whole)] if self.num_unknown else ()),
            ("time", f"{self.seconds:.2f} s, {short_count(rate)} tokens/s"),
        ]


def with_unknown(
    result: Evaluation,
    num_unknown: int,
    num_chars: int,
    first: Sequence[tuple[str, int]],
    vocab_size: int,
) -> Evaluation:
    """Returns an evaluation that also counts unknown characters, which were left out.

    A character model gives them no probability. `bits_per_char_with_unknown` is the cost of the
    text when a code that knows the share u of unknown characters first marks every character as
    known or unknown, and an unknown one is any other character of Unicode, all equally likely:
    ``(1 - u) bits_per_char + H(u) + u log2(1,112,064 - V)``, with
    ``H(u) = -u log2(u) - (1 - u) log2(1 - u)``.

    `num_chars` counts known and unknown characters; `first` are some unknown ones, each with its
    position.
    """
    bits, share = result.bits_per_char, num_unknown / num_chars
    if share > 0:
        entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
        bits = (1 - share) * bits + entropy + share * math.log2(_UNICODE - vocab_size)
    return replace(
        result,
        num_unknown=num_unknown,
        unknown_share=share,
        first_unknown=tuple(first),
        bits_per_char_with_unknown=bits,
    )


def evaluate(
    model: LanguageModel,
    ids: NDArray[Any],
    tokenizer: Tokenizer,
    *,
    lanes: int = LANES,
    chunk: int = CHUNK,
    zero_state_window: int | None = None,
    max_tokens: int | None = None,
    should_stop: Callable[[], bool] | None = None,
    watch: Callable[[int, int], object] | None = None,
) -> Evaluation:
    """Scores every token of `ids` but the first, with the state carried through the text.

    Args:
        model: put into evaluation mode meanwhile; its mode is restored. No randomness is used.
        ids: 1-d token ids; a memory map is read piece by piece.
        tokenizer: characters and bytes per token.
        lanes: contiguous parts evaluated side by side; 1 is exact. The 256 tokens before each lane
            but the first warm its state, unscored. A text with fewer tokens per lane gets fewer
            lanes.
        chunk: steps per forward pass.
        zero_state_window: cut the text into windows of this many predictions, not into lanes; each
            window starts from a zero state, and the remainder is dropped. Models without carried
            state are evaluated this way.
        max_tokens: score at most this many.
        should_stop: polled between forward passes.
        watch: called after every forward pass with the tokens scored so far and in all.

    Returns:
        The figures over all scored tokens.

    Raises:
        DataError: too few tokens.
        ConfigError: a setting out of range.
        Stopped: `should_stop` returned True.

    Numerics:
        float32, sums in float64. With 16 lanes the result is within 1e-3 bits of one lane.
    """
    numbers = {"lanes": lanes, "chunk": chunk, "max_tokens": max_tokens}
    for name, value in {**numbers, "zero_state_window": zero_state_window}.items():
        is_left_out = value is None and name in ("zero_state_window", "max_tokens")
        if not is_left_out and (not is_whole(value) or value < 1):  # type: ignore[operator]
            raise ConfigError(f"`{name}` is {value!r}, expected a whole number, at least 1")
    started = time.perf_counter()
    if max_tokens is not None:
        ids = ids[: max_tokens + 1]
    if len(ids) < 2:
        raise DataError(f"the text has {counted(len(ids), 'token')}; evaluation needs at least 2")
    if zero_state_window is not None:
        pieces = _windows(len(ids), zero_state_window)
    else:
        pieces = [lanes_of(len(ids), num_lanes(len(ids), lanes))]
    V = len(tokenizer.token_chars)
    counts = np.zeros(V, dtype=np.int64)
    nats = _nats_of(model, ids, pieces, chunk, should_stop, watch)
    for piece in pieces:
        for start, length in zip(piece.start, piece.length, strict=True):
            counts += token_counts(ids[start : start + length], V)
    seconds = time.perf_counter() - started
    return evaluation_of(math.fsum(nats.tolist()), counts, tokenizer, seconds)


def evaluate_on(
    device: Device,
    model: LanguageModel,
    ids: NDArray[Any],
    tokenizer: Tokenizer,
    *,
    lanes: int | None = None,
    **settings: Any,
) -> Evaluation:
    """Works like `evaluate`, on a device; "auto" takes a GPU if there is one.

    On a GPU the default of `lanes` is `LANES_ON_GPU`, and a copy of the model is scored. A pass
    that does not fit into memory is repeated with half the steps. Raises ConfigError: there is no
    such device, or its memory is too small for a pass of a few steps.
    """
    check_device(device)
    if device == "cpu" or not has_gpu():
        lanes = LANES if lanes is None else lanes
        return evaluate(model, ids, tokenizer, lanes=lanes, **settings)
    lanes, chunk = LANES_ON_GPU if lanes is None else lanes, CHUNK
    while True:
        try:
            with tf32_kept():
                allow_tf32("fp32")
                copied = copy.deepcopy(model).to("cuda")
                return evaluate(copied, ids, tokenizer, lanes=lanes, chunk=chunk, **settings)
        except torch.OutOfMemoryError:
            if chunk <= _FEWEST_STEPS:
                raise ConfigError(
                    f"the GPU has too little free memory for {counted(lanes, 'lane')}; use fewer"
                    " `lanes`, or `device='cpu'`"
                ) from None
        chunk //= 2
        torch.cuda.empty_cache()


def lane_nats(
    model: LanguageModel,
    ids: NDArray[Any],
    lanes: range,
    should_stop: Callable[[], bool] | None,
    watch: Callable[[int, int], object] | None,
) -> NDArray[np.float64]:
    """Returns the nats of some of the lanes of `evaluate`, with its defaults.

    A lane's nats do not depend, to the last bit, on the others. `watch` is called with the tokens
    scored so far and the tokens of these lanes.
    """
    start, length, prime = lanes_of(len(ids), num_lanes(len(ids)))
    own = slice(lanes.start, lanes.stop)
    piece = ScoredLanes(start[own], length[own], prime)
    return _nats_of(model, ids, [piece], CHUNK, should_stop, watch)


def _windows(num_ids: int, window: int) -> list[ScoredLanes]:
    num_windows = num_ids // (window + 1)
    if num_windows == 0:
        raise DataError(
            f"the text has {counted(num_ids, 'token')}, fewer than one window of {window + 1};"
            " give a longer text or a smaller `zero_state_window`"
        )
    starts = 1 + np.arange(num_windows, dtype=np.int64) * (window + 1)
    parts = [starts[k : k + _WINDOWS_AT_ONCE] for k in range(0, num_windows, _WINDOWS_AT_ONCE)]
    return [ScoredLanes(part, np.full(len(part), window, dtype=np.int64)) for part in parts]


def evaluation_of(
    nats: float, counts: NDArray[np.int64], tokenizer: Tokenizer, seconds: float
) -> Evaluation:
    """Returns the figures of tokens that occur `counts` times, `(V,)`, and cost `nats` in all."""
    num_tokens = int(counts.sum())
    num_chars = round(float(counts @ tokenizer.token_chars))
    num_bytes = int(counts @ tokenizer.token_bytes)
    bits, nats_per_token = nats / math.log(2), nats / num_tokens
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


def _nats_of(
    model: LanguageModel,
    ids: NDArray[Any],
    pieces: Sequence[ScoredLanes],
    chunk: int,
    should_stop: Callable[[], bool] | None,
    watch: Callable[[int, int], object] | None,
) -> NDArray[np.float64]:
    """Returns the nats of each lane; each sum is rounded once a chunk, whatever its order."""
    parts, done, total = [], 0, sum(int(piece.length.sum()) for piece in pieces)
    with _evaluating(model):
        for piece in pieces:
            sums, longest = np.zeros(len(piece.start)), int(piece.length.max(initial=0))
            state = _primed_state(model, ids, piece, chunk, should_stop) if longest else None
            for offset, steps in _passes(longest, chunk, should_stop):
                assert state is not None
                tokens = _gather(model, ids, piece.start + offset - 1, steps + 1)
                nats, state = model.token_nats(tokens[:-1], tokens[1:], state)
                has_target = (offset + np.arange(steps))[:, None] < piece.length
                own = np.where(has_target, nats.double().cpu().numpy(), 0.0)
                sums += [math.fsum(lane) for lane in own.T.tolist()]
                done += int(has_target.sum())
                if watch is not None:
                    watch(done, total)
            parts.append(sums)
    return np.concatenate(parts)


def _primed_state(
    model: LanguageModel,
    ids: NDArray[Any],
    piece: ScoredLanes,
    chunk: int,
    should_stop: Callable[[], bool] | None,
) -> State:
    """Returns the state of every lane before its first token; zero at the start of the text."""
    h, c = model.initial_state(len(piece.start))
    first = int(piece.start[0] <= piece.prime)  # lanes without tokens before them
    primed = h[:, first:], c[:, first:]
    for offset, steps in _passes(piece.prime, chunk, should_stop):
        tokens = _gather(model, ids, piece.start[first:] - 1 - piece.prime + offset, steps)
        with torch.no_grad():
            _, primed = model.features(tokens, primed)
    return torch.cat([h[:, :first], primed[0]], 1), torch.cat([c[:, :first], primed[1]], 1)


def _passes(
    num_steps: int, chunk: int, should_stop: Callable[[], bool] | None
) -> Iterator[tuple[int, int]]:
    """Yields the offset and the steps of every forward pass; polls `should_stop` before each."""
    for offset in range(0, num_steps, chunk):
        if should_stop is not None and should_stop():
            raise Stopped("evaluation was asked to stop")
        yield offset, min(chunk, num_steps - offset)


def _gather(
    model: LanguageModel, ids: NDArray[Any], starts: NDArray[np.int64], steps: int
) -> torch.Tensor:
    """Returns `(steps, lanes)` ids from each start; past the end, the last id again (unscored)."""
    out = np.empty((steps, len(starts)), dtype=np.int64)
    for lane, start in enumerate(starts):
        part = np.asarray(ids[start : start + steps])
        out[: len(part), lane] = part
        out[len(part) :, lane] = ids[-1]
    return torch.from_numpy(out).to(model.output.bias.device)


@contextmanager
def _evaluating(model: LanguageModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.autocast(model.output.bias.device.type, enabled=False):
            yield
    finally:
        model.train(was_training)
