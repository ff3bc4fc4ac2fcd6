"""Pictures of forecasts, cross-validation, and columns of new tables by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from fastlstm import Forecaster
from fastlstm.errors import ConfigError, DataError


def frame(num_series: int = 2, rows: int = 120) -> pd.DataFrame:
    t = np.arange(rows)
    parts = [
        {"unique_id": f"s{n}", "ds": pd.date_range("2024-01-01", periods=rows),
         "y": 100.0 * n + 10 + np.sin(t), "temp": np.cos(t / 3), "price": t % 5 + 0.5}
        for n in range(num_series)
    ]  # fmt: skip
    return pd.concat(map(pd.DataFrame, parts), ignore_index=True)


@pytest.fixture(scope="module")
def model() -> Forecaster:
    return Forecaster(4, steps=20, input_size=12, hidden_size=8).fit(frame())


def test_columns_are_found_by_name(model: Forecaster) -> None:
    expected = model.predict(frame())
    mixed = frame()[["price", "ds", "temp", "y", "unique_id"]].assign(more=1.5)
    pd.testing.assert_frame_equal(model.predict(mixed), expected)
    with pytest.raises(DataError, match="no column 'temp'"):
        model.predict(frame().drop(columns="temp"))


@pytest.mark.charts
def test_pictures_have_a_panel_per_series_and_can_be_saved(
    model: Forecaster, tmp_path: Path
) -> None:
    picture = model.forecasts().plot()
    assert [panel.title for panel in picture.panels] == ["s0", "s1"]
    actual, ahead = picture.panels[0].curves
    y = frame()["y"].to_numpy()[:120]
    np.testing.assert_allclose(actual.y, y[-12:], rtol=1e-6)
    np.testing.assert_allclose(ahead.y, model.predict()["y"][:4], rtol=1e-6)
    ElementTree.parse(picture.save(tmp_path / "a.svg"))
    assert picture.save(tmp_path / "a.png", dark=True).read_bytes()[:4] == b"\x89PNG"
    assert "prefers-color-scheme: dark" in picture._repr_html_()
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        picture.save(tmp_path / "a.pdf")
    tested = model.plot_backtest(series=["s1"], max_panels=2)
    assert [panel.title for panel in tested.panels] == ["s1", "s1"]
    with pytest.raises(ConfigError, match="no series 'x'"):
        model.plot_backtest(series=["x"])


@pytest.mark.charts
def test_a_notebook_shows_the_forecaster_its_forecasts_and_its_errors(model: Forecaster) -> None:
    assert "not fitted" in Forecaster(4)._repr_html_()
    shown = model._repr_html_()
    assert "<td>forecasts</td><td>y, every day</td>" in shown
    assert "<td>trained</td><td>20 steps" in shown
    loaded = pickle.loads(pickle.dumps(model))._repr_html_()
    assert "every day" in loaded
    assert all(f">{name}</text>" in model.forecasts()._repr_html_() for name in ("s0", "s1"))
    figures, evaluation = model.backtest(), model.evaluation()
    assert figures == evaluation.figures
    assert "seasonal naive (season 7)" in evaluation._repr_html_()
    assert "seasonal naive (season 7)" in figures._repr_html_()
    assert "<th>season</th>" not in figures._repr_html_()
    assert f"<td>{figures['naive']['mae']:.4g}</td>" in figures._repr_html_()
    assert '<tr class="best"><td>forecaster</td>' in figures._repr_html_()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"max_panels": 0}, "`max_panels` is 0"),
        ({"max_panels": 1.5}, "`max_panels` is 1.5"),
        ({"series": []}, "empty"),
    ],
)
def test_an_empty_picture_is_refused(model: Forecaster, choice: Any, message: str) -> None:
    for draw in (model.forecasts().plot, model.plot_backtest):
        with pytest.raises(ConfigError, match=message):
            draw(**choice)


def test_series_without_a_window_in_the_part_are_named(model: Forecaster) -> None:
    whole = frame()
    table = whole[(whole.unique_id == "s0") | (whole.ds < "2024-02-01")]  # s1 ends early
    with pytest.raises(DataError, match="none of these series has a window in this part"):
        model.plot_backtest(series=["s1"], frame=table)


def heights(svg: Path) -> dict[str, float]:
    """Returns the distance of each text of a picture from its top."""
    texts = [e for e in ElementTree.parse(svg).iter() if e.tag.endswith("}text")]
    return {str(e.text): float(e.attrib["y"]) for e in texts}


@pytest.mark.charts
def test_a_single_panel_has_its_legend_above_its_title_and_dark_paper(
    model: Forecaster, tmp_path: Path
) -> None:
    from matplotlib.image import imread

    picture = model.plot_backtest(series=["s1"], max_panels=1)
    found = heights(picture.save(tmp_path / "a.svg"))
    assert found["80 % interval"] == found["forecast"] < found["s1"] - 5
    pixels = imread(picture.save(tmp_path / "a.png", dark=True))[..., :3]
    assert np.median(pixels) < 0.2


@pytest.mark.parametrize("refit", [False, True])
def test_cross_validation(refit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fits, fit = [], Forecaster.fit
    monkeypatch.setattr(
        Forecaster, "fit", lambda self, f: (fits.append(self.split), fit(self, f))[1]
    )
    model = Forecaster(4, steps=5, input_size=12, hidden_size=8)
    table = model.cross_validation(
        frame(), n_windows=3, step_size=2, refit=refit, quantiles=(0.25, 0.75)
    )
    assert list(table) == ["unique_id", "ds", "cutoff", "y", "y-forecast", "y-q0.25", "y-q0.75"]
    assert table["y-forecast"].between(table["y-q0.25"], table["y-q0.75"]).all()
    assert len(fits) == (3 if refit else 1)
    cutoffs = pd.to_datetime(["2024-04-21", "2024-04-23", "2024-04-25"])
    assert (table["cutoff"].unique() == cutoffs).all()
    steps = (table["ds"] - table["cutoff"]).dt.days.to_numpy().reshape(-1, 4)
    assert (steps == [1, 2, 3, 4]).all()
    joined = table.merge(frame(), on=["unique_id", "ds"], suffixes=("", "_true"))
    assert len(joined) == len(table) == 3 * 2 * 4
    np.testing.assert_allclose(joined["y"], joined["y_true"], rtol=1e-7)  # as stored: float32
    with pytest.raises(DataError, match="leave"):
        model.cross_validation(frame(), n_windows=40)
    with pytest.raises(ConfigError, match="n_windows"):
        model.cross_validation(frame(), n_windows=0)
    with pytest.raises(ConfigError, match="quantile 2 is outside"):
        model.cross_validation(frame(), quantiles=(2,))


def test_cross_validation_needs_rows_before_the_validation_part() -> None:
    model = Forecaster(4, steps=5, input_size=12, hidden_size=8, split=(70, 100, 20))
    with pytest.raises(DataError, match="leave 100, expected more than 100, for validation"):
        model.cross_validation(frame(), n_windows=5)


def test_cross_validation_has_the_quantiles_of_predict() -> None:
    given, whole, levels = {"steps": 5, "input_size": 12, "hidden_size": 8}, frame(), (0.2, 0.8)
    found = Forecaster(4, **given).cross_validation(whole, quantiles=levels)
    past = whole[whole["ds"] <= found["cutoff"].iloc[0]]
    origin = past["ds"].nunique()
    split = (origin - round(origin / 8), round(origin / 8), 4)
    expected = Forecaster(4, **given, split=split).fit(whole).predict_quantiles(past, levels)
    for name in ("y-q0.2", "y-q0.8"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)
