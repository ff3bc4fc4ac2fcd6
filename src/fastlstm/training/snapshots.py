"""Where a run keeps its state to go back to: checkpoints on disk, or the memory of the process."""

from __future__ import annotations

import copy
import dataclasses
from typing import Protocol

from fastlstm.runs.events import Event
from fastlstm.runs.manifest import metrics_mark
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.training.checkpoint import Checkpoint, find_checkpoint, save_checkpoint


class Snapshots(Protocol):
    """Keeps states of a run."""

    def save(self, state: Checkpoint) -> Event | None:
        """Keeps a state; returns more of the `checkpoint` event.

        The path of the state is its name in messages.

        Raises:
            StorageError: the disk refused; older checkpoints are intact.
        """
        ...

    def last_good(self) -> Checkpoint | None:
        """Returns the newest state without NaN or Inf."""
        ...


class RunSnapshots:
    """The newest `keep` checkpoints of a locked run directory."""

    def __init__(self, run: RunDirectory, keep: int) -> None:
        self._run, self._keep = run, keep

    def save(self, state: Checkpoint) -> Event:
        meta = {**state.meta, "metrics": metrics_mark(self._run.metrics_path)}
        path = save_checkpoint(
            self._run, state.step, state.tensors, meta, state.files,
            finite=state.finite, keep=self._keep,
        )  # fmt: skip
        return {"path": path.name, "bytes": sum(file.stat().st_size for file in path.iterdir())}

    def last_good(self) -> Checkpoint | None:
        return find_checkpoint(self._run, finite=True)[0]


class MemorySnapshots:
    """The newest finite state of a run without a directory."""

    def __init__(self) -> None:
        self._newest: Checkpoint | None = None

    def save(self, state: Checkpoint) -> None:
        if state.finite:
            own = {
                stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in group.items()}
                for stem, group in state.tensors.items()
            }
            meta = copy.deepcopy(state.meta)
            self._newest = dataclasses.replace(state, tensors=own, meta=meta)

    def last_good(self) -> Checkpoint | None:
        return copy.deepcopy(self._newest)  # callbacks may change their tensors
