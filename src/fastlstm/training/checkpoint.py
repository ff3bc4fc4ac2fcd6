"""Checkpoints: a whole training state in one directory, written so that no crash can tear it.

Files are written to `checkpoint-<step>.tmp-<pid>/`, each fsynced, the manifest last. The directory
is renamed, its parent is fsynced, and everything is read back and compared. Old checkpoints are
removed only then. Tensors are safetensors, the rest is JSON: loading executes nothing.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastlstm.distributed.world import World
from fastlstm.errors import CorruptFileError, FormatError, StorageError
from fastlstm.runs.events import Event
from fastlstm.runs.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    check_name,
    metrics_mark,
    read_file,
    read_manifest,
    refuse_unlisted,
    verify_manifest,
    write_directory,
)
from fastlstm.runs.run_directory import METRICS_KEY, TRAINER_FILE, RunDirectory, checkpoint_step
from fastlstm.runs.stored_values import checked_values
from fastlstm.system import storage
from fastlstm.system.tensors import decode_tensors, encode_tensors
from fastlstm.training.state import Progress, Tensors, first_non_finite, require_like, weights_of

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

FORMAT = "fastlstm-checkpoint"
FORMAT_VERSION = 1
_TENSORS = ".safetensors"
BEST = "best"
"""File stem of the best weights."""
COUNTERS = ("best_step", "best_loss", "best_bits_per_char")
"""Counters of `Progress` about the best weights."""
_FINITE = ("model", "optimizer", "average", "carried")
"""File stems whose tensors must be finite for a roll-back to their checkpoint."""
_FIRST_SAVE_S, _SAVE_S = 15.0, 60.0
"""Seconds to the first checkpoint after the start, and between later ones."""


@dataclass(frozen=True)
class Checkpoint:
    """A training state, as a checkpoint holds it.

    `path` is its directory, or words for a state that is in memory. `tensors` are by file stem
    ("model", "optimizer", "state", …) and name; `files` are config.json, tokenizer.json, …. It is
    not `finite` if a weight is NaN or Inf.
    """

    path: Path
    step: int
    tensors: Tensors
    meta: dict[str, Any]
    files: dict[str, bytes]
    finite: bool


def save_checkpoint(run: RunDirectory, state: Checkpoint, keep: int) -> Path:
    """Writes `checkpoint-<step>`, reads it back, then removes all but `keep` checkpoints.

    The run is locked. Replaces a checkpoint of the same step. Removes later ones, which a roll-back
    or a resume past damage left behind. The newest finite checkpoint always stays. Raises
    StorageError: the disk refused or returned other bytes, and older checkpoints are intact; or
    RunDirectoryError: another process writes the run now.
    """
    contents = {stem + _TENSORS: encode_tensors(group) for stem, group in state.tensors.items()}
    about = {"step": state.step, "meta": state.meta}
    trainer = {"format": FORMAT, "format_version": FORMAT_VERSION, **about}
    contents |= {TRAINER_FILE: storage.encode_json(trainer), **state.files}
    for name in contents:
        check_name(name, Path(name))
    records = {name: FileRecord.of(data) for name, data in contents.items()}
    path = run.path / f"checkpoint-{state.step}"
    storage.require_space(run.path, sum(map(len, contents.values())))
    with storage.storage_errors(path, "write the checkpoint"):
        _write(run, path, contents, Manifest(records, state.finite, {"step": state.step}))
    run.require_owned()  # else later checkpoints belong to another process
    with contextlib.suppress(OSError):  # the next start sweeps what cannot be removed now
        _rotate(run, path, state.finite, keep)
    return path


def _write(
    run: RunDirectory, path: Path, contents: Mapping[str, bytes], manifest: Manifest
) -> None:
    staged = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    aside = path.with_name(f"{path.name}.old-{os.getpid()}")
    try:
        write_directory(staged, contents, manifest)
        run.require_owned()
        if path.exists():
            if aside.exists():
                storage.discard(aside)
            storage.rename(path, aside)
        storage.rename(staged, path)
        verify_manifest(path, from_disk=True)
    except BaseException as error:
        with contextlib.suppress(OSError):
            _undo(path, staged, aside, bad=isinstance(error, CorruptFileError))
        if isinstance(error, CorruptFileError):
            raise StorageError(
                f"{error}: the disk returned other bytes than were written to it and may be"
                " failing; copy the run elsewhere. Older checkpoints are intact."
            ) from error
        raise
    with contextlib.suppress(OSError):
        if aside.exists():
            storage.discard(aside)


def _undo(path: Path, staged: Path, aside: Path, *, bad: bool) -> None:
    """Removes what a failed save left; puts the checkpoint of the same step back."""
    if staged.exists():
        storage.remove_tree(staged)
    if bad and path.exists():
        storage.discard(path)
    if aside.exists() and not path.exists():  # if both exist, the next sweep decides
        storage.rename(aside, path)


def _rotate(run: RunDirectory, newest: Path, finite: bool, keep: int) -> None:
    others = [path for path in run.checkpoints() if path != newest]
    earlier = [path for path in others if checkpoint_step(path) < checkpoint_step(newest)]
    keepers = {newest, *earlier[: max(keep, 1) - 1]}
    if not finite:
        good = run.intact_checkpoint(besides=newest)
        keepers |= {good} if good is not None else set(others)
    for path in others:
        if path not in keepers:
            storage.discard(path)


def reading(checkpoint: Checkpoint) -> AbstractContextManager[None]:
    """Returns `checked_values` for the values of a checkpoint."""
    return checked_values(checkpoint.path, "continue from another checkpoint or start a new run")


def load_checkpoint(directory: Path) -> Checkpoint:
    """Reads a checkpoint and checks every byte against its manifest. Raises CorruptFileError, which
    names the damaged file, or FormatError: no checkpoint, or one of a newer fastlstm."""
    manifest = read_manifest(directory)
    refuse_unlisted(directory, manifest)
    if TRAINER_FILE not in manifest.files:
        raise FormatError(f"{directory / MANIFEST}: lists no {TRAINER_FILE}: this is no checkpoint")
    contents = {n: read_file(directory / n, record) for n, record in manifest.files.items()}
    step, meta = _parse_trainer(contents.pop(TRAINER_FILE), directory / TRAINER_FILE)
    tensors = {
        name.removesuffix(_TENSORS): decode_tensors(contents.pop(name), directory / name)
        for name in list(contents)
        if name.endswith(_TENSORS)
    }
    return Checkpoint(directory, step, tensors, meta, contents, manifest.finite)


def _parse_trainer(data: bytes, path: Path) -> tuple[int, dict[str, Any]]:
    trainer = storage.parse_json(data, path)
    if not isinstance(trainer, dict) or trainer.get("format") != FORMAT:
        raise FormatError(f"{path}: is not the trainer.json of a fastlstm checkpoint")
    version = trainer.get("format_version")
    if type(version) is not int or version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: has format version {version!s:.60}, this fastlstm reads up to"
            f" {FORMAT_VERSION}; update it: pip install -U fastlstm"
        )
    step, meta = trainer.get("step"), trainer.get("meta")
    if type(step) is not int or step < 0 or not isinstance(meta, dict):
        raise CorruptFileError(f"{path}: lacks the step or the values of the trainer")
    return step, meta


def find_checkpoint(
    run: RunDirectory, *, finite: bool = False
) -> tuple[Checkpoint | None, list[CorruptFileError]]:
    """Returns the newest intact checkpoint, finite if asked, and the damage of newer ones. Raises
    FormatError: the newest one is of a newer fastlstm; an older checkpoint would silently lose
    work."""
    checkpoint: Checkpoint | None = None
    damage: list[CorruptFileError] = []
    for path in run.checkpoints():
        try:
            if finite and not read_manifest(path).finite:
                continue
            checkpoint = load_checkpoint(path)
            break
        except CorruptFileError as error:
            damage.append(error)
    end = f"{run.path} has no intact checkpoint"
    if checkpoint is not None:
        end = f"Using {checkpoint.path}, which is intact"
    return checkpoint, [CorruptFileError(f"{error}. {end}") for error in damage]


class RunSnapshots:
    """Stores states as the newest `keep` checkpoints of a locked run directory."""

    def __init__(self, run: RunDirectory, keep: int) -> None:
        self._run, self._keep = run, keep

    def save(self, state: Checkpoint) -> Event:
        """Writes a state; returns its part of the `checkpoint` event."""
        mark = metrics_mark(self._run.metrics_path)
        marked = replace(state, meta={**state.meta, METRICS_KEY: mark})
        path = save_checkpoint(self._run, marked, self._keep)
        return {"path": path.name, "bytes": sum(file.stat().st_size for file in path.iterdir())}

    def last_good(self) -> Checkpoint | None:
        return find_checkpoint(self._run, finite=True)[0]


class MemorySnapshots:
    """Stores the newest finite state of a run without a directory."""

    def __init__(self) -> None:
        self._newest: Checkpoint | None = None

    def save(self, state: Checkpoint) -> Event | None:
        if state.finite:
            own = {
                stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in group.items()}
                for stem, group in state.tensors.items()
            }
            self._newest = replace(state, tensors=own, meta=copy.deepcopy(state.meta))
        return None

    def last_good(self) -> Checkpoint | None:
        return copy.deepcopy(self._newest)  # callbacks may change their tensors


Snapshots = RunSnapshots | MemorySnapshots
"""Where a run stores its state, to go back to it."""


class BestWeights:
    """The weights of the best evaluation.

    If a task publishes at once, these weights are soon in the run directory; memory and checkpoints
    hold them only until they are published. Other tasks need the weights at the end. The last
    publication was at `published_step`, -1 before the first.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.weights: dict[str, Tensor] = {}
        self.published_step = -1
        self._refusal: StorageError | None = None

    def keep(self) -> None:
        own = weights_of(self._trainer.model)
        self.weights = {name: tensor.detach().clone() for name, tensor in own.items()}
        self.published_step = -1  # a roll-back may find a better model at an earlier step
        if self._trainer.task.publishes_at_once:
            self.publish_if_possible()

    def forget(self) -> None:
        """Starts anew: no evaluation is the best so far. Published files stay."""
        progress, first = self._trainer.progress, Progress()
        for name in COUNTERS:
            setattr(progress, name, getattr(first, name))
        self.weights, self.published_step, self._refusal = {}, -1, None

    def restore(self, stored: Mapping[str, Tensor], published_step: int) -> None:
        """Restores the weights of a checkpoint; raises ValueError if they do not fit the model."""
        if stored:
            require_like(weights_of(self._trainer.model), stored, BEST)
        self.weights = {name: tensor.clone() for name, tensor in stored.items()}
        self.published_step = published_step

    def into_model(self) -> None:
        if self.weights:
            self._trainer.model.load_state_dict(self.weights, strict=False)

    def publish(self) -> None:
        """Publishes the weights unless they are published; raises StorageError."""
        trainer, step = self._trainer, self._trainer.progress.best_step
        if self.weights and step != self.published_step:
            trainer.task.publish(self.weights, trainer)
            self.set_published()

    def set_published(self) -> None:
        self.published_step, self._refusal = self._trainer.progress.best_step, None
        if self._trainer.task.publishes_at_once:
            self.weights = {}

    def publish_if_possible(self) -> None:
        """Publishes the weights; warns if the disk refuses, and the next checkpoint tries again."""
        try:
            self.publish()
        except StorageError as error:
            self._refusal = error
            self._trainer.say("warning", f"the best model is not published yet: {error}")

    def require_published(self, saved_step: int) -> None:
        """Raises StorageError if the weights are still not published."""
        if self._refusal is not None:
            raise StorageError(
                f"{self._refusal} The best model (step {self._trainer.progress.best_step}) is not"
                f" published; checkpoint-{saved_step} keeps it, start the run again with"
                " `resume=True` to publish it."
            ) from self._refusal


