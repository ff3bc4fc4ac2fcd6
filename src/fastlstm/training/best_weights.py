"""The best weights of a run: copied, published, and published again after a refused write."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from fastlstm.errors import StorageError
from fastlstm.training.state import Progress, require_like, weights_of

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

STEM = "best"
"""File stem in a checkpoint."""
COUNTERS = ("best_step", "best_loss", "best_bits_per_char")
"""What the progress of a run has of them."""


class BestWeights:
    """The weights of the best evaluation.

    A task that publishes at once has its best weights in the run directory; they are held here,
    and in checkpoints, only until they are published. Other tasks need them at the end.

    Attributes:
        weights: by name; empty where there are none to publish.
        published_step: step of the weights that were published last, -1 before.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.weights: dict[str, torch.Tensor] = {}
        self.published_step = -1
        self._refusal: StorageError | None = None

    def keep(self) -> None:
        """Keeps a copy of the weights that are in the model now."""
        self._copy()
        self.published_step = -1  # a roll-back may find a better model at an earlier step
        if self._trainer.task.publishes_at_once:
            self.publish_if_possible()

    def copy_averaged(self) -> None:
        """Keeps a copy of the weights that an evaluation at this step has scored."""
        average = self._trainer.state.average
        with average.applied() if average is not None else nullcontext():
            self._copy()

    def _copy(self) -> None:
        own = weights_of(self._trainer.task.model)
        self.weights = {name: tensor.detach().clone() for name, tensor in own.items()}

    def forget(self) -> None:
        """Starts anew: nothing is the best so far. What was published stays published."""
        progress, first = self._trainer.progress, Progress()
        for name in COUNTERS:
            setattr(progress, name, getattr(first, name))
        self.weights, self.published_step, self._refusal = {}, -1, None

    def restore(self, stored: Mapping[str, torch.Tensor], published_step: int) -> None:
        """Puts the weights of a checkpoint back; raises ValueError if they do not fit the model."""
        if stored:
            require_like(weights_of(self._trainer.task.model), stored, STEM)
        self.weights = {name: tensor.clone() for name, tensor in stored.items()}
        self.published_step = published_step

    def into_model(self) -> None:
        """Puts the weights, if there are any, into the model."""
        if self.weights:
            self._trainer.task.model.load_state_dict(self.weights, strict=False)

    def publish(self) -> None:
        """Publishes the weights unless they are published; raises StorageError."""
        trainer, step = self._trainer, self._trainer.progress.best_step
        if self.weights and step != self.published_step:
            trainer.task.publish(self.weights, trainer)
            self.set_published()

    def set_published(self) -> None:
        """Notes that the weights are published."""
        self.published_step, self._refusal = self._trainer.progress.best_step, None
        if self._trainer.task.publishes_at_once:
            self.weights = {}

    def publish_if_possible(self) -> None:
        """Publishes the weights; a refusal is a warning, and tried again at the next checkpoint."""
        try:
            self.publish()
        except StorageError as error:
            self._refusal = error
            self._trainer.say("warning", f"the best model is not published yet: {error}")

    def require_published(self, saved_step: int) -> None:
        """Raises StorageError when the weights are still not published."""
        if self._refusal is not None:
            raise StorageError(
                f"{self._refusal} The best model (step {self._trainer.progress.best_step}) is not"
                f" published; checkpoint-{saved_step} keeps it, start the run again with"
                " `resume=True` to publish it.",
            ) from self._refusal
