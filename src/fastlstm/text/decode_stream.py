"""`Stream`: one text being written by a `Decoder`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlstm.errors import NonFiniteError
from fastlstm.system import hardware

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from fastlstm.text.decoder import Decoder
    from fastlstm.text.sampling import Sampling

NOT_FINITE = "the model's output is not finite; its weights are damaged"


class Stream:
    """One text being written: what the model has read, what it is to read, how it chooses.

    While `Decoder.run` has it in one thread, other threads may ask for `status` and `is_running`
    only; everything else raises a RuntimeError.
    """

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        self.decoder = decoder
        sizes = config.vocab_size, config.rnn_size, config.num_layers
        self._record = hardware.native().DecodeStream(*sizes)

    @property
    def native(self) -> Any:
        """The stream of the kernels."""
        return self._record

    def set(
        self,
        sampling: Sampling,
        *,
        stops: Iterable[Sequence[int]] = (),
        num_top: int | None = None,
        scores_given: bool = False,
    ) -> None:
        """Sets how to choose from now on; a seed of None is drawn, `stop` is left to the caller.

        `stops` are sequences of up to 64 tokens that end the text. With `num_top`, 0 to 20, the log
        probability of every token written and of so many likeliest is reported; with
        `scores_given` also those of the tokens fed, after the first.
        """
        settings = sampling.native(self.decoder.config.vocab_size, stops)
        settings.num_top = -1 if num_top is None else num_top
        settings.scores_given = scores_given
        self._use(settings)

    def _use(self, settings: Any) -> None:
        self.native.set(settings)

    def feed(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Adds tokens to be read; frequency and presence penalties count from here."""
        self.native.feed([int(token) for token in tokens])

    def begin(self, max_tokens: int) -> None:
        """Lets it write so many tokens from now on; with 0 it only reads."""
        self.native.begin(max_tokens)

    @property
    def is_running(self) -> bool:
        """Whether it has more to do."""
        return bool(self.native.status == "running")

    @property
    def num_waiting(self) -> int:
        """Number of tokens that are to be read."""
        return int(self.native.num_waiting)

    @property
    def status(self) -> str:
        """ "running", or why not: "length", "stop", "not finite", "bad token"."""
        return str(self.native.status)

    def take(self) -> list[int]:
        if self.native.status == "not finite":
            raise NonFiniteError(NOT_FINITE)
        return list(self.native.take())

    def take_scores(self) -> tuple[list[float], list[int], list[float]]:
        """Returns log probabilities of the tokens since the last call, the likeliest tokens,
        theirs."""
        log_probs, top_tokens, top_log_probs = self.native.take_scores()
        return log_probs, top_tokens, top_log_probs

    def save(self) -> bytes:
        """Returns everything that decides what comes next, except the settings."""
        return bytes(self.native.save())

    def restore(self, blob: bytes) -> None:
        """Takes over what `save` returned for a model of these sizes; else a ValueError."""
        self.native.restore(blob)

    def mark(self) -> Any:
        """Returns what `go_back` takes after the next call of the decoder; cheaper than `save`."""
        return self.save()

    def go_back(self, mark: Any) -> None:
        """Restores the stream to where it stood at `mark`."""
        self.restore(mark)

    def fork(self) -> Stream:
        """Returns a stream at the same place; settings are the default."""
        other = self.decoder.stream()
        other.restore(self.save())
        return other
