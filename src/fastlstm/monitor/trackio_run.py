"""A run in Trackio's local database."""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastlstm.errors import StorageError
from fastlstm.monitor.destination import PublishedRun, State, tracker_library

if TYPE_CHECKING:
    from fastlstm.monitor.published_rows import PublishedRow


class TrackioRun:
    """The run of Trackio whose id is the identity of ours.

    `trackio.init` finds runs by name, so two runs of one name would become one, and it stamps rows
    with the time of publishing. Its storage, which its own imports write to, takes id and times; an
    id for each row makes it refuse what it has.
    """

    is_append_only = True
    note = ""

    def __init__(self) -> None:
        self.where = self.next_command = ""
        self._storage: Any = tracker_library("trackio").SQLiteStorage
        self._about: PublishedRun | None = None
        self._config: dict[str, Any] = {}

    def open(self, run: PublishedRun) -> int | None:
        self._about = run
        with _trackio_errors():
            self._storage.validate_project_name(run.project)
            self.where = f"{self._storage.get_project_db_path(run.project)}, run {run.name}"
            self.next_command = f"trackio show --project {shlex.quote(run.project)}"
            last = self._storage.get_max_step_for_run(
                run.project, run.name, run_id=run.identity
            )  # fmt: skip
        return None if last is None else int(last)

    def describe(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)

    def send(self, rows: Sequence[PublishedRow]) -> None:
        assert self._about is not None
        samples = [{} if row.sample is None else {"sample": row.sample} for row in rows]
        times = [datetime.fromtimestamp(row.time, UTC).isoformat() for row in rows]
        with _trackio_errors():
            self._storage.bulk_log(
                project=self._about.project, run=self._about.name, run_id=self._about.identity,
                metrics_list=[row.values | text for row, text in zip(rows, samples, strict=True)],
                steps=[row.step for row in rows], timestamps=times, config=self._config,
                log_ids=[f"fastlstm-{self._about.identity}-{row.step}" for row in rows],
            )  # fmt: skip

    def close(self, state: State) -> None:
        """All is stored; Trackio keeps no state of a run."""


@contextmanager
def _trackio_errors() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, ValueError) as error:
        raise StorageError(f"Trackio: {error}") from error
    except (AttributeError, TypeError) as error:
        raise StorageError(
            f"this version of Trackio stores runs in another way ({error}); install 0.43"
        ) from error
