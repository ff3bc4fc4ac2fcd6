"""Where the metrics of a run are published: one protocol, one file per target."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fastlstm.errors import MissingExtraError

if TYPE_CHECKING:
    from types import ModuleType

    from fastlstm.monitor.published_rows import PublishedRow

State = Literal["ended", "running", "dead"]


@dataclass(frozen=True)
class PublishedRun:
    """The run that is published.

    Attributes:
        path: its directory.
        identity: 12 hexadecimal digits; the same whenever this run is published.
        name: for people.
        project: the project or experiment that it is listed in.
        began: Unix time of its start; of older runs that of publishing.
    """

    path: Path
    identity: str
    name: str
    project: str
    began: float


class Destination(Protocol):
    """A tracker or a file that takes the rows of one run.

    Attributes:
        is_append_only: gets each row once; else gets all rows so far each time.
        where: where they are, for people; known after `close`.
        next_command: what to type to see them, or empty.
        note: what should be known about them, or empty.
    """

    is_append_only: bool
    where: str
    next_command: str
    note: str

    def open(self, run: PublishedRun) -> int | None:
        """Returns the last step of this run that is published already.

        Raises:
            StorageError: the tracker fails; so do the other methods.
        """

    def describe(self, config: Mapping[str, Any]) -> None:
        """Takes the configuration of the run, again whenever it has changed."""

    def send(self, rows: Sequence[PublishedRow]) -> None:
        """Takes rows by step."""

    def close(self, state: State) -> None:
        """Completes what was sent; returns when it is stored."""


def destination(to: str, out: Path) -> Destination:
    """Returns the destination of a target; `out` is the file of "csv".

    Raises:
        MissingExtraError: the library of the tracker is not installed.
    """
    if to == "wandb":
        from fastlstm.monitor.wandb_run import WandbRun

        return WandbRun()
    if to == "mlflow":
        from fastlstm.monitor.mlflow_run import MLflowRun

        return MLflowRun()
    if to == "trackio":
        from fastlstm.monitor.trackio_run import TrackioRun

        return TrackioRun()
    from fastlstm.monitor.csv_file import CsvFile

    return CsvFile(out)


def tracker_library(name: str) -> ModuleType:
    """Imports the library of a tracker.

    Raises:
        MissingExtraError: it is not installed, or cannot be imported.
    """
    try:
        library = importlib.import_module(name)
        if library.__file__ is not None:  # else a folder, such as the ./wandb that W&B writes
            return library
        why = f"there is only a folder of that name in {', '.join(library.__path__)}"
    except ImportError as error:
        why = str(error)
    raise MissingExtraError(f"--to {name} needs {name} ({why}): pip install 'fastlstm[{name}]'")


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings as one level of "train.seed"; lists stay values."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
