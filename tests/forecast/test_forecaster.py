"""`Forecaster`: fit, predict, backtest, files; refusals in one line."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv

from fastlstm import Forecaster
from fastlstm.errors import ConfigError, DataError
from fastlstm.forecast.data.error_measures import QuantileScores
from fastlstm.forecast.evaluation import evaluate_forecasts
from series_frames import START, long_table

pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")

QUICK: dict[str, Any] = {
    "horizon": 6, "input_size": 24, "patch": 6, "hidden_size": 16, "steps": 60, "dropout": 0.0,
    "learning_rate": 0.01, "split": "60/20/20",
}  # fmt: skip


def waves(num_rows: int = 240, num_series: int = 3, noise: float = 0.05) -> pa.Table:
    """Daily waves with several heights and levels."""
    rng = np.random.default_rng(0)
    hours = np.tile(np.arange(num_rows), num_series)
    which = np.repeat(np.arange(num_series), num_rows)
    y = 10 * which + (1 + which) * np.sin(hours * (2 * np.pi / 24))
    y += noise * rng.normal(size=len(hours))
    return long_table(num_rows, num_series, y=y.astype(np.float32), temp=None)


@pytest.fixture(scope="module")
def fitted() -> Forecaster:
    return Forecaster(**QUICK).fit(waves())


@pytest.mark.isa
def test_a_forecaster_learns_and_scores_itself(fitted: Forecaster) -> None:
    found = fitted.backtest()
    assert set(found) == {"forecaster", "ridge", "naive", "seasonal_naive"}
    assert found["seasonal_naive"]["season"] == 24
    assert found["forecaster"]["mse"] < 0.5 * found["naive"]["mse"]
    assert found["naive"]["rel_mae"] == pytest.approx(1.0)
    assert fitted.score() == pytest.approx(1 - found["forecaster"]["rel_mae"])
    assert fitted.fitted_.steps == 60
    without_times = Forecaster(**QUICK | {"steps": 1}).fit(waves().column("y").to_numpy())
    assert without_times.backtest()["seasonal_naive"]["season"] == 1
    scaled = fitted.backtest(scaled=True)["forecaster"]["mse"]
    std = fitted._inputs.series.std  # type: ignore[union-attr]
    low, high = float(std.min()) ** 2, float(std.max()) ** 2
    assert low * scaled <= found["forecaster"]["mse"] <= high * scaled


@pytest.mark.isa
@pytest.mark.parametrize(
    "given",
    [{"bidirectional": True}, {"tbptt": 12, "batch_size": 4},
     {"balance": True}],
)  # fmt: skip
def test_other_networks_learn_and_are_saved(tmp_path: Path, given: dict[str, Any]) -> None:
    model = Forecaster(**{**QUICK, "patch": 3, "steps": 150}, **given).fit(waves(noise=0.0))
    found = model.backtest()
    assert found["forecaster"]["mse"] < 0.3 * found["naive"]["mse"]
    model.save(tmp_path)
    assert Forecaster.load(tmp_path).predict(waves(noise=0.0)).equals(model.predict())


@pytest.mark.isa
def test_backtest_agrees_with_predict_at_each_origin(fitted: Forecaster) -> None:
    """Compares the forecast of the table cut at an origin with the actual values."""
    table = waves()
    y = table["y"].to_numpy().reshape(3, 240)
    errors = []
    for origin in (192, 200, 234):
        cut = table.filter(pa.array(np.tile(np.arange(240) < origin, 3)))
        forecast = fitted.predict(cut)["y"].to_numpy().reshape(3, 6)
        errors.append((forecast - y[:, origin : origin + 6]) ** 2)
    rows = np.concatenate([240 * s + np.array([192, 200, 234]) - 24 for s in range(3)])
    scores = QuantileScores((0.5,), ())
    found = evaluate_forecasts(fitted.stored_, fitted._inputs, rows, 24, scores)["forecaster"]
    assert found["mse"] == pytest.approx(np.mean(errors), rel=1e-4)


def test_backtest_scores_quantiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Forecaster(**{**QUICK, "steps": 20}, output="quantiles").fit(waves())
    report = model.backtest(quantiles=(0.1, 0.5))
    assert "crps" not in report["naive"]
    found = report["forecaster"]
    assert found["crps"] < found["mae"]
    scaled = model.backtest(scaled=True)["forecaster"]
    std = model._inputs.series.std  # type: ignore[union-attr]
    assert std.min() * scaled["crps"] <= found["crps"] <= std.max() * scaled["crps"]
    assert "pinball_0.5" not in scaled
    monkeypatch.setattr("fastlstm.forecast.evaluation._MAX_NUMBERS", 1)  # a window at a time
    one_by_one = model.backtest(quantiles=(0.1, 0.5))["forecaster"]
    assert one_by_one == pytest.approx(found, rel=1e-4)
    with pytest.raises(ConfigError, match=r"quantile 0.999 is outside"):
        model.backtest(quantiles=(0.999,))


def test_forecasts_follow_the_end_of_every_series(fitted: Forecaster) -> None:
    table = fitted.predict()
    assert table.column_names == ["unique_id", "ds", "y"]
    assert table["unique_id"].to_pylist() == ["s0"] * 6 + ["s1"] * 6 + ["s2"] * 6
    hours = np.arange(240, 246).astype("timedelta64[h]") + np.datetime64(START, "us")
    assert (table["ds"].to_numpy()[:6].astype("datetime64[us]") == hours).all()
    level = table["y"].to_numpy().reshape(3, 6).mean(1)
    assert np.all(np.abs(level - [0, 10, 20]) < 3)


@pytest.mark.isa
def test_quantiles_are_ordered_and_cover(fitted: Forecaster) -> None:
    table = fitted.predict_quantiles(quantiles=np.array([0.025, 0.5, 0.975]))
    with pytest.raises(ConfigError, match=r"got the list \[0.1, 0.9\], expected a table; for"):
        fitted.predict_quantiles([0.1, 0.9])
    assert table.column_names[2:] == ["y-q0.025", "y-q0.5", "y-q0.975"]
    low, middle, high = (table[name].to_numpy() for name in table.column_names[2:])
    assert (low <= middle).all()
    assert (middle <= high).all()
    found = fitted.backtest("valid")["forecaster"]  # what it was calibrated on
    assert found["coverage_80"] == pytest.approx(0.8, abs=0.02)
    assert found["coverage_95"] == pytest.approx(0.95, abs=0.02)
    for level in (0.001, 0.999, float("nan")):
        with pytest.raises(ConfigError, match=f"quantile {level} is outside 0.005 to 0.995"):
            fitted.predict_quantiles(quantiles=[0.5, level])


def test_intervals_keep_their_coverage_in_a_calm_series() -> None:
    """Training and validation rows move four times as much as test rows do."""
    rng = np.random.default_rng(0)
    height = np.where(np.arange(900) < 700, 4.0, 1.0)
    y = height * (np.sin(np.arange(900) * (2 * np.pi / 24)) + 0.3 * rng.normal(size=900))
    given = {**QUICK, "split": (500, 180, 220), "normalize": "standard"}
    model = Forecaster(**given).fit(y.astype(np.float32))
    assert model.backtest()["forecaster"]["coverage_80"] == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda table: table.to_pandas(), pandas.DataFrame),
        (polars.from_arrow, polars.DataFrame),
        (lambda table: table["y"].to_numpy(), np.ndarray),
    ],
    ids=["pandas", "polars", "array"],
)
def test_a_pickle_keeps_the_kind_of_frame_but_no_rows(make: Any, kind: type) -> None:
    sizes = []
    for rows in (120, 2400):
        frame = make(waves(rows, 1))
        model = Forecaster(**{**QUICK, "steps": 2, "split": (80, 20, 20)}).fit(frame)
        pickled = pickle.dumps(model)
        sizes.append(len(pickled))
        again = pickle.loads(pickled)
        own, found = model.predict(), again.predict(frame)
        assert isinstance(own, kind)
        assert isinstance(found, kind)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(own))
    assert abs(sizes[1] - sizes[0]) < 200
    with pytest.raises(ConfigError, match="pickled Forecaster has no table"):
        again.predict()


@pytest.mark.isa
@pytest.mark.usefixtures("same_random_numbers")
def test_the_same_seed_gives_the_same_forecaster() -> None:
    table = waves(120)
    first, second = (
        Forecaster(**{**QUICK, "steps": 5, "dropout": 0.3}).fit(table) for _ in range(2)
    )
    assert first.predict().equals(second.predict())
    other = Forecaster(**{**QUICK, "steps": 5, "dropout": 0.3, "seed": 1}).fit(table)
    assert not first.predict().equals(other.predict())


@pytest.mark.parametrize("gaps", [None, "split", "fill"])
@pytest.mark.parametrize("lost", [(), (100,), range(80, 120)])
def test_a_forecast_reads_the_rows_that_training_read(
    gaps: Any, lost: Sequence[int], tmp_path: Path
) -> None:
    """Not the file again; another file, or other options, are read."""
    kept = [row for row in range(480) if row not in lost]
    table = waves(num_series=2).append_column("temp", pa.array(np.arange(480) / 7)).take(kept)
    path, options = tmp_path / "a.csv", {**QUICK, "steps": 1, "gaps": gaps}
    csv.write_csv(table, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Forecaster(**options).fit(path).save(tmp_path / "run")
        model = Forecaster.load(tmp_path / "run")
        assert model.forecasts(path).dataset.from_cache
        found = model.predict(path)
        assert not Forecaster.load(tmp_path / "run", snap="1h").forecasts(path).dataset.from_cache
        again = Forecaster.load(tmp_path / "run").predict(csv.read_csv(path).to_pandas())
        assert found.equals(again)


@pytest.mark.isa
def test_a_saved_forecaster_predicts_the_same(fitted: Forecaster, tmp_path: Path) -> None:
    fitted.save(tmp_path / "run")
    again = Forecaster.load(tmp_path / "run")
    assert again.get_params() == fitted.get_params()
    assert again.predict(waves()).equals(fitted.predict())
    assert again.backtest(frame=waves()) == fitted.backtest()
    with pytest.raises(ConfigError, match="a loaded or pickled Forecaster has no table"):
        again.predict()
    with pytest.raises(ConfigError, match="expected train, valid or test"):
        again.backtest("long.csv")
    names = {path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")}
    assert names == {
        *("config.json", "schema.json", "scaler.json", "model.safetensors", "manifest.json"),
    }


@pytest.mark.filterwarnings("ignore:80 % intervals cover")
@pytest.mark.usefixtures("same_random_numbers")
def test_partial_fit_continues_from_the_weights(tmp_path: Path) -> None:
    model = Forecaster(**{**QUICK, "steps": 20}, linear=False).fit(waves())
    first, scaler = model.backtest()["forecaster"]["mse"], model.stored_.scaler
    before = {n: t.clone() for n, t in model.network_.state_dict().items()}
    kept = model.stored_
    shifted = waves(noise=0.0)
    model.set_params(steps=60).partial_fit(shifted)
    assert model.stored_.scaler is scaler
    assert model.backtest(frame=waves())["forecaster"]["mse"] < first
    assert all(torch.equal(t, before[n]) for n, t in kept.network.state_dict().items())
    still = model.network_.state_dict()
    model.set_params(learning_rate=0.0, ema=0.0).partial_fit(shifted)
    assert all(torch.equal(t, still[n]) for n, t in model.network_.state_dict().items())
    model.save(tmp_path)
    assert Forecaster.load(tmp_path).get_params() == model.get_params()
    model.set_params(hidden_size=8)
    with pytest.raises(ConfigError, match="`hidden_size` is 8 and was 16 at fit"):
        model.partial_fit(shifted)
    model.set_params(hidden_size=16)
    model.partial_fit(long_table(240))  # its other column is left out, as at `predict`
    with pytest.raises(DataError, match="has no column 'y'"):
        model.partial_fit(long_table(240).drop_columns(["y"]))
    assert Forecaster(**{**QUICK, "steps": 2}).partial_fit(shifted).fitted_.steps == 2


@pytest.mark.filterwarnings("ignore:1 of 3 series lack", "ignore:80 % intervals")
@pytest.mark.parametrize("has_rows", [False, True], ids=["later", "empty before"])
def test_a_series_without_training_values_is_forecast_as_a_new_one(has_rows: bool) -> None:
    table = waves(240, 3).to_pandas()
    is_late = (table["unique_id"] == "s2") & (np.arange(720) - 480 < 170)
    late = table.assign(y=table["y"].mask(is_late)) if has_rows else table[~is_late]
    model = Forecaster(**QUICK, gaps="fill").fit(late)
    assert model.stored_.series is not None
    assert model.stored_.series.names == ("s0", "s1")
    renamed = late.assign(unique_id=late["unique_id"].replace("s2", "s9"))
    for found in (Forecaster.predict, Forecaster.predict_quantiles):
        own, other = (found(model, rows).iloc[-6:, 2:] for rows in (late, renamed))
        np.testing.assert_array_equal(own, other)
        np.testing.assert_array_equal(own, found(model).iloc[-6:, 2:])


def test_future_covariates_come_in_a_second_table() -> None:
    """The future columns alone determine the target."""
    rng = np.random.default_rng(0)
    plan = rng.choice([-1.0, 1.0], size=3 * 200).astype(np.float32)
    kinds = np.array(["on", "off"])[(plan > 0).astype(int)]
    y = np.where(kinds == "on", 2.0, -2.0) + plan
    table = long_table(200, 3, y=y.astype(np.float32), temp=None, plan=plan, kind=kinds)
    settings: dict[str, Any] = {**QUICK, "normalize": "none", "steps": 150}
    roles: dict[str, Any] = {"future": ["plan", "kind"], "categorical": ["kind"]}
    model = Forecaster(**settings, **roles).fit(table)
    past = table.filter(pa.array(np.tile(np.arange(200) < 190, 3)))
    ahead = table.filter(pa.array(np.tile(np.arange(200) >= 190, 3))).drop_columns(["y"])
    ahead = ahead.take(rng.permutation(len(ahead)))  # sorted by whoever reads it
    model.set_params(disorder="sort")
    with pytest.raises(ConfigError, match="the forecast needs plan, kind of every step"):
        model.predict(past)
    with pytest.raises(DataError, match="sort"):
        model.predict(past, ahead)
    ahead = ahead.sort_by([("unique_id", "descending"), ("ds", "ascending")])
    found = model.predict(past, ahead)["y"].to_numpy().reshape(3, 6)
    due = y.reshape(3, 200)[:, 190:196]
    assert np.abs(found - due).mean() < 0.7
    with pytest.raises(DataError, match=r"has no column 'kind' \(given as .*future"):
        model.predict(past, ahead.drop_columns(["kind"]))
    with pytest.raises(DataError, match=r"no column 'plan'[^']*; its columns: unique_id, ds"):
        model.predict(past, ahead.drop_columns(["kind", "plan"]))
    late = ahead.filter(pa.compute.not_equal(ahead["ds"], ahead["ds"][2]))
    with pytest.raises(DataError, match=r"future table has no row for series 's0' at 2020-01-09;"):
        model.predict(past, late)
    stray = ahead.filter(pa.compute.equal(ahead["unique_id"], "s2"))
    stray = stray.set_column(0, "unique_id", pa.array(["s9"] * len(stray)))
    with pytest.raises(DataError, match="has rows of series 's9', which the past lacks"):
        model.predict(past, pa.concat_tables([ahead, stray]))
    some = past.filter(pa.compute.not_equal(past["unique_id"], "s2"))  # a plan of all may be given
    assert len(model.predict(some, ahead)) == 12
    plain = Forecaster(**{**QUICK, "steps": 1}).fit(waves())
    with pytest.raises(ConfigError, match="fitted without future columns"):
        plain.predict(waves(), ahead)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stride": 0}, "`stride` is 0, expected 1"),
        ({"part": "validation"}, "`part` is 'validation', expected train, valid or test"),
        ({"part": "long.csv"}, "`part` is 'long.csv', .* give a table as `frame`"),
        ({"part": waves()}, "`part` is a .*Table, .* give a table as `frame`"),
    ],
)
def test_invalid_options_of_backtest_are_refused(
    fitted: Forecaster, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fitted.backtest(**given)


def with_zone(zone: str | None) -> pa.Table:
    table = waves()
    return table.set_column(1, "ds", table["ds"].cast(pa.timestamp("us", zone)))


BAD = [
    ({"horizon": 0}, lambda: waves(), "`horizon` is 0, expected a number from 1"),
    ({"input_size": 25}, lambda: waves(), "not a multiple of `patch` 6; give `input_size=24`"),
    ({}, lambda: waves(40), "a window needs 30 rows, the longest segment"),
    ({"horizon": 300}, lambda: waves(), "a horizon of 300 needs at least 301"),
    ({"steps": 5, "epochs": 1}, lambda: waves(), "`steps` and `epochs` exclude each other"),
    ({"budget": "soon", "steps": None}, lambda: waves(), "expected a duration"),
    ({"target": "z"}, lambda: waves(), "no column 'z'"),
    (
        {"split": "5,0"},
        lambda: waves(),
        "`split` is '5,0', .* two or three counts of steps, .*, or rest,48,48",
    ),
    ({"split": (1, 2, 3, 4)}, lambda: waves(), "two or three counts of steps"),
    ({"tbptt": 12, "balance": True}, lambda: waves(), "leave out one of them"),
    ({"tbptt": 13}, lambda: waves(), "`tbptt` is 13, not a multiple of `patch` 6; give `tbptt=12`"),
    ({"tbptt": 600}, lambda: waves(), "a chunk needs 600 rows and 6 after them,"),
    ({"tbptt": 12, "bidirectional": True}, lambda: waves(), "leave out `bidirectional` or `tbptt`"),
]


@pytest.mark.parametrize(("given", "make", "message"), BAD)
def test_invalid_options_of_fit_are_refused(given: dict[str, Any], make: Any, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        Forecaster(**{**QUICK, **given}).fit(make())
    assert "\n" not in str(caught.value)


def test_another_table_at_predict_is_refused(fitted: Forecaster) -> None:
    with pytest.raises(ConfigError, match="not fitted yet; call fit"):
        Forecaster().predict()
    with pytest.raises(DataError, match="has no column 'y'"):
        fitted.predict(waves().rename_columns(["unique_id", "ds", "x"]))
    with pytest.raises(DataError, match="series 's0' ends in 20 rows without gaps"):
        fitted.predict(waves(20))
    with pytest.raises(DataError, match="the time zone Europe/Berlin, the table at fit had None"):
        fitted.predict(with_zone("Europe/Berlin"))
    table = waves()
    with pytest.raises(DataError, match="the frequency 2 hours, the table at fit had 1 hour"):
        fitted.predict(table.take(np.arange(0, 720, 2)))
    minutes = np.tile(np.arange(240), 3).astype("timedelta64[m]") + np.datetime64(START, "us")
    with pytest.raises(DataError, match="the frequency 1 minute, the table at fit had 1 hour"):
        fitted.predict(table.set_column(1, "ds", pa.array(minutes)))


def with_places(table: pa.Table) -> pa.Table:
    num = table.num_rows // 3
    size = pa.array(np.repeat([1.0, 2.0, 30.0], num))
    kinds = pa.array(np.array(["work", "rest"])[np.arange(table.num_rows) % num % 24 // 12])
    same = pa.array(np.full(table.num_rows, 7.0))  # a constant is not scaled
    town = pa.array(np.repeat(["n", "s", "e"], num))
    columns = {"size": size, "same": same, "kind": kinds, "town": town}
    for name, values in columns.items():
        table = table.append_column(name, values)
    return table


PLACES: dict[str, Any] = {
    "static": ["size", "same", "town"], "past": "kind", "categorical": ["kind", "town"],
}  # fmt: skip


def test_another_table_is_scaled_and_numbered_as_at_fit(tmp_path: Path) -> None:
    table = with_places(waves(120))
    model = Forecaster(**{**QUICK, "steps": 5}, **PLACES).fit(table)
    whole = model.predict().to_pandas().set_index("unique_id")["y"]
    for series in ("s0", "s2"):
        part = table.filter(pa.compute.equal(table["unique_id"], series)).slice(12)
        found = model.predict(part)["y"].to_numpy()  # its names come in another order
        np.testing.assert_allclose(found, whole[series].to_numpy(), rtol=1e-5)
    model.save(tmp_path)
    again = Forecaster.load(tmp_path)
    np.testing.assert_allclose(
        again.predict(table.slice(12))["y"].to_numpy(), whole.to_numpy(), rtol=1e-5
    )
    other = table.drop_columns(["kind"]).append_column("kind", pa.array(["work", "play"] * 180))
    with pytest.raises(DataError, match=r"'kind' has the unknown category 'play'; .* had 2 others"):
        model.predict(other)


def test_a_constant_target_is_refused_at_fit_and_forecast_at_predict(fitted: Forecaster) -> None:
    flat = long_table(240, y=np.full(720, 5.0), temp=None)
    with pytest.raises(DataError, match="target 'y' has the same value in every row"):
        Forecaster(**QUICK).fit(flat)
    assert np.isfinite(fitted.predict(flat)["y"].to_numpy()).all()


def test_series_may_be_named_by_several_columns() -> None:
    days = pandas.date_range("2024-01-01", periods=60)
    parts = [
        pandas.DataFrame({"ds": days, "store": s, "item": i, "y": np.arange(60.0) % 7})
        for s in (1, 2)
        for i in "ab"
    ]
    model = Forecaster(horizon=2, input_size=8, hidden_size=4, steps=1, series=["store", "item"])
    model.fit(pandas.concat(parts))
    assert model.dataset_.series == ("1/a", "1/b", "2/a", "2/b")
    assert set(model.predict()["store,item"]) == {"1/a", "1/b", "2/a", "2/b"}
