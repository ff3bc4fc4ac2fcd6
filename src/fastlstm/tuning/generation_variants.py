"""The writing of text with one thing changed, whose speed can be timed beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastlstm.errors import FastLSTMError
from fastlstm.system import hardware
from fastlstm.text.decoder import FORMATS, default_format, make_decoder
from fastlstm.text.sampling import Sampling
from fastlstm.text.stored_model import StoredModel
from fastlstm.text.writing import Text, begin

if TYPE_CHECKING:
    from fastlstm.text.decoder import Decoder

SAME_TEXT = "same text"
CHANGES_WEIGHTS = "changes weights"
CHANGES_TEXT = "changes the text"
MORE_TEXTS = "more texts at once"
STREAM_COUNTS = (4, 16, 64)
_CALL_S = 0.01
"""About as long as a call of the decoder takes in `text.writing.write_all`."""
_MAX_STEPS = 4096
_ENDLESS = 1 << 62


@dataclass
class Generation:
    """A model that writes texts without end.

    Attributes:
        cause: what would hold the writing back if this is faster.
        effect: on the text.
        options: changed, by name.
        decoder: the weights.
        model: whose tokenizer reads and writes.
        sampling: how to choose a token.
        prompt: that all texts continue.
        num_streams: texts that are written at the same time.
        threads: of a call; None has the fastest number found, as `fastlstm generate`.
        chars: written so far.
        tokens: written so far.
    """

    cause: str
    effect: str
    options: Mapping[str, Any]
    decoder: Decoder
    model: StoredModel
    sampling: Sampling
    prompt: str = ""
    num_streams: int = 1
    threads: int | None = None
    chars: int = 0
    tokens: int = 0
    _texts: list[Text] = field(default_factory=list)
    _steps: int = 4

    def warm_up(self) -> None:
        """Reads the prompt and writes until the length of a call has settled."""
        # A stop string would end the text.
        settings = [replace(self.sampling, stop=(), seed=seed) for seed in range(self.num_streams)]
        self._texts = [
            begin(self.decoder, self.model.tokenizer, self.prompt, _ENDLESS, one)
            for one in settings
        ]
        self.turn(4 * _CALL_S)

    def turn(self, seconds: float) -> float:
        """Writes for about so many seconds; returns the seconds per token of all texts.

        Args:
            seconds: of the turn; at least one call is made.
        """
        num_tokens, started_s = 0, time.perf_counter()
        now_s = started_s
        while num_tokens == 0 or now_s - started_s < seconds:
            call_s = now_s
            self.decoder.run([text.stream for text in self._texts], self._steps, self.threads)
            self.chars += sum(len(text.take()) for text in self._texts)
            num_tokens += self._steps * self.num_streams
            now_s = time.perf_counter()
            rate = _CALL_S / max(now_s - call_s, 1e-6)
            self._steps = max(1, min(_MAX_STEPS, int(self._steps * min(2.0, rate))))
        self.tokens += num_tokens
        return (now_s - started_s) / num_tokens

    def close(self) -> None:
        """Gives up the texts."""
        self._texts = []


def as_stored(
    model: StoredModel, weights: str | None, sampling: Sampling, prompt: str = ""
) -> Generation:
    """Returns what `fastlstm generate` does with a model.

    Args:
        model: read from disk.
        weights: format; None is that of the run.
        sampling: how to choose a token.
        prompt: text to continue.
    """
    weights = weights or default_format(model.weight_format, model.model_config)
    decoder = make_decoder(model.weights, model.model_config, weights)
    return Generation("", SAME_TEXT, {}, decoder, model, sampling, prompt)


def variants(base: Generation, not_timed: list[str]) -> Iterator[Generation]:
    """Yields the variants of a generation that are worth timing.

    Args:
        base: the generation as it is.
        not_timed: receives what cannot be timed, with the reason.
    """

    def changed(cause: str, effect: str, options: dict[str, Any], **fields: Any) -> Generation:
        new = {**fields, "chars": 0, "tokens": 0, "_texts": [], "_steps": 4}
        return replace(base, cause=cause, effect=effect, options=options, **new)

    for weights in ("int8", "int4", "bf16", "fp32"):
        assert weights in FORMATS
        if weights == base.decoder.weight_format:
            continue
        try:
            decoder = make_decoder(base.model.weights, base.model.model_config, weights)
        except FastLSTMError as error:
            not_timed.append(f"weights {weights}: {error}")
            continue
        yield changed("weights", CHANGES_WEIGHTS, {"weights": weights}, decoder=decoder)
    if base.sampling.temperature > 0:
        greedy = replace(base.sampling, temperature=0.0)
        yield changed("sampler", CHANGES_TEXT, {"temperature": 0}, sampling=greedy)
    for threads in sorted({1, hardware.default_threads()} - {base.threads or 0}):
        yield changed("threads", SAME_TEXT, {"threads": threads}, threads=threads)
    for count in STREAM_COUNTS:
        if count > base.num_streams:
            yield changed("texts at once", MORE_TEXTS, {"streams": count}, num_streams=count)
