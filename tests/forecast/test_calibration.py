"""Calibrated quantiles: their coverage, order and shape, and the order statistics behind them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray

from fastlstm import Forecaster
from fastlstm.compression.forecast import has_own_intervals
from fastlstm.errors import ConfigError, DataError
from fastlstm.forecast.calibration import LEVELS, Calibration, calibrate, conformal, spread
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import split_table, validation_steps
from fastlstm.forecast.model.outputs import Point
from series_frames import long_table, replaced

HORIZON, INPUT = 6, 24
QUICK: dict[str, Any] = {
    "horizon": HORIZON, "input_size": INPUT, "patch": 6, "hidden_size": 16, "steps": 150,
    "dropout": 0.0, "learning_rate": 0.01, "split": "60/20/20", "normalize": "standard",
}  # fmt: skip


def deviations(num_rows: int = 2400) -> NDArray[np.float32]:
    """Deviation of every row: one half of the day is eight times as noisy as the other."""
    return np.where(np.arange(num_rows) % 24 < 12, 0.1, 0.8).astype(np.float32)


def noisy(num_rows: int = 2400) -> NDArray[np.float32]:
    noise = np.random.default_rng(0).normal(size=num_rows)
    wave = np.sin(np.arange(num_rows) * (2 * np.pi / 24))
    return (wave + deviations(num_rows) * noise).astype(np.float32)


def inside(model: Forecaster, level: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns which test values lie in their interval, and which belong to quiet hours."""
    rows = model._windows(model.dataset_, "test", 1)[1].rows()
    ends = ((1 - level) / 2, (1 + level) / 2)
    q, y = model.stored_.forecast(model._inputs, rows, ends)
    quiet = deviations()[rows[:, None] + INPUT + np.arange(HORIZON)] < 0.5
    return ((q[..., 0] <= y) & (y <= q[..., 1]))[..., 0], quiet


@pytest.mark.parametrize("output", ["quantiles", "student_t"])
def test_learned_quantiles_cover_changing_noise(output: Any) -> None:
    model = Forecaster(**QUICK, output=output, linear=False).fit(noisy())
    is_inside, quiet = inside(model, 0.8)
    assert is_inside.mean() == pytest.approx(0.8, abs=0.05)
    assert is_inside[quiet].mean() == pytest.approx(0.8, abs=0.12)
    assert is_inside[~quiet].mean() == pytest.approx(0.8, abs=0.12)


def test_recalibrated_intervals_hold_their_level_after_the_noise_has_grown() -> None:
    y = noisy()
    model = Forecaster(**QUICK, linear=False).fit(y[:1600])
    louder = y.copy()
    louder[1600:] += np.random.default_rng(1).normal(size=800, scale=2.0).astype(np.float32)

    def share() -> float:
        low, high = model.predict_quantiles(louder[:n], (0.1, 0.9)).T.reshape(2, -1)
        actual = louder[n : n + HORIZON]
        return float(((low <= actual) & (actual <= high)).mean())

    before, after = [], []
    model.recalibrate(y[:1600])  # on these rows the calibration of fit is the same
    fitted = model.stored_.calibration
    for n in range(2000, 2390, HORIZON):
        model.stored_ = replace(model.stored_, calibration=fitted)
        before.append(share())
        model.recalibrate(louder[:n], steps=400)
        after.append(share())
    assert np.mean(before) < 0.7
    assert np.mean(after) == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("has_run", [False, True])
def test_intervals_off_their_level_are_told_with_the_cure(has_run: bool, tmp_path: Path) -> None:
    louder = noisy()
    told = "80 % intervals cover [3-6]. % of .* `recalibrate` fits them to the newest"
    louder[1900:] += np.random.default_rng(1).normal(size=500, scale=2.0).astype(np.float32)
    with pytest.warns(UserWarning, match=told):
        model = Forecaster(**QUICK, linear=False).fit(louder, out=tmp_path if has_run else None)
    with pytest.warns(UserWarning, match=told):
        model.backtest()
    model.backtest("train")
    model.recalibrate(louder).backtest()
    if has_run:
        assert "80 % intervals cover" in (tmp_path / "report.html").read_text()


