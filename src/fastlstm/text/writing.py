"""Text from a decoder, piece by piece: tokens in, whole characters out, stop strings held back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.errors import DataError, PromptError, kind_of_value
from fastlstm.text.sampling import PENALTY_WINDOW, Sampling, StopText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fastlstm.text.data.tokenizer import StreamDecoder, Tokenizer
    from fastlstm.text.decoder import Decoder, Stream

SHORTEST_S, PER_TEXT_S, LONGEST_S = 0.005, 0.0002, 0.1
"""A call for one text is short, so that its text comes at once. With many texts, calls become
longer, because the work around a call is the same for one token and for a hundred."""
_MAX_STEPS = 4096
_SHARE = 0.3


class StepSizer:
    """Chooses the tokens per text of a call from the seconds that earlier calls computed.

    Time around a call is left out: counted, it would shorten calls, and more calls take more of it.
    """

    def __init__(self) -> None:
        self._token_s = 2e-4
        self._num_texts = 0

    def num_tokens(self, num_texts: int) -> int:
        aim_s = min(LONGEST_S, SHORTEST_S + PER_TEXT_S * num_texts)
        # Texts share the reading of the weights: time grows more slowly than their number.
        token_s = self._token_s * max(1.0, num_texts / max(1, self._num_texts))
        return max(1, min(_MAX_STEPS, int(aim_s / token_s)))

    def record(self, num_texts: int, num_tokens: int, seconds: float) -> None:
        """Takes the seconds of a call that read and wrote `num_tokens` for all texts together."""
        if num_tokens <= 0 or seconds <= 0.0:
            return
        token_s = seconds * num_texts / num_tokens
        if token_s < self._token_s:  # falls by half at most: one short call proves little
            self._token_s = max(token_s, self._token_s / 2)
        elif num_texts != self._num_texts:
            self._token_s = token_s
        else:
            self._token_s += _SHARE * (token_s - self._token_s)
        self._num_texts = num_texts


class Text:
    """The text that a stream, fed and ready to start, writes; it ends before any of `stops`."""

    def __init__(self, stream: Stream, decoder: StreamDecoder, stops: tuple[str, ...] = ()) -> None:
        self.stream = stream
        self._decoder, self._gate = decoder, StopText(stops)
        self.is_done, self.num_tokens = False, 0

    def take(self) -> str:
        """Returns the text that became ready since the last call."""
        tokens = self.stream.take()
        self.num_tokens += len(tokens)
        ready = self._gate.push(self._decoder.push_all(tokens))
        if self._gate.is_done:
            self.is_done = True
        elif not self.stream.is_running:
            self.is_done = True
            ready += self._gate.flush()
        return ready


def write_all(
    decoder: Decoder, texts: Sequence[Text], max_steps: int = _MAX_STEPS
) -> Iterator[list[str]]:
    """Runs streams to their ends; yields after each call the text that each has ready."""
    sizer = StepSizer()
    while running := [text.stream for text in texts if not text.is_done]:
        steps = min(max_steps, sizer.num_tokens(len(running)))
        sizer.record(len(running), steps * len(running), decoder.run(running, steps))
        yield ["" if text.is_done else text.take() for text in texts]


class Pieces(Iterator[str]):
    """The pieces of a text, as they are written; `num_tokens` counts the tokens so far."""

    def __init__(
        self, decoder: Decoder, texts: Sequence[Text], max_steps: int = _MAX_STEPS
    ) -> None:
        self._texts = texts
        self._pieces = (p for (p,) in write_all(decoder, texts, max_steps) if p)

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def num_tokens(self) -> int:
        return sum(text.num_tokens for text in self._texts)


def token_stops(tokenizer: Tokenizer, stops: tuple[str, ...]) -> list[list[int]]:
    """Returns the stop strings that are always the same sequence of tokens.

    The stream ends at such a sequence; other stop strings are found in the text afterwards.
    """
    if tokenizer.kind == "bpe":
        return []
    sequences = []
    for stop in stops:
        with suppress(DataError):  # a character that is never written
            sequences.append([int(token) for token in tokenizer.encode(stop)])
    return [tokens for tokens in sequences if len(tokens) <= PENALTY_WINDOW]


def begin(
    decoder: Decoder, tokenizer: Tokenizer, prompt: str, max_tokens: int, sampling: Sampling
) -> Text:
    """Returns the text that continues a prompt; PromptError for an unseen character."""
    stream = decoder.stream()
    stream.set(sampling, stops=token_stops(tokenizer, sampling.stops))
    stream.feed(prompt_ids(tokenizer, prompt))
    stream.begin(max_tokens)
    return Text(stream, tokenizer.stream_decoder(), sampling.stops)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> NDArray[Any]:
    """Returns at least one id: an empty prompt becomes a line end, or else the first token."""
    if not isinstance(prompt, str):
        raise PromptError(f"the prompt is {kind_of_value(prompt)}, expected a str")
    try:
        return tokenizer.encode(prompt or "\n")
    except DataError as error:
        if not prompt:
            return np.zeros(1, dtype=np.int64)
        raise PromptError(f"the prompt has {error}") from error
