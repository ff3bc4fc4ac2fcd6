"""Callbacks: user code that a trainer calls at fixed points."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastlstm.errors import ConfigError, CorruptFileError, counted, kind_of_value, nearest_hint
from fastlstm.report.terminal import percent

if TYPE_CHECKING:
    from fastlstm.runs.events import Event
    from fastlstm.training.state import Tensors
    from fastlstm.training.trainer import Trainer

_STEM = "callback-"
_RISE_EVALUATIONS, _RISE_SHARE, _CLEAR_RISE = 3, 0.25, 0.03
"""Evaluations and share of the run since the best one, and rise of their median above the best."""


class Callback:
    """Base class: override what you need. An exception ends the run.

    Callbacks may use `trainer.model`, `trainer.progress`, `trainer.optimizers`,
    `trainer.emit(event)` and `trainer.end(reason)`. A function that only reads events needs no
    class: `observers=[…]`.

    Example:
        ```python
        class StopAt(fastlstm.Callback):
            def on_evaluate(self, trainer, metrics):
                if metrics["bits_per_char"] < 2.0:
                    trainer.end("2 bits per character reached")

        fastlstm.train("book.txt", callbacks=[StopAt()])
        ```
    """

    def on_begin(self, trainer: Trainer) -> None:
        """Called before the first step, after a checkpoint was restored."""

    def on_gradients(self, trainer: Trainer) -> None:
        """Called with complete, unscaled gradients, before they are clipped."""

    def on_update(self, trainer: Trainer) -> None:
        """Called after the optimizer has changed the weights, before they enter the average."""

    def on_evaluate(self, trainer: Trainer, metrics: Event) -> Event | None:
        """Called after an evaluation, while the model holds the evaluated weights.

        Args:
            trainer: the trainer.
            metrics: the `eval` event so far.

        Returns:
            Further metrics for the event, numbers or texts by new names, or None.
        """
        return None

    def on_event(self, trainer: Trainer, event: Event) -> None:
        """Called with every event, a plain dict."""

    def on_end(self, trainer: Trainer) -> None:
        """Called when training is over or was stopped."""

    def accepts(self, trainer: Trainer) -> bool:
        """Returns whether an evaluation now may be the best one of the run.

        While a callback returns False, evaluations are reported, but none is the best, patience
        does not count them, and the best one before is forgotten.
        """
        return True

    def weights_in_use(self, trainer: Trainer) -> AbstractContextManager[None]:
        """Returns a block within which the model holds the weights to use, such as rounded ones.

        The passes of a step and whole evaluations run within the block, and the best weights are
        copied in it. The end of the block must restore the weights that the optimizer updates and
        checkpoints hold.
        """
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for checkpoints: tensors and JSON values by name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state`, which `state_dict` returned.

        Raises:
            CorruptFileError: a checkpoint with another state.
        """


class EarlyStopping(Callback):
    """Ends training after `patience` evaluations without a better loss."""

    def __init__(self, patience: int) -> None:
        self._patience = patience

    def on_begin(self, trainer: Trainer) -> None:
        self._look(trainer)

    def on_evaluate(self, trainer: Trainer, metrics: Event) -> None:
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        if trainer.progress.without_gain >= self._patience:
            trainer.end(f"no gain in {counted(self._patience, 'evaluation')}")


