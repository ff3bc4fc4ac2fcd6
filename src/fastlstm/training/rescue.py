"""What each process of a run keeps of the last steps, so that the loss of another one costs none.

Weights and optimizers are the same in all processes; only the carried state of its own rows is a
process's alone. So in every step it sends those to the next rank, of several machines to the same
process of the next one. When a process is lost, each of the others writes what it has into
``RUN/.rescue``, without asking anybody, and ends. The next start puts a state together from these
files (`rescued_state`). Of a pipeline nothing is kept: the weights of a lost process are nowhere
else::

    rank            0        1        2        3
    weights         W        W        W        W
    carried state   r0 r3    r1 r0    r2 r1    r3 r2      own, and of the rank before
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.distributed.world import Order
from fastlstm.errors import FastLSTMError, LostProcessError
from fastlstm.runs.manifest import MANIFEST, write_directory
from fastlstm.runs.run_directory import RunDirectory, checkpoint_step
from fastlstm.runs.tensors import encode_tensors
from fastlstm.system import storage
from fastlstm.training.best_weights import STEM as BEST
from fastlstm.training.checkpoint import encoded_state
from fastlstm.training.guard import NonFiniteGuard
from fastlstm.training.state import Progress, Tensors

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

FOLDER = ".rescue"
KEY = "rescue"
"""In the plain values of a rescued state: whose it is."""
_NUM_REPLICAS = 8
"""Ranks that write weights and optimizers; of more processes a shared disk would get too much."""


class Rescue:
    """Keeps what a process knows of the last steps; does nothing where no other has them too: of
    one process, and of local steps.

    Args:
        trainer: whose state it is.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._world = trainer, trainer.plan.step_world
        self._ticks = 0  # steps since this start, skipped ones too
        self._rows: dict[tuple[int, int], bytes] = {}  # by tick and rank
        self._loader: dict[str, int] | None = None  # position after the last whole step
        self._start, self._told = secrets.token_hex(8), ""
        self._note: dict[str, Any] | None = None

    # every step ---------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Sends the carried state of the step that is being taken to the next rank."""
        if self._has_rows():
            own = encode_tensors(self._trainer.task.carried())
            self._rows[self._ticks + 1, self._world.rank] = own
            self._world.begin_copy(own)

    def finish_step(self) -> None:
        """Receives that of the rank before."""
        if self._has_rows():
            source, rows = self._world.finish_copy()
            self._rows[self._ticks + 1, source] = rows

    def stepped(self) -> None:
        """Notes that a step is complete. One rank may be a step ahead of another: two are kept."""
        if self._world.size > 1:
            self._ticks += 1
            self._loader = self._trainer.task.loader.state_dict()
            self._rows = {
                key: rows for key, rows in self._rows.items() if key[0] >= self._ticks - 1
            }

    def forget(self) -> None:
        """Forgets the last steps: the state is another one now."""
        self._rows, self._loader = {}, None

    def _has_rows(self) -> bool:
        return self._world.size > 1 and self._trainer.task.num_lanes > 0

    # what rank 0 alone knows --------------------------------------------------------------------

    def tell(self) -> None:
        """Has rank 0 tell the others what evaluations, checkpoints and bad steps have changed."""
        trainer, progress = self._trainer, self._trainer.progress
        if self._world.size == 1 or trainer.task.pipeline is not None:
            return  # what a stage of a pipeline has is nowhere else
        numbers = (
            progress.evaluations, progress.evaluated_step, progress.best_step, progress.slot,
            progress.scored, progress.lr_scale, trainer.best.published_step,
            trainer.saver.saved_step, asdict(trainer.state.guard),
        )  # fmt: skip
        if (now := json.dumps(numbers)) == self._told:
            return
        self._told = now
        tensors, plain = trainer.callbacks.capture()
        progress.elapsed_s = trainer.elapsed_s()
        self._note = {
            "start": self._start,
            "progress": progress.to_meta(),
            "guard": asdict(trainer.state.guard),
            "callbacks": plain,
            "callback_tensors": tensors,
            "published_step": trainer.best.published_step,
            **_place(trainer.run_path),
        }
        self._world.order(Order.NOTE)
        self._world.shared(self._note)

    def take_note(self) -> None:
        """Takes in what rank 0 tells; between two steps."""
        trainer, best, before = self._trainer, self._trainer.best, self._trainer.progress
        is_first, self._note = self._note is None, self._world.shared()
        assert self._note is not None
        trainer.state.progress = progress = Progress(**self._note["progress"])
        trainer.state.guard = NonFiniteGuard(**self._note["guard"])
        trainer.continue_clock(progress.elapsed_s)
        best.published_step = self._note["published_step"]
        is_published = best.published_step == progress.best_step
        if progress.best_step < 0 or (is_published and trainer.task.publishes_at_once):
            best.weights = {}
        elif progress.best_step == progress.step and progress.best_loss != before.best_loss:
            best.copy_averaged()  # after a roll-back the same step may be the best again
        if is_first and self._note["run"] is not None:
            discard(Path(self._note["run"]))

    # the loss of a process ----------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Writes what this process has where another one is lost in the block."""
        try:
            yield
        except LostProcessError:
            try:
                self._write()
            except (OSError, FastLSTMError) as error:
                self._trainer.say("warning", f"the last steps could not be saved: {error}")
            raise

    def _write(self) -> None:
        note, rank = self._note, self._world.rank
        if note is None or note["run"] is None or self._loader is None:
            return
        if self._trainer.progress.step <= note["base_step"]:
            return  # the checkpoint has it
        tensors, meta = self._replica(note, self._loader) if rank < _NUM_REPLICAS else ({}, {})
        meta[KEY] = {
            "start": note["start"], "base": note["base"], "rank": rank,
            "size": self._world.size, "tick": self._ticks, "has_rows": self._has_rows(),
            "row_axis": dict(self._trainer.task.row_axis),
        }  # fmt: skip
        rows = {f"rows-{t}-{r}.safetensors": rows for (t, r), rows in self._rows.items()}
        is_finite = self._trainer.saver.is_finite(tensors)
        step = self._trainer.progress.step
        contents, manifest = encoded_state(step, tensors, meta, rows, is_finite)
        place = Path(note["run"]) / FOLDER / f"{note['start']}-{rank}"
        place.parent.mkdir(parents=True, exist_ok=True)
        staged = place.with_name(f"{place.name}.tmp")
        write_directory(staged, contents, manifest)
        storage.rename(staged, place)

    def _replica(
        self, note: dict[str, Any], loader: dict[str, int]
    ) -> tuple[Tensors, dict[str, Any]]:
        """Returns all but the carried state, as a checkpoint has it."""
        trainer = self._trainer
        tensors, meta = trainer.saver.capture_own()
        meta["loader"] = loader  # that of now may be a batch further
        if not self._world.is_leader:
            meta["callbacks"] = note["callbacks"]
            tensors.update(note["callback_tensors"])
        if not tensors.get(BEST):
            tensors.pop(BEST, None)
        return tensors, meta


def checkpoint_mark(path: Path) -> str:
    """Returns what identifies a checkpoint: the SHA-256 of its manifest."""
    return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()


def discard(run: Path) -> None:
    """Removes what processes have left in a run directory, and one that has nothing else."""
    if (place := run / FOLDER).is_dir():
        with suppress(OSError):
            storage.remove_tree(place)
            run.rmdir()  # of a machine where rank 0 does not write


def _place(run_path: str | None) -> dict[str, Any]:
    """Returns the run directory and its newest checkpoint, which a rescued state continues."""
    checkpoints = [] if run_path is None else RunDirectory(run_path).checkpoints()
    if run_path is None or not checkpoints:
        return {"run": None}
    step, mark = checkpoint_step(checkpoints[0]), checkpoint_mark(checkpoints[0])
    return {"run": str(Path(run_path).absolute()), "base_step": step, "base": mark}
