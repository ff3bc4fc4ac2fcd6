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
from fastlstm.forecast.files import StoredForecaster, forecaster_files
from fastlstm.forecast.model.network import ForecastNetwork
from fastlstm.forecast.ridge import MAX_AVERAGED, best_share
from fastlstm.runs.events import Event
from fastlstm.training.session import RunSession
from fastlstm.training.trainer import CLOSING_S, Trainer

MIN_CALIBRATED = 256
"""Validation windows, if there are as many, that calibrate quantiles however long it takes: every
level of `LEVELS` needs 199."""
_FINAL_SHARE, _EARLY_SHARE, _TEST_SHARE = 0.1, 0.02, 0.15
"""Of a budget, at most: the last calibration, an earlier one, evaluating the test part."""
_CALIBRATION_COST, _TEST_COST = 1.5, 2.5
"""Time per window over a forecast's (ETTh1, 96 steps of 7 targets)."""


@dataclass
class Closing:
    """Calibrates, publishes and evaluates a forecaster.

    Attributes:
        session: of the run; without a directory nothing is written or evaluated.
        stored: the forecaster; its network is the one that is trained. At the end it has the best
            weights and their calibration.
        dataset: the prepared table.
        split: its parts.
        inputs: its windows as the network takes them.
        valid: validation windows.
        budget_s: of the whole run, or None.
        is_averaged: the forecast is averaged with the linear path's, if that has a smaller loss.
        approve: called with the forecaster that is about to be published, and the trainer; returns
            the one that is, and further files to publish with it, or None, which refuses.
    """

    session: RunSession
    stored: StoredForecaster
    dataset: SeriesDataset
    split: Split
    inputs: ScaledWindows
    valid: WindowIndex
    budget_s: float | None
    is_averaged: bool = False
    approve: Callable[
        [StoredForecaster, Trainer], tuple[StoredForecaster, Mapping[str, bytes]] | None
    ] = lambda stored, trainer: (stored, {})

    def __post_init__(self) -> None:
        sizes, has_run = self.stored.network.config, self.session.run is not None
        self._num_tested = num_test_windows(self.dataset, self.split, sizes) if has_run else 0
        self._known: tuple[Mapping[str, Tensor], Calibration] | None = None

    def seconds(self, window_s: float) -> float:
        """Returns about what closing takes of a budget, where a forecast takes `window_s`."""
        if self.budget_s is None:
            return 0.0
        averaged_s = self.is_averaged * min(len(self.valid), MAX_AVERAGED) * window_s
        calibration_s = _CALIBRATION_COST * len(self.valid) * window_s
        test_s = _TEST_COST * self._num_tested * window_s
        return (
            min(calibration_s, _FINAL_SHARE * self.budget_s)
            + min(test_s, _TEST_SHARE * self.budget_s)
            + _CALIBRATION_COST * averaged_s
            + self.session.report_s()
        )

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        """Publishes weights; with a budget they are calibrated on few windows until the end."""
        if self.session.run is None:
            return
        network = copy.deepcopy(self.stored.network).cpu().eval()
        network.load_state_dict(weights)
        calibration, *_ = self._calibrate(network, _EARLY_SHARE)
        if self.budget_s is None:
            self._known = weights, calibration
        best = dataclasses.replace(self.stored, network=network, calibration=calibration)
        self.session.run.publish(forecaster_files(best))

    def finish(self, trainer: Trainer) -> Event:
        """Calibrates the network, which has the best weights, publishes and evaluates it.

        Returns:
            What the `end` event holds of the test part.

        Raises:
            Stopped: the trainer's `stop` returned True.
        """
        network = self.stored.network.eval()
        if self.is_averaged:
            network = self._averaged(network, trainer)
        with trainer.progress.counted("calibration"):
            calibration = self._last_calibration(network, trainer)
        self.stored = dataclasses.replace(self.stored, network=network, calibration=calibration)
        if missing := self.stored.unsupported((0.025, 0.1, 0.9, 0.975)):
            trainer.say("info", missing)
        if self.session.run is None or (approved := self.approve(self.stored, trainer)) is None:
            return {}
        self.stored, more = approved
        with trainer.progress.counted("saving"):
            self.session.run.publish({**forecaster_files(self.stored), **more})
            trainer.best.set_published()
        return self._evaluate(trainer)

    def _averaged(self, network: ForecastNetwork, trainer: Trainer) -> ForecastNetwork:
        """Returns a network whose forecast is averaged with the linear path's."""
        share, ratio = best_share(network, self.inputs, self.valid)
        if share == 1.0:
            return network
        trainer.say(
            "info",
            f"the forecast is {share:.0%} the network's and {1 - share:.0%} the linear path's: its"
            f" error on validation windows is {1 - ratio:.1%} less than the network's alone",
        )
        network, self._known = copy.deepcopy(network), None
        network.average_with_linear(share)
        return network

    def _last_calibration(self, network: ForecastNetwork, trainer: Trainer) -> Calibration:
        if self._known is not None and self._known[0] is trainer.best.weights:
            return self._known[1]
        calibration, read, total = self._calibrate(network, _FINAL_SHARE)
        if read < total:
            text = f"quantiles are calibrated on {read:,} of {total:,} validation windows"
            trainer.say("info", f"{text}: more would not fit the budget")
        return calibration

    def _calibrate(self, network: ForecastNetwork, share: float) -> tuple[Calibration, int, int]:
        """Returns a calibration that takes at most a share of the budget; windows read, of all.

        Once the run is stopped it takes `MIN_CALIBRATED` windows; a stop meanwhile raises Stopped.
        """
        is_stopped = self._is_stopped()
        started, read, total = time.perf_counter(), 0, 0
        show_progress = self.session.watch("calibrating quantiles", "windows")

        def show(done: int, of: int) -> None:
            nonlocal read, total
            read, total = done, of
            show_progress(done, of)
            if not is_stopped:
                self._stop_if_asked("calibrating quantiles")

        def has_time(done: int) -> bool:
            return time.perf_counter() - started < limit_s or done < MIN_CALIBRATED

        limit_s = 0.0 if is_stopped else share * (self.budget_s or 0.0)
        is_limited = is_stopped or self.budget_s is not None
        should_continue = has_time if is_limited else None
        calibration = calibrate(network, self.inputs, self.valid, show, should_continue)
        return calibration, read, total

    def _is_stopped(self) -> bool:
        return self.session.stop is not None and self.session.stop()

    def _stop_if_asked(self, doing: str) -> None:
        if self._is_stopped():
            raise Stopped(f"stopped while {doing}")

    def _evaluate(self, trainer: Trainer) -> Event:
        """Emits the errors of the forecasts of the test part and of naive forecasts."""
        trainer.say("info", "evaluating the forecasts of the test part")
        show = self.session.watch("evaluating the test part", "windows")

        def should_continue(done: int, total: int) -> bool:
            show(done, total)
            self._stop_if_asked("evaluating the test part")
            if self.budget_s is None:
                return True
            return self.budget_s - trainer.elapsed_s() - self.session.report_s() > CLOSING_S

        about: Event = {}
        with trainer.progress.counted("judging"):
            for event in evaluation_events(
                self.stored, self.dataset, self.split, self.inputs, should_continue
            ):
                trainer.emit(event)
                if event["event"] == "test":
                    about = self._test_error(event, trainer)
        return about

    def _test_error(self, test: Event, trainer: Trainer) -> Event:
        """Returns the error on the test part; reports where not all of it was evaluated."""
        if test["windows"] < test["of_windows"] and self.budget_s is not None:
            part = f"{test['windows']:,} of {test['of_windows']:,} windows"
            text = f"evaluated {part}, evenly spread: all would not fit the budget"
            trainer.say("info", f"{text}; 'fastlstm evaluate RUN DATA' evaluates all")
        measure = "mse" if self.stored.config.loss == "mse" else "mae"
        if len(test["targets"]) > 1:  # of several units
            measure = "rel_mae"
        errors = {name: scores.get(measure) for name, scores in test["scores"].items()}
        return {"test_error": {"measure": measure, **errors}}
