"""All runs below some directories, summarised; kept in the user's cache between calls.

The cache is one sqlite3 file. Nothing is written into the directories of runs.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.errors import RunDirectoryError
from fastlstm.monitor.run_summary import RunSummary
from fastlstm.monitor.tune_front import TUNE_FILE
from fastlstm.system.environment import cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FORMAT = 2
_SEARCH_EVERY_S = 10.0
_NOT_SEARCHED = ("checkpoint-", "tensorboard", ".")
_METRICS = "metrics.jsonl"


def find_runs(directories: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Returns the directories at or below some directories that hold a run, and a tune.json."""
    runs, searches = set[str](), set[str]()
    for directory in directories:
        for place, names, files in os.walk(os.path.abspath(directory)):
            names[:] = [name for name in names if not name.startswith(_NOT_SEARCHED)]
            if _METRICS in files:
                runs.add(place)
            if TUNE_FILE in files:
                searches.add(place)
    return [Path(place) for place in sorted(runs)], [Path(place) for place in sorted(searches)]


class RunIndex:
    """The summaries of all runs below some directories.

    Args:
        directories: where to look; runs that appear later are found too.
        cache: file of the cache; by default in the user's cache directory.

    Attributes:
        runs: their summaries.
        searches: directories of `fastlstm tune`.

    Raises:
        RunDirectoryError: a directory does not exist.
    """

    def __init__(self, directories: Sequence[Path], cache: Path | None = None) -> None:
        for directory in directories:
            if not directory.is_dir():
                raise RunDirectoryError(
                    f"{directory}: no such directory; name one that has runs in it"
                )
        self._directories = directories
        self._cache = cache_dir() / "monitor.sqlite" if cache is None else cache
        self.runs: dict[Path, RunSummary] = {}
        self.searches: list[Path] = []
        self._searched_at = -_SEARCH_EVERY_S

    def update(self, show: Callable[[int, int], None] | None = None) -> bool:
        """Reads what was added to the runs; returns whether there was anything new.

        Args:
            show: called with the numbers of runs read and of all while new ones are read.
        """
        changed: list[RunSummary] = []
        now = time.monotonic()
        is_new = False
        if now - self._searched_at >= _SEARCH_EVERY_S:
            self._searched_at = now
            is_new = self._search()
        for at, run in enumerate(list(self.runs.values())):
            if run.update():
                changed.append(run)
            if show is not None:
                show(at + 1, len(self.runs))
        if changed:
            self._store([run for run in changed if is_new or run.end is not None])
        return is_new or bool(changed)

    def _search(self) -> bool:
        paths, self.searches = find_runs(self._directories)
        new = [path for path in paths if path not in self.runs]
        stored = self._stored() if new else {}
        for path in new:
            self.runs[path] = RunSummary(path, stored.get(str(path)))
        gone = set(self.runs) - set(paths)
        for path in gone:
            del self.runs[path]
        return bool(new or gone)

    def _open(self) -> sqlite3.Connection:
        self._cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        database = sqlite3.connect(self._cache, timeout=5.0)
        os.chmod(self._cache, 0o600)
        database.execute(
            f"CREATE TABLE IF NOT EXISTS runs_{_FORMAT} (path TEXT PRIMARY KEY, summary TEXT,"
            " training BLOB, validation BLOB, machine BLOB)"
        )
        return database

    def _stored(self) -> dict[str, Any]:
        """Returns the stored summaries; a damaged cache is removed, one that is locked is not."""
        try:
            with closing(self._open()) as database:
                rows = database.execute(f"SELECT * FROM runs_{_FORMAT}").fetchall()
        except (sqlite3.OperationalError, OSError):
            return {}
        except sqlite3.Error:
            for name in (self._cache.name, f"{self._cache.name}-journal"):
                with suppress(OSError):
                    self._cache.with_name(name).unlink()
            return {}
        return {path: stored for path, *stored in rows}

    def _store(self, runs: Sequence[RunSummary]) -> None:
        rows = [(os.fspath(run.path), *run.stored()) for run in runs]
        command = f"REPLACE INTO runs_{_FORMAT} VALUES (?, ?, ?, ?, ?)"
        with (
            suppress(sqlite3.Error, OSError, UnicodeError),
            closing(self._open()) as database,
            database,
        ):
            database.executemany(command, rows)
