"""A run in MLflow: in the store that MLFLOW_TRACKING_URI names, else in MLflow's local one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastlstm.errors import StorageError
from fastlstm.monitor.destination import PublishedRun, State, flat, tracker_library

if TYPE_CHECKING:
    from fastlstm.monitor.published_rows import PublishedRow

_IDENTITY_TAG, _LAST_STEP_TAG = "fastlstm.identity", "fastlstm.last_step"
_MAX_METRICS, _MAX_PARAMS = 800, 100
"""Of one request; MLflow takes 1,000 metrics, params and tags together."""
_MAX_KEY, _MAX_VALUE = 250, 500
"""Characters that every MLflow store takes."""
_STATUS = {"ended": "FINISHED", "dead": "FAILED", "running": "RUNNING"}


class MLflowRun:
    """The MLflow run with a tag that has our identity.

    The last step is a tag too, in the same request as its values, so publishing again goes on
    behind it. A param cannot change: the first value stays. Longer ones are cut; config.json is an
    artifact of the run, as a whole.
    """

    is_append_only = True
    next_command = ""

    def __init__(self) -> None:
        self.where = self.note = ""
        self._mlflow: Any = tracker_library("mlflow")
        self._client: Any = None
        self._id = ""
        self._params: dict[str, str] = {}
        self._last: PublishedRow | None = None

    def open(self, run: PublishedRun) -> int | None:
        mlflow = self._mlflow
        with _mlflow_errors(mlflow):
            uri = mlflow.get_tracking_uri()
            self._client = client = mlflow.MlflowClient()
            experiment = client.get_experiment_by_name(run.project)
            experiment_id = (
                client.create_experiment(run.project)
                if experiment is None
                else experiment.experiment_id
            )
            wanted = f"tags.`{_IDENTITY_TAG}` = '{run.identity}'"
            found = client.search_runs([experiment_id], filter_string=wanted, max_results=1)
            tags = {_IDENTITY_TAG: run.identity, "fastlstm.run": str(run.path.absolute())}
            one = found[0] if found else client.create_run(
                experiment_id, tags=tags, run_name=run.name, start_time=_milliseconds(run.began)
            )  # fmt: skip
        self._id, self._params = one.info.run_id, dict(one.data.params)
        self.where = f"{uri}, experiment {run.project}, run {self._id}"
        if not uri.startswith("http"):
            self.next_command = f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
        last = one.data.tags.get(_LAST_STEP_TAG, "")
        return int(last) if last.isdecimal() else None

    def describe(self, config: Mapping[str, Any]) -> None:
        settings = {_name(key): str(value)[:_MAX_VALUE] for key, value in flat(config).items()}
        changed = [k for k in settings if self._params.get(k, settings[k]) != settings[k]]
        if changed:
            self.note = f"MLflow keeps the first value of a param; changed since: {changed[0]}"
            self.note += f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        new = [(key, value) for key, value in settings.items() if key not in self._params]
        with _mlflow_errors(self._mlflow):
            for at in range(0, len(new), _MAX_PARAMS):
                params = [self._mlflow.entities.Param(*pair) for pair in new[at : at + _MAX_PARAMS]]
                self._client.log_batch(self._id, params=params)
            self._client.log_dict(self._id, dict(config), "config.json")
        self._params.update(new)

    def send(self, rows: Sequence[PublishedRow]) -> None:
        with _mlflow_errors(self._mlflow):
            batch: list[Any] = []
            for at, row in enumerate(rows):
                stamp = _milliseconds(row.time)
                batch += [
                    self._mlflow.entities.Metric(_name(key), value, stamp, row.step)
                    for key, value in row.values.items()
                ]
                if row.sample is not None:
                    name = f"samples/{row.step:08d}.txt"
                    self._client.log_text(self._id, row.sample, name)
                if at == len(rows) - 1 or len(batch) > _MAX_METRICS:
                    self._log(batch, row.step)
                    batch, self._last = [], row

    def _log(self, batch: list[Any], last_step: int) -> None:
        tag = self._mlflow.entities.RunTag(_LAST_STEP_TAG, str(last_step))
        while len(batch) > _MAX_METRICS:  # of one step
            self._client.log_batch(self._id, metrics=batch[:_MAX_METRICS])
            batch = batch[_MAX_METRICS:]
        self._client.log_batch(self._id, metrics=batch, tags=[tag])

    def close(self, state: State) -> None:
        with _mlflow_errors(self._mlflow):
            if state == "running" or self._last is None:
                self._client.update_run(self._id, status=_STATUS[state])
            else:
                end = _milliseconds(self._last.time)
                self._client.set_terminated(self._id, _STATUS[state], end_time=end)


def _milliseconds(seconds: float) -> int:
    return max(round(seconds * 1000), 0)


def _name(key: str) -> str:
    """Returns a key in the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", key, flags=re.ASCII)[:_MAX_KEY]


@contextmanager
def _mlflow_errors(mlflow: Any) -> Iterator[None]:
    try:
        yield
    except (mlflow.exceptions.MlflowException, OSError) as error:
        raise StorageError(f"MLflow: {error}") from error
