"""Saves the state and the best weights of a run when it is due, and puts them back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastlstm.errors import CorruptFileError, StorageError
from fastlstm.training.checkpoint import Checkpoint, reading
from fastlstm.training.data_parallel import average_optimizers
from fastlstm.training.guard import first_non_finite
from fastlstm.training.schedule import SaveTimes
from fastlstm.training.state import Progress, Tensors, require_like, weights_of

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

BEST = "best"
"""File stem of the best weights."""
COUNTERS = ("best_step", "best_loss", "best_bits_per_char")
"""Counters of `Progress` that belong to them."""
_FINITE = ("model", "optimizer", "average", "carried")
"""Stems of the tensors without NaN and Inf in a state that can be restored."""


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
        own = weights_of(self._trainer.task.model)
        self.weights = {name: tensor.detach().clone() for name, tensor in own.items()}
        self.published_step = -1  # a roll-back may find a better model at an earlier step
        if self._trainer.task.publishes_at_once:
            self.publish_if_possible()

    def forget(self) -> None:
        """Starts anew: nothing is the best so far. What was published stays published."""
        progress, first = self._trainer.progress, Progress()
        for name in COUNTERS:
            setattr(progress, name, getattr(first, name))
        self.weights, self.published_step, self._refusal = {}, -1, None

    def restore(self, stored: Mapping[str, torch.Tensor], published_step: int) -> None:
        """Puts the weights of a checkpoint back; raises ValueError if they do not fit the model."""
        if stored:
            require_like(weights_of(self._trainer.task.model), stored, BEST)
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


def of_all_rows(
    parts: Sequence[Mapping[str, Tensor]], axis: Mapping[str, int]
) -> dict[str, Tensor]:
    """Returns the carried state of all rows, of the parts that processes have, in order of rank."""
    if len(parts) == 1:
        return dict(parts[0])
    return {name: torch.cat([part[name] for part in parts], axis[name]) for name in parts[0]}


def own_rows(trainer: Trainer, carried: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the part of the carried state that belongs to the rows of this process."""
    if trainer.plan.share.size == 1:
        return carried
    own, axis = dict[str, Tensor](), trainer.task.row_axis
    num_rows = min((t.shape[axis[name]] for name, t in carried.items()), default=0)
    rows = range(num_rows)[trainer.plan.share.rows(trainer.task.num_lanes)]
    for name, tensor in carried.items():
        each = tensor.shape[axis[name]] // num_rows  # a row may have several cells
        own[name] = tensor.narrow(axis[name], rows.start * each, len(rows) * each).contiguous()
    return own


def told_state(trainer: Trainer, own: Checkpoint | None) -> Checkpoint:
    """Returns the state of rank 0 in every process."""
    if trainer.world.size == 1 and own is not None:
        return own
    tensors: Tensors = {} if own is None else own.tensors
    flat = {f"{stem}/{name}": t for stem, group in tensors.items() for name, t in group.items()}
    told = trainer.world.told(None if own is None else [own.step, own.meta])
    flat = trainer.world.told_tensors(flat)
    if own is not None:
        return own
    step, meta = told
    for full_name, tensor in flat.items():
        stem, _, name = full_name.partition("/")
        tensors.setdefault(stem, {})[name] = tensor
    return Checkpoint(Path(f"step {step} of rank 0"), step, tensors, meta, {}, True)


