"""`Forecaster`: from a table to forecasts, in the manner of scikit-learn."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from fastlstm.errors import ConfigError, DataError, counted, kind_of_value
from fastlstm.estimator import Estimator, signature_of, warn
from fastlstm.forecast.calibration import calibrate, require_known
from fastlstm.forecast.config import READING, ForecastConfig, split_of
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.error_measures import QuantileScores, SeriesErrors
from fastlstm.forecast.data.padding import own_rows
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.roles import LISTS
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split, split_table, validation_steps
from fastlstm.forecast.data.window_index import WindowIndex, read_windows
from fastlstm.forecast.evaluation import (
    INTERVALS,
    Figures,
    TableEvaluation,
    coverage_note,
    evaluate_forecasts,
    example_rows,
    examples,
    require_counts,
    season_of,
    series_numbers,
)
from fastlstm.forecast.files import StoredForecaster, forecaster_files, read_forecaster
from fastlstm.forecast.forecast_table import (
    Forecasts,
    as_kind,
    as_times,
    kind_of,
    read_future,
    read_past,
    step_columns,
    times_from,
)
from fastlstm.forecast.model.network import ForecastNetwork
from fastlstm.forecast.size_plan import CHOSEN
from fastlstm.forecast.table_schema import apply_schema
from fastlstm.forecast.train import train_forecaster
from fastlstm.report.html import InNotebook
from fastlstm.report.progress import fit_shown
from fastlstm.report.terminal import clock
from fastlstm.runs.events import checked_observers
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.fields import Device
from fastlstm.system.hardware import check_device, has_gpu
from fastlstm.training.options import chosen_names
from fastlstm.training.signals import StopFlag

if TYPE_CHECKING:
    from fastlstm.report.picture import Picture


class Forecaster(InNotebook, Estimator[StoredForecaster]):
    """Forecasts the next steps of time series with an LSTM.

    Args:
        horizon: steps ahead.
        options: fields of `ForecastConfig` by name. A column may be a string, several columns a
            sequence of strings; `split` may be counts of steps. Without `steps`, `epochs` or
            `budget`, `fit` takes two minutes. A budget chooses `hidden_size` (on a GPU also
            `batch_size` and `precision`) if `hidden_size` and `num_layers` are None. Further
            options: `observers`, functions called with every event, a plain dict; `callbacks`, see
            `fastlstm.Callback`; `verbose`: None shows a live line in a terminal or a notebook, True
            everything that the command line shows, False nothing.

    Raises:
        ConfigError: an unknown option. `fit` checks the values.

    Attributes:
        dataset_: the table of `fit`; missing after loading, unpickling or copying.
        fitted_: steps, epochs, best loss and time of the training.
        network_: the trained network.

    Example:
        ```python
        model = Forecaster(horizon=96, budget="2m").fit("ETTh1.csv")
        table = model.predict()
        print(model.backtest())
        ```
    """

    _device: Device | None = None
    options = signature_of(
        ForecastConfig, "horizon", observers=(), callbacks=(), verbose=None,
        **dict.fromkeys(CHOSEN),
    )  # fmt: skip

    def __init__(self, horizon: int = 24, **options: Any) -> None:
        super().__init__(horizon=horizon, **options)

    def __sklearn_tags__(self) -> Any:
        """Returns scikit-learn's tags: y is not needed, NaN is allowed."""
        from sklearn.utils import InputTags, Tags, TargetTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            input_tags=InputTags(allow_nan=True),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickle and copy, without the table, which may be large."""
        state = {n: v for n, v in self.__dict__.items() if n not in ("dataset_", "_inputs")}
        if "stored_" in state and self.network_.head.weight.is_cuda:
            network = copy.deepcopy(self.network_).cpu()
            state["stored_"] = dataclasses.replace(self.stored_, network=network)
        return state

    def fit(
        self, frame: Any, y: None = None, *, out: str | Path | None = None, resume: bool = False
    ) -> Forecaster:
        """Trains on a table: a path, a pandas, polars or Arrow frame, or an array.

        Fits in several threads share torch's random generator and are not reproducible; use
        processes.

        Args:
            frame: see `fastlstm.forecast.data.dataset.open_records`.
            y: not used; scikit-learn passes it.
            out: a run directory as ``fastlstm train`` writes it: checkpoints, metrics.jsonl,
                report.html; SIGTERM and Ctrl-C save the state first. None writes nothing.
            resume: continue from the checkpoint in `out`, or start if there is none. Only the end,
                the device and the intervals of evaluation and saving may change.

        Raises:
            ConfigError: an invalid option, or one that a resumed run cannot change.
            DataError: an unusable table; the message says where and why.
            RunDirectoryError: `out` has a run and `resume` is False.
            Stopped: a signal arrived; the state is saved.
            NonFiniteError: training did not recover from NaN or Inf.
            BudgetError: the budget ended before the first step.
        """
        return self._train(frame, None, out, resume)

    def partial_fit(self, frame: Any, y: None = None) -> Forecaster:
        """Continues training from the current weights on `frame`, a table of the same columns.

        Keeps the scaler of `fit`. Training options (duration, learning rate, batch size, split …)
        may change. If the forecaster is not fitted yet, this is `fit`.

        Raises:
            ConfigError: a parameter of the network or its columns changed since `fit`.
            DataError: the schema of the table differs from the schema at `fit`.
        """
        start = getattr(self, "stored_", None)
        if start is not None:
            start = dataclasses.replace(start, compression=None)  # training makes float32 weights
        return self._train(frame, start)

    def _train(
        self,
        frame: Any,
        start: StoredForecaster | None,
        out: str | Path | None = None,
        resume: bool = False,
    ) -> Forecaster:
        given, began = self.get_options(), time.perf_counter()
        observers, verbose = checked_observers(given["observers"]), given["verbose"]
        config, names = _config(given)
        with nullcontext() if out is None else StopFlag() as stop, fit_shown(verbose) as shown:
            trained = train_forecaster(
                frame, config, out=out, resume=resume, given=names,
                observers=[*observers, shown], callbacks=given["callbacks"], stop=stop, start=start,
                ends_early=True, began=began,
            )  # fmt: skip
        _warn_of_repairs(trained.dataset)
        if config.steps is None and config.epochs is None and trained.fitted.steps < _FEW_STEPS:
            steps = counted(trained.fitted.steps, "step")
            warn(f"training ended after {steps}: {trained.fitted.reason}")
        self._came = kind_of(frame)
        if isinstance(frame, np.ndarray):
            self.n_features_in_ = 1 if frame.ndim == 1 else frame.shape[1]  # scikit-learn asks
        self.stored_, self.dataset_ = trained.stored, trained.dataset
        self._inputs, self.fitted_ = trained.inputs, trained.fitted
        return self

    @property
    def network_(self) -> ForecastNetwork:
        """The trained network."""
        return self._fitted().network

    def predict(self, frame: Any = None, future: Any = None) -> Any:
        """Forecasts the steps after the end of every series.

        A series with fewer rows than `input_size` at its end is left out, one without any value of
        a target gets NaN, both with a warning.

        Args:
            frame: the past of the series; default: the table of `fit`.
            future: a table of series, time and future covariates with a row for every step to
                forecast; needed if `fit` had future columns.

        Returns:
            A table of the kind of `frame` (of files: pandas if it is installed, else Arrow):
            series, time, targets. For an array, an array ``(h, targets)``.

        Raises:
            DataError: other columns than at `fit`, no series that is long enough, or a step without
                future covariates.
        """
        return self._as_came(self.forecasts(frame, (), future), frame)

    def predict_quantiles(
        self, frame: Any = None, quantiles: Sequence[float] = (0.1, 0.5, 0.9), future: Any = None
    ) -> Any:
        """Forecasts `quantiles`, levels from 0 to 1, in columns such as ``y-q0.1``; see `predict`.

        Each quantile of the network is shifted by its error on validation windows, per step and
        target. For point forecasts, residuals of validation windows are added. Counts have the
        quantiles of their distribution, without calibration. A quantile is infinite, with a
        warning, if validation has too few values for it.

        Raises:
            ConfigError: an unknown level, or an error of `predict`.
        """
        if isinstance(frame, list | tuple) and frame and isinstance(frame[0], float):
            raise ConfigError(
                f"got the list {frame!r:.60}, expected a table; for levels of quantiles give"
                f" `quantiles={list(frame)!r:.60}`"
            )
        return self._as_came(self.forecasts(frame, quantiles, future), frame)

    def forecasts(
        self, frame: Any = None, quantiles: Sequence[float] = (), future: Any = None
    ) -> Forecasts:
        """Returns the forecasts of `predict` or `predict_quantiles`, computed block by block.

        ``for table in model.forecasts("sales/").blocks(): …`` holds one block of series in memory.
        `quantiles` are the levels; without levels the forecasts are points.
        """
        self._warn_unsupported(quantiles)
        dataset, inputs = self._table(frame)
        ahead = read_future(self._fitted(), future, dataset)
        self._place(len(dataset.table.segments.series))
        return Forecasts(self._fitted(), dataset, inputs, quantiles, ahead)

    def _as_came(self, forecasts: Forecasts, frame: Any) -> Any:
        return as_kind(forecasts.table(), kind_of(frame) if frame is not None else self._came)

    def _table(self, frame: Any) -> tuple[SeriesDataset, ScaledWindows]:
        """Returns a table and its windows; default: the table of `fit`."""
        stored = self._fitted()
        if frame is None:
            if not hasattr(self, "dataset_"):
                raise ConfigError(
                    "a loaded or pickled Forecaster has no table; give one as `frame`"
                )
            return self.dataset_, self._inputs
        dataset = read_past(stored, frame)
        _warn_of_repairs(dataset, self.dataset_.repairs if hasattr(self, "dataset_") else ())
        return dataset, apply_schema(dataset, stored)

    def backtest(
        self,
        part: Literal["train", "valid", "test"] = "test",
        stride: int = 1,
        season: int | None = None,
        scaled: bool = False,
        frame: Any = None,
        quantiles: Sequence[float] = (),
    ) -> Figures:
        """Evaluates forecasts from every origin of a part of a table.

        Args:
            part: train, valid or test.
            stride: rows from one origin to the next.
            season: period of the seasonal naive forecast and of mase, in steps; default: a day for
                shorter steps, a week for days, a year for months, else 1.
            scaled: report errors in standard deviations of the training rows, not in the table's
                units (counts stay counts).
            frame: the table; default: the table of `fit`.
            quantiles: levels for which to report the pinball loss.

        Returns:
            num_values, mse, mae, rmse, smape (0 to 2), rel_mae and mase of each forecast:
            "forecaster"; "ridge", ridge regression on the lags that the network reads and the
            numeric future covariates, with the penalty chosen on validation windows, unless a part
            is too short; "seasonal_naive", the last present value of the same season; "naive", the
            last present value. "seasonal_naive" also has the season: 1 for a table without times
            unless given. rel_mae is mae over the mae of "naive". mase is each error over the
            mean absolute error of the seasonal naive forecast on the training rows of its series
            (Hyndman & Koehler 2006). "forecaster" also has crps, ``pinball_0.1`` and so on for
            `quantiles`, coverage_80 and coverage_95. An infinite interval holds every value; an
            infinite quantile has the loss of the outermost finite percentile.

            All figures are over the same num_values values: every present target of every window.
            num_without_past of them have no earlier value in their series: there the naive
            forecasts are the mean of the training rows (0 for counts). mase leaves out
            num_without_scale of them: their series repeats itself every season in its training
            rows, or has no such rows. Counts of 0 are left out.
        """
        return self.evaluation(part, stride, season, scaled, frame, quantiles).figures

    def evaluation(
        self,
        part: Literal["train", "valid", "test"] = "test",
        stride: int = 1,
        season: int | None = None,
        scaled: bool = False,
        frame: Any = None,
        quantiles: Sequence[float] = (),
    ) -> TableEvaluation:
        """Returns the figures of `backtest` and the errors of every series and target."""
        _require_part(part)
        require_counts(stride=stride, season=1 if season is None else season)
        self._warn_unsupported(quantiles)
        dataset, inputs = self._table(frame)
        split, windows = self._windows(dataset, part, stride)
        self._place(len(windows))
        by_series = SeriesErrors(len(dataset.series), len(dataset.roles.target))
        season = season or season_of(dataset)
        figures = evaluate_forecasts(
            self._fitted(), inputs, windows.rows(), season, QuantileScores(quantiles, INTERVALS),
            split, scaled, by_series=by_series,
        )  # fmt: skip
        figures["seasonal_naive"]["season"] = season
        note = coverage_note(self._fitted(), inputs, windows.rows(), figures["forecaster"])
        if note and part != "train":
            warn(note)
        return TableEvaluation(Figures(figures), season, by_series, dataset)

    def plot_backtest(
        self,
        part: Literal["train", "valid", "test"] = "test",
        series: Sequence[Any] | None = None,
        max_panels: int = 6,
        frame: Any = None,
    ) -> Picture:
        """Returns forecasts from origins of a part beside the actual values, as a matplotlib
        Figure.

        Args:
            part: train, valid or test.
            series: names of the series to draw; default: evenly spread ones.
            max_panels: most windows to draw: one of every series, or several of each if series are
                few.
            frame: the table; default: the table of `fit`.

        Raises:
            ConfigError: an unknown series, or `max_panels` below 1.
            DataError: none of the series has a window in that part.
        """
        from fastlstm.report.picture import forecast_picture

        _require_part(part)
        require_counts(max_panels=max_panels)
        dataset, inputs = self._table(frame)
        index = self._windows(dataset, part, 1)[1]
        rows = example_rows(dataset, index, max_panels, series_numbers(dataset, series))
        self._place(len(rows))
        return forecast_picture(examples(self._fitted(), dataset, inputs, rows))

    def cross_validation(
        self,
        frame: Any,
        n_windows: int = 1,
        step_size: int | None = None,
        refit: bool = False,
        quantiles: Sequence[float] = (),
    ) -> Any:
        """Forecasts the last origins of a table with models trained on the rows before them.

        The models have the options of this forecaster, which stays as it is.

        Args:
            frame: the table.
            n_windows: origins, the same for all series; `horizon` steps follow the last one.
            step_size: steps from one origin to the next; default: `horizon`.
            refit: train at every origin, not only before the first.
            quantiles: levels to forecast too; see `predict_quantiles`.

        Returns:
            A table of the kind of `frame` (Arrow for arrays): series, time, cutoff (the
            last time before the forecast), and for every target ``y`` its value, ``y-forecast`` and
            the quantiles, ``y-q0.1`` …. The coverage of an origin is the share of its rows with
            ``y`` between two of them. A series without the rows for an origin is left out there;
            a missing row that was filled in has a row too, without ``y``.

        Raises:
            ConfigError: a count below 1, or an unknown level.
            DataError: too few rows, or an error of `fit`.
        """
        options = self.get_options()
        horizon = options["horizon"]
        step_size = horizon if step_size is None else step_size
        require_known(quantiles)
        require_counts(n_windows=n_windows, step_size=step_size)
        config, _ = _config(options)
        total = _num_steps(prepare(frame, config))
        first = total - horizon - (n_windows - 1) * step_size
        train, valid, *_ = split_of(config.split)
        least = valid if isinstance(valid, int) else 1
        if first <= least:
            raise DataError(
                f"the table has {total} steps, {n_windows} windows of {horizon} steps leave"
                f" {first}, expected more than {least}, for validation; take a smaller `n_windows`"
            )
        tables, model = [], None
        for origin in range(first, total - horizon + 1, step_size):
            held_out = valid
            if not isinstance(valid, int):
                held_out = min(origin - 1, round(origin * valid / (train + valid)))
            cuts = f"{origin - held_out},{held_out},{horizon}"
            if refit or model is None:
                model = Forecaster(**{**options, "split": cuts}).fit(frame)
                model._warn_unsupported(quantiles)
            found = _of_one_origin(model.stored_, model._inputs, model.dataset_, cuts, quantiles)
            tables.append(found)
        kind = kind_of(frame)
        return as_kind(pa.concat_tables(tables), "arrow" if kind == "array" else kind)

    def recalibrate(self, frame: Any, steps: int | None = None) -> Forecaster:
        """Calibrates the intervals on the last windows of a table instead of the validation part.

        Noise changes with time: call it as new rows arrive, before `predict_quantiles` or `save`.
        The network stays as it is. docs/series.md compares the coverage.

        Args:
            frame: the table up to now.
            steps: last steps of the table to compare with their forecasts; default: as many as
                `split` gives the validation part. Reads at most 5,000 windows, evenly spread. Steps
                that trained the network make intervals too narrow.

        Raises:
            ConfigError: the output is a distribution of counts, or `steps` is below the horizon.
            DataError: a target has fewer than three values at a step of the horizon, or an error of
                `predict`. The intervals then stay as they were.
        """
        stored, horizon = self._fitted(), self.network_.config.horizon
        if not stored.network.output.is_calibrated:
            raise ConfigError(
                f"`output` is {stored.config.output!r}: its intervals are quantiles of the"
                " distribution and are not calibrated; fit with another output"
            )
        require_counts(steps=horizon if steps is None else steps)
        if steps is not None and steps < horizon:
            raise ConfigError(f"`steps` is {steps}, expected {horizon}, the horizon, or more")
        dataset, inputs = self._table(frame)
        if steps is None:
            steps = validation_steps(dataset.table, dataset.frequency, stored.config.split)
        total = _num_steps(dataset)
        steps = min(max(steps, horizon), total)
        split = split_table(dataset.table, dataset.frequency, (max(1, total - steps), steps))
        try:
            input_size = self.network_.config.input_size
            windows = split.windows(dataset.table, "valid", input_size, horizon)
        except DataError as error:
            raise DataError(
                f"the last {counted(steps, 'step')} have no window of {input_size} rows of input"
                f" and {horizon} to forecast; give a table with more rows, or larger `steps`"
            ) from error
        calibration = calibrate(
            self.network_.cpu(), inputs, windows, noise_before=stored.calibration.noise
        )
        if calibration.infinite((0.25, 0.75)):
            raise DataError(
                f"the last {counted(steps, 'step')} have fewer than three values of a target to"
                " calibrate a step of the horizon; give a table with more values, or larger `steps`"
            )
        self.stored_ = dataclasses.replace(stored, calibration=calibration, is_recalibrated=True)
        return self

    def score(self, frame: Any = None, y: None = None) -> float:
        """Returns 1 - rel_mae of the test part (see `backtest`): above 0 beats naive, 1 is best.

        Args:
            frame: the table; default: the table of `fit`.
            y: not used; scikit-learn passes it.

        Raises:
            DataError: rel_mae is undefined, as the targets do not change.
        """
        scores = self.backtest(frame=frame)["forecaster"]
        if "rel_mae" not in scores:
            raise DataError(
                "rel_mae is undefined, as the targets of the test part are constant or all missing;"
                " use the other measures of backtest()"
            )
        return 1 - scores["rel_mae"]

    def _rows(self) -> list[tuple[str, str]]:
        if not hasattr(self, "stored_"):
            return [("not fitted", repr(self))]
        if (fitted := getattr(self, "fitted_", None)) is None:
            return self.stored_.rows()
        amount = f"{counted(fitted.steps, 'step')}, {fitted.epochs:.3g} epochs"
        best = f", validation loss {fitted.best_loss:.4g} at step {fitted.best_step:,}"
        trained = f"{amount} in {clock(fitted.seconds)}{best if fitted.best_step >= 0 else ''}"
        return [*self.stored_.rows(), ("trained", trained), ("ended", fitted.reason)]

    def _place(self, num_windows: int) -> None:
        """Moves the network to the device that forecasts so many windows."""
        device = self._device or self.get_options()["device"]
        is_many = device == "cuda" or (device == "auto" and num_windows >= _FEWEST_WINDOWS)
        self.network_.to("cuda" if is_many and has_gpu() else "cpu")

    def _warn_unsupported(self, levels: Sequence[float]) -> None:
        require_known(levels)
        text = self._fitted().unsupported(levels) if len(levels) else None
        if text is not None:
            warn(text)

    def _windows(self, dataset: SeriesDataset, part: str, stride: int) -> tuple[Split, WindowIndex]:
        """Returns the parts of a table, and the windows of one part."""
        config, sizes = self._fitted().config, self._fitted().network.config
        split = split_table(dataset.table, dataset.frequency, config.split)
        return split, split.windows(dataset.table, part, sizes.input_size, sizes.horizon, stride)

    def save(self, path: str | Path) -> None:
        """Writes config.json, schema.json, scaler.json and model.safetensors into `path`.

        Raises:
            ConfigError: the forecaster is not fitted.
            StorageError: the disk failed.
        """
        files = forecaster_files(self._fitted())
        run = RunDirectory(path)
        run.create()
        run.publish(files)

    @staticmethod
    def load(path: str | Path, *, device: Device = "auto", **reading: Any) -> Forecaster:
        """Opens a forecaster that `save` or ``fastlstm train`` wrote.

        Args:
            path: the directory.
            device: where to forecast: "cpu", "cuda" (an NVIDIA GPU), or "auto": a GPU for 64
                windows or more.
            reading: options of reading tables that differ from `fit`, such as gaps, disorder,
                duplicates, missing_value, keep_value, time_format.

        Raises:
            ConfigError: another parameter is given.
            CorruptFileError: a damaged file; the message names it.
        """
        for name in reading:
            if name not in READING:
                raise ConfigError(
                    f"`{name}` is an option of fit; load takes device and the options of reading"
                    f" tables: {', '.join(READING)}"
                )
        check_device(device)
        stored = read_forecaster(path)
        config, given = (dataclasses.replace(c, **reading) for c in (stored.config, stored.given))
        model = Forecaster(**{name: getattr(given, name) for name in chosen_names(given)})
        model._device = device
        model.stored_ = dataclasses.replace(stored, config=config, given=given)
        model._came = "arrow"
        return model


def _warn_of_repairs(dataset: SeriesDataset, told: Collection[str] = ()) -> None:
    """Warns of changed rows, as the command line does, except of those `told` by `fit`."""
    for text in dataset.repairs:
        if text not in told:
            warn(f"{dataset.name}: {text}")


def _num_steps(dataset: SeriesDataset) -> int:
    """Returns the steps from the first time of a table to the last."""
    starts, rows = own_rows(dataset.table, dataset.frequency)
    return int((starts + rows).max() - starts.min())


def _of_one_origin(
    stored: StoredForecaster,
    inputs: ScaledWindows,
    dataset: SeriesDataset,
    cuts: str,
    quantiles: Sequence[float],
) -> pa.Table:
    """Returns the forecasts of the test part of a split, one window of each series."""
    sizes, roles = stored.network.config, dataset.roles
    split = split_table(dataset.table, dataset.frequency, cuts)
    windows = split.windows(dataset.table, "test", sizes.input_size, sizes.horizon)
    rows = windows.rows()
    segments = dataset.table.segments.of_rows(rows)
    series = dataset.table.segments.series[segments]
    levels = tuple(quantiles)
    answers = {of: stored.forecast(inputs, rows, of)[0] for of in {(), levels}}
    ahead = read_windows(dataset.table, rows + sizes.input_size, sizes.horizon).double().numpy()
    ahead += dataset.table.origins(series)[:, None]
    last = rows + sizes.input_size - 1 - dataset.table.segments.first_rows[segments]
    times = times_from(dataset, segments, last, sizes.horizon + 1)
    table = step_columns(dataset, pa.array(list(dataset.series)), segments, times[:, 1:])
    table["cutoff"] = as_times(dataset, np.repeat(times[:, :1], sizes.horizon, 1))
    for c, name in enumerate(roles.target):
        table[name] = pa.array(ahead[..., c].reshape(-1), from_pandas=True)
        columns = {f"{name}-forecast": answers[()][..., 0]}
        columns |= {f"{name}-q{level:g}": answers[levels][..., k] for k, level in enumerate(levels)}
        for column, values in columns.items():
            table[column] = pa.array(values[..., c].reshape(-1), from_pandas=True)
    return pa.table(table)


def _require_part(part: Any) -> None:
    if not isinstance(part, str) or part not in ("train", "valid", "test"):
        shown = repr(part) if isinstance(part, str | int) else kind_of_value(part)
        raise ConfigError(
            f"`part` is {shown:.80}, expected train, valid or test; give a table as `frame`"
        )


def _config(given: dict[str, Any]) -> tuple[ForecastConfig, Collection[str]]:
    """Returns the options as a configuration, and their names without those left to a budget; a
    string is one column, counts of a split may be a sequence."""
    options = {
        name: value
        for name, value in given.items()
        if name not in ("observers", "callbacks", "verbose")
        and (value is not None or name not in CHOSEN)
    }
    for name in LISTS:
        if isinstance(options[name], str):
            options[name] = (options[name],)
    for name in ("time", "series"):
        if isinstance(options[name], list | tuple):
            options[name] = ",".join(options[name])
    split = options["split"]
    if isinstance(split, Iterable) and not isinstance(split, str):
        options["split"] = ",".join(str(count) for count in split)
    return ForecastConfig(**options), options.keys()


_FEW_STEPS = 20
_FEWEST_WINDOWS = 64
"""From this many windows on, "auto" takes a GPU."""
