"""Tables as a configuration says: roles, how they are read, future covariates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastlstm import ForecastConfig
from fastlstm.errors import DataError
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.preparation import prepare, prepare_future
from series_frames import long_table


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path))


def past(config: ForecastConfig | None = None, **columns: Any) -> SeriesDataset:
    return prepare(long_table(**columns), config or ForecastConfig())


def test_roles_are_those_of_the_configuration() -> None:
    config = ForecastConfig(
        target="temp", future="y", static="size", categorical="sky", ignore="spare"
    )
    columns = {"size": np.repeat([1.0, 2.0, 3.0], 50), "sky": ["a", "b"] * 75, "spare": [0] * 150}
    roles = past(config, **columns).roles
    assert (roles.target, roles.past, roles.future) == (("temp",), ("sky",), ("y",))
    assert (roles.static, roles.categorical) == (("size",), ("sky",))
    assert (roles.time, roles.series) == ("ds", "unique_id")


def test_progress_is_reported(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", np.arange(100.0))
    calls: list[tuple[int, int | None]] = []
    prepare(tmp_path / "y.npy", ForecastConfig(target="0"), lambda *call: calls.append(call))
    assert {total for _, total in calls} == {(tmp_path / "y.npy").stat().st_size}


def test_a_future_table_has_series_times_and_future_columns() -> None:
    config = ForecastConfig(future=("temp", "sky"), categorical=("sky", "kind"))
    columns = {"sky": ["a", "b"] * 75, "kind": ["x"] * 150}
    before = past(config, **columns)
    table = long_table(num_rows=5, sky=["b", "a", "b"] * 5, spare=np.zeros(15))
    future = prepare_future(table, config, before)
    assert (future.roles.target, future.roles.past) == ((), ())
    assert (future.roles.future, future.roles.categorical) == (("temp", "sky"), ("sky",))
    assert (future.roles.time, future.roles.series) == (before.roles.time, before.roles.series)
    assert future.table.columns == ("temp", "sky")
    one_hour = prepare_future(long_table(num_rows=1, sky=["b"] * 3), config, before)
    assert one_hour.frequency == before.frequency


def test_a_future_table_needs_times_of_the_same_kind() -> None:
    config = ForecastConfig(future="temp")
    hours = long_table()["ds"].to_numpy()
    in_zone = pa.array(hours).cast(pa.timestamp("us", "Europe/Berlin"))
    table, zoned = long_table(), long_table(ds=in_zone)
    plain = long_table(ds=np.tile(np.arange(50), 3))
    for here, there, message in (
        (zoned, table, "'ds' has time zone in the future table and no time zone in the past table"),
        (table, plain, "'ds' has times in the future table and no times in the past table"),
    ):
        with pytest.raises(DataError, match=message):
            prepare_future(here, config, prepare(there, config))
