"""`train_forecaster()`: from a table to a trained forecaster, with or without a run directory."""

from __future__ import annotations

import copy
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fastlstm.distributed.joining import joined
from fastlstm.errors import ConfigError, DataError, FormatError, counted
from fastlstm.forecast.calibration import Calibration
from fastlstm.forecast.config import READING, ForecastConfig
from fastlstm.forecast.data.calendar import calendar_names, with_calendar
from fastlstm.forecast.data.dataset import COUNTED, DROPPED, SeriesDataset
from fastlstm.forecast.data.preparation import prepare, require_counts
from fastlstm.forecast.data.records import require_files
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split, split_table
from fastlstm.forecast.data.timeline import ROWS
from fastlstm.forecast.files import (
    SCALER_FILE,
    StoredForecaster,
    forecaster_of,
    read_forecaster,
    read_options,
)
from fastlstm.forecast.linear_plan import choose_by_linear, num_without_logarithm
from fastlstm.forecast.plan import (
    LEARNING_RATES,
    forecast_ends,
    note_of_short_input,
    note_of_short_series,
    training_loader,
    untrained_forecaster,
    with_padding,
)
from fastlstm.forecast.ridge import Ridge, best_ridge, fit_ridges, joint_ridge
from fastlstm.forecast.size_plan import CHOSEN, can_choose_size, choose_size, step_seconds
from fastlstm.forecast.table_schema import apply_schema
from fastlstm.forecast.task import ForecastTask
from fastlstm.ops.call import LSTMCall
from fastlstm.ops.explain import explain
from fastlstm.report.history import read_history
from fastlstm.runs.events import Event, Observer
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.stored_values import checked_values, json_object
from fastlstm.training.callbacks import Callback, RiseStopping, checked_callbacks
from fastlstm.training.checkpoint import Checkpoint, reading
from fastlstm.training.options import MAY_CHANGE
from fastlstm.training.plan import TrainingResult
from fastlstm.training.precision import (
    PrecisionChoice,
    autocast,
    choose_precision,
    notes_on,
    pass_seconds,
    require_fast_kernels,
)
from fastlstm.training.remembered_plan import ChosenPlan, changes, remembered_plan
from fastlstm.training.schedule import StopCriterion, default_evaluations
from fastlstm.training.session import RunSession, Start, locked_run, torch_settings_kept

MakeTask = Callable[..., ForecastTask]
_ROLES = ("target", "past", "future", "static")
_MAY_CHANGE = MAY_CHANGE | {"cache_dir"}
_MAY_DIFFER = _MAY_CHANGE | frozenset(
    {"batch_size", "balance", "learning_rate", "ema", "evaluations", "seed", "precision", "split"}
    | {"optimizer", "weight_decay", "warmup", "cooldown", "grad_clip", "accumulate"}
    | set(READING)
)
"""Fields that training on may change."""


@dataclass(frozen=True)
class Trained:
    """A trained forecaster with the table it was trained on."""

    stored: StoredForecaster
    dataset: SeriesDataset
    inputs: ScaledWindows
    fitted: TrainingResult