def _told(world: World, own: Checkpoint | None) -> Checkpoint:
    """Returns the checkpoint of rank 0 in every process."""
    if world.size == 1 and own is not None:
        return own
    groups: Tensors = {} if own is None else own.tensors
    flat = {f"{stem}/{name}": t for stem, group in groups.items() for name, t in group.items()}
    told, flat = world.told(None if own is None else [own.step, own.meta]), world.told_tensors(flat)
    if own is not None:
        return own
    for full_name, tensor in flat.items():
        stem, _, name = full_name.partition("/")
        groups.setdefault(stem, {})[name] = tensor
    return Checkpoint(Path(f"step {told[0]} of rank 0"), told[0], groups, told[1], {}, True)


class Saver:
    """Saves the state of a trainer when it is due, and restores it.

    `saved_step` is the step of the saved state, -1 if it must be saved again.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.saved_step = trainer, -1
        self._every, self._tried_step = trainer.plan.options.checkpoint_every, -1
        self._interval_s, self._tried_s = _FIRST_SAVE_S, time.perf_counter()

    def capture(self) -> tuple[Tensors, dict[str, Any]]:
        """Returns (tensors by file stem, plain values) for a checkpoint."""
        trainer = self._trainer
        trainer.task.gather(trainer.state)
        if trainer.plan.is_local:
            self._average_optimizers()
        trainer.progress.elapsed_s = trainer.elapsed_s()
        tensors, meta = trainer.state.capture(trainer.task.loader.state_dict())
        tensors["optimizer"] = trainer.task.optimizer_tensors(trainer.state)
        own, meta["callbacks"] = trainer.callbacks.capture()
        groups = {**own, BEST: trainer.best.weights}
        tensors.update({stem: group for stem, group in groups.items() if group})
        meta["published_step"] = trainer.best.published_step
        carried, axis = trainer.task.carried(), trainer.task.row_axis
        if trainer.plan.share.size > 1:
            parts = trainer.world.gathered_tensors(carried)
            carried = {n: torch.cat([part[n] for part in parts], axis[n]) for n in carried}
        if carried:
            tensors["carried"] = carried
        return tensors, meta

    def _average_optimizers(self) -> None:
        """Moves the optimizers' state to its mean over the processes: a checkpoint holds one."""
        world, named = self._trainer.world, self._trainer.optimizers.tensors()
        own = [named[name] for name in sorted(named) if named[name].dim() > 0]  # no counters
        num = world.summed(torch.tensor([float(len(own))]))
        if own and float(num) == len(own) * world.size:  # else a process has taken no step yet
            world.average(own)

    def _own_rows(self, carried: dict[str, Tensor]) -> dict[str, Tensor]:
        share, task = self._trainer.plan.share, self._trainer.task
        if share.size == 1:
            return carried
        own, axis = dict[str, Tensor](), task.row_axis
        num_rows = min((t.shape[axis[name]] for name, t in carried.items()), default=0)
        rows = range(num_rows)[share.rows(task.num_lanes)]
        for name, tensor in carried.items():
            each = tensor.shape[axis[name]] // num_rows  # a row may have several cells
            own[name] = tensor.narrow(axis[name], rows.start * each, len(rows) * each).contiguous()
        return own

    def restore(self, own: Checkpoint | None, is_roll_back: bool) -> None:
        """Restores the checkpoint of rank 0; a roll-back keeps the present guard and best weights.
        Raises CorruptFileError: the checkpoint holds invalid values."""
        trainer, checkpoint = self._trainer, _told(self._trainer.world, own)
        tensors, meta = checkpoint.tensors, checkpoint.meta
        with reading(checkpoint):
            trainer.task.loader.load_state_dict(trainer.state.restore(tensors, meta, is_roll_back))
            trainer.task.restore_carried(self._own_rows(tensors.get("carried", {})))
            if not is_roll_back:
                trainer.best.restore(tensors.get(BEST, {}), int(meta.get("published_step", -1)))
            if not isinstance(callbacks := meta.get("callbacks", {}), dict):
                raise TypeError("callbacks is no object")
            if not all(isinstance(state, dict) for state in callbacks.values()):
                raise TypeError("the state of a callback is no object")
        if trainer.world.is_leader:
            trainer.callbacks.restore(tensors, callbacks)
        # After a roll-back the next state has half the learning rate.
        self.saved_step, self._tried_step = -1 if is_roll_back else trainer.progress.step, -1

    def is_due(self) -> bool:
        step = self._trainer.progress.step
        if step == self.saved_step:
            return False
        if self._every is not None:
            return step % self._every == 0 and step != self._tried_step
        return time.perf_counter() - self._tried_s > self._interval_s

    def _note_attempt(self) -> None:
        self._tried_step, self._tried_s = self._trainer.progress.step, time.perf_counter()
        self._interval_s = _SAVE_S if self._tried_step else _FIRST_SAVE_S

    def save_if_possible(self) -> None:
        """Saves the state; warns if the disk refuses, and tries again later."""
        try:
            self.save()
        except (StorageError, CorruptFileError) as error:
            self._note_attempt()
            self._trainer.say("warning", f"checkpoint not written, training continues: {error}")

    def save(self) -> None:
        """Saves the state and publishes the best weights, if not done. Raises StorageError."""
        trainer = self._trainer
        if trainer.task.publishes_at_once:  # first: the checkpoint need not hold the weights then
            trainer.best.publish_if_possible()
        if trainer.world.decided(self.saved_step != trainer.progress.step)[0]:
            self._save()
        if not trainer.task.publishes_at_once:  # last: it may take long
            with trainer.progress.counted("saving"):
                trainer.best.publish_if_possible()

    def save_last(self) -> None:
        """Saves the last state; a task that does not publish at once publishes in `finish`."""
        best, at_once = self._trainer.best, self._trainer.task.publishes_at_once
        if at_once:
            best.publish_if_possible()
        self._save()  # with the last evaluation, even if this step is saved
        if at_once:
            best.require_published(self.saved_step)

    def _save(self) -> None:
        trainer, step = self._trainer, self._trainer.progress.step
        started = time.perf_counter()
        tensors, meta = self.capture()
        if not trainer.world.is_leader:
            self.saved_step = step
            return
        named = (item for stem in _FINITE for item in tensors.get(stem, {}).items())
        bad = first_non_finite(item for item in named if item[0] not in trainer.task.may_be_nan)
        place = Path(f"the state of step {step}")
        state = Checkpoint(place, step, tensors, meta, trainer.task.files(), bad is None)
        about = trainer.snapshots.save(state)
        self.saved_step = step
        self._note_attempt()
        seconds = trainer.meter.save_s = time.perf_counter() - started
        trainer.progress.add("saving", seconds)
        if about is not None:
            trainer.emit({"event": "checkpoint", "step": step, "seconds": seconds, **about})
