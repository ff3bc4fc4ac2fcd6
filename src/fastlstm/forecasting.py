"""`Forecaster`: from a table to forecasts, in the manner of scikit-learn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.config import parse_duration
from fastlstm.errors import ConfigError, DataError
from fastlstm.infer.backtest import backtest, judge_quantiles, season_of
from fastlstm.infer.fitted_table import Fit, like_fitted, static_scale, statics_of
from fastlstm.infer.forecast_table import as_came, forecast_table
from fastlstm.infer.forecaster_files import StoredForecaster, read_forecaster, write_forecaster
from fastlstm.infer.forecasts import Calibration, answer, calibrate
from fastlstm.nn.forecaster import ForecasterConfig, ForecastNetwork
from fastlstm.series.arrange import Policy
from fastlstm.series.counts import require_counts
from fastlstm.series.dataset import PrepareOptions, SeriesDataset, prepare_table
from fastlstm.series.inputs import Inputs
from fastlstm.series.metrics import QuantileScores
from fastlstm.series.roles import RoleRequest
from fastlstm.series.splits import Split, fit_scaler, split_table
from fastlstm.series.windows import read_windows
from fastlstm.training.forecast_trainer import FitPlan, Fitted, ForecastTrainer
from fastlstm.training.metrics import Event
from fastlstm.training.schedule import Ending

_SEGMENTS = (48, 24, 12, 8, 6, 4, 3, 2, 1)
_LONGEST_INPUT = 720


class Forecaster:
    """Forecasts the next steps of time series with an LSTM.

    Args:
        horizon: steps ahead.
        input_size: steps of the past that are read; default is up to 720, as the data allows.
        target: columns to forecast; default "y", or every number of a table without series.
        time: the column of times; default "ds", "date" … or the only one that holds times.
        series: the column that tells series apart; default "unique_id" where there is one.
        past: columns known up to now only; default every other number.
        future: columns known ahead.
        static: columns with one value per series.
        categorical: which of past, future, static hold names.
        ignore: columns left out.
        split: training, validation, test in percent of the rows by time, or in counts of steps.
        segment: steps read, and answered, at once; default fits input and horizon.
        hidden_size: H.
        num_layers: of the LSTM.
        channels: shared gives each target its own pass through one network, joint reads all.
        decoder: direct answers all segments at once; autoregressive one after the other, each after
            reading the forecasts before it.
        bidirectional: the input is read both ways; for the direct decoder.
        normalize: what is taken from a window: its last value, mean and deviation, or nothing;
            counts are divided by one more than their mean instead.
        dropout: before the last layer.
        output: point, quantiles, student_t or negative_binomial (of counts).
        loss: of a point: mae, mse or huber.
        budget: wall clock for training, such as "2m"; default 2m where no other end is given.
        epochs: passes over the training windows.
        steps: optimizer steps.
        batch_size: windows per step.
        learning_rate: peak.
        ema: decay of averaged weights.
        patience: evaluations without gain after which training ends; 0 never does.
        gaps: split or fill (see `fastlstm.series.arrange.Policy`).
        disorder: error or sort.
        duplicates: error, first or last.
        missing_value: a number that stands for "no value".
        time_format: how times are written where they are text.
        seed: of everything random.
        observers: called with every event, a plain dict.

    Attributes:
        network_: the trained network.
        dataset_: the table it was trained on.
        fitted_: what training did.

    Example:
        ::

            model = Forecaster(horizon=96, budget="2m").fit("ETTh1.csv")
            table = model.predict()
            print(model.backtest())
    """

    def __init__(
        self,
        horizon: int = 24,
        *,
        input_size: int | None = None,
        target: str | Sequence[str] = (),
        time: str | None = None,
        series: str | None = None,
        past: Sequence[str] | None = None,
        future: Sequence[str] = (),
        static: Sequence[str] = (),
        categorical: Sequence[str] = (),
        ignore: Sequence[str] = (),
        split: str | Sequence[int] = "70/10/20",
        segment: int | None = None,
        hidden_size: int = 256,
        num_layers: int = 1,
        channels: Literal["shared", "joint"] = "shared",
        decoder: Literal["direct", "autoregressive"] = "direct",
        bidirectional: bool = False,
        normalize: Literal["last", "standard", "none"] = "last",
        dropout: float = 0.5,
        output: Literal["point", "quantiles", "student_t", "negative_binomial"] = "point",
        loss: Literal["mae", "mse", "huber"] = "mae",
        budget: str | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        batch_size: int = 32,
        learning_rate: float = 2e-3,
        ema: float = 0.99,
        patience: int = 0,
        gaps: Literal["split", "fill"] = "split",
        disorder: Literal["error", "sort"] = "error",
        duplicates: Literal["error", "first", "last"] = "error",
        missing_value: float | None = None,
        time_format: str | None = None,
        seed: int = 0,
        observers: Sequence[Callable[[Event], object]] = (),
    ) -> None:
        self.horizon, self.input_size, self.segment = horizon, input_size, segment
        self.target, self.time, self.series, self.past = target, time, series, past
        self.future, self.static, self.categorical = future, static, categorical
        self.ignore, self.split, self.gaps = ignore, split, gaps
        self.hidden_size, self.num_layers, self.channels = hidden_size, num_layers, channels
        self.normalize, self.dropout, self.output, self.loss = normalize, dropout, output, loss
        self.budget, self.epochs, self.steps, self.patience = budget, epochs, steps, patience
        self.batch_size, self.learning_rate, self.ema = batch_size, learning_rate, ema
        self.disorder, self.duplicates, self.seed = disorder, duplicates, seed
        self.missing_value, self.time_format, self.decoder = missing_value, time_format, decoder
        self.bidirectional, self.observers = bidirectional, observers

    # scikit-learn's ways ------------------------------------------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns the constructor's arguments by name."""
        return {name: getattr(self, name) for name in _PARAMETERS}

    def set_params(self, **parameters: Any) -> Forecaster:
        """Changes arguments of the constructor.

        Raises:
            ConfigError: there is none of that name.
        """
        for name, value in parameters.items():
            if name not in _PARAMETERS:
                raise ConfigError(f"a Forecaster has no parameter '{name}'")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = inspect.signature(Forecaster).parameters
        shown = [f"{n}={v!r}" for n, v in self.get_params().items() if v != defaults[n].default]
        return f"Forecaster({', '.join(shown)})"

    # fitting ------------------------------------------------------------------------------------

    def fit(self, frame: Any, y: None = None) -> Forecaster:
        """Trains on a table: a path, a pandas, polars or Arrow frame, or an array.

        Args:
            frame: see `fastlstm.series.records.open_records`.
            y: not used; scikit-learn passes it.

        Raises:
            DataError: the table cannot be used; the message says where and why.
            NonFiniteError: training met NaN that it could not get past.
        """
        if not isinstance(self.horizon, int) or self.horizon < 1:
            raise ConfigError(f"horizon is {self.horizon!r}, expected 1 or more steps")
        self._came = frame if not isinstance(frame, str | Path) else None
        dataset = self._prepare(frame)
        for name in dataset.roles.target:
            if name in dataset.constant:
                raise DataError(
                    f"the target '{name}' is the same in every row; there is nothing to learn, name"
                    " another with target=…"
                )
        split = split_table(dataset.table, dataset.frequency, self.split)
        config = self._architecture(dataset, split)
        places = [dataset.table.columns.index(n) for n in self._row_categories(dataset)]
        if self.output == "negative_binomial":
            require_counts(dataset)
            places += range(config.num_targets)
        scaler = fit_scaler(dataset.table, split.train_ends, places)
        self._static_scale = static_scale(dataset)
        inputs = Inputs(dataset.table, scaler, statics_of(dataset, self._static_scale))
        sizes = (config.input_size, config.horizon)
        train = split.windows(dataset.table, "train", *sizes)
        valid = split.windows(dataset.table, "valid", *sizes)
        torch.manual_seed(self.seed)
        network = ForecastNetwork(config)
        ending = self._ending(-(-len(train) // self.batch_size))
        plan = FitPlan(
            ending, self.batch_size, self.learning_rate, ema=self.ema, patience=self.patience,
            seed=self.seed,
        )  # fmt: skip
        for note in dataset.notes:
            self._emit({"event": "message", "level": "info", "text": note})
        trainer = ForecastTrainer(network, inputs, train, valid, plan, self._emit)
        self.fitted_: Fitted = trainer.train()
        self.calibration_: Calibration = calibrate(network, inputs, valid)
        self.network_, self.dataset_, self.split_, self._inputs = network, dataset, split, inputs
        return self

    def _emit(self, event: Event) -> None:
        for observer in self.observers:
            observer(event)

    def _prepare(self, frame: Any) -> SeriesDataset:
        roles = RoleRequest(
            target=_names(self.target),
            time=self.time,
            series=self.series,
            past=None if self.past is None else _names(self.past),
            future=_names(self.future),
            static=_names(self.static),
            categorical=_names(self.categorical),
            ignore=_names(self.ignore),
        )
        policy = Policy(self.disorder, self.duplicates, self.gaps)
        options = PrepareOptions(
            roles, policy, time_format=self.time_format, missing_value=self.missing_value
        )
        return prepare_table(frame, options)

    def _row_categories(self, dataset: SeriesDataset) -> list[str]:
        return [n for n in dataset.roles.categorical if n in dataset.table.columns]

    def _architecture(self, dataset: SeriesDataset, split: Split) -> ForecasterConfig:
        roles, table = dataset.roles, dataset.table
        longest = int((split.train_ends - table.segments.first_rows).max())
        if longest < self.horizon + 1:
            raise DataError(
                f"the longest stretch of training rows has {longest}, a horizon of {self.horizon}"
                f" needs {self.horizon + 1} at least; give longer series or a smaller horizon"
            )
        wanted = self.input_size
        if wanted is None:
            wanted = max(1, min(_LONGEST_INPUT, (longest - self.horizon) // 2))
        segment = self.segment
        if segment is None:
            fitting = [s for s in _SEGMENTS if s <= max(self.horizon, 1) and s * 4 <= wanted]
            exact = [s for s in fitting if self.input_size is None or wanted % s == 0]
            segment = exact[0] if exact else 1
        if self.input_size is None:
            wanted = max(1, wanted // segment) * segment
        return ForecasterConfig(
            input_size=wanted,
            horizon=self.horizon,
            num_targets=len(roles.target),
            num_past=len(roles.past),
            num_future=len(roles.future),
            categories=tuple(
                (table.columns.index(name), len(dataset.categories[name]))
                for name in self._row_categories(dataset)
            ),
            num_static=len(roles.static),
            static_categories=tuple(
                (place, len(dataset.categories[name]))
                for place, name in enumerate(roles.static)
                if name in roles.categorical
            ),
            segment=segment,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            channels=self.channels,
            decoder=self.decoder,
            bidirectional=self.bidirectional,
            normalize=self.normalize,
            dropout=self.dropout,
            has_missing=dataset.has_missing,
            output=self.output,
            loss=self.loss,
        )

    def _ending(self, steps_per_epoch: int) -> Ending:
        given = [n for n in ("budget", "epochs", "steps") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} contradict each other; give one")
        if self.steps is not None:
            return Ending("steps", self.steps, None, f"{self.steps} steps")
        if self.epochs is not None:
            total = max(1, round(self.epochs * steps_per_epoch))
            return Ending("epochs", total, None, f"{self.epochs:g} epochs = {total} steps")
        budget = self.budget or "2m"
        return Ending("budget", None, parse_duration(budget), f"budget {budget}")

    # forecasting --------------------------------------------------------------------------------

    def predict(self, frame: Any = None) -> Any:
        """Forecasts the steps after the end of every series.

        Args:
            frame: the past of the series; default what `fit` was given.

        Returns:
            A table of the kind that came (an Arrow table for files): series, time, targets.

        Raises:
            DataError: other columns than at `fit`, or a series that is too short.
        """
        return self._predict(frame, ())

    def predict_quantiles(
        self, frame: Any = None, quantiles: Sequence[float] = (0.1, 0.5, 0.9)
    ) -> Any:
        """Forecasts quantiles: columns such as ``y-q0.1``; see `predict`.

        The quantiles that the network has learned, each shifted by what it was off by on validation
        windows, per step and target; of a point, it plus the residuals of the validation windows;
        of counts, those of the distribution as they are.
        """
        return self._predict(frame, quantiles)

    def _predict(self, frame: Any, quantiles: Sequence[float]) -> Any:
        self._require_fitted()
        dataset = self.dataset_ if frame is None else self._prepare(frame)
        config, table = self.network_.config, dataset.table
        if config.num_future:
            raise ConfigError(
                f"columns known ahead ({', '.join(dataset.roles.future)}) are not taken at predict"
                " yet; use backtest, or fit without them"
            )
        last = np.flatnonzero(np.diff(table.segments.series, append=-1))
        rows = table.segments.num_rows[last]
        short = np.flatnonzero(rows < config.input_size)
        if len(short):
            name = dataset.series[int(table.segments.series[last[short[0]]])]
            raise DataError(
                f"{len(short)} series end in fewer rows than input_size={config.input_size}, first"
                f" '{name}' with {int(rows[short[0]])}; give their past, or a smaller input_size"
            )
        ends = table.segments.first_rows[last] + rows
        inputs = self._inputs
        if frame is not None:
            fitted = Fit.of(self.dataset_, self.network_.config.has_missing)
            inputs = like_fitted(dataset, fitted, self._inputs.scaler, self._static_scale)
        found = []
        for first in range(0, len(last), 256):
            part = slice(first, first + 256)
            past = read_windows(table, ends[part] - config.input_size, config.input_size)
            ahead = past.new_full((len(past), config.horizon, past.shape[2]), float("nan"))
            values, statics = inputs.prepare(torch.cat([past, ahead], 1), last[part])
            found.append(answer(self.network_, values, statics, self.calibration_, quantiles))
        columns = self._columns(torch.cat(found), dataset, quantiles)
        ticks = dataset.frequency
        starts = [
            int(ticks.after(int(table.segments.start_times[s]), int(n))[-1])
            for s, n in zip(last, rows, strict=True)
        ]
        whole = forecast_table(
            dataset, table.segments.series[last], np.array(starts, dtype=np.int64), columns
        )
        return as_came(whole, frame if frame is not None else self._came)

    def _columns(
        self, scaled: torch.Tensor, dataset: SeriesDataset, quantiles: Sequence[float]
    ) -> dict[str, NDArray[np.float32]]:
        names = [f"-q{level:g}" for level in quantiles] or [""]
        found: dict[str, NDArray[np.float32]] = {}
        for number, name in enumerate(names):
            plain = self._unscaled(scaled[..., number])
            found |= {f"{n}{name}": plain[..., c] for c, n in enumerate(dataset.roles.target)}
        return found

    def _unscaled(self, scaled: torch.Tensor) -> NDArray[np.float32]:
        num = scaled.shape[-1]
        scaler = self._inputs.scaler
        plain: NDArray[np.float32] = scaled.numpy() * scaler.std[:num] + scaler.mean[:num]
        return plain

    def _require_fitted(self) -> None:
        if not hasattr(self, "network_"):
            raise ConfigError("this Forecaster is not fitted yet; call fit first")

    # judging ------------------------------------------------------------------------------------

    def backtest(
        self,
        part: Literal["valid", "test"] = "test",
        stride: int = 1,
        season: int | None = None,
        scaled: bool = False,
        quantiles: Sequence[float] = (),
    ) -> dict[str, dict[str, float]]:
        """Judges forecasts from every origin of a part of the table it was fitted on.

        Args:
            part: valid or test.
            stride: rows from one origin to the next.
            season: steps of the seasonal naive forecast; default a day where steps are shorter.
            scaled: in standard deviations of the training rows instead of the table's units (counts
                stay counts).
            quantiles: levels whose pinball loss is wanted, too.

        Returns:
            mse, mae, rmse, smape, mase of "forecaster", and of "naive" and "seasonal_naive". Of
            "forecaster", on at most 2,000 of the windows, evenly spread, also crps, ``pinball_0.1``
            and so on for every one of `quantiles`, coverage_80 and coverage_95.
        """
        self._require_fitted()
        rows = self._origins(part, stride)
        found = backtest(
            self.network_, self._inputs, rows, season or season_of(self.dataset_), scaled
        )
        report = {name: scores.result() for name, scores in found.items() if scores.num_values}
        some = rows[np.linspace(0, len(rows) - 1, min(len(rows), 2_000)).astype(np.int64)]
        judged = self._judged(some, QuantileScores(quantiles, (0.8, 0.95)), scaled)
        if judged.num_values:
            report["forecaster"] |= judged.result()
        return report

    def coverage(
        self, intervals: Sequence[float] = (0.8, 0.95), part: Literal["valid", "test"] = "test"
    ) -> dict[float, float]:
        """Returns the share of values within their central intervals, by the intervals' level."""
        self._require_fitted()
        scores = QuantileScores((), intervals, has_crps=False)
        return self._judged(self._origins(part, 1), scores).coverage()

    def _judged(
        self, rows: NDArray[np.int64], scores: QuantileScores, scaled: bool = False
    ) -> QuantileScores:
        return judge_quantiles(self.network_, self._inputs, rows, self.calibration_, scores, scaled)

    def score(self, frame: Any = None, y: None = None) -> float:
        """Returns one minus MASE on the test part: above 0 is better than naive, 1 is perfect."""
        if frame is not None:
            raise ConfigError("score judges the test part of the table that fit was given")
        return 1 - self.backtest()["forecaster"]["mase"]

    def _origins(self, part: str, stride: int) -> NDArray[np.int64]:
        config = self.network_.config
        sizes = (config.input_size, config.horizon, stride)
        return self.split_.windows(self.dataset_.table, part, *sizes).rows()

    # files --------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes config.json, schema.json, scaler.json and model.safetensors; nothing executable.

        Raises:
            ConfigError: it is not fitted.
            StorageError: the disk refused.
        """
        self._require_fitted()
        parameters = {n: v for n, v in self.get_params().items() if n != "observers"}
        stored = StoredForecaster(
            parameters, self.network_, self._inputs.scaler, self.calibration_,
            self.dataset_.table.columns, self._static_scale, self.dataset_.frequency,
            self.dataset_.time_zone, self.dataset_.categories,
        )  # fmt: skip
        write_forecaster(path, stored)

    @staticmethod
    def load(path: str | Path, frame: Any) -> Forecaster:
        """Opens what `save` wrote, for the table `frame`.

        Raises:
            CorruptFileError: a file is damaged; it is named.
            DataError: the table has other columns.
        """
        stored = read_forecaster(path)
        found = Forecaster(**stored.parameters)
        found.network_, found.calibration_ = stored.network, stored.calibration
        dataset = found._prepare(frame)
        fitted = Fit(
            stored.columns, stored.frequency, stored.time_zone, stored.categories,
            stored.network.config.has_missing,
        )  # fmt: skip
        found.dataset_, found._static_scale = dataset, stored.static_scale
        found._inputs = like_fitted(dataset, fitted, stored.scaler, stored.static_scale)
        found.split_ = split_table(dataset.table, dataset.frequency, found.split)
        found._came = None if isinstance(frame, str | Path) else frame
        return found


_PARAMETERS = tuple(inspect.signature(Forecaster.__init__).parameters)[1:]


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