@torch_settings_kept()
def train_forecaster(
    frame: Any,
    config: ForecastConfig,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    given: Collection[str] = (),
    observers: Sequence[Observer] = (),
    callbacks: Sequence[Callback] = (),
    stop: Callable[[], bool] | None = None,
    start: StoredForecaster | str | Path | None = None,
    make_task: MakeTask = ForecastTask,
    needs_steps: bool = True,
    ends_early: bool = False,
    began: float | None = None,
) -> Trained:
    """Trains a forecaster on a table.

    Args:
        frame: a path, a frame or an array; see `fastlstm.forecast.data.dataset.open_records`.
        config: the options.
        out: the run directory; None writes nothing.
        resume: continue from the checkpoint in `out`, or start if there is none.
        given: fields of `config` that the user set; a resumed run compares them with its own.
        observers: called with every event, a plain dict.
        callbacks: see `fastlstm.Callback`.
        stop: polled; if it returns True, the state is saved and Stopped is raised.
        start: a forecaster, or a run of one, to continue from, with its columns, scales and sizes;
            `frame` must be like its table. A resumed run needs the run no more; the caller gives it
            the same `StoredForecaster`.
        make_task: makes the task from the arguments of `ForecastTask`.
        needs_steps: see `RunSession`.
        ends_early: end a budget when the loss rises (`RiseStopping`).
        began: `time.perf_counter()` at the start of the budget; default: now.

    Raises:
        UsageError: an unusable option or table.
        Stopped: `stop` returned True.
        NonFiniteError: training did not recover from NaN or Inf.
        BudgetError: the budget ended before the first step.
    """
    began = time.perf_counter() if began is None else began
    own = checked_callbacks(callbacks)
    with ExitStack() as stack:
        world = stack.enter_context(joined(config, stop))
        with world.together():
            require_files(frame)
            origin, is_kept = _origin(start, out, resume)
            if world.size > 1 and (origin or start or make_task is not ForecastTask):
                raise ConfigError(
                    f"compress, partial_fit and `start` run in one process, but {world.size} were"
                    " started; start one, without `nproc` and torchrun"
                )
        run = stack.enter_context(locked_run(out if world.is_leader else None))
        session = _ForecastSession(run, observers, stop, began, world)
        session.needs_steps, session.chosen, session.ends_early = needs_steps, given, ends_early
        session.origin, base = origin, start if isinstance(start, StoredForecaster) else None
        session.is_trained = origin is not None
        if origin is not None and not is_kept:
            base, config = _started_with(origin, config, given)
        with session.start(
            config, given, resume, lambda stored: read_options(stored)[:2], _MAY_CHANGE
        ) as begin:
            if is_kept and begin.checkpoint is not None:
                with reading(begin.checkpoint):
                    base = forecaster_of(begin.checkpoint.files, begin.checkpoint.path)
            return session.train(frame, begin, own, base, make_task)