class RiseStopping(Callback):
    """Ends training if the validation loss is clearly above its best for a quarter of the run.

    A lower learning rate does not cure overfitting (benchmarks/log).
    """

    def __init__(self) -> None:
        self._losses: list[float] = []

    def on_begin(self, trainer: Trainer) -> None:
        self._look(trainer)

    def on_evaluate(self, trainer: Trainer, metrics: Event) -> None:
        if metrics["is_best"]:
            self._losses = []
        elif metrics.get("is_accepted", True):
            self._losses.append(metrics["loss"])
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        progress = trainer.progress
        if len(self._losses) < _RISE_EVALUATIONS or progress.best_loss <= 0.0:
            return
        share = trainer.done() * (1.0 - progress.best_step / max(progress.step, 1))
        rise = statistics.median(self._losses) / progress.best_loss - 1.0
        if share >= _RISE_SHARE and rise >= _CLEAR_RISE:
            trainer.end(
                f"the validation loss has been {percent(rise)} above its best since step"
                f" {progress.best_step:,}; a shorter run is enough"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        losses = state.get("losses")
        if not isinstance(losses, list) or not all(isinstance(x, int | float) for x in losses):
            raise CorruptFileError(
                f"the checkpoint has {losses!r:.80} as losses since the best evaluation, expected"
                " a list of numbers; continue from another checkpoint or start a new run"
            )
        self._losses = [float(loss) for loss in losses]


def checked_callbacks(callbacks: Any) -> list[Callback]:
    """Returns the callbacks as a list; raises ConfigError for other objects and misspelt hooks."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks is {kind_of_value(callbacks)}, expected a list of Callback")
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in callbacks:
        if isinstance(callback, type) and issubclass(callback, Callback):
            name = callback.__name__
            raise ConfigError(
                f"callbacks holds the class {name}, expected an object: write {name}()"
            )
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks holds {kind_of_value(callback)}, expected objects of classes derived"
                " from fastlstm.Callback; a function that reads events goes into observers"
            )
        kind = type(callback)
        for name in dir(kind):
            if name.startswith("on_") and name not in hooks and callable(getattr(kind, name)):
                hint = nearest_hint(name, hooks)
                raise ConfigError(f"{kind.__name__}.{name} is no hook of a callback{hint}")
    return list(callbacks)


def _added(callback: Callback, returned: Any, metrics: Event) -> Event:
    """Returns the result of `on_evaluate` as plain values; raises ConfigError for other ones."""
    hook, expected = f"{type(callback).__name__}.on_evaluate", "expected a dict of numbers or None"
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise ConfigError(f"{hook} returned {type(returned).__name__}, {expected}")
    added = {}
    for key, value in returned.items():
        if key in metrics:
            raise ConfigError(
                f"{hook} returned '{key}', which the evaluation already has; return new names only"
            )
        plain = value.item() if getattr(value, "ndim", None) == 0 else value
        if not isinstance(plain, bool | int | float | str):
            raise ConfigError(f"{hook} returned {type(plain).__name__} for '{key}', {expected}")
        added[key] = plain
    return added


class CallbackList:
    """The callbacks of a run, called in order."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self._trainer, self.all = trainer, tuple(callbacks)
        for callback in callbacks:
            own = type(callback).weights_in_use is not Callback.weights_in_use
            if trainer.world.size > 1 and own:
                raise ConfigError(
                    f"{type(callback).__name__} has weights_in_use, which would change the weights"
                    " of rank 0 only: train with it in one process"
                )

    def call(self, method: str, *args: object) -> None:
        for callback in self.all:
            getattr(callback, method)(self._trainer, *args)

    def evaluate(self, metrics: Event) -> Event:
        for callback in self.all:
            returned = callback.on_evaluate(self._trainer, dict(metrics))
            metrics = {**metrics, **_added(callback, returned, metrics)}
        return metrics

    def refusing(self) -> list[str]:
        """Returns the class names of the callbacks that accept no evaluation now."""
        return [type(c).__name__ for c in self.all if not c.accepts(self._trainer)]

    @contextmanager
    def weights_in_use(self) -> Iterator[None]:
        """Enters the blocks of all callbacks; the block of the first one is outermost."""
        with ExitStack() as stack:
            for callback in self.all:
                stack.enter_context(callback.weights_in_use(self._trainer))
            yield

    def _named(self) -> dict[str, Callback]:
        """Returns the callbacks by class name, numbered if a name occurs again."""
        named: dict[str, Callback] = {}
        for callback in self.all:
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
        """Restores what `capture` returned; a callback without a state stays new."""
        for name, callback in self._named().items():
            state = {**plain.get(name, {}), **tensors.get(_STEM + name, {})}
            if state:
                callback.load_state_dict(state)