class Saver:
    """Saves the state of a trainer.

    Attributes:
        saved_step: step of the state that was saved last, -1 where it must be saved again.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.saved_step = trainer, -1
        self._times = SaveTimes(trainer.plan.options.checkpoint_every)

    def capture(self) -> tuple[Tensors, dict[str, Any]]:
        """Returns (tensors by file stem, plain values) for a checkpoint."""
        trainer = self._trainer
        trainer.stepper.gather()
        if trainer.plan.is_local:
            average_optimizers(trainer)
        trainer.progress.elapsed_s = trainer.elapsed_s()
        tensors, meta = trainer.state.capture(trainer.task.loader.state_dict())
        tensors["optimizer"] = trainer.stepper.optimizer_tensors()
        own, meta["callbacks"] = trainer.callbacks.capture()
        groups = {**own, BEST: trainer.best.weights}
        tensors.update({stem: group for stem, group in groups.items() if group})
        meta["published_step"] = trainer.best.published_step
        carried = trainer.task.carried()
        parts = (
            [carried] if trainer.plan.share.size == 1 else trainer.world.gathered_tensors(carried)
        )
        if carried := of_all_rows(parts, trainer.task.row_axis):
            tensors["carried"] = carried
        return tensors, meta

    def restore(self, own: Checkpoint | None, is_roll_back: bool) -> None:
        """Puts a state of rank 0 back; a roll-back keeps the trouble counters and best weights of
        now.

        Raises:
            CorruptFileError: the checkpoint's values make no sense.
        """
        trainer, checkpoint = self._trainer, told_state(self._trainer, own)
        tensors, meta = checkpoint.tensors, checkpoint.meta
        with reading(checkpoint):
            trainer.task.loader.load_state_dict(trainer.state.restore(tensors, meta, is_roll_back))
            first = {name: tensor for name, tensor in tensors["state"].items() if name in "hc"}
            carried = tensors.get("carried", first)  # of format 1: in "state"
            trainer.task.restore_carried(own_rows(trainer, carried))
            if not is_roll_back:
                trainer.best.restore(tensors.get(BEST, {}), int(meta.get("published_step", -1)))
            if not isinstance(callbacks := meta.get("callbacks", {}), dict):
                raise TypeError("callbacks is no object")
            if not all(isinstance(state, dict) for state in callbacks.values()):
                raise TypeError("the state of a callback is no object")
        if trainer.world.is_leader:
            trainer.callbacks.restore(tensors, callbacks)
        self.saved_step = trainer.progress.step
        if is_roll_back:  # the state is saved again, with its new rate
            self.saved_step = -1
            self._times.rolled_back()

    def is_due(self) -> bool:
        """Returns whether the state is to be saved at this step."""
        step = self._trainer.progress.step
        return step != self.saved_step and self._times.is_due(step)

    def save_if_possible(self) -> None:
        """Saves the state; a refusal is a warning, and tried again later."""
        try:
            self.save()
        except (StorageError, CorruptFileError) as error:
            self._times.tried(self._trainer.progress.step)
            self._trainer.say("warning", f"checkpoint not written, training continues: {error}")

    def save(self) -> None:
        """Saves the state and publishes the best weights, unless that is done.

        Raises:
            StorageError: the disk refused.
        """
        trainer = self._trainer
        if trainer.task.publishes_at_once:  # what the disk refused before is not in the checkpoint
            trainer.best.publish_if_possible()
        if trainer.world.decided(self.saved_step != trainer.progress.step)[0]:
            self._save()
        if not trainer.task.publishes_at_once:  # it may take long, and the state is safe now
            with trainer.progress.counted("saving"):
                trainer.best.publish_if_possible()

    def save_last(self) -> None:
        """Saves the state; a task that does not publish at once does so when it finishes."""
        best, at_once = self._trainer.best, self._trainer.task.publishes_at_once
        if at_once:
            best.publish_if_possible()
        self._save()  # the last evaluation belongs to it, even where the step is saved
        if at_once:
            best.require_published(self.saved_step)

    def _save(self) -> None:
        trainer, step = self._trainer, self._trainer.progress.step
        started = time.perf_counter()
        tensors, meta = self.capture()
        if not trainer.world.is_leader:
            self.saved_step = step
            return
        is_finite, place = self.is_finite(tensors), Path(f"the state of step {step}")
        state = Checkpoint(place, step, tensors, meta, trainer.task.files(), is_finite)
        about = trainer.snapshots.save(state)
        self.saved_step = step
        self._times.tried(step)
        seconds = trainer.meter.save_s = time.perf_counter() - started
        trainer.progress.add("saving", seconds)
        if about is not None:
            trainer.emit({"event": "checkpoint", "step": step, "seconds": seconds, **about})

    def is_finite(self, tensors: Tensors) -> bool:
        """Returns whether a state has no NaN and Inf, so that a run can go back to it."""
        named = (
            (name, tensor)
            for stem in _FINITE
            for name, tensor in tensors.get(stem, {}).items()
            if name not in self._trainer.task.may_be_nan
        )
        return first_non_finite(named) is None
