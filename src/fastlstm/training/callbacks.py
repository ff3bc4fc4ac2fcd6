"""Callbacks: code of the user's that a trainer calls at fixed places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastlstm.errors import ConfigError, counted, kind_of_value

if TYPE_CHECKING:
    from fastlstm.runs.events import Event
    from fastlstm.training.state import Tensors
    from fastlstm.training.trainer import Trainer

_STEM = "callback-"


class Callback:
    """Base class: override what you need. What a callback raises ends the run.

    A callback sees the whole trainer: `trainer.model`, `trainer.progress`, `trainer.optimizers`,
    `trainer.emit(event)`, `trainer.end(reason)`. For a function that only reads events,
    `observers=[…]` is enough.

    Example:
        ::

            class StopAt(fastlstm.Callback):
                def on_evaluate(self, trainer, metrics):
                    if metrics["bits_per_char"] < 2.0:
                        trainer.end("2 bits per character reached")

            fastlstm.train("book.txt", callbacks=[StopAt()])
    """

    def on_begin(self, trainer: Trainer) -> None:
        """Called once before the first step, after a checkpoint was restored."""

    def on_gradients(self, trainer: Trainer) -> None:
        """Called when the gradients of a step are complete, unscaled and not clipped yet."""

    def on_update(self, trainer: Trainer) -> None:
        """Called after the optimizer has changed the weights, before they are averaged."""

    def on_evaluate(self, trainer: Trainer, metrics: Event) -> Event | None:
        """Called after an evaluation while the model holds the weights that were evaluated.

        Args:
            trainer: the trainer.
            metrics: the `eval` event so far.

        Returns:
            Further metrics for the event, or None.
        """
        return None

    def on_event(self, trainer: Trainer, event: Event) -> None:
        """Called with every event, a plain dict."""

    def on_end(self, trainer: Trainer) -> None:
        """Called once when training is over or was stopped."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs: tensors, and plain values that JSON can hold."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts what `state_dict` returned back."""


class EarlyStopping(Callback):
    """Ends training after `patience` evaluations without a better loss (Prechelt 1998)."""

    def __init__(self, patience: int) -> None:
        self._patience = patience

    def on_begin(self, trainer: Trainer) -> None:
        self._look(trainer)

    def on_evaluate(self, trainer: Trainer, metrics: Event) -> None:
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        if trainer.progress.without_gain >= self._patience:
            trainer.end(f"no gain in {counted(self._patience, 'evaluation')}")


def checked_callbacks(callbacks: Any) -> list[Callback]:
    """Returns the callbacks as a list; raises ConfigError for what is no `Callback`."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks is {kind_of_value(callbacks)}, expected a list of Callback")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks holds {kind_of_value(callback)}, expected objects of classes derived"
                " from fastlstm.Callback; a function that reads events goes into observers"
            )
    return list(callbacks)


class CallbackList:
    """The callbacks of a run, called in their order."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self._trainer, self._callbacks = trainer, list(callbacks)

    def call(self, method: str, *args: object) -> None:
        """Calls a method of every callback, with the trainer first."""
        for callback in self._callbacks:
            getattr(callback, method)(self._trainer, *args)

    def evaluate(self, metrics: Event) -> Event:
        """Returns the metrics with those that callbacks add."""
        for callback in self._callbacks:
            metrics = {**metrics, **(callback.on_evaluate(self._trainer, metrics) or {})}
        return metrics

    def _named(self) -> dict[str, Callback]:
        """Returns the callbacks by class; of several of one class, numbered."""
        named: dict[str, Callback] = {}
        for callback in self._callbacks:
            name = type(callback).__name__
            number = sum(key.split("-")[0] == name for key in named)
            named[f"{name}-{number + 1}" if number else name] = callback
        return named

    def capture(self) -> tuple[Tensors, dict[str, Any]]:
        """Returns (tensors by file stem, plain values by callback) for a checkpoint."""
        tensors: Tensors = {}
        plain: dict[str, Any] = {}
        for name, callback in self._named().items():
            state = callback.state_dict()
            own = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            if own:
                tensors[_STEM + name] = own
            if rest := {key: value for key, value in state.items() if key not in own}:
                plain[name] = rest
        return tensors, plain

    def restore(self, tensors: Tensors, plain: dict[str, Any]) -> None:
        """Puts back what `capture` returned; a callback that was not there before stays new."""
        for name, callback in self._named().items():
            state = {**plain.get(name, {}), **tensors.get(_STEM + name, {})}
            if state:
                callback.load_state_dict(state)
