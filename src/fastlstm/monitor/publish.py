"""`fastlstm publish RUN --to wandb|mlflow|trackio|csv`: the metrics of a run for other tools."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.errors import ConfigError, FastLSTMError, RunDirectoryError, Setting
from fastlstm.monitor.destination import Destination, PublishedRun, State, destination
from fastlstm.monitor.event_tail import EventTail
from fastlstm.monitor.published_rows import RowQueue, bounded_time
from fastlstm.report.events import number
from fastlstm.report.history import read_events
from fastlstm.runs.events import event_line
from fastlstm.runs.find_run import require_run
from fastlstm.runs.lock_holder import lock_holder
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.environment import cache_dir, tracker_project
from fastlstm.system.storage import MAX_JSON_BYTES, parse_json, read_bytes

if TYPE_CHECKING:
    from fastlstm.runs.events import Event

TARGETS = ("wandb", "mlflow", "trackio", "csv")
DEFAULT_PROJECT = "fastlstm"
_LOOK_EVERY_S = 1.0
_ROWS_AT_ONCE = 100
_NOT_SETTINGS = ("format", "format_version", "given")
"""Keys of config.json; `given` is what was typed, `train` what came of it."""


@dataclass(frozen=True)
class PublishReport:
    """What was published.

    Attributes:
        run: the run directory.
        to: the target.
        where: the file, or the run in the tracker.
        rows: steps with at least one number or text that were written.
        last_step: the last step that is published, or None.
        state: ended, running, or dead: no process writes it, and it has not ended.
        next_command: what to type to see or upload it, or empty.
        notes: what should be known about it.
    """

    run: str
    to: str
    where: str
    rows: int
    last_step: int | None
    state: State
    next_command: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it for JSON."""
        return asdict(self)