def test_recalibration_reads_as_many_steps_as_the_validation_part(tmp_path: Path) -> None:
    y = noisy(1200)
    model = Forecaster(**{**QUICK, "steps": 5, "split": "800,200"}).fit(y[:1000])
    fitted = model.stored_.calibration.residuals
    again = model.recalibrate(y[:1000]).stored_.calibration.residuals
    torch.testing.assert_close(again, fitted)
    model.recalibrate(y, steps=400)
    assert not torch.allclose(model.stored_.calibration.residuals, fitted)
    model.save(tmp_path)
    loaded = Forecaster.load(tmp_path)
    assert not has_own_intervals(loaded.stored_)  # compress compares them with none of its own
    answers = (m.predict_quantiles(y, (0.1, 0.9)) for m in (model, loaded))
    np.testing.assert_array_equal(*map(np.asarray, answers))


def test_a_failed_recalibration_keeps_the_intervals() -> None:
    y = noisy(600)
    y[100] = np.nan  # a table with missing values
    model = Forecaster(**{**QUICK, "steps": 2}).fit(y)
    fitted, ended = model.stored_, y.copy()
    ended[-50:-1] = np.nan  # rows behind the last value would be dropped
    for table, steps, message in (
        (y, 0, "`steps` is 0, expected 1 or more"),
        (y, 3, "`steps` is 3, expected 6, the horizon, or more"),
        (y[:20], None, "no window of 24 rows of input and 6 to forecast; give a table with more"),
        (y, 7, "fewer than three values of a target"),
        (ended, 40, "fewer than three values of a target"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            model.recalibrate(table, steps)
        assert model.stored_ is fitted
    model.recalibrate(y, 2**70)  # every window
    counts = Forecaster(**{**QUICK, "steps": 2, "normalize": "last"}, output="negative_binomial")
    with pytest.raises(ConfigError, match="quantiles of the distribution"):
        counts.fit(np.arange(600) % 7).recalibrate(np.arange(600) % 7)


@pytest.mark.parametrize(("split", "expected"), [("200,100,100", 100), ("50/25/25", 100)])
def test_gaps_do_not_shorten_recalibration(split: str, expected: int) -> None:
    rows = np.delete(np.arange(400), [60, 250, 275])
    times = np.datetime64("2024-01-01T00", "s") + rows.astype("timedelta64[h]")
    table = pa.table({"ds": times, "y": noisy(400)[rows]})
    dataset = prepare(table, ForecastConfig(horizon=6, target=("y",), gaps="split"))
    steps = validation_steps(dataset.table, dataset.frequency, split)
    assert abs(steps - expected) <= 2


def test_a_series_without_windows_keeps_the_width_of_its_intervals() -> None:
    rng = np.random.default_rng(0)
    scales = np.repeat([0.02] * 9 + [0.5], 300)
    y = np.sin(np.tile(np.arange(300), 10) / 4) + rng.normal(size=3000) * scales
    table = long_table(300, 10, y=y.astype(np.float32), temp=None)
    model = Forecaster(**{**QUICK, "steps": 60, "normalize": "last"}, target="y").fit(table)

    def widths() -> NDArray[np.float64]:
        found = model.predict_quantiles(table, (0.1, 0.9))
        wide = np.asarray(found["y-q0.9"]) - np.asarray(found["y-q0.1"])
        return wide.reshape(10, HORIZON).mean(1)

    before = widths()
    model.recalibrate(table[:2700])
    after = widths()
    assert after[9] > 5 * after[0]
    assert after[9] / before[9] == pytest.approx(after[0] / before[0], rel=0.3)


@pytest.mark.parametrize("output", ["point", "quantiles", "student_t"])
def test_quantiles_are_calibrated_on_validation_values(output: Any) -> None:
    """This holds for an untrained network too: its errors are added."""
    model = Forecaster(**{**QUICK, "steps": 1}, output=output).fit(noisy(600))
    rows = model._windows(model.dataset_, "valid", 1)[1].rows()
    levels = (0.025, 0.1, 0.3, 0.825, 0.975)
    q, y = model.stored_.forecast(model._inputs, rows, levels)
    share = (y[..., None] <= q)[:, :, 0].mean(0)  # per step
    for step in range(HORIZON):
        assert share[step].tolist() == pytest.approx(levels, abs=0.03)


def test_a_point_lies_within_its_intervals() -> None:
    """This holds even if nearly all validation values lie above their forecasts."""
    rising = noisy(400) + np.r_[np.zeros(250), np.arange(150.0)]
    model = Forecaster(**{**QUICK, "steps": 1}, linear=False).fit(rising)
    assert (model.stored_.calibration.residuals[LEVELS.index(0.5)] > 1).all()
    point = model.predict()
    for level in (0.25, 0.1, 0.025):
        low, high = model.predict_quantiles(quantiles=(level, 1 - level)).T
        assert (low <= point[:, 0]).all()
        assert (point[:, 0] <= high).all()


@pytest.mark.parametrize("size", [1, len(LEVELS)])
def test_quantiles_never_cross(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(5, 3, 2, size, generator=generator)
    calibration = Calibration(torch.randn(len(LEVELS), 3, 2, generator=generator))
    levels = [k / 200 for k in range(1, 200)]
    found = calibration.quantiles(Point(), base, torch.ones(5, 2), levels)
    assert found.shape == (5, 3, 2, 199)
    assert (found.diff(dim=-1) >= 0).all()
    few = calibration.quantiles(Point(), base, torch.ones(5, 2), levels[10:100:7])
    assert torch.equal(few, found[..., 10:100:7])


def test_the_horizon_does_not_change_the_spread() -> None:
    model = Forecaster(**{**QUICK, "steps": 1}, output="quantiles").fit(noisy(400))
    values = torch.randn(3, INPUT + HORIZON, 1, generator=torch.Generator().manual_seed(0))
    want = spread(values, model.network_.config)
    deviation = values[:, :INPUT].std(1, correction=0) + 0.05
    torch.testing.assert_close(want, deviation)
    last = replace(model.network_.config, normalize="last")
    torch.testing.assert_close(spread(values, last), deviation.sqrt())
    values[:, INPUT:] = 1e6
    assert torch.equal(spread(values, model.network_.config), want)


def test_residuals_are_added_at_their_step_and_target_in_units_of_spread() -> None:
    sign = torch.tensor(LEVELS).sub(0.5).sign()[:, None, None]
    residuals = sign * torch.arange(6.0).view(1, 3, 2)
    wide = torch.tensor([[1.0, 10.0]])
    found = Calibration(residuals).quantiles(Point(), torch.ones(1, 3, 2, 1), wide, [0.1, 0.925])
    shift = torch.tensor([[0.0, 10.0], [2.0, 30.0], [4.0, 50.0]])
    torch.testing.assert_close(found[0], 1 + torch.stack([-shift, shift], -1))


@pytest.mark.parametrize("output", ["point", "quantiles", "student_t"])
def test_the_median_is_the_point_forecast(output: Any) -> None:
    """This holds even if nearly all validation values lie above their forecasts."""
    rising = noisy(400) + np.r_[np.zeros(250), np.arange(150.0)]
    model = Forecaster(**{**QUICK, "steps": 3}, output=output, linear=False).fit(rising)
    found = model.predict_quantiles(quantiles=(0.45, 0.5, 0.55))
    np.testing.assert_array_equal(found[:, 1:2], model.predict())
    assert (np.diff(found) >= 0).all()
    if output == "point":  # the mean is no median
        mean = Forecaster(**{**QUICK, "steps": 3}, loss="mse", linear=False).fit(rising)
        assert (mean.predict_quantiles(quantiles=(0.5,)) > mean.predict() + 1).all()


@pytest.mark.filterwarnings("ignore:80 % intervals cover")
def test_intervals_allow_for_an_offset_of_the_other_sign() -> None:
    """Of few validation windows, as long as they do not repeat it often."""
    rng, shares = np.random.default_rng(0), {}
    for num_valid in (40, 400):
        slope = np.r_[np.zeros(300), np.full(num_valid, -0.2), np.full(60, 0.2)]
        y = slope.cumsum() + rng.normal(size=len(slope)) * 0.3
        split = (300, num_valid, 60)
        given = {**QUICK, "horizon": 20, "patch": 1, "steps": 1, "split": split}
        model = Forecaster(**{**given, "normalize": "last"}, linear=False).fit(y)
        shares[num_valid] = model.backtest()["forecaster"]["coverage_80"]
    assert shares[40] > 0.7
    assert shares[400] < 0.5


def test_calibration_reads_evenly_spread_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Forecaster(**{**QUICK, "steps": 1}, output="quantiles").fit(noisy(1200))
    monkeypatch.setattr("fastlstm.forecast.calibration._MAX_VALUES", 100 * HORIZON * 7)
    taken: list[NDArray[np.int64]] = []
    read = ScaledWindows.read

    def recorded(inputs: ScaledWindows, rows: NDArray[np.int64], length: int, size: int) -> Any:
        taken.append(rows)
        return read(inputs, rows, length, size)

    monkeypatch.setattr(ScaledWindows, "read", recorded)
    dataset = model.dataset_
    split = split_table(dataset.table, dataset.frequency, model.split)
    valid = split.windows(dataset.table, "valid", INPUT, HORIZON)
    shown: list[tuple[int, int]] = []
    calibrate(model.network_, model._inputs, valid, show=lambda *how_far: shown.append(how_far))
    assert shown == [(100, 100)]
    assert len(taken[0]) == 100
    assert (taken[0][0], taken[0][-1]) == (valid.rows()[0], valid.rows()[-1])
    # Where the time may not be enough for all, those that come first are of the whole part.
    monkeypatch.setattr("fastlstm.forecast.calibration.MIN_CALIBRATED", 64)
    for limit_s, num in ((0.0, 64), (600.0, 100)):
        calibrate(
            model.network_, model._inputs, valid, lambda *how_far: shown.append(how_far), limit_s
        )
        assert shown[-1] == (num, 100)
    assert np.array_equal(np.sort(taken[1]), taken[0])
    places = np.searchsorted(taken[0], np.sort(taken[1][:20]))
    assert np.diff([0, *places, 100]).max() <= 15


def counts(num_rows: int = 600, num_series: int = 3) -> pa.Table:
    """Negative binomial counts of dispersion 0.2 around daily waves; means of about 3, 30, 300."""
    rng = np.random.default_rng(0)
    hours, scale = np.arange(num_rows), 3.0 * 10.0 ** np.arange(num_series)
    mean = scale[:, None] * (1 + 0.8 * np.sin(hours * (2 * np.pi / 24)))
    rate = rng.gamma(1 / 0.2, 0.2 * mean)
    return long_table(num_rows, num_series, y=rng.poisson(rate).ravel().astype(float), temp=None)


@pytest.fixture(scope="module")
def counting() -> Forecaster:
    given = {**QUICK, "input_size": 48, "steps": 500}  # at 250 the seed decides
    return Forecaster(**given, output="negative_binomial").fit(counts())


def test_mean_and_dispersion_of_counts_are_learned_at_every_scale(counting: Forecaster) -> None:
    rows = counting._windows(counting.dataset_, "test", 1)[1].rows()
    hours = (rows[:, None] + 48 + np.arange(HORIZON)) % 600
    series = rows // 600
    found = []
    for values, statics in counting._inputs.read(rows, counting.network_.config):
        with torch.no_grad():
            found.append(counting.network_(values, statics))
    mean, dispersion = torch.cat(found)[:, :, 0].unbind(-1)
    for number in range(3):
        of = series == number
        wave = 3 * 10.0**number * (1 + 0.8 * np.sin(hours[of] * (2 * np.pi / 24)))
        relative = np.abs(mean[of].numpy() - wave).mean() / wave.mean()
        assert relative < 0.25, number
        assert dispersion[of].median().item() == pytest.approx(0.2, abs=0.1), number


def test_quantiles_of_counts_are_counts_and_cover(counting: Forecaster) -> None:
    table = counting.predict_quantiles(quantiles=(0.025, 0.5, 0.975))
    for name in table.column_names[2:]:
        values = table[name].to_numpy()
        assert (values >= 0).all()
        assert (values == np.round(values)).all()
    assert counting.predict()["y"].to_numpy().min() > 0
    found = counting.backtest()["forecaster"]
    assert found["coverage_80"] == pytest.approx(0.8, abs=0.08)  # whole numbers: a bit more
    assert found["coverage_95"] == pytest.approx(0.95, abs=0.04)


@pytest.mark.parametrize(("value", "said"), [(-1.0, "-1"), (2.5, "2.5")])
def test_negative_and_fractional_counts_are_refused(value: float, said: str) -> None:
    table, message = replaced(counts(60), "y", 72, value), f"'y' is {said} in row 12 of series 's1'"
    with pytest.raises(DataError, match=f"{message}, expected counts"):
        Forecaster(**{**QUICK, "steps": 1}, output="negative_binomial").fit(table)


def test_counts_may_be_missing() -> None:
    y = counts(120)["y"].to_numpy().copy()
    y[::5] = np.nan
    table = counts(120).set_column(2, "y", pa.array(y))
    model = Forecaster(**{**QUICK, "steps": 3}, output="negative_binomial").fit(table)
    assert np.isfinite(model.predict()["y"].to_numpy()).all()


def test_smooth_and_noisy_series_have_intervals_of_their_own() -> None:
    rng, rows = np.random.default_rng(0), 900
    wave = np.sin(np.arange(rows) * (2 * np.pi / 24))
    made = {"smooth": wave + 0.05 * rng.normal(size=rows), "noisy": wave + rng.normal(size=rows)}
    table = long_table(rows, 2, y=np.concatenate(list(made.values())), temp=None)
    model = Forecaster(**{**QUICK, "steps": 60}).fit(table)
    noise = model.stored_.calibration.noise
    assert noise is not None
    assert noise[1] > 2 * noise[0]
    part = model._windows(model.dataset_, "test", 1)[1].rows()
    series = model.dataset_.table.segments.of_rows(part)
    q, y = model.stored_.forecast(model._inputs, part, (0.1, 0.9))
    is_inside = (q[..., 0] <= y) & (y <= q[..., 1])
    for number in (0, 1):
        assert is_inside[series == number].mean() == pytest.approx(0.8, abs=0.08)
    other = table.set_column(0, "unique_id", pa.array(["s1"] * rows + ["new"] * rows))
    model.set_params(steps=5).partial_fit(other)  # a series less, and one that is not known
    assert model.stored_.calibration.noise.shape == (2, 1)  # type: ignore[union-attr]
    assert np.isfinite(model.predict_quantiles(other)["y-q0.1"].to_numpy()).all()


@pytest.mark.parametrize("n", [1, 2, 9, 10, 39, 199, 200])
def test_order_statistics_follow_their_definition(n: int) -> None:
    errors = torch.randperm(n, generator=torch.Generator().manual_seed(0)).float()[:, None, None]
    found = conformal(errors + 1)[:, 0]  # the order statistic of rank k is k
    for level, value in zip(LEVELS, found.tolist(), strict=True):
        place = round((n + 1) * level, 6)
        rank = np.floor(place) if level < 0.5 else np.ceil(place)
        if level == 0.5:
            rank = place
        want = -np.inf if rank < 1 else np.inf if rank > n else rank
        assert value == want, level


def test_missing_errors_do_not_count() -> None:
    errors = torch.randn(40, 2, len(LEVELS), generator=torch.Generator().manual_seed(0))
    whole = conformal(errors[:25])
    errors[25:] = torch.nan
    shuffled = errors[torch.randperm(40, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(conformal(shuffled), whole)
    for number in range(len(LEVELS)):
        assert torch.equal(conformal(errors[..., number : number + 1])[number], whole[number])
    none = conformal(errors[25:])
    assert none[:, 0].tolist() == [-np.inf] * 12 + [0.0] + [np.inf] * 12


def test_a_level_beside_an_infinite_one_is_infinite() -> None:
    calibration = Calibration(conformal(torch.randn(30, 1, 1))[:, None])
    zeros = torch.zeros(1, 1, 1, 1)
    levels = (0.04, 0.05, 0.06, 0.5, 0.95, 0.951)
    found = calibration.quantiles(Point(), zeros, torch.ones(1, 1), levels)[0, 0, 0]
    assert found.isinf().tolist() == [True, False, False, False, False, True]
    assert calibration.unsupported((0.05, 0.5, 0.95)) is None
    text = str(calibration.unsupported((0.025, 0.5, 0.99)))
    assert text.startswith("quantiles 0.025, 0.99 are infinite: validation has too few values")
    assert "(99 per step" in text
    assert "(39 per step" in str(calibration.unsupported((0.04,)))


def test_too_few_validation_values_make_infinite_quantiles() -> None:
    y = np.random.default_rng(0).normal(size=160).astype(np.float32)
    given: dict[str, Any] = {"horizon": 4, "input_size": 8, "patch": 4, "hidden_size": 8}
    model = Forecaster(**given, steps=2, split=(90, 30, 40)).fit(y)  # 27 validation windows
    found = model.predict_quantiles(quantiles=(0.05, 0.5, 0.95))
    assert np.isfinite(found).all()
    infinite = r"quantiles 0\.025, 0\.975 are infinite.*or levels nearer to 0\.5"
    with pytest.warns(UserWarning, match=infinite):
        found = model.predict_quantiles(quantiles=(0.025, 0.5, 0.975))
    assert (found[:, 0] == -np.inf).all()
    assert (found[:, 2] == np.inf).all()
    report = model.backtest()["forecaster"]
    assert report["coverage_95"] == 1.0
    assert np.isfinite(report["crps"])
