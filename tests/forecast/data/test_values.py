"""Values: codes for "no value", numbers far from 0, names of every type."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from pyarrow import csv
from pyarrow import parquet as pq

from fastlstm import Forecaster
from fastlstm.cli.main import main
from fastlstm.errors import ConfigError, DataError
from fastlstm.forecast.config import ForecastConfig, ReadOptions
from fastlstm.forecast.data.column_stats import best_origins
from fastlstm.forecast.data.dataset import SeriesDataset, prepare_table
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.roles import RoleRequest
from series_frames import long_table, prepared

QUICK: dict[str, Any] = {
    "horizon": 4, "input_size": 12, "patch": 4, "hidden_size": 16, "steps": 60, "dropout": 0.0,
    "learning_rate": 0.01,
}  # fmt: skip


def configured(source: Any, **options: Any) -> SeriesDataset:
    return prepare(source, ForecastConfig(**options))


def with_codes(low: float, high: float, *codes: float) -> pa.Table:
    values = np.random.default_rng(0).uniform(low, high, 150)
    values[: 3 * len(codes) : 3] = codes
    return long_table(y=values, temp=None)


@pytest.mark.parametrize(
    ("low", "high", "codes"),
    [
        (-10, 40, [-9999]), (0, 1, [-99]), (0, 5, [-99.9]), (0, 300, [-999]), (0, 9, [9999, 9999]),
        (0, 9, [1e20]), (5, 6, [9.969209968386869e36]), (-400, 9000, [-32768]),
        (0, 50, [-9999, -999, -999]), (14, 26, [-200, -200]), (14, 26, [-3, -3, -3]), # whole, alone
        (14, 26, [500, 500, 500]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_code_for_no_value_is_refused_until_it_is_said_what_it_is(
    low: float, high: float, codes: list[float], dtype: str
) -> None:
    table = with_codes(low, high, *codes)
    table = table.set_column(2, "y", table["y"].cast(dtype))
    named = ",".join(f"{code!r}".removesuffix(".0") for code in sorted(set(codes)))
    listed = repr(named) if "," in named else named
    with pytest.raises(DataError, match="looks like a code for no value") as caught:
        prepared(table)
    advice = f"give `missing_value={listed}` if it is one, or `keep_value={listed}` if"
    assert advice in str(caught.value)
    missing = configured(table, missing_value=codes)
    rows = missing.table.rows(0, 150)[:, 0] + missing.table.origin[0, 0]
    assert np.flatnonzero(np.isnan(rows)).tolist() == list(range(0, 3 * len(codes), 3))
    kept = configured(table, keep_value=named)
    np.testing.assert_allclose(kept.table.rows(0, 3 * len(codes))[::3, 0], codes, rtol=1e-6)
    assert not any("value=" in note for note in (*kept.notes, *missing.notes))


@pytest.mark.parametrize(
    ("low", "high", "codes"),
    [
        (-200, 200, [-99]), (0, 20_000, [9999, 9999]), (-60, 80, [-99]), (9000, 9500, [9999, 9999]),
        (0, 5000, [9999]), (-9000, 9000, [-9999]), (0, 9, []), (0, 9, [-1, -1]), (5, 6, [0.0, 100]),
        (14, 26, [-200]), (14, 26, [-0.5, -0.5]), (14, 26, [500, 500]), (14, 26, [0, 0, 0]),
    ],
)  # fmt: skip
def test_values_that_are_no_codes_are_not_refused(
    low: float, high: float, codes: list[float]
) -> None:
    assert not prepared(with_codes(low, high, *codes)).has_missing


@pytest.mark.parametrize("levels", [[-1.0, 0.0, 1.0], [1.0, 2.0, 5.0]])
def test_levels_are_no_codes(levels: list[float]) -> None:
    assert not prepared(long_table(y=np.tile(levels, 50), temp=None)).has_missing


def test_a_code_in_any_batch_and_in_a_static_column_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastlstm.forecast.data.records._BATCH_ROWS", 4)
    values = np.random.default_rng(0).uniform(0, 9, 150)
    values[[7, 78, 79]] = 9999
    with pytest.raises(DataError, match=r"column 'y' is 9999 in 3 rows and between 0\.0"):
        prepared(long_table(y=values))
    table = long_table(size=np.repeat([3.0, -9999.0, 4.0], 50))
    with pytest.raises(DataError, match=r"'size' is -9999 in 1 series and between 3 and 4 in all"):
        prepared(table, roles=RoleRequest(static=("size",)))


def test_values_missing_in_several_batches_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastlstm.forecast.data.records._BATCH_ROWS", 4)
    values = np.random.default_rng(0).uniform(0, 9, 150)
    values[[5, 77]] = np.nan
    assert "column 'y' has missing values in 2 rows (1.33%)" in prepared(long_table(y=values)).notes


def frost() -> pa.Table:
    """-1 is a temperature, and no humidity."""
    humidity = np.random.default_rng(0).uniform(50, 70, 150).round()
    humidity[[3, 50, 51]] = -1
    temperature = np.tile([-2.0, -1.0, 3.0], 50)
    return long_table(150, 1, y=None, temp=temperature, humidity=humidity)


@pytest.mark.parametrize("kind", ["arrow", "pandas", "polars", "csv", "parquet"])
def test_a_code_may_hold_for_one_column(kind: str, tmp_path: Path) -> None:
    table: Any = frost()
    if kind == "pandas":
        table = table.to_pandas()
    elif kind == "polars":
        table = pytest.importorskip("polars").from_arrow(table)
    elif kind != "arrow":
        path = str(tmp_path / f"a.{kind}")
        (csv.write_csv if kind == "csv" else pq.write_table)(table, path)
        table = path
    with pytest.raises(DataError, match="give `missing_value='humidity=-1'` if it is one, or `k"):
        configured(table, target="temp")
    found = configured(table, target="temp", missing_value={"humidity": -1})
    assert np.isnan(found.table.whole_rows(0, 150)).sum(0).tolist() == [0, 3]
    note = "missing values in 3 rows (2.00%), 3 of them given by `missing_value`"
    assert f"column 'humidity' has {note}" in found.notes


def test_a_past_without_the_column_of_a_code_is_read() -> None:
    codes = ReadOptions(missing_value=("humidity=-1",))
    whole = prepare_table(frost(), codes, RoleRequest(target=("temp",)))
    past = frost().drop_columns(["humidity"])
    request = RoleRequest(target=("temp",), past=())
    assert prepare_table(past, codes, request, like=whole.timeline).table.num_rows == 150


def test_a_code_of_all_columns_says_where_it_is_within_the_values() -> None:
    notes = configured(frost(), target="temp", missing_value=-1).notes
    more = "-1 is within its other values, -2 to 3: for one column give `missing_value='COLUMN=-1'`"
    assert any(f"50 of them given by `missing_value`; {more}" in note for note in notes)
    with pytest.raises(DataError, match=r"no column 'humid' .given as 'humid=-1'. .did you mean '"):
        configured(frost(), target="temp", missing_value="humid=-1")


@pytest.mark.parametrize(
    ("given", "codes"),
    [
        ("-1,a=-9", (-1.0, "a=-9")), ("a, b=-1e3,-9", ("a, b=-1e3", -9.0)), (None, ()),
        ({"a": [-1, -2.5], "b": 0}, ("a=-1", "a=-2.5", "b=0")),
        ([-9999.0, "a=1"], (-9999.0, "a=1")), (np.array([-1.0, -2.5]), (-1.0, -2.5)),
    ],
)  # fmt: skip
def test_codes_are_read_from_texts_lists_and_mappings(given: Any, codes: Any) -> None:
    assert ForecastConfig(missing_value=given).missing_value == codes


def test_a_target_that_was_not_named_changes() -> None:
    """A constant column is left out, and a stream of Arrow is read once."""
    table = long_table(50, 1, site=np.full(50, 16.0), y=None, unique_id=None)
    found = configured(pa.RecordBatchReader.from_batches(table.schema, table.to_batches()))
    assert found.roles.values == ("temp",)
    assert "ignored columns (the same in every row): site" in found.repairs
    assert configured(table, target="temp,site").roles.target == ("temp", "site")


def test_covariates_without_information_are_left_out() -> None:
    """A constant, and a number for each series, as its name is."""
    columns = {"site_no": [1646500] * 150, "plant": np.repeat([901, 17, 5], 50)}
    columns["size"] = np.repeat([2, 2, 3], 50)
    found = prepared(long_table(**columns))
    assert found.roles.past == ("temp", "size")
    wanted = prepared(long_table(size=columns["size"])).table
    np.testing.assert_array_equal(found.table.values, wanted.values)
    own = "another number for each series; for such numbers give `static`"
    assert f"ignored columns ({own}): plant" in found.notes
    assert "ignored columns (the same in every row): site_no" in found.notes
    asked = prepared(long_table(**columns), roles=RoleRequest(past=("site_no", "plant")))
    assert asked.roles.past == ("site_no", "plant")


def test_advice_goes_with_the_codes_already_given() -> None:
    given: Any = {"missing_value": (-1.0,), "keep_value": (9999.0,)}
    message = "`missing_value='-1,-9999'` if it is one, or `keep_value='9999,-9999'` if"
    with pytest.raises(DataError, match=message):
        prepared(with_codes(0, 9, -9999), **given)
    notes = prepared(with_codes(-9000, 9000, -9999), **given).notes
    assert any("give `missing_value='-1,-9999'`" in note for note in notes)


def test_what_codes_stand_for_is_kept_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.random.default_rng(0).normal(size=150)
    values[[20, 90]] = -9999
    data, run = tmp_path / "a.csv", str(tmp_path / "run")
    csv.write_csv(long_table(y=values), data)
    small = ["--horizon", "2", "--input-size", "8", "--patch", "2", "--hidden-size", "4"]
    train = ["train", str(data), "--out", run, *small, "--steps", "2", "--no-tensorboard"]
    assert main(["prepare", str(data)]) == 2
    assert main(train) == 2
    shown = capsys.readouterr().err
    assert "give `--missing-value -9999` if it is one, or `--keep-value -9999` if it is a" in shown
    assert main([*train, "--missing-value", "-9999", "--threads", "1"]) == 0
    assert main(["forecast", run, str(data)]) == 0
    values[30:33] = -99
    csv.write_csv(long_table(y=values), data)
    assert main(["forecast", run, str(data)]) == 2
    shown = capsys.readouterr().err
    assert "give `--missing-value -9999,-99` if it is one, or `--keep-value -99` if" in shown
    for verb in ("forecast", "evaluate"):
        assert main([verb, run, str(data), "--missing-value", "-9999,-99"]) == 0
    model = Forecaster.load(run, keep_value=-99)
    assert (model.missing_value, model.keep_value) == ((-9999.0,), (-99.0,))
    assert len(model.predict(str(data))) == 6
    with pytest.raises(ConfigError, match="`steps` is an option of fit; load takes device and"):
        Forecaster.load(run, steps=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"missing_value": "none"}, "`missing_value` is 'none', expected numbers, such as -9999"),
        ({"keep_value": float("nan")}, "`keep_value` is nan, expected numbers"),
        ({"missing_value": -9, "keep_value": [-9]}, "`missing_value` and `keep_value` both hold"),
    ],
)
def test_codes_are_numbers(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ForecastConfig(**given)


def counted(num: int = 150) -> NDArray[np.int64]:
    return 10**9 + np.cumsum(np.random.default_rng(0).integers(-3, 4, num))


@pytest.mark.parametrize("kind", ["int64", "float64", "decimal", "csv", "array", "text", "npy"])
@pytest.mark.parametrize("add", [0, 0.25, -2e9])
def test_steps_of_1_around_1e9_are_kept(kind: str, add: float, tmp_path: Path) -> None:
    y: Any = counted() + add
    table = pa.table({"y": y})
    source: Any = table
    if kind == "int64" and not add:
        source = pa.table({"y": y.astype(np.int64)})
    elif kind == "decimal":
        source = pa.table({"y": [Decimal(str(value)) for value in y]})
    elif kind == "csv":
        source = tmp_path / "a.csv"
        csv.write_csv(table, source)
    elif kind == "array":
        source = y
    elif kind == "text":
        source = pa.table({"y": [str(value) for value in y]})
    elif kind == "npy":
        source = tmp_path / "a.npy"
        np.save(source, y)
    found = prepared(source, roles=RoleRequest(target=("0",) if kind in ("array", "npy") else ()))
    back = found.table.rows(0, 150).astype(np.float64) + found.table.origin
    np.testing.assert_array_equal(back[:, 0], y)
    assert found.table.values.dtype == ("float32" if add == 0.25 else "int16")
    assert found.constant == ()
    assert not any("float32" in note for note in found.notes)


def test_what_needs_no_origin_has_none() -> None:
    values = {"y": np.arange(150.0) + 0.5, "temp": np.full(150, 7.0)}
    asked = RoleRequest(past=("temp",))
    assert prepared(long_table(**values), roles=asked).table.origin.tolist() == [[0, 0]]
    for price in (3.99, float(np.float32(15.3918371)), 2.0**24):  # no second reading
        found = prepared(long_table(y=values["y"], temp=np.full(150, price)), roles=asked)
        assert found.table.origin.tolist() == [[0, 0]]
        assert found.table.rows(0, 1)[0, 1] == np.float32(price)
    constant = prepared(long_table(temp=np.full(150, 1e9 + 1)), roles=asked)
    assert constant.table.origin.tolist() == [[0, 1e9 + 1]]
    assert constant.constant == ("temp",)


def test_the_number_that_int16_marks_missing_values_by_is_a_value() -> None:
    values = np.arange(150.0) - 32768
    found = prepared(long_table(y=values, temp=None))
    assert not found.has_missing
    np.testing.assert_array_equal(found.table.rows(0, 150)[:, 0], values)


def waves(level: float) -> pa.Table:
    hours = np.tile(np.arange(240), 2)
    rng = np.random.default_rng(0)
    y = np.sin(hours * (2 * np.pi / 12)) * np.repeat([1, 2], 240) + 0.05 * rng.normal(size=480)
    plan = rng.normal(size=480)
    return long_table(240, 2, y=np.round(y * 1024) / 1024 + level, temp=None, plan=plan + level)


@pytest.mark.parametrize(
    "given", [{}, {"tbptt": 8, "batch_size": 4}, {"output": "quantiles"}], ids=str
)
def test_a_level_of_1e9_changes_no_forecast(given: dict[str, Any], tmp_path: Path) -> None:
    """Everything a forecaster answers is the same, the level apart."""
    plain, raised = waves(0.0), waves(1e9)
    models = [Forecaster(**QUICK, **given, past=["plan"]).fit(table) for table in (plain, raised)]
    low, high = (model.predict()["y"].to_numpy() for model in models)
    assert high.dtype == np.float64
    np.testing.assert_allclose(high - 1e9, low, atol=2e-3)
    low, high = (model.predict_quantiles()["y-q0.1"].to_numpy() for model in models)
    np.testing.assert_allclose(high - 1e9, low, atol=2e-3)
    low, high = (model.backtest() for model in models)  # type: ignore[assignment]
    for who, scores in low.items():
        for name in ("mse", "mae", "mase"):
            assert high[who][name] == pytest.approx(scores[name], rel=0.02), (who, name)
    cut = raised.filter(pa.array(np.tile(np.arange(240) < 100, 2)))
    models[1].save(tmp_path)
    np.testing.assert_array_equal(
        Forecaster.load(tmp_path).predict(cut)["y"], models[1].predict(cut)["y"]
    )
    np.testing.assert_allclose(
        models[1].predict(cut)["y"].to_numpy() - 1e9,
        models[0].predict(plain.filter(pa.array(np.tile(np.arange(240) < 100, 2))))["y"],
        atol=2e-3,
    )


def test_what_is_known_ahead_may_be_far_from_0() -> None:
    plain, raised = waves(0.0), waves(1e9)
    found = []
    for table in (plain, raised):
        past = table.filter(pa.array(np.tile(np.arange(240) < 230, 2)))
        ahead = table.filter(pa.array(np.tile(np.arange(240) >= 230, 2))).drop_columns(["y"])
        model = Forecaster(**QUICK, future=["plan"]).fit(past)
        found.append(model.predict(future=ahead)["y"].to_numpy())
    np.testing.assert_allclose(found[1] - 1e9, found[0], atol=2e-3)


def test_counts_far_from_0_are_counts() -> None:
    table = pa.table({"y": counted(300)})
    model = Forecaster(**{**QUICK, "steps": 2}, output="negative_binomial").fit(table)
    assert np.isfinite(model.predict()["y"].to_numpy()).all()
    with pytest.raises(DataError, match=r"target 'y' is 1e\+09 in row 0"):
        Forecaster(**QUICK, output="negative_binomial").fit(pa.table({"y": counted(300) + 0.5}))


IDS = [7, 12, 7, 30]


def typed(kind: str, folder: Path) -> Any:
    table = long_table(num_rows=200, num_series=4, unique_id=np.repeat(np.arange(4), 200))
    codes: Any = np.repeat(IDS, 200)
    if kind in ("float64", "csv of floats"):
        codes = codes.astype(np.float64)
    elif kind in ("string", "large_string"):
        codes = pa.array([str(code) for code in codes], kind)
    elif kind == "dictionary":
        codes = pa.array(codes).dictionary_encode()
    elif kind == "decimal":
        codes = pa.array([Decimal(f"{code}.0") for code in codes])
    table = table.append_column("code", codes if isinstance(codes, pa.Array) else pa.array(codes))
    if not kind.startswith("csv"):
        return table
    path = folder / f"{kind}.csv"
    if kind == "csv of floats":
        table.to_pandas().to_csv(path, index=False)
        assert ",7.0" in path.read_text()
    else:
        csv.write_csv(table, path)
    return path


KINDS = [
    *("int64", "float64", "string", "large_string", "dictionary", "decimal", "csv"),
    "csv of floats",
]


@pytest.mark.parametrize("here", ["int64", "string", "csv of floats"])
def test_a_name_is_the_same_of_any_type(here: str, tmp_path: Path) -> None:
    roles = {"static": ["code"], "categorical": ["code"]}
    model = Forecaster(**{**QUICK, "steps": 2}, **roles).fit(typed(here, tmp_path))
    wanted = model.predict(typed(here, tmp_path))["y"].to_numpy()
    for there in KINDS:
        found = model.predict(typed(there, tmp_path))["y"].to_numpy()
        np.testing.assert_array_equal(found, wanted, there)


@pytest.mark.parametrize("kind", ["int64", "float64", "string", "csv"])
def test_series_of_what_is_known_ahead_are_found_by_any_type(kind: str, tmp_path: Path) -> None:
    table = long_table(200, 2, unique_id=np.repeat([7, 12], 200), plan=np.arange(400.0))
    past = table.filter(pa.array(np.tile(np.arange(200) < 190, 2)))
    ahead = table.filter(pa.array(np.tile(np.arange(200) >= 190, 2))).drop_columns(["y"])
    ids = ahead["unique_id"].cast("int64" if kind == "csv" else kind)
    if kind == "string":
        assert ids[0].as_py() == "7"
    changed: Any = ahead.set_column(0, "unique_id", ids)
    if kind == "csv":
        csv.write_csv(changed, tmp_path / "a.csv")
        changed = tmp_path / "a.csv"
    model = Forecaster(**{**QUICK, "steps": 2}, future=["plan"]).fit(past)
    found = model.predict(future=changed)
    assert found["unique_id"].to_pylist() == [7] * 4 + [12] * 4
    np.testing.assert_array_equal(found["y"], model.predict(future=ahead)["y"])


def test_names_of_two_types_in_one_table_are_one_and_told(tmp_path: Path) -> None:
    first = long_table(20, 1, unique_id=np.full(20, 7))
    second = long_table(40, 1, unique_id=np.full(40, "7")).slice(20)
    pq.write_table(first, tmp_path / "a.parquet")
    pq.write_table(second, tmp_path / "b.parquet")
    found = prepared(tmp_path)
    assert found.series == (7,)
    assert len(found.table.segments) == 1
    assert "column 'unique_id': 7 and '7' are the same name" in found.notes


@pytest.mark.parametrize("names", [("v1.0", "v1"), ("1.10", "1.1"), ("007", "7")])
def test_names_that_only_look_alike_stay_apart(names: tuple[str, str], tmp_path: Path) -> None:
    rows = [f"{name},{time},{time}.5" for name in names for time in (1, 2)]
    (tmp_path / "a.csv").write_text("\n".join(["unique_id,ds,y", *rows]))
    assert prepared(tmp_path / "a.csv").series == names


def test_a_name_that_is_nan_is_missing_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastlstm.forecast.data.records._BATCH_ROWS", 4)
    codes = np.array([1.0, np.nan, 2.0])[np.arange(150) % 3]
    found = prepared(long_table(code=codes), roles=RoleRequest(categorical=("code",)))
    assert found.categories == {"code": [1.0, 2.0]}
    np.testing.assert_array_equal(found.table.rows(0, 6)[:, -1], [0, np.nan, 1, 0, np.nan, 1])


@pytest.mark.parametrize(("missing", "names"), [(None, ["x", "y"]), (2, ["x", "y", None])])
def test_a_name_left_out_of_a_dictionary_column_is_missing(missing: Any, names: Any) -> None:
    indices = pa.array([1, missing, 0] * 50, pa.int32())
    codes = pa.DictionaryArray.from_arrays(indices, pa.array(names))
    found = prepared(long_table(code=codes), roles=RoleRequest(categorical=("code",)))
    assert found.categories == {"code": ["y", "x"]}, "in the order they come"
    numbers = found.table.rows(0, 3)[:, -1]
    assert np.isnan(numbers).tolist() == [False, True, False]
    assert [found.categories["code"][int(numbers[row])] for row in (0, 2)] == ["y", "x"]


def test_series_of_a_dictionary_column_stand_in_the_order_they_come() -> None:
    names = pa.DictionaryArray.from_arrays(np.repeat([1, 0], 20).astype(np.int32), ["a", "b"])
    found = prepared(long_table(20, 2, unique_id=names))
    assert found.series == ("b", "a")
    assert not any("mixed" in note for note in found.notes)


def test_true_is_one_name_whoever_writes_it(tmp_path: Path) -> None:
    roles = RoleRequest(categorical=("open",))
    table = long_table(open=np.arange(150) % 2 == 0)
    path = tmp_path / "a.csv"
    table.to_pandas().to_csv(path, index=False)
    found = [prepared(source, roles=roles).categories["open"] for source in (table, path)]
    assert found == [[True, False], ["true", "false"]]


def test_a_name_is_one_though_only_a_later_file_writes_a_fraction(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("unique_id,ds,y\n7,1,1.5\n7,2,2.5\n-8,1,2.5\n-8,2,0.5\n")
    (tmp_path / "b.csv").write_text("unique_id,ds,y\n7.0,3,3.5\n7.0,4,4.5\n-8.0,3,2.5\n-8.0,4,1\n")
    found = prepared(tmp_path)
    assert found.series == ("7", "-8")
    assert len(found.table.segments) == 2


def test_a_column_that_is_empty_in_the_first_file_is_what_the_next_says(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("shop,ds,y\n,1,1.5\n,2,2.5\n")
    (tmp_path / "b.csv").write_text("shop,ds,y\nx,3,3.5\nx,4,4.5\n")
    found = prepared(tmp_path, roles=RoleRequest(categorical=("shop",)))
    assert found.categories == {"shop": ["x"]}
    assert prepared(tmp_path).roles.values == ("y",)


def test_origins_of_numbers_beyond_float32_are_found_without_a_warning() -> None:
    low, high = np.array([1e300, -1e39, 5.0]), np.array([1e300, 1e307, 5.0])
    assert np.isfinite(best_origins(low, high)).all()
