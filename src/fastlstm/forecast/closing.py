"""What follows the training of a forecaster: calibrated quantiles, files, scores on the test part.

Within a budget each has its share of it; what does not fit reads fewer windows and says so.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fastlstm.errors import Stopped
from fastlstm.forecast.calibration import Calibration, calibrate
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.data.window_index import WindowIndex
from fastlstm.forecast.evaluation import evaluation_events, num_test_windows
from fastlstm.forecast.files import StoredForecaster, description_files, forecaster_files
from fastlstm.forecast.model.network import ForecastNetwork
from fastlstm.runs.events import Event
from fastlstm.training.session import RunSession
from fastlstm.training.trainer import CLOSING_S, Trainer

_MIN_CALIBRATED = 256
"""Validation windows that quantiles are calibrated on, where there are as many, however long: every
level of `LEVELS` needs 199."""
_FINAL_SHARE, _EARLY_SHARE, _JUDGING_SHARE = 0.1, 0.02, 0.15
"""Of a budget, at most: the last calibration, one on the way, judging the test part."""
_CALIBRATION_COST, _JUDGING_COST = 1.5, 2.5
"""Time per window over that of a forecast (ETTh1, 96 steps of 7 targets)."""


@dataclass
class Closing:
    """Calibrates, publishes and judges a forecaster.

    Attributes:
        session: of the run; without a directory nothing is written or judged.
        stored: the forecaster; its network is the one that is trained. At the end it has the best
            weights and their calibration.
        dataset: the prepared table.
        split: its parts.
        inputs: its windows as the network takes them.
        valid: validation windows.
        budget_s: of the whole run, or None.
    """

    session: RunSession
    stored: StoredForecaster
    dataset: SeriesDataset
    split: Split
    inputs: ScaledWindows
    valid: WindowIndex
    budget_s: float | None

    def __post_init__(self) -> None:
        sizes, has_run = self.stored.network.config, self.session.run is not None
        self._num_judged = num_test_windows(self.dataset, self.split, sizes) if has_run else 0
        self._known: tuple[Mapping[str, Tensor], Calibration] | None = None

    @property
    def measure(self) -> str:
        """What the loss is called."""
        config = self.stored.config
        return config.loss if config.output == "point" else "loss"

    def files(self) -> dict[str, bytes]:
        """Returns config.json, schema.json and scaler.json."""
        return description_files(self.stored)

    def seconds(self, window_s: float) -> float:
        """Returns what closing takes of a budget, about.

        Args:
            window_s: seconds of forecasting a window.
        """
        if self.budget_s is None:
            return 0.0
        calibration_s = _CALIBRATION_COST * len(self.valid) * window_s
        judging_s = _JUDGING_COST * self._num_judged * window_s
        return (
            min(calibration_s, _FINAL_SHARE * self.budget_s)
            + min(judging_s, _JUDGING_SHARE * self.budget_s)
            + self.session.report_s()
        )

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Publishes weights; within a budget they are calibrated roughly, the last ones well."""
        if self.session.run is None:
            return
        network = copy.deepcopy(self.stored.network).cpu().eval()
        network.load_state_dict(weights)
        if self.budget_s is None:
            calibration = self._calibrate(network)
            self._known = weights, calibration
        else:
            calibration, *_ = self._calibrate_for(_EARLY_SHARE * self.budget_s, network)
        best = dataclasses.replace(self.stored, network=network, calibration=calibration)
        self.session.run.publish(forecaster_files(best))

    def finish(self, trainer: Trainer) -> Event:
        """Calibrates the network, which has the best weights, publishes and judges it.

        Returns:
            What the `end` event holds of the test part.

        Raises:
            Stopped: the trainer's `stop` said so.
        """
        network = self.stored.network.eval()
        with trainer.progress.counted("calibration"):
            calibration = self._last_calibration(network, trainer)
        self.stored = dataclasses.replace(self.stored, calibration=calibration)
        if missing := self.stored.unsupported((0.025, 0.1, 0.9, 0.975)):
            trainer.say("info", missing)
        if self.session.run is None:
            return {}
        with trainer.progress.counted("saving"):
            self.session.run.publish(forecaster_files(self.stored))
            trainer.best.set_published()
        return self._judge(trainer)

    def _last_calibration(self, network: ForecastNetwork, trainer: Trainer) -> Calibration:
        if self._known is not None and self._known[0] is trainer.best.weights:
            return self._known[1]
        if self.budget_s is None:
            return self._calibrate(network)
        calibration, read, total = self._calibrate_for(_FINAL_SHARE * self.budget_s, network)
        if read < total:
            text = f"quantiles are calibrated on {read:,} of {total:,} validation windows"
            trainer.say("info", f"{text}: more would not fit the budget")
        return calibration

    def _shows(self) -> Callable[[int, int], None]:
        return self.session.watch("calibrating quantiles", "windows")

    def _calibrate(self, network: ForecastNetwork) -> Calibration:
        return calibrate(network, self.inputs, self.valid, show=self._shows())

    def _calibrate_for(
        self, limit_s: float, network: ForecastNetwork
    ) -> tuple[Calibration, int, int]:
        """Returns a calibration that takes so long at most, on how many windows, of how many."""
        started, read, total = time.perf_counter(), 0, 0
        show = self._shows()

        def continues(done: int, of: int) -> bool:
            nonlocal read, total
            read, total = done, of
            show(done, of)
            return time.perf_counter() - started < limit_s or done < _MIN_CALIBRATED

        calibration = calibrate(network, self.inputs, self.valid, continues)
        return calibration, read, total

    def _judge(self, trainer: Trainer) -> Event:
        """Emits how good the forecasts of the test part are, beside naive ones."""
        trainer.say("info", "judging the forecasts of the test part")
        show = self.session.watch("judging the test part", "windows")

        def continues(done: int, total: int) -> bool:
            show(done, total)
            if trainer.stop is not None and trainer.stop():
                raise Stopped("stopped while judging")
            if self.budget_s is None:
                return True
            return self.budget_s - trainer.elapsed_s() - self.session.report_s() > CLOSING_S

        about: Event = {}
        with trainer.progress.counted("judging"):
            for event in evaluation_events(
                self.stored, self.dataset, self.split, self.inputs, continues
            ):
                trainer.emit(event)
                if event["event"] == "test":
                    about = self._test_error(event, trainer)
        return about

    def _test_error(self, test: Event, trainer: Trainer) -> Event:
        """Returns the error on the test part; says where not all of it was judged."""
        if test["windows"] < test["of_windows"] and self.budget_s is not None:
            part = f"{test['windows']:,} of {test['of_windows']:,} windows"
            text = f"judged on {part}, evenly spread: all would not fit the budget"
            trainer.say("info", f"{text}; 'fastlstm evaluate RUN DATA' judges all")
        measure = "mse" if self.stored.config.loss == "mse" else "mae"
        errors = {who: found[measure] for who, found in test["scores"].items()}
        return {"test_error": {"measure": measure, **errors}}
