"""Trackers as callbacks: W&B, MLflow and Trackio receive the figures of a run."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import queue
import re
import secrets
import shlex
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fastlstm.errors import CorruptFileError, MissingExtraError
from fastlstm.report.events import number, text_of
from fastlstm.system import environment
from fastlstm.system.redaction import redacted
from fastlstm.training.callbacks import Callback

if TYPE_CHECKING:
    from fastlstm.runs.events import Event
    from fastlstm.training.trainer import Trainer

Row = dict[str, float | str]
_MAX_WAITING = 10_000
_CLOSE_S = 30.0
"""Limit for sending the waiting rows at the end of a run."""
_INIT_S = 60.0
"""Limit for the answer of W&B's server, also at the end of the process."""
_TAG = "fastlstm.id"
_MAX_PARAMS, _MAX_KEY, _MAX_VALUE = 100, 250, 500
"""Params per request and characters of a key and a value: limits of MLflow's stores."""


class TrackerLogger(Callback):
    """Base of the loggers: a thread sends rows to the tracker, so that training never waits.

    A row holds the figures of a `step`, `eval` or `end` event, or a sample. After an error of the
    tracker, or with 10,000 waiting rows, the logger warns once and stops. Resumed runs keep their
    id.

    Args:
        project: project of W&B and Trackio, experiment of MLflow; default is WANDB_PROJECT or
            MLFLOW_EXPERIMENT_NAME, else "fastlstm".
        name: name of the run in the tracker; default is the name of the run directory.

    Raises:
        MissingExtraError: the package of the tracker is not installed.
    """

    package: ClassVar[str]

    def __init__(self, project: str | None = None, name: str | None = None) -> None:
        _package(self.package)
        self._project, self._name = project, name
        self._id, self._is_resumed, self._failure, self._where = "", False, "", ""
        self._thread: threading.Thread | None = None

    def on_begin(self, trainer: Trainer) -> None:
        self._id = self._id or secrets.token_hex(6)
        self._rows = queue.Queue[tuple[int, Row] | None](_MAX_WAITING)
        self._failure, self._is_told, self._where, self._end = "", False, "", ""
        work = functools.partial(self._work, trainer.run_path, _configuration(trainer))
        self._thread = threading.Thread(target=work, name=type(self).__name__, daemon=True)
        self._thread.start()

    def on_event(self, trainer: Trainer, event: Event) -> None:
        self._tell(trainer)
        if event.get("event") == "end":
            self._end = text_of(event, "reason")
        row, step = _row(event), number(event, "step")
        if self._thread is None or self._failure or not row or step is None:
            return
        try:
            self._rows.put_nowait((int(step), row))
        except queue.Full:
            self._fail(f"{_MAX_WAITING:,} rows wait for it")

    def on_end(self, trainer: Trainer) -> None:
        if self._thread is None:
            return
        deadline = time.monotonic() + _CLOSE_S
        with suppress(queue.Full):
            self._rows.put(None, timeout=0.0 if self._failure else _CLOSE_S)
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive() and not self._failure:
            self._failure = f"had not sent everything {_CLOSE_S:g} s after the end of the run"
        self._tell(trainer)
        self._thread, self._id, self._is_resumed = None, "", False

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = state.get("id")
        if not isinstance(found, str) or not re.fullmatch("[0-9a-f]{12}", found):
            raise CorruptFileError(
                f"the checkpoint has {found!r:.80} as the id of {type(self).__name__}, expected 12"
                " hexadecimal digits; continue from another checkpoint or start a new run"
            )
        self._id, self._is_resumed = found, True

    def _tell(self, trainer: Trainer) -> None:
        name, where = type(self).__name__, self._where
        if where and not self._failure:
            self._where = ""
            trainer.say("info", redacted(f"{name}: {where}"))
        if self._failure and not self._is_told:
            self._is_told = True
            trainer.say("warning", f"{name} {self._failure}")

    def _work(self, run: str | None, configuration: Row) -> None:
        try:
            name = self._name or (None if run is None else Path(run).absolute().name)
            project = self._project or environment.tracker_project(self.package) or "fastlstm"
            self._where = self._open(_package(self.package), project, name, configuration)
            while (row := self._rows.get()) is not None:
                self._log(*row)
            self._close()
        except Exception as error:  # whatever a tracker raises
            text = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
            self._fail(textwrap.shorten(redacted(text).removesuffix(": "), 200, placeholder=" …"))

    def _fail(self, why: str) -> None:
        self._failure = f"stopped: {why}; the run continues without it"

    def _open(self, library: Any, project: str, name: str | None, configuration: Row) -> str:
        """Starts or continues the run; returns its place, or the command that shows it."""
        raise NotImplementedError

    def _log(self, step: int, row: Row) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        """Ends the run; `_end` is the reason, empty after an error."""
        raise NotImplementedError


