from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastlstm.errors import DataError
from fastlstm.forecast.config import ReadOptions
from fastlstm.forecast.data.ingest import TableIngest, without_views
from fastlstm.forecast.data.problems import Problems
from fastlstm.forecast.data.records import FrameRecords
from fastlstm.forecast.data.roles import Roles


def ingested(
    work: Path,
    columns: dict[str, Any],
    batch_rows: int = 2,
    missing: tuple[float, ...] = (),
    **given: Any,
) -> TableIngest:
    """Takes a table in, some rows at a time; y is the target."""
    roles = Roles(("y",), given.get("time"), given.get("series"), given.get("past", ()), (),
                  given.get("static", ()), given.get("categorical", ()))  # fmt: skip
    records = FrameRecords(pa.table(columns))
    problems = Problems("t")
    batches = records._table.to_batches(max_chunksize=2)
    records.batches = lambda types: iter([b.select(list(types)) for b in batches])  # type: ignore
    found = TableIngest(
        work, records, roles, problems, ReadOptions(missing_value=missing), None, {}
    )
    found.run(None)
    problems.raise_all()
    return found


def values(found: TableIngest, num_columns: int = 1) -> list[list[float]]:
    rows = np.fromfile(found.values, dtype=np.float32).reshape(-1, num_columns)
    return [[float(v) for v in row] for row in rows]


def test_rows_are_written_in_the_order_they_come(tmp_path: Path) -> None:
    found = ingested(tmp_path, {"y": [3.0, 1.0, 2.0], "x": [1, 2, 3]}, past=("x",))
    assert values(found, 2) == [[3.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    assert (found.num_rows, found.series, found.counts.tolist()) == (3, [""], [3])
    assert (found.columns["y"].low, found.columns["y"].high) == (1.0, 3.0)


def test_grouped_series_need_no_codes(tmp_path: Path) -> None:
    found = ingested(tmp_path, {"y": [0.0] * 5, "s": list("aabbb")}, series="s")
    assert (found.series, found.counts.tolist(), found.is_grouped) == (["a", "b"], [2, 3], True)
    assert found.codes.stat().st_size == 0


def test_interleaved_series_have_a_code_per_row(tmp_path: Path) -> None:
    found = ingested(tmp_path, {"y": [0.0] * 6, "s": list("aabbab")}, series="s")
    assert (found.counts.tolist(), found.is_grouped) == ([3, 3], False)
    assert np.fromfile(found.codes, dtype=np.int32).tolist() == [0, 0, 1, 1, 0, 1]


def test_categories_are_numbered_over_all_batches(tmp_path: Path) -> None:
    columns = {"y": [0.0] * 4, "sky": ["grey", "blue", None, "grey"]}
    found = ingested(tmp_path, columns, past=("sky",), categorical=("sky",))
    assert found.categories == {"sky": ["grey", "blue"]}
    codes = np.array(values(found, 2))[:, 1]
    np.testing.assert_array_equal(codes, [0.0, 1.0, np.nan, 0.0])


def test_codes_for_no_value_are_missing(tmp_path: Path) -> None:
    found = ingested(tmp_path, {"y": [1.0, -9999.0, 2.0]}, missing=(-9999.0,))
    assert np.isnan(values(found)[1][0])
    assert (found.columns["y"].missing, found.columns["y"].low) == (1, 1.0)


def test_a_static_column_has_one_number_per_series(tmp_path: Path) -> None:
    columns = {"y": [0.0] * 4, "s": list("aabb"), "size": [None, 5.0, 7.0, 7.0]}
    with pytest.raises(DataError, match="static column 'size' changes within series 'a', in row 2"):
        ingested(tmp_path, columns, series="s", static=("size",))
    columns["size"] = [5.0, 5.0, 7.0, 7.0]
    found = ingested(tmp_path, columns, series="s", static=("size",))
    assert found.statics == {"size": [5.0, 7.0]}


def test_times_are_microseconds(tmp_path: Path) -> None:
    times = np.array(["1970-01-01T00:00:01", "1970-01-02"], dtype="datetime64[s]")
    found = ingested(tmp_path, {"y": [0.0, 0.0], "ds": times}, time="ds")
    assert found.times is not None
    assert np.fromfile(found.times, dtype=np.int64).tolist() == [1_000_000, 86_400_000_000]
    assert found.has_clock


@pytest.mark.parametrize(
    ("columns", "roles", "message"),
    [
        ({"y": [1.0, np.inf]}, {}, "column 'y' is infinite, or beyond float32, in row 2"),
        ({"y": ["1", "two"]}, {}, "column 'y' has the text 'two' in row 2"),
        ({"y": [1.0, 2.0], "s": ["a", None]}, {"series": "s"}, r"row 2 has no series \('s'\)"),
        ({"y": [1.0, 2.0], "ds": [1, None]}, {"time": "ds"}, r"row 2 has no time \('ds'\)"),
        ({"y": [[1.0], [2.0]]}, {}, "column 'y' is list<.*, expected numbers"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_row(
    tmp_path: Path, columns: dict[str, Any], roles: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        ingested(tmp_path, columns, **roles)


def test_string_views_become_strings() -> None:
    column = pa.array(["a", "b"]).cast(pa.string_view())
    batch = without_views(pa.record_batch({"s": column}))
    assert batch.schema.field("s").type == pa.large_string()
