"""A run in Weights & Biases: online where a key is configured, else files for `wandb sync`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.errors import ConfigError, FastLSTMError, StorageError
from fastlstm.monitor.destination import PublishedRun, State, tracker_library
from fastlstm.system.storage import read_json, write_json

if TYPE_CHECKING:
    from fastlstm.monitor.published_rows import PublishedRow

_SENT_FILE = "fastlstm-published.json"


class WandbRun:
    """The run of W&B whose id is the identity of ours.

    W&B drops what comes for an older step, so steps that were sent once are not sent again. Offline
    each publication that has new steps is one more directory of the same run; the last step sent is
    kept in a file of ours beside W&B's own.
    """

    is_append_only = True

    def __init__(self) -> None:
        self.where = self.next_command = self.note = ""
        self._wandb: Any = tracker_library("wandb")
        self._run: Any = None
        self._about: PublishedRun | None = None
        self._config: dict[str, Any] = {}
        self._is_offline = False

    def open(self, run: PublishedRun) -> int | None:
        self._about = run
        with _wandb_errors(self._wandb):
            settings = self._wandb.setup().settings
            if settings.mode == "disabled":
                raise ConfigError("WANDB_MODE is disabled, expected online or offline")
            self._is_offline = settings.mode == "offline"
            if settings.mode == "online" and not self._wandb.login(prompt=False, verify=False):
                self._is_offline = True
                self.note = "no W&B key is configured, so the run is written for `wandb sync`"
            if self._is_offline:
                self.where = str(settings.wandb_dir)
                return _last_sent(Path(settings.wandb_dir), run.identity)
            self._begin()
        return self._run.step - 1 if self._run.resumed and self._run.step else None

    def describe(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        if self._run is not None:
            with _wandb_errors(self._wandb):
                self._run.config.update(self._config, allow_val_change=True)

    def send(self, rows: Sequence[PublishedRow]) -> None:
        with _wandb_errors(self._wandb):
            if self._run is None:
                self._begin()
            for row in rows:
                values: dict[str, Any] = {**row.values, "_timestamp": row.time}
                if row.sample is not None:
                    values["sample"] = row.sample
                self._run.log(values, step=row.step, commit=True)
        if rows and self._is_offline:
            write_json(Path(self.where) / _SENT_FILE, {"last_step": rows[-1].step})

    def close(self, state: State) -> None:
        if self._run is not None:
            with _wandb_errors(self._wandb):
                self._run.finish(exit_code=int(state == "dead"))

    def _begin(self) -> None:
        assert self._about is not None
        settings = self._wandb.Settings(
            silent=True, console="off", x_disable_stats=True, x_disable_meta=True,
            x_save_requirements=False, disable_git=True, save_code=False,
        )  # fmt: skip
        self._run = self._wandb.init(
            id=self._about.identity, name=self._about.name, project=self._about.project,
            config=self._config, resume="allow", settings=settings,
            mode="offline" if self._is_offline else None,
        )  # fmt: skip
        if self._is_offline:
            self.where = str(Path(self._run.dir).parent)
            self.next_command = f"wandb sync {shlex.quote(self.where)}"
        else:
            self.where = str(self._run.url)


def _last_sent(directory: Path, identity: str) -> int | None:
    """Returns the last step in the offline directories of a run, or None.

    Of two in the same second W&B gives the later one a name that ends in "-1".
    """
    steps = []
    for path in directory.glob(f"offline-run-*-{identity}*/{_SENT_FILE}"):
        try:
            stored = read_json(path)
        except FastLSTMError:
            continue
        step = stored.get("last_step") if isinstance(stored, dict) else None
        steps += [step] if isinstance(step, int) else []
    return max(steps, default=None)


@contextmanager
def _wandb_errors(wandb: Any) -> Iterator[None]:
    try:
        yield
    except FastLSTMError:
        raise
    except (wandb.Error, OSError, ValueError) as error:
        raise StorageError(f"W&B: {error}") from error