class _ForecastSession(RunSession):
    """One start of a run: prepares the table, builds the network, trains, evaluates, reports.

    Attributes:
        chosen: names of the options that the user set; the others may be chosen.
        origin: the run that the training continues from, or None.
    """

    chosen: Collection[str] = ()
    ends_early = False
    origin: str | None = None

    def train(
        self,
        frame: Any,
        start: Start[ForecastConfig],
        callbacks: Sequence[Callback],
        base: StoredForecaster | None,
        make_task: MakeTask,
    ) -> Trained:
        config, device, checkpoint = start.options, start.device, start.checkpoint
        require_fast_kernels(config, _layer_call(config, device))
        dataset = self._prepared(frame, config, checkpoint, base)
        is_new = base is None and checkpoint is None
        config, dataset, split = self._divided(config, dataset, is_new)
        config, dataset, linear = self._decided(config, dataset, split, device, is_new)
        if base is None:
            config = self.with_rate(config, LEARNING_RATES)
            stored = untrained_forecaster(config, start.first, dataset, split)
        else:
            first = None if checkpoint is None else start.first
            stored = _continued_from(base, config, first, dataset)
        if checkpoint is not None:
            _require_same_start(stored, checkpoint)
        sizes = stored.network.to(device).config
        choice = self.of_leader(PrecisionChoice, lambda: _precision(stored, dataset, split, device))
        config = dataclasses.replace(stored.config, precision=choice.name)
        stored = dataclasses.replace(stored, config=config)
        inputs = apply_schema(dataset, stored)
        self.check_processes(config)
        share = self.world.share
        loader = training_loader(config, sizes, dataset.table, split, self.loader_stop, share)
        plan = self.plan(config, device, checkpoint, loader.steps_per_epoch, config.eval_every)
        stop_criterion = plan.stop_criterion
        task = make_task(
            self, stored, dataset, split, inputs, loader, device, stop_criterion.budget_s
        )
        task.is_averaged = base is None and sizes.linear
        if is_new and sizes.linear and self.world.is_leader:
            self._set_linear(task, linear)
        spread = config.evaluations or default_evaluations(task, stop_criterion, config.patience)
        plan = dataclasses.replace(plan, evaluations=spread)
        shown, warning = _notes(stored, dataset, split, is_new)
        self.notes += [*shown, *notes_on(choice.name, device, _layer_call(config, device))]
        about = {"source": source_text(frame), "precision_why": start.why(choice)}
        about |= {} if self.origin is None else {"start": self.origin}
        about |= _about(task, stored, dataset)
        own = [RiseStopping()] * (self.ends_early and _may_rise(config, stop_criterion))
        result = self.fit(task, plan, checkpoint, [*callbacks, *own], about, warning)
        return Trained(self._told(task.stored), dataset, inputs, result)

    def _told(self, stored: StoredForecaster) -> StoredForecaster:
        """Returns the forecaster with the weights and the calibration of rank 0."""
        own = {name: t for name, t in vars(stored.calibration).items() if t is not None}
        calibration = Calibration(**self.world.told_tensors(own))
        stored.network.cpu()
        if self.world.size > 1:
            stored.network.load_state_dict(self.world.told_tensors(stored.network.state_dict()))
        return dataclasses.replace(stored, calibration=calibration)

    def _divided(
        self, config: ForecastConfig, dataset: SeriesDataset, is_new: bool
    ) -> tuple[ForecastConfig, SeriesDataset, Split]:
        """Returns the options and the table, of a new run with padding and calendar, and the parts
        of the table."""
        split = split_table(dataset.table, dataset.frequency, config.split)
        if not is_new:
            return config, dataset, split
        config, dataset, note = with_padding(config, dataset, split)
        if note:
            self.notes.append(note)
            split = split_table(dataset.table, dataset.frequency, config.split)
        return config, with_calendar(dataset, config.calendar or ()), split

    def _decided(
        self,
        config: ForecastConfig,
        dataset: SeriesDataset,
        split: Split,
        device: torch.device,
        is_new: bool,
    ) -> tuple[ForecastConfig, SeriesDataset, Ridge | None]:
        """Returns rank 0's options with all that the table and the budget decide, the table with
        the calendar, and the linear path if it is known."""
        linear = None
        if is_new and self.world.is_leader:
            plan = choose_by_linear(config, dataset, split, self.part_of_setup)
            config, dataset, linear, notes = plan
            self.notes += notes
            config = self._with_size(config, dataset, split, device)
        config = self.agreed(config)
        parts = config.calendar or ()
        if is_new and not set(calendar_names(parts)) <= set(dataset.table.columns):
            dataset = with_calendar(dataset, parts)
        return config, dataset, linear

    def _set_linear(self, task: ForecastTask, ridge: Ridge | None) -> None:
        """Sets the weights of the linear path, with a joint part if it has one, and the effects."""
        network, sizes = task.model, task.model.config
        with self.part_of_setup("the linear path"):
            if ridge is None:
                ridge = best_ridge(fit_ridges(network, task.inputs, task.split))
            # Several targets: the path is averaged with the trained LSTM instead.
            is_start = task.stored.config.linear is True or sizes.num_targets == 1
            if ridge.effects is not None:
                network.set_effects(ridge.effects)
            if sizes.has_joint_path:
                ridge = joint_ridge(network, task.inputs, task.split, ridge)
            network.set_linear(ridge, is_start)

    def _with_size(
        self, config: ForecastConfig, dataset: SeriesDataset, split: Split, device: torch.device
    ) -> ForecastConfig:
        """Returns the options with the size that suits the budget."""
        if not can_choose_size(config, self.chosen):
            return config

        def make() -> ChosenPlan:
            sized, why = choose_size(config, dataset, split, self.started, device, self.chosen)
            return ChosenPlan(changes(config, sized), why)

        data = {"table": dataset.key, "chosen": sorted(set(CHOSEN).intersection(self.chosen))}
        budget_s = StopCriterion.of(config, 1).budget_s or 0.0
        left_s = budget_s - (time.perf_counter() - self.started)
        with self.part_of_setup("the plan"):
            plan = remembered_plan(config, data, device, left_s, make)
        self.notes.append(plan.why)
        return dataclasses.replace(config, **plan.changes)

    def _prepared(
        self,
        frame: Any,
        config: ForecastConfig,
        checkpoint: Checkpoint | None,
        base: StoredForecaster | None,
    ) -> SeriesDataset:
        """Returns the table; other processes read it after rank 0."""

        def show(done: int, total: int | None) -> None:
            self.emit({"event": "prepare", "done_bytes": done, "total_bytes": total})

        if base is not None:
            own = {name: getattr(base.config, name) for name in ("calendar", "pad_start")}
            config = dataclasses.replace(config, **own, **base.columns)
        elif checkpoint is None:
            config = dataclasses.replace(config, calendar=None)  # added behind the padding
        like = None if base is None else base.schema.timeline
        with self.world.together():
            is_file = isinstance(frame, str | Path | list | tuple)
            with self.part_of_setup("the table", is_cached=is_file):
                dataset = prepare(frame, config, show, like=like)
            for name in dataset.roles.target:
                if name in dataset.constant:
                    raise DataError(
                        f"the target '{name}' has the same value in every row: there is nothing to"
                        " learn; give another `target`"
                    )
            if checkpoint is not None and read_options(checkpoint)[2] != dataset.key:
                assert self.run is not None
                first = read_history(self.run.metrics_path).start.get("source") or "another table"
                raise FormatError(
                    f"'{self.run.path}' was started with {first}; {source_text(frame)} is another"
                    " table, or has changed since; resume with the same table, or start a new run"
                    " with another `out`"
                )
        self.require_same(dataset.key, f"{source_text(frame)} is another table")
        self.mark()
        if config.output == "negative_binomial":
            require_counts(dataset)
        return dataset


