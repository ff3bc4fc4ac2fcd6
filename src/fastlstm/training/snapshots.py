"""Where a run keeps its state to go back to: checkpoints on disk, or the memory of the process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Protocol

from fastlstm.runs.events import Event
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.training.checkpoint import (
    Checkpoint,
    find_checkpoint,
    metrics_mark,
    save_checkpoint,
)
from fastlstm.training.state import Tensors


class Snapshots(Protocol):
    """Keeps states of a run."""

    def save(
        self,
        step: int,
        tensors: Tensors,
        meta: dict[str, Any],
        files: dict[str, bytes],
        is_finite: bool,
    ) -> Event | None:
        """Keeps a state; returns what the `checkpoint` event says of it.

        Raises:
            StorageError: the disk refused; older checkpoints are intact.
        """
        ...

    def last_good(self) -> Checkpoint | None:
        """Returns the newest state without NaN or Inf."""
        ...


class RunSnapshots:
    """Checkpoints of a run directory.

    Args:
        run: the locked run directory.
        keep: how many checkpoints to keep.
    """

    def __init__(self, run: RunDirectory, keep: int) -> None:
        self._run, self._keep = run, keep

    def save(
        self,
        step: int,
        tensors: Tensors,
        meta: dict[str, Any],
        files: dict[str, bytes],
        is_finite: bool,
    ) -> Event:
        meta["metrics"] = metrics_mark(self._run.metrics_path)
        path = save_checkpoint(
            self._run, step, tensors, meta, files, finite=is_finite, keep=self._keep
        )
        return {"path": path.name, "bytes": sum(file.stat().st_size for file in path.iterdir())}

    def last_good(self) -> Checkpoint | None:
        return find_checkpoint(self._run, finite=True)[0]


class MemorySnapshots:
    """The newest finite state of a run without a directory."""

    def __init__(self) -> None:
        self._newest: Checkpoint | None = None

    def save(
        self,
        step: int,
        tensors: Tensors,
        meta: dict[str, Any],
        files: dict[str, bytes],
        is_finite: bool,
    ) -> None:
        if is_finite:
            own = {
                stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in group.items()}
                for stem, group in tensors.items()
            }
            place = Path(f"the state of step {step}")
            self._newest = Checkpoint(place, step, own, copy.deepcopy(meta), {}, True)

    def last_good(self) -> Checkpoint | None:
        return copy.deepcopy(self._newest)  # callbacks may go on with what they are given
