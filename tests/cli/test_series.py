"""train, forecast, evaluate and info on a table, from the command line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pyarrow import csv
from pyarrow import parquet as pq

from fastlstm.cli.main import main
from series_frames import long_table

SMALL = [
    *("--horizon", "4", "--input-size", "24", "--patch", "4", "--hidden-size", "8"),
    *("--steps", "4", "--split", "60/20/20", "--no-tensorboard", "--threads", "1"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("series")
    path, out = folder / "table.csv", folder / "run"
    csv.write_csv(long_table(120), path)
    assert main(["train", str(path), "--out", str(out), *SMALL, "--json"]) == 0
    return str(path), str(out)


def test_quantiles_go_to_standard_out(run, capfdbinary):
    path, out = run
    assert main(["forecast", out, path, "--quantiles", "0.1,0.9"]) == 0
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert lines[0] == '"unique_id","ds","y-q0.1","y-q0.9"'
    assert len(lines) == 13


def test_evaluate_includes_simple_forecasts(run, printed):
    path, out = run
    found = json.loads(printed("evaluate", out, path, "--json"))
    assert set(found["scores"]) == {"forecaster", "ridge", "naive", "seasonal_naive"}
    shown = printed("evaluate", out, path, "--split", "valid", "--scaled")
    assert "valid split, in standard deviations of the training rows" in shown
    assert "seasonal naive" in shown


def test_info_of_a_forecaster(run, printed):
    _, out = run
    shown = printed("info", out)
    for part in ("24 steps in, 4 out", "y", "4 steps", "all match their recorded SHA-256"):
        assert part in shown


def test_resume_needs_no_options_again(run, refused, printed):
    path, out = run
    shown = printed("train", path, "--out", out, "--resume", "--steps", "6", "--json")
    assert json.loads(shown.splitlines()[-1])["step"] == 6
    assert "already contains a run (step 6)" in refused("train", path, "--out", out, *SMALL)


def test_a_binary_table_needs_a_horizon_too(tmp_path, refused):
    table, out = tmp_path / "table.parquet", tmp_path / "run"
    pq.write_table(long_table(120), table)
    assert f"the next N rows of {table}" in refused("train", table, "--out", out)
    assert not out.exists()


def test_the_error_of_a_missing_column_names_file_and_column(run, tmp_path, refused):
    table, other = long_table(120), tmp_path / "other.csv"
    for column, told in (
        ("y", f"{other} has no column 'y'"),
        ("temp", f"{other} has no column 'temp' (given as past); its columns: unique_id, ds, y"),
        ("ds", f"{other} has no time column, the table at fit had one"),
    ):
        csv.write_csv(table.drop_columns([column]), other)
        shown = refused("forecast", run[1], other)
        assert told in shown
        assert "--target" not in shown


def test_a_runs_own_settings_are_a_configuration(run, tmp_path, printed):
    path, out = run
    new = tmp_path / "new"
    given = ["--config", f"{out}/config.json", "--no-tensorboard", "--steps", "2"]
    assert main(["train", path, "--out", str(new), *given, "--json"]) == 0
    own, old = (json.loads((Path(p) / "config.json").read_text())["train"] for p in (new, out))
    assert {**own, "steps": 4} == {**old, "steps": 4}
    yaml = tmp_path / "a.yaml"
    yaml.write_text("horizon: 4\ntarget: [y, temp]\n")
    printed("train", path, "--out", tmp_path / "c", "--config", yaml, *SMALL[2:])
    assert json.loads((tmp_path / "c/config.json").read_text())["train"]["target"] == ["y", "temp"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--horizon", "0"], "`--horizon` is 0, expected a number from 1"),
        (["--horizon", "4", "--target", "z"], "no column 'z'"),
        (["--horizon", "4", "--split", "9"], "`--split` is '9', expected"),
        (["--horizon", "4", "--steps", "3", "--epochs", "1"], "exclude each other"),
        (["--horizon", "400"], "needs at least 401"),
        (["--target", "y"], "--horizon is missing: give --horizon N to train a forecaster of the"),
        (["--hidden-size", "8"], "--horizon is missing"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(run, tmp_path, argv, message, refused):
    assert message in refused("train", run[0], "--out", tmp_path / "new", *argv)
    assert not (tmp_path / "new").exists()


def test_a_path_with_equals_signs_is_shown_unchanged(tmp_path, refused):
    path = tmp_path / "series=7" / "horizon=3.csv"
    path.parent.mkdir()
    csv.write_csv(long_table(30).take([1, 0, *range(2, 90)]), path)
    shown = refused("prepare", path)
    assert f"{path}: series" in shown
    assert "correct it, or give `--disorder sort`" in shown


def test_notes_about_tables_name_settings(tmp_path, printed):
    path = tmp_path / "a.csv"
    path.write_text("ds,y\n" + "".join(f"{1467331200 + 3600 * k},{k}\n" for k in range(99)))
    for _ in range(2):  # the second time from the cache
        assert "give `--time-format s`" in printed("prepare", path)
    new = [str(path), "--out", str(tmp_path / "new"), *SMALL]
    assert "give `--time-format s`" in " ".join(printed("train", *new).split())


def test_texts_beside_tables_are_left_out_and_named(run, tmp_path, monkeypatch, capsys):
    from fastlstm.forecast import train as forecast_run

    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(forecast_run, "train_forecaster", lambda _, **given: calls.append(given))
    (tmp_path / "table.csv").write_bytes(Path(run[0]).read_bytes())
    (tmp_path / "notes.md").write_text("about the table")
    before = time.perf_counter()
    assert main(["train", str(tmp_path), "--out", str(tmp_path / "new"), *SMALL]) == 0
    assert before <= calls[0]["began"] <= time.perf_counter()
    told = " ".join(capsys.readouterr().out.split())
    assert "notes.md not used" in told
    assert "table.csv" not in told


@pytest.mark.filterwarnings("default")
def test_a_series_that_opened_late_costs_the_others_nothing(run, tmp_path, capfdbinary):
    late = tmp_path / "late.csv"
    csv.write_csv(long_table(120).slice(0, 250), late)  # ten rows of the third series
    assert main(["forecast", run[1], str(late)]) == 0
    shown = capfdbinary.readouterr()
    assert len(shown.out.splitlines()) == 1 + 2 * 4
    assert b"warning: not forecast: series 's2' ends in 10 rows without gaps, a fore" in shown.err
    csv.write_csv(long_table(120).slice(0, 10), late)
    assert main(["forecast", run[1], str(late)]) == 2
    assert b"error: series 's0' ends in 10 rows without gaps" in capfdbinary.readouterr().err
