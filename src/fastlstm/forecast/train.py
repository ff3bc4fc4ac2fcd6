"""`train_forecaster()`: from a table to a trained forecaster, with or without a run directory."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastlstm.errors import (
    ConfigError,
    DataError,
    FormatError,
    NonFiniteError,
    Setting,
    Stopped,
    UsageError,
)
from fastlstm.forecast.calibration import Calibration, calibrate
from fastlstm.forecast.config import READING, ForecastConfig
from fastlstm.forecast.data.counts import require_counts
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.records import require_files
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split, fit_scaler, split_table
from fastlstm.forecast.data.window_index import WindowIndex
from fastlstm.forecast.evaluation import evaluation_events, num_test_windows
from fastlstm.forecast.files import (
    CONFIG_FILE,
    StoredForecaster,
    description_files,
    forecaster_files,
    stored_configs,
)
from fastlstm.forecast.model.config import ForecasterConfig
from fastlstm.forecast.model.network import ForecastNetwork
from fastlstm.forecast.plan import (
    choose_architecture,
    choose_ending,
    flop_per_window,
    note_of_short_series,
    training_loader,
)
from fastlstm.forecast.table_schema import TableSchema, apply_schema, static_scale
from fastlstm.forecast.trainer import FitPlan, ForecastTrainer, TrainingResult
from fastlstm.ops.dispatch import explain
from fastlstm.report.history import read_history
from fastlstm.runs.events import Event, Observer
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system import hardware
from fastlstm.system.hardware import peak_memory_bytes
from fastlstm.training.checkpoint import Checkpoint, metrics_mark, reading, save_checkpoint
from fastlstm.training.guard import first_non_finite
from fastlstm.training.precision import autocast
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.session import RunSession, resumed, resumed_config, torch_settings_kept

_LEAST_CALIBRATED = 256
"""Validation windows that quantiles are calibrated on, where there are as many, however long: every
level of `LEVELS` needs 199."""
_PUBLISHING_S = 0.5
_ROLES = ("target", "past", "future", "static")
_MAY_CHANGE = frozenset(
    {"steps", "epochs", "budget", "patience", "checkpoint_every", "keep_checkpoints"}
    | {"tensorboard", "threads", "strict_kernels", "cache_dir"}
)
"""Fields that a resumed run may be given anew; the others belong to what was begun."""


_MAY_DIFFER = _MAY_CHANGE | frozenset(
    {"batch_size", "balance", "learning_rate", "ema", "evaluations", "seed", "precision", "split"}
    | set(READING)
)
"""Fields that more training, on another table, may be given anew."""


@dataclass(frozen=True)
class Trained:
    """A trained forecaster with the table it was trained on.

    Attributes:
        stored: what is written to disk.
        dataset: the prepared table.
        split: its parts.
        inputs: its windows as the network takes them.
        fitted: what training did.
    """

    stored: StoredForecaster
    dataset: SeriesDataset
    split: Split
    inputs: ScaledWindows
    fitted: TrainingResult


@dataclass(frozen=True)
class _Closing:
    """What follows training, and its place in a budget.

    Attributes:
        budget_s: the whole.
        num_calibrated: validation windows.
        num_judged: test windows.
        report_s: gives the seconds that the report will take, about.
    """

    budget_s: float
    num_calibrated: int
    num_judged: int
    report_s: Callable[[], float]

    @property
    def calibration_s(self) -> float:
        """Returns the most that the last calibration may take."""
        return 0.1 * self.budget_s

    @property
    def early_calibration_s(self) -> float:
        """Returns the most that a calibration on the way may take."""
        return 0.02 * self.budget_s

    def seconds(self, forecast_s: float) -> float:
        """Returns what all of it takes, about, where a window takes so long to forecast.

        Calibrating and judging take 1.5 and 2.5 times as long (ETTh1, 96 steps of 7 targets).
        """
        calibration_s = min(1.5 * self.num_calibrated * forecast_s, self.calibration_s)
        judging_s = min(2.5 * self.num_judged * forecast_s, 0.15 * self.budget_s)
        return calibration_s + judging_s + self.report_s() + _PUBLISHING_S

    def left_s(self, elapsed_s: float) -> float:
        """Returns the seconds that are left for judging."""
        return self.budget_s - elapsed_s - self.report_s() - _PUBLISHING_S


@torch_settings_kept()
@torch.random.fork_rng(devices=[])  # the caller's random numbers stay as they are
def train_forecaster(
    frame: Any,
    config: ForecastConfig,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    given: Collection[str] = (),
    observers: Sequence[Observer] = (),
    stop: Callable[[], bool] | None = None,
    start: StoredForecaster | None = None,
    began: float | None = None,
) -> Trained:
    """Trains a forecaster on a table.

    Args:
        frame: a path, a frame or an array; see `fastlstm.forecast.data.records.open_records`.
        config: how.
        out: the run directory; None keeps nothing on disk.
        resume: go on if `out` holds a checkpoint, else start.
        given: the fields of `config` that were chosen and are no defaults; a resumed run checks
            them against what it was begun with.
        observers: called with every event, a plain dict.
        stop: polled; when set, the state is saved and Stopped is raised.
        start: a forecaster whose weights and scaler are gone on from; `frame` must be like the
            table it was trained on.
        began: `time.perf_counter()` from which a budget counts; default now.

    Raises:
        UsageError: something given cannot be done as asked.
        Stopped: `stop` said so.
        NonFiniteError: NaN or Inf that training could not get past.
        BudgetError: the budget was over before the first step.
    """
    began = time.perf_counter() if began is None else began
    require_files(frame)
    if out is not None and start is not None:
        raise ConfigError("a run directory cannot go on from another forecaster; leave out start")
    if out is None:
        session = _Session(frame, config, None, list(observers), stop, began)
        return session.train(False, given, start)
    run = RunDirectory(out)
    run.create()
    with ExitStack() as stack:
        stack.enter_context(run.lock())
        try:
            session = _Session(frame, config, run, list(observers), stop, began)
            return session.train(resume, given)
        except UsageError:
            run.remove_if_empty()
            raise


class _Session(RunSession):
    """One start of a run: prepares the table, builds the network, trains, judges, reports."""

    def __init__(
        self,
        frame: Any,
        config: ForecastConfig,
        run: RunDirectory | None,
        observers: list[Observer],
        stop: Callable[[], bool] | None,
        began: float,
    ) -> None:
        super().__init__(
            run or RunDirectory(""), observers, began
        )  # without one nothing is written
        self._frame, self._config, self._stop, self._has_run = frame, config, stop, run is not None
        self._published: tuple[int, Calibration] | None = None  # as it will stay
        self._published_step = -1
        self._closing: _Closing | None = None  # of a run with a budget

    def train(
        self, resume: bool, given: Collection[str], start: StoredForecaster | None = None
    ) -> Trained:
        found = self.find(resume) if self._has_run else None
        first = config = self._config
        if found is not None:
            with reading(found):
                begun, first = stored_configs(found.files[CONFIG_FILE], found.path / CONFIG_FILE)
            self._config = config = resumed_config(config, given, begun, first, _MAY_CHANGE)
        hardware.keep_freed_memory()
        if self._has_run or config.threads is not None:
            self.set_threads(config.threads)
        dataset = self._prepare(config, found, start)
        self.mark()
        if config.output == "negative_binomial":
            require_counts(dataset)
        split = split_table(dataset.table, dataset.frequency, config.split)
        if start is None:
            stored = _untrained(config, first, dataset, split)
        else:
            stored = _gone_on_from(start, config, dataset)
        config, sizes = stored.config, stored.network.config
        inputs = apply_schema(dataset, stored.schema, stored.scaler, stored.static_scale)
        loader = training_loader(config, sizes, dataset.table, split, self._stop)
        valid = split.windows(dataset.table, "valid", sizes.input_size, sizes.horizon)
        ending = self.remaining(found, choose_ending(config, loader.steps_per_epoch))
        plan = _plan(config, sizes, ending)
        if (budget_s := plan.ending.budget_s) is not None:
            num_judged = num_test_windows(dataset, split, sizes) if self._has_run else 0
            self._closing = _Closing(budget_s, len(valid), num_judged, self.report_s)
            plan = dataclasses.replace(plan, closing=self._closing.seconds)
        trainer = ForecastTrainer(
            stored.network, inputs, loader, valid, plan, self.emit, self._stop,
            (lambda t: self._save(t, stored, valid)) if self._has_run else None,
            self.began, self.watch("evaluating", "windows"),
        )  # fmt: skip
        with self.outputs(found, config.tensorboard) if self._has_run else nullcontext():
            self._announce(stored, dataset, plan, (loader.num_windows, len(valid)), found)
            for note in (*self.notes, *dataset.notes):
                self.say("info", note)
            short = note_of_short_series(config, sizes, dataset, split)
            if short is not None:
                self.say("warning", short)
            return self._run(trainer, stored, dataset, split, valid, found)

    def _run(
        self,
        trainer: ForecastTrainer,
        stored: StoredForecaster,
        dataset: SeriesDataset,
        split: Split,
        valid: WindowIndex,
        found: Checkpoint | None,
    ) -> Trained:
        """Trains, calibrates and, where there is a run directory, publishes and judges."""
        try:
            fitted = trainer.train(found)
            with trainer.progress.counted("calibration"):
                best = self._calibrated(stored, fitted.best_step, trainer.inputs, valid)
            trained = Trained(best, dataset, split, trainer.inputs, fitted)
            if self._has_run:
                with trainer.progress.counted("saving"):
                    self.run.publish(forecaster_files(best))
                self._judge(trained, trainer)
        except Stopped:
            self._stopped(trainer)
        except NonFiniteError:
            if self._has_run and trainer.progress.best_step >= 0:
                self._try(lambda: self._publish_best(trainer, stored, valid))
            raise
        return trained

    def _calibrated(
        self, stored: StoredForecaster, best_step: int, inputs: ScaledWindows, valid: WindowIndex
    ) -> StoredForecaster:
        if self._published is not None and self._published[0] == best_step:
            calibration = self._published[1]
        elif self._closing is None:
            calibration = calibrate(stored.network, inputs, valid, show=self._shows_calibration())
        else:
            calibration, read, of = self._calibrate_for(
                self._closing.calibration_s, stored.network, inputs, valid
            )
            if read < of:
                part = f"{read:,} of {of:,} validation windows"
                text = f"quantiles are calibrated on {part}: more would not fit the budget"
                self.say("info", text)
        stored = dataclasses.replace(stored, calibration=calibration)
        missing = stored.unsupported((0.025, 0.1, 0.9, 0.975))
        if missing is not None:
            self.say("info", missing)
        return stored

    def _shows_calibration(self) -> Callable[[int, int], None]:
        return self.watch("calibrating quantiles", "windows")

    def _calibrate_for(
        self, limit_s: float, network: ForecastNetwork, inputs: ScaledWindows, valid: WindowIndex
    ) -> tuple[Calibration, int, int]:
        """Returns a calibration that takes so long at most, on how many windows, of how many."""
        started, read, of = time.perf_counter(), 0, 0
        show = self._shows_calibration()

        def should_continue(done: int, total: int) -> bool:
            nonlocal read, of
            read, of = done, total
            show(done, total)
            return time.perf_counter() - started < limit_s or done < _LEAST_CALIBRATED

        calibration = calibrate(network, inputs, valid, should_continue)
        return calibration, read, of

    def _prepare(
        self, config: ForecastConfig, found: Checkpoint | None, start: StoredForecaster | None
    ) -> SeriesDataset:
        dataset = prepare(
            self._frame,
            config,
            lambda done, total: self.emit(
                {"event": "prepare", "done_bytes": done, "total_bytes": total}
            ),
            like=None if start is None else start.schema.timeline,
        )
        for name in dataset.roles.target:
            if name in dataset.constant:
                raise DataError(
                    f"the target '{name}' is the same in every row; there is nothing to learn, name"
                    " another with ",
                    Setting("target", ...),
                )
        if found is not None and _key_of(found) != dataset.key:
            begun = read_history(self.run.metrics_path).start.get("source") or "another table"
            raise FormatError(
                f"'{self.run.path}' was started with {begun}, as it was then, and"
                f" {_source_text(self._frame)} differs from it; resume with the same table, or"
                " start a new run with another ",
                Setting("out"),
            )
        return dataset

    # files --------------------------------------------------------------------------------------

    def _save(self, trainer: ForecastTrainer, stored: StoredForecaster, valid: Any) -> None:
        """Writes a checkpoint, and publishes the best weights so far if they are new.

        At the end they are calibrated first.
        """
        self._checkpoint(trainer, stored)
        if not trainer.is_over:
            self._publish_best(trainer, stored, valid)

    def _publish_best(
        self, trainer: ForecastTrainer, stored: StoredForecaster, valid: WindowIndex
    ) -> None:
        best_step = trainer.progress.best_step
        if best_step <= self._published_step:
            return
        with trainer.best_weights() as network:
            if self._closing is None:
                show = self._shows_calibration()
                calibration = calibrate(network, trainer.inputs, valid, show=show)
                self._published = best_step, calibration
            else:  # of a budget a rough one; the last one takes its place
                limit_s = self._closing.early_calibration_s
                calibration, *_ = self._calibrate_for(limit_s, network, trainer.inputs, valid)
            best = dataclasses.replace(stored, calibration=calibration)
            self.run.publish(forecaster_files(best))
        self._published_step = best_step

    def _checkpoint(self, trainer: ForecastTrainer, stored: StoredForecaster) -> None:
        tensors, meta = trainer.capture()
        meta["metrics"] = metrics_mark(self.run.metrics_path)
        files = description_files(stored)
        named = ((f"{s} {n}", t) for s, group in tensors.items() for n, t in group.items())
        path = save_checkpoint(
            self.run,
            trainer.progress.step,
            tensors,
            meta,
            files,
            finite=first_non_finite(named) is None,
            keep=stored.config.keep_checkpoints,
        )
        size = sum(file.stat().st_size for file in path.iterdir())
        about = {"step": trainer.progress.step, "path": path.name, "bytes": size}
        self.emit({"event": "checkpoint", **about})

    def _stopped(self, trainer: ForecastTrainer) -> None:
        if not self._has_run:
            raise Stopped("stopped while training")
        name = getattr(self._stop, "name", "request")
        self.emit({"event": "end", "reason": f"stopped by {name}", **self._totals(trainer)})
        raise Stopped(
            f"stopped by {name}; checkpoint-{trainer.progress.step} is saved, the same command"
            " with ",
            Setting("resume", True),
            " goes on",
        )

    # events -------------------------------------------------------------------------------------

    def _judge(self, trained: Trained, trainer: ForecastTrainer) -> None:
        """Says how good the forecasts of the test part are, beside naive ones, and ends the run.

        Raises:
            Stopped: `stop` said so.
        """
        self.say("info", "judging the forecasts of the test part")
        show, closing = self.watch("judging the test part", "windows"), self._closing

        def should_continue(done: int, total: int) -> bool:
            show(done, total)
            if self._stop is not None and self._stop():
                raise Stopped("stopped while judging")
            return closing is None or closing.left_s(trainer.elapsed_s()) > 0.0

        parts = trained.stored, trained.dataset, trained.split, trained.inputs
        about: Event = {}
        with trainer.progress.counted("judging"):
            for event in evaluation_events(*parts, should_continue):
                self.emit(event)
                if event["event"] == "test":
                    about = self._test_error(event)
        totals = self._totals(trainer)
        self.emit({"event": "end", "reason": trained.fitted.reason, **totals, **about})

    def _test_error(self, test: Event) -> Event:
        """Returns what the end says of the test part, and says where not all of it was judged."""
        if test["windows"] < test["of_windows"] and self._closing is not None:
            part = f"{test['windows']:,} of {test['of_windows']:,} windows"
            text = f"judged on {part}, evenly spread: all would not fit the budget"
            self.say("info", f"{text}; 'fastlstm evaluate RUN DATA' judges all")
        measure = "mse" if self._config.loss == "mse" else "mae"
        errors = {who: found[measure] for who, found in test["scores"].items()}
        return {"test_error": {"measure": measure, **errors}}

    def _totals(self, trainer: ForecastTrainer) -> Event:
        progress = trainer.progress
        return {
            "step": progress.step,
            "windows": progress.tokens,
            "elapsed_s": trainer.elapsed_s(),
            "train_s": progress.train_s,
            "spent_s": dict(progress.spent),
            "best_step": progress.best_step,
            "best_loss": progress.best_loss,
            "measure": self._config.loss if self._config.output == "point" else "loss",
            "peak_memory_bytes": peak_memory_bytes(torch.device("cpu")),
            "run": str(self.run.path),
            "task": "forecast",
        }

    def _announce(
        self,
        stored: StoredForecaster,
        dataset: SeriesDataset,
        plan: FitPlan,
        windows: tuple[int, int],
        found: Checkpoint | None,
    ) -> None:
        config, network = stored.config, stored.network
        sizes = network.config
        steps = (config.tbptt or sizes.input_size) // sizes.patch
        batch = config.batch_size * network.num_channels
        with autocast(config.precision, torch.device("cpu")):
            kernels = [str(line) for line in explain(network.train(), T=steps, B=batch)]
        self.emit(
            {
                "event": "start",
                "task": "forecast",
                "run": str(self.run.path) if self._has_run else None,
                "source": _source_text(self._frame),
                "rows": dataset.table.num_rows,
                "series": len(dataset.series),
                **{role: list(getattr(dataset.roles, role)) for role in _ROLES},
                "frequency": str(dataset.frequency),
                "train_windows": windows[0],
                "valid_windows": windows[1],
                "device": "cpu",
                "precision": config.precision,
                "model": dataclasses.asdict(sizes),
                "num_parameters": sum(p.numel() for p in network.parameters()),
                "flop_per_window": flop_per_window(sizes),
                **(self.ceiling(config.precision) if self._has_run else {}),
                "threads": torch.get_num_threads(),
                "batch_size": config.batch_size,
                "tbptt": config.tbptt,
                "balance": config.balance,
                "optimizer": plan.optimizer,
                "learning_rate": config.learning_rate,
                "dropout": config.dropout,
                "seed": config.seed,
                "kernels": kernels,
                "end": plan.ending.text,
                **resumed(found),
            }
        )


def _untrained(
    config: ForecastConfig, given: ForecastConfig, dataset: SeriesDataset, split: Split
) -> StoredForecaster:
    """Returns a forecaster for a table with every choice made and weights drawn."""
    sizes = choose_architecture(config, dataset, split)
    config = dataclasses.replace(config, input_size=sizes.input_size, patch=sizes.patch)
    columns = dataset.table.columns
    unscaled = [columns.index(name) for name in dataset.roles.categorical if name in columns]
    if config.output == "negative_binomial":
        unscaled += range(sizes.num_targets)
    torch.default_generator.manual_seed(config.seed)
    network = ForecastNetwork(sizes)
    network.lstm.strict = config.strict_kernels
    return StoredForecaster(
        config, given, network, fit_scaler(dataset.table, split.train_ends, unscaled),
        Calibration.none(sizes), static_scale(dataset), TableSchema.of(dataset, sizes.has_missing),
        dataset.key,
    )  # fmt: skip


def _plan(config: ForecastConfig, sizes: ForecasterConfig, ending: StopCriterion) -> FitPlan:
    per_step = config.batch_size * (config.tbptt or sizes.input_size) / sizes.input_size
    return FitPlan(
        ending, config.learning_rate, per_step, ema=config.ema,
        patience=config.patience, evaluations=config.evaluations, precision=config.precision,
        checkpoint_every=config.checkpoint_every, seed=config.seed,
    )  # fmt: skip


def _gone_on_from(
    start: StoredForecaster, config: ForecastConfig, dataset: SeriesDataset
) -> StoredForecaster:
    """Returns a forecaster whose weights may change while those of `start` stay."""
    changed = _set_since(start, config)
    begun, given = (dataclasses.replace(one, **changed) for one in (start.config, start.given))
    network = copy.deepcopy(start.network)
    return dataclasses.replace(start, config=begun, given=given, network=network, key=dataset.key)


def _set_since(start: StoredForecaster, config: ForecastConfig) -> dict[str, Any]:
    """Returns the fields that were given another value than at fit.

    Raises:
        ConfigError: one that the network or its columns were made by.
    """
    now, then = dataclasses.asdict(config), dataclasses.asdict(start.given)
    changed = {name: value for name, value in now.items() if value != then[name]}
    for name in sorted(changed.keys() - _MAY_DIFFER):
        raise ConfigError(
            f"{name} is {changed[name]!r} and was {then[name]!r} at fit: partial_fit goes on with"
            f" that network; set {name} back, or call fit"
        )
    return changed


def _key_of(found: Checkpoint) -> object:
    """Returns the key of the table that a run was begun with."""
    with reading(found):
        return json.loads(found.files[CONFIG_FILE])["data"]["key"]


def _source_text(frame: Any) -> str:
    """Returns what to call a table: its paths, or the kind of frame."""
    if isinstance(frame, str | Path):
        return str(frame)
    if isinstance(frame, list | tuple) and all(isinstance(part, str | Path) for part in frame):
        return ", ".join(str(part) for part in frame)
    return f"{type(frame).__module__.split('.')[0]} {type(frame).__name__}"