def _notes(
    stored: StoredForecaster, dataset: SeriesDataset, split: Split, is_new: bool
) -> tuple[list[str], str | None]:
    """Returns notes on an input that was shortened and on the table, and a warning about series too
    short to train on or to forecast, rows that were dropped and years that are no time."""
    given, sizes = stored.given, stored.network.config
    warned = [text for text in dataset.repairs if text.startswith((DROPPED, COUNTED))]
    shortened = note_of_short_input(given, sizes, dataset, split) if is_new else None
    notes = [shortened, *(note for note in dataset.notes if note not in warned)]
    ends, short = forecast_ends(dataset, sizes.input_size)
    warnings = [note_of_short_series(given, sizes, dataset, split)]
    what = "leave series out" if len(ends) else "be refused"
    if given.normalize == "log" and (num := num_without_logarithm(dataset)):
        warnings.append(
            f"the target is 0 or less in {counted(num, 'row')}, which have no logarithm and are"
            " read as a little above 0: `normalize='last'` reads them as they are"
        )
    warnings += [short and f"forecasts of this table will {what}: {short}", *warned]
    return list(filter(None, notes)), "; ".join(filter(None, warnings)) or None


def _layer_call(config: ForecastConfig, device: torch.device) -> LSTMCall:
    """Returns an LSTM call with the sizes known before the table is read."""
    T, B, H = config.tbptt or config.horizon, config.batch_size, config.hidden_size
    return LSTMCall(T, B, H, H, torch.float32, device.type, True)


def _may_rise(config: ForecastConfig, stop_criterion: StopCriterion) -> bool:
    """Returns whether a run has a budget, a loss above zero and no patience."""
    has_ratio = config.output in ("point", "quantiles")
    return has_ratio and stop_criterion.budget_s is not None and config.patience == 0


def _about(task: ForecastTask, stored: StoredForecaster, dataset: SeriesDataset) -> Event:
    """Returns the keys of the `start` event that only tables have."""
    config, network = stored.config, stored.network
    sizes = network.config
    steps = (config.tbptt or sizes.input_size) // sizes.patch
    batch = config.batch_size * network.num_channels
    is_named = dataset.roles.time is None or dataset.frequency != ROWS
    with autocast(config.precision, next(network.parameters()).device):
        kernels = [str(line) for line in explain(network.train(), T=steps, B=batch)]
    return {
        "rows": dataset.table.num_rows - dataset.table.padding * len(dataset.series),
        "series": len(dataset.series),
        **{role: list(getattr(dataset.roles, role)) for role in _ROLES},
        "frequency": str(dataset.frequency) if is_named else None,
        "num_units": {"train": task.loader.num_windows, "valid": task.num_valid},
        "model": dataclasses.asdict(sizes),
        **{name: getattr(config, name) for name in ("tbptt", "balance", "dropout")},
        "kernels": kernels,
    }


def _origin(
    start: StoredForecaster | str | Path | None, out: str | Path | None, resume: bool
) -> tuple[str | None, bool]:
    """Returns the path of the run to train on, and whether a checkpoint in `out` has it."""
    if isinstance(start, StoredForecaster):
        return None, False
    origin = None if start is None else os.path.abspath(start)
    if not resume or out is None:
        return origin, False
    before = read_history(Path(out) / "metrics.jsonl").start.get("start")
    is_kept = before is not None and origin in (None, before)
    return origin or before, is_kept and bool(RunDirectory(out).checkpoints())