def publish(
    run: str | os.PathLike[str],
    *,
    to: str = "csv",
    out: str | os.PathLike[str] | None = None,
    name: str | None = None,
    project: str | None = None,
    live: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> PublishReport:
    """Publishes the metrics of a run, which may still be training. The run is only read.

    Publishing again repeats nothing: a csv file is written anew as a whole, trackers get the steps
    that they have not.

    Args:
        run: a run directory.
        to: "wandb", "mlflow", "trackio" or "csv".
        out: the file of "csv"; default is RUN.csv beside the run.
        name: of the run in the table or tracker; default is that of its directory. In a tracker
            another name is another run.
        project: of W&B and Trackio, the experiment of MLflow; default is what WANDB_PROJECT or
            MLFLOW_EXPERIMENT_NAME says, else "fastlstm".
        live: follow the run until it ends or dies.
        stop: polled; ends the publication with what is sent.

    Raises:
        ConfigError: another target, or an option that it has not got.
        RunDirectoryError: no run, or one without metrics; another process publishes it there.
        MissingExtraError: the library of the tracker is not installed.
        StorageError: the file cannot be written, or the tracker fails.
    """
    if to not in TARGETS:
        raise ConfigError(Setting("to", to), f": expected one of {', '.join(TARGETS)}")
    _refuse_misplaced(to, out, project)
    directory = RunDirectory(run)
    if not (live and directory.metrics_path.is_file()):  # it may have no checkpoint yet
        require_run(run)
    place = Path(os.path.abspath(directory.path))  # the name of ".." is that of the run
    target = destination(to, place.with_name(f"{place.name}.csv") if out is None else Path(out))
    starts = _first_starts(directory.metrics_path, live, stop)
    start = starts[-1]
    began = bounded_time(number(start, "time") or time.time())
    about = PublishedRun(
        place, _identity(place, start, name), place.name if name is None else name,
        project or tracker_project(to) or DEFAULT_PROJECT, began,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        if target.is_append_only:
            stack.enter_context(_alone(about, to))
        publication = _Publication(about, target, starts)
        state = publication.finish(live, stop)
    if not publication.has_steps or not (target.is_append_only or publication.num_sent):
        raise RunDirectoryError(f"{directory.path} has no metrics to publish: no step was recorded")
    notes = tuple(note for note in (target.note, publication.note) if note)
    rows, last_step = publication.num_sent, publication.last_step
    return PublishReport(
        str(directory.path), to, target.where, rows, last_step, state, target.next_command, notes
    )


class _Publication:
    def __init__(self, run: PublishedRun, target: Destination, starts: list[Event]) -> None:
        self._run, self._target, self._start = run, target, starts[-1]
        self._known = set(map(event_line, starts))
        self._metrics = run.path / "metrics.jsonl"
        self._tail, self._queue = EventTail(self._metrics), RowQueue()
        self._config: dict[str, Any] | None = None
        self._is_open = False
        self.num_sent, self.note = 0, ""
        self.last_step: int | None = None

    @property
    def has_steps(self) -> bool:
        return self._queue.has_steps

    def finish(self, live: bool, stop: Callable[[], bool]) -> State:
        """Sends what there is, or until the run is over, and closes the destination."""
        try:
            looks_without_writer = 0
            while True:
                is_written = lock_holder(self._run.path / ".lock")[0] is True
                self._read()  # after the look: the end is written before the lock is released
                looks_without_writer = 0 if is_written else looks_without_writer + 1
                is_over = self._queue.is_ended or looks_without_writer > (2 if live else 0)
                self._send(is_over, stop)
                if is_over or not live or stop():
                    break
                _sleep(_LOOK_EVERY_S, stop)
            state: State = "ended" if self._queue.is_ended else "dead" if is_over else "running"
        except BaseException:
            with contextlib.suppress(Exception):
                self._close("running")
            raise
        self._close(state)
        return state

    def _close(self, state: State) -> None:
        if self._is_open:
            self._is_open = False
            self._target.close(state)

    def _read(self) -> None:
        is_behind = True
        while is_behind:
            for event in self._tail.read():
                if event.get("event") == "start" and event.get("resumed_from") is None:
                    self._refuse_another(event)
                self._queue.add(event)
            is_behind = self._tail.has_more

    def _refuse_another(self, start: Event) -> None:
        if event_line(start) not in self._known:
            raise RunDirectoryError(
                f"{self._run.path}: another run has begun there while this one was published"
            )

    def _send(self, is_over: bool, stop: Callable[[], bool]) -> None:
        if not self.has_steps:
            return
        if not self._is_open:
            self.last_step = self._target.open(self._run)
            self._is_open = True
        written = _modified(self._metrics)
        went_back_to, last = self._queue.resumed_from, self.last_step
        if not self._target.is_append_only:
            rows = self._queue.rows(written)
            if rows:
                self._target.send(rows)
                self.num_sent, self.last_step = len(rows), rows[-1].step
            return
        rows = self._queue.take(written, with_newest=is_over)
        if last is not None:
            if self.num_sent and went_back_to is not None and went_back_to < last:
                self.note = (
                    f"training went back to step {went_back_to:,}: steps to {last:,} keep what was"
                    " sent before"
                )
            rows = [row for row in rows if row.step > last]
        rows = [row for row in rows if row.values or row.sample is not None]
        if rows:
            self._describe()
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            if stop():
                break
            part = rows[at : at + _ROWS_AT_ONCE]
            self._target.send(part)
            self.num_sent, self.last_step = self.num_sent + len(part), part[-1].step

    def _describe(self) -> None:
        config = _configuration(self._run.path, self._start)
        if config != self._config:
            self._config = config
            self._target.describe(config)


def _refuse_misplaced(to: str, out: object, project: str | None) -> None:
    if out is not None and to != "csv":
        raise ConfigError(
            Setting("out", str(out)),
            f": only csv has a file; {to} writes where its own settings say (docs/publish.md)",
        )
    if project is not None and to == "csv":
        raise ConfigError(Setting("project", project), ": a csv file has no project")


def _first_starts(metrics: Path, live: bool, stop: Callable[[], bool]) -> list[Event]:
    """Returns the `start` events that continue no other, or an empty one. The last is that of the
    run; those before it had no checkpoint. A run that is just starting is awaited."""
    while True:
        events = [event for event, _ in read_events(metrics) if event.get("event") == "start"]
        starts = [event for event in events if event.get("resumed_from") is None] or events[:1]
        if starts or not live or stop() or not lock_holder(metrics.with_name(".lock"))[0]:
            return starts or [{}]
        _sleep(_LOOK_EVERY_S, stop)


def _identity(path: Path, start: Event, name: str | None) -> str:
    """Returns what tells this run from any other, also from a later one in its directory."""
    place = "" if "time" in start else str(path)  # the time is that of older runs no one knows
    text = "\n".join((event_line(start), place, "" if name is None else name))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


@contextlib.contextmanager
def _alone(run: PublishedRun, to: str) -> Any:
    """Keeps a second process from publishing the same run to the same tracker."""
    place = RunDirectory(cache_dir() / "publish" / f"{to}-{run.identity}")
    place.create()
    try:
        lock = place.lock()
    except RunDirectoryError:
        if not lock_holder(place.path / ".lock")[0]:
            raise
        raise RunDirectoryError(
            f"{run.path} is being published to {to} by another process; end that one first"
        ) from None
    with lock:
        yield


def _configuration(path: Path, start: Event) -> dict[str, Any]:
    """Returns config.json, and what is known of the start; that alone before there is a model."""
    begun = {k: v for k, v in start.items() if k not in ("event", "run", "time", "resumed_from")}
    try:
        data = read_bytes(path / "config.json", MAX_JSON_BYTES)
        config = parse_json(data, path / "config.json")
    except FastLSTMError:
        config = None
    config = config if isinstance(config, dict) else {}
    settings = {key: value for key, value in config.items() if key not in _NOT_SETTINGS}
    text = event_line({**settings, "start": begun})
    return dict(json.loads(text.encode("utf-8", "replace")))  # half a surrogate pair: a "?"


def _modified(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return time.time()


def _sleep(seconds: float, stop: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not stop() and time.monotonic() < end:
        time.sleep(0.05)