class WandbLogger(TrackerLogger):
    """Logs a run to W&B: online if a key is configured, else to files for `wandb sync`.

    Example:
        ```python
        fastlstm.train("book.txt", callbacks=[fastlstm.WandbLogger(project="books")])
        ```
    """

    package = "wandb"

    def _open(self, library: Any, project: str, name: str | None, configuration: Row) -> str:
        mode = library.setup().settings.mode
        if mode == "online" and not library.login(prompt=False, verify=False):
            mode = "offline"
        settings = library.Settings(
            silent=True, console="off", x_disable_stats=True, x_disable_meta=True,
            x_save_requirements=False, disable_git=True, save_code=False,
            init_timeout=_INIT_S,
        )  # fmt: skip
        self._run = library.init(
            id=self._id, name=name, project=project, config=configuration, resume="allow",
            mode=mode, settings=settings, reinit="create_new",
        )  # fmt: skip
        # A resumed run repeats steps, and W&B drops what comes for an older step of its own count.
        self._run.define_metric("*", step_metric="step")
        offline = f"wandb sync {shlex.quote(str(Path(self._run.dir).parent))}"
        return offline if mode == "offline" else str(self._run.url)

    def _log(self, step: int, row: Row) -> None:
        self._run.log({**row, "step": step})

    def _close(self) -> None:
        self._run.finish(exit_code=0 if self._end else 1)


class MlflowLogger(TrackerLogger):
    """Logs a run to MLflow, at MLFLOW_TRACKING_URI or in its local store."""

    package = "mlflow"

    def _open(self, library: Any, project: str, name: str | None, configuration: Row) -> str:
        self._entities, self._client = library.entities, library.MlflowClient()
        experiment = self._client.get_experiment_by_name(project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(project)
        wanted = f"tags.`{_TAG}` = '{self._id}'"
        found = self._client.search_runs([place], wanted) if self._is_resumed else []
        one = found[0] if found else self._client.create_run(
            place, tags={_TAG: self._id}, run_name=name
        )  # fmt: skip
        self._run = one.info.run_id
        where = f"{library.get_tracking_uri()}, experiment {project}, run {self._run}"
        if found:  # keep its params, which MLflow does not change
            self._client.update_run(self._run, "RUNNING")
            return where
        pairs = [(key, str(value)[:_MAX_VALUE]) for key, value in configuration.items()]
        for at in range(0, len(pairs), _MAX_PARAMS):
            params = [self._entities.Param(*pair) for pair in pairs[at : at + _MAX_PARAMS]]
            self._client.log_batch(self._run, params=params)
        return where

    def _log(self, step: int, row: Row) -> None:
        now, figures = int(1000 * time.time()), []
        for key, value in row.items():
            if isinstance(value, str):
                self._client.log_text(self._run, value, f"samples/{step:08d}.txt")
            else:
                name = re.sub(r"[^\w\-. :/]", "_", key, flags=re.ASCII)[:_MAX_KEY]
                figures.append(self._entities.Metric(name, value, now, step))
        self._client.log_batch(self._run, metrics=figures)

    def _close(self) -> None:
        is_stopped = self._end.startswith("stopped")
        status = "KILLED" if is_stopped else "FINISHED" if self._end else "FAILED"
        self._client.set_terminated(self._run, status)


class TrackioLogger(TrackerLogger):
    """Logs a run to Trackio, in its local database or at TRACKIO_SPACE_ID."""

    package = "trackio"

    def _open(self, library: Any, project: str, name: str | None, configuration: Row) -> str:
        self._run = library.init(
            project=project, name=f"{name or 'run'}-{self._id[:6]}",  # Trackio finds runs by name
            config=configuration, resume="allow", embed=False, auto_log_cpu=False,
            auto_log_gpu=False,
        )  # fmt: skip
        return f"trackio show --project {shlex.quote(project)}"

    def _log(self, step: int, row: Row) -> None:
        self._run.log(row, step=step)

    def _close(self) -> None:
        self._run.finish()


LOGGERS = {kind.package: kind for kind in (WandbLogger, MlflowLogger, TrackioLogger)}
"""The loggers by the name of their tracker."""


def _package(name: str) -> Any:
    """Imports the package of a tracker and keeps it from writing to standard output."""
    environment.quiet("mlflow")
    try:
        library = importlib.import_module(name)
        if library.__file__ is None:  # such as the directory ./wandb of earlier runs
            raise ImportError(f"{', '.join(library.__path__)} is only a folder of that name")
    except ImportError as error:
        raise MissingExtraError(
            f"{name} cannot be imported ({error}): pip install 'fastlstm[{name}]'"
        ) from error
    if name == "trackio":
        for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == name]:
            module.print = lambda *_, **__: None  # type: ignore[attr-defined]
    return library


def _configuration(trainer: Trainer) -> Row:
    options = dataclasses.asdict(trainer.plan.options)
    options |= {"run": trainer.run_path, "task": trainer.task.name}
    options["num_parameters"] = sum(weight.numel() for weight in trainer.model.parameters())
    return {
        key: value if isinstance(value, int | float) else redacted(str(value))
        for key, value in options.items()
        if value is not None
    }


def _row(event: Event) -> Row:
    """Returns the row of an event, without secrets."""
    kind = event.get("event")
    if kind == "sample":
        return {"sample": redacted(str(event.get("text")))}
    if kind not in ("step", "eval", "end"):
        return {}
    group = {"step": "train", "end": "end"}.get(kind) or text_of(event, "split") or "valid"
    figures = {key: number(event, key) for key in event if key != "step"}
    return {f"{group}/{key}": value for key, value in figures.items() if value is not None}
