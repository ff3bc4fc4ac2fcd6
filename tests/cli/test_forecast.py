"""`fastlstm forecast`: quantile levels and output files; test_series.py checks the forecasts."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv, ipc, parquet

from fastlstm.cli import forecast
from fastlstm.cli.main import main
from fastlstm.cli.options import levels_of
from fastlstm.errors import ConfigError
from fastlstm.forecast import forecast_table

TABLE = pa.table({"ds": pa.array([0, 3600], pa.timestamp("s")), "y": [1.0, 2.0]})


class Model:
    """Stands for a forecaster: remembers what it is asked."""

    schema = csv_schema = TABLE.schema
    num_rows = 2

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def forecasts(self, *arguments: Any) -> Model:
        self.asked.append(arguments)
        return self

    def recalibrate(self, table: Any) -> None:
        self.asked.append(table)

    def blocks(self) -> list[pa.Table]:
        return [TABLE.slice(0, 1), TABLE.slice(1)]


@pytest.fixture
def model(monkeypatch):
    made = Model()
    monkeypatch.setattr(forecast, "open_forecaster", lambda parsed, tables: made)
    return made


@pytest.mark.parametrize(
    ("text", "levels"), [(None, ()), ("0.5", (0.5,)), ("0.1, 0.5,0.9,", (0.1, 0.5, 0.9))]
)
def test_levels_are_numbers_between_commas(text, levels):
    assert levels_of(text) == levels


@pytest.mark.parametrize("text", ["", ",", "0", "1", "0.1,1.5", "half", "nan"])
def test_other_levels_are_refused(text):
    with pytest.raises(ConfigError, match=r"--quantiles is .* expected numbers between 0 and 1"):
        levels_of(text)


def test_points_quantiles_and_future_reach_the_model(model):
    assert main(["forecast", "run", "a.csv"]) == 0
    assert main(["forecast", "run", "a.csv", "b.csv", "--quantiles", "0.1", "--future", "f"]) == 0
    assert model.asked == [("a.csv", (), None), (["a.csv", "b.csv"], (0.1,), "f")]


def test_the_table_recalibrates_before_it_is_forecast(model):
    assert main(["forecast", "run", "a.csv", "--recalibrate", "--quantiles", "0.1"]) == 0
    assert model.asked == ["a.csv", ("a.csv", (0.1,), None)]
    assert main(["forecast", "run", "a.csv", "--recalibrate"]) == 2  # points have no intervals


def test_the_end_of_the_name_decides_the_kind_of_file(model, tmp_path, refused, printed):
    for name in ("a.csv", "a.parquet", "a.arrow", "\x1b.csv"):
        shown = printed("forecast", "run", "a.csv", "--out", tmp_path / name)
        assert shown == f"{tmp_path / name}: 2 rows of ds, y\n".replace("\x1b", "\\x1b")
    assert csv.read_csv(tmp_path / "a.csv")["y"].to_pylist() == [1.0, 2.0]
    assert "1970-01-01 01:00:00," in (tmp_path / "a.csv").read_text()
    assert parquet.read_table(tmp_path / "a.parquet")["y"].to_pylist() == [1.0, 2.0]
    with ipc.open_file(tmp_path / "a.arrow") as file:
        assert file.read_all().equals(TABLE)
    assert "--out is 'a.txt', expected a file name ending in" in refused(
        "forecast", "run", "a.csv", "--out", "a.txt"
    )
    assert len(model.asked) == 4


def test_a_failed_write_leaves_the_old_file(model, tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.csv"
    path.write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(forecast_table._WRITERS, ".csv", full)
    assert main(["forecast", "run", "a.csv", "--out", str(path)]) == 1
    assert "the disk is full; free some space" in capsys.readouterr().err
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