def _started_with(
    run: str | Path, config: ForecastConfig, chosen: Collection[str]
) -> tuple[StoredForecaster, ForecastConfig]:
    """Returns the forecaster of a run, and the options with what it keeps: its network, its
    columns, and how tables are read. Raises FormatError for a pruned one."""
    stored = read_forecaster(run)
    about = {} if stored.compression is None else stored.compression.about
    if about.get("structured") in ("none", "blocks"):
        raise FormatError(
            f"{run} is pruned, and training on would fill its zeros in; `fastlstm compress {run}"
            " --out NEW --budget 2m` trains on with them kept"
        )
    own = (_MAY_DIFFER - set(READING)) | set(chosen)
    names = {field.name for field in dataclasses.fields(config)} - own
    kept = {name: getattr(stored.given, name) for name in names}
    return dataclasses.replace(stored, compression=None), dataclasses.replace(config, **kept)


def _require_same_start(stored: StoredForecaster, checkpoint: Checkpoint) -> None:
    """Raises FormatError if a resumed run was started with another forecaster, or without one."""
    origin, mean = checkpoint.path / SCALER_FILE, stored.scaler.mean
    with checked_values(origin):
        before = np.asarray(json_object(checkpoint.files[SCALER_FILE], origin)["mean"], float)
    if before.shape != mean.shape or not np.allclose(before, mean, rtol=1e-4):
        raise FormatError(
            f"'{checkpoint.path.parent}' was started with another `start`, or without one; give the"
            " same, or another `out`"
        )


def _continued_from(
    start: StoredForecaster,
    config: ForecastConfig,
    first: ForecastConfig | None,
    dataset: SeriesDataset,
) -> StoredForecaster:
    """Returns a copy of a forecaster with other options, to be trained on another table.

    `first` are the given options of a resumed run; `config` are then its resolved ones. Raises
    ConfigError: an option of the network or its columns changed.
    """
    copied = dataclasses.replace(start, network=copy.deepcopy(start.network), key=dataset.key)
    if first is not None:
        return dataclasses.replace(copied, config=config, given=first)
    changed = changes(start.given, config)
    for name in sorted(changed.keys() - _MAY_DIFFER):
        before = getattr(start.config, name)  # as given or chosen
        if changed[name] == before:
            continue
        raise ConfigError(
            f"`{name}` is {changed[name]!r} and was {before!r} at fit: the network and its"
            f" columns stay; set `{name}` back, or train a new forecaster"
        )
    resolved, given = (dataclasses.replace(c, **changed) for c in (start.config, start.given))
    if given.learning_rate is None:
        resolved = dataclasses.replace(resolved, learning_rate=LEARNING_RATES[resolved.optimizer])
    return dataclasses.replace(copied, config=resolved, given=given)


def _precision(
    stored: StoredForecaster, dataset: SeriesDataset, split: Split, device: torch.device
) -> PrecisionChoice:
    """Returns the precision of the training; `auto` times passes on a CPU, whole steps on a GPU."""
    config, network, sizes = stored.config, stored.network, stored.network.config
    steps = (config.tbptt or sizes.input_size) + sizes.horizon
    columns = sizes.num_targets + sizes.num_past + sizes.num_future
    values = torch.zeros(config.batch_size, steps, columns, device=device)
    statics = torch.zeros(config.batch_size, sizes.num_static, device=device)

    def forward() -> torch.Tensor:
        own = statics if sizes.num_static else None
        parameters = network.read_chunk(values, own)[0] if sizes.stateful else network(values, own)
        return parameters.float().sum()

    about = {"model": dataclasses.asdict(sizes), "batch": [steps, config.batch_size]}

    def seconds(name: Any) -> float:
        if device.type == "cpu":
            return pass_seconds(network, forward, name, device)
        timed = dataclasses.replace(config, precision=name)
        return step_seconds(dataclasses.replace(stored, config=timed), dataset, split, device)

    is_open = config.precision == "auto"
    what: Literal["pass", "step"] = "pass" if device.type == "cpu" else "step"
    return choose_precision(config.precision, device, about, seconds if is_open else None, what)


def source_text(frame: Any) -> str:
    """Returns the name of a table: its paths, or the type of the frame."""
    if isinstance(frame, str | Path):
        return str(frame)
    if isinstance(frame, list | tuple) and all(isinstance(part, str | Path) for part in frame):
        return ", ".join(str(part) for part in frame)
    return f"{type(frame).__module__.split('.')[0]} {type(frame).__name__}"
