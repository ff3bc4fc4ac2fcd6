"""Text models as `tune` sees them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.errors import UsageError
from fastlstm.text.train import train
from fastlstm.tuning import moves
from fastlstm.tuning.job import Default, Job, Show
from fastlstm.tuning.predict import law_of
from fastlstm.tuning.preparation import prepare

if TYPE_CHECKING:
    from fastlstm.runs.events import Event, Observer
    from fastlstm.text.config import TrainConfig
    from fastlstm.training.callbacks import Callback
    from fastlstm.training.trainer import Trainer
    from fastlstm.tuning.halving import Changes
    from fastlstm.tuning.tune import Search


class TextJob(Job):
    """Runs of a text are compared by what the law of quality expects of the whole run."""

    axes = tuple(moves.FIELDS)
    fields = moves.FIELDS
    size, per, ending = "rnn_size", "token", " expected"

    def check(self, config: TrainConfig) -> None:
        if config.vocab == "bpe":
            raise UsageError("tune needs a text of characters or bytes: --vocab is bpe")

    def train(
        self,
        source: Any,
        config: TrainConfig,
        *,
        given: Collection[str],
        out: Path,
        observers: Sequence[Observer] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        train(
            source, out=out, config=config, given=given, as_text=True, observers=observers,
            callbacks=callbacks,
        )  # fmt: skip

    def prepare(
        self, trainer: Trainer, given: Collection[str], search: Search, show: Show
    ) -> Default:
        return prepare(self, trainer, given, search, show)

    def options_of(self, default: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
        return moves.options_of(default, changes)

    def label_of(self, changes: Changes) -> str:
        return moves.label_of(changes)

    def result(self, start: Event, end: Event, budget_s: float) -> tuple[float, float]:
        # Steps of AdamW at another rate are worth more than the law's: all count like Muon's.
        law = law_of(start, end, "muon")
        return law.measured_bits, law.after(law.length_in(budget_s)).bits

    def told(self, measured: float, expected: float) -> str:
        return f"{measured:.3f} bits/char, whole run expected {expected:.3f}"

    def figure(self, value: float, has_unit: bool = True) -> str:
        return f"{value:.3f}" + " bits/char" * has_unit
