"""Files that were damaged or made to do harm: an error, never a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from fastlstm.errors import DataError
from fastlstm.forecast.data.dataset import prepare_table
from fastlstm.forecast.data.records import FrameRecords
from fastlstm.forecast.data.roles import RoleRequest

ROWS = 600
ROLES = RoleRequest(series="store", target=("y",), categorical=("kind",))


def content() -> bytes:
    """An Arrow file with times, texts, names and numbers."""
    stores = [f"shop {k % 7}" for k in range(ROWS)]
    table = pa.table(
        {
            "time": pa.array(np.arange(ROWS) // 7 * 3600, pa.timestamp("s")),
            "store": pa.array(stores),
            "kind": pa.array(stores).dictionary_encode(),
            "y": np.arange(ROWS) * 0.5,
        }
    )
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("has_table", [False, True], ids=["file", "table"])
@pytest.mark.parametrize(
    "numbers", [np.arange(20) * 6, np.arange(20) % 7], ids=["offsets of texts", "numbers of names"]
)
def test_an_offset_beyond_the_memory_is_refused(
    tmp_path: Path, has_table: bool, numbers: Any
) -> None:
    data = bytearray(content())
    at = bytes(data).find(numbers.astype(np.int32).tobytes())
    assert at > 0
    place = at + 4 * 5
    data[place : place + 4] = (2**31 - 8).to_bytes(4, "little")
    source: object = tmp_path / "bad.arrow"
    (tmp_path / "bad.arrow").write_bytes(data)
    if has_table:
        source = ipc.open_file(pa.py_buffer(bytes(data))).read_all()
    with pytest.raises(DataError, match=r"cannot be read .*; is it complete"):
        prepare_table(source, request=ROLES, cache_dir=tmp_path / "cache")


def test_mutated_arrow_files_crash_nothing(tmp_path: Path) -> None:
    (tmp_path / "good.arrow").write_bytes(content())
    code = """
import sys
from pathlib import Path
import numpy as np
from fastlstm.errors import FastLSTMError
from fastlstm.forecast.data.dataset import prepare_table
from fastlstm.forecast.data.records import FrameRecords
from fastlstm.forecast.data.roles import RoleRequest

folder, rng, refused = Path(sys.argv[1]), np.random.default_rng(0), 0
good = (folder / "good.arrow").read_bytes()
roles = RoleRequest(series="store", target=("y",), categorical=("kind",))
for number in range(150):
    data = bytearray(good)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(data) - 8))
        if rng.random() < 0.5:
            data[at] ^= 1 << rng.integers(8)
        else:
            value = int(rng.choice([-1, 2**31 - 8, -(2**31), 2**62, 1 << 20]))
            data[at // 4 * 4 : at // 4 * 4 + 8] = value.to_bytes(8, "little", signed=True)
    path = folder / f"{number}.arrow"
    path.write_bytes(data)
    try:
        prepare_table(path, request=roles, cache_dir=folder / "cache")
    except FastLSTMError:
        refused += 1
print(refused)
"""
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert int(found.stdout) > 15


def test_names_that_only_pandas_can_show_are_refused_without_it(tmp_path: Path) -> None:
    code = """
import sys
import pyarrow as pa
from fastlstm.errors import DataError
from fastlstm.forecast.data.dataset import prepare_table
from fastlstm.forecast.data.roles import RoleRequest

class Nowhere:
    def find_spec(self, name, *rest):
        if name == "pandas":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Nowhere())
table = pa.table({"y": [1.0, 2.0], "x": pa.array([1, 2], pa.timestamp("ns"))})
try:
    prepare_table(table, request=RoleRequest(categorical=("x",)), cache_dir=sys.argv[1])
except DataError as error:
    print(error)
"""
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "cannot be read as names" in found.stdout, found.stderr[-2000:]


def test_times_beyond_the_year_9999_are_shown(tmp_path: Path) -> None:
    seconds = [2**40 + 3600 * k for k in (0, 1, 3, 2, 4)]
    table = pa.table({"time": pa.array(seconds, pa.timestamp("s")), "y": np.arange(5) * 0.5})
    with pytest.raises(DataError, match="row 4, 36812-02-20 02:36:16"):
        prepare_table(table, request=RoleRequest(target=("y",)), cache_dir=tmp_path / "cache")


def header(shape: str) -> bytes:
    """A .npy file that claims a shape, and holds ten numbers."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(80)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("()", "has no rows, expected an array"),
        ("(-1, 2)", "cannot be read"),
        ("(10, 10**9)", "cannot be read"),
        ("(1000000000, 1000000)", "cannot be read"),
        ("(99999999999999999999999,)", "cannot be read"),
        ("(True, 2)", "cannot be read"),
        ("(0, 2)", "no rows"),
        ("(2, 0)", "no column of numbers"),
    ],
)
def test_a_npy_file_of_an_odd_shape_is_refused(tmp_path: Path, shape: str, message: str) -> None:
    (tmp_path / "odd.npy").write_bytes(header(shape))
    with pytest.raises(DataError, match=message):
        prepare_table(tmp_path / "odd.npy", cache_dir=tmp_path / "cache")


def test_an_archive_named_npy_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "archive.npz", a=np.zeros(3))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    with pytest.raises(DataError, match="has no rows, expected an array"):
        prepare_table(tmp_path / "archive.npy")


@pytest.mark.parametrize(
    ("head", "more", "message"),
    [
        (b"a,b\n1,", b"9" * (20 << 20) + b"\n1,2\n", "a line has more than 8 MiB; is it a CSV"),
        (b"h", b"h" * (9 << 20) + b",b\n1,2\n", "the first line has no column names"),
        (b"PK\x03\x04", b"xl/workbook.xml", "is a workbook or a zip; save its sheet as CSV"),
        (b'a,b\n1,"', b"x\n" * (40 << 19), "a quoted value spans lines"),
    ],
)
def test_a_line_that_is_no_row_is_named(
    tmp_path: Path, head: bytes, more: bytes, message: str
) -> None:
    (tmp_path / "long.csv").write_bytes(head + more)
    with pytest.raises(DataError, match=message):
        prepare_table(tmp_path / "long.csv")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(DataError, match="is a pipe or a device; save the table to a file"):
        prepare_table(tmp_path / "pipe.csv")


def test_a_table_of_very_many_columns_is_refused(tmp_path: Path) -> None:
    names = [f"c{k}" for k in range(70_000)]
    (tmp_path / "wide.csv").write_text(",".join(names) + "\n" + ",".join("1" for _ in names))
    with pytest.raises(DataError, match="has 70,000 columns, the limit is 65,536"):
        prepare_table(tmp_path / "wide.csv")


ODD: list[tuple[pa.Array, dict[str, Any], str]] = [
    (pa.array(["1_0", "2"]), {"past": ("x",)}, "has the text '1_0' in row 1, expected numbers"),
    (pa.array(["2", "\u0661"]), {"past": ("x",)}, "in row 2, expected numbers"),
    (pa.array([{"a": 1}] * 2), {"series": "x"}, "is struct<a: int64>, which cannot be read as"),
    (pa.array([[1], [2]]), {"categorical": ("x",)}, "is list<.*>, which cannot be read as names"),
    (pa.array([10**70, 1], pa.decimal256(76)), {"series": "x"}, "which cannot be read as names"),
    (pa.array([b"1", b"2"], pa.binary_view()), {"series": "x"}, "which cannot be read as names"),
    (pa.array([2**62, 1], pa.timestamp("us")), {"categorical": ("x",)}, "cannot be read as names"),
    (pa.array([1, 2], pa.timestamp("us", "Mars/Moon")), {"time": "x"}, "time zone 'Mars/Moon'"),
    (pa.array(["x" * 9999] * 2), {"time": "x"}, "row 1 has 'x{59};"),
]


@pytest.mark.parametrize(("column", "roles", "message"), ODD)
def test_a_column_of_an_odd_type_is_named(
    tmp_path: Path, column: pa.Array, roles: dict[str, Any], message: str
) -> None:
    table = pa.table({"y": [1.0, 2.0], "x": column})
    with pytest.raises(DataError, match=message):
        prepare_table(table, request=RoleRequest(**roles), cache_dir=tmp_path)


def test_a_wide_table_is_read_in_few_rows_at_a_time() -> None:
    rows, columns = 1 << 13, 1 << 12
    table = pa.table(
        [pa.array(np.zeros(rows, np.int8))] * columns, [str(k) for k in range(columns)]
    )
    types = {name: pa.int8() for name in table.column_names}
    batches = list(FrameRecords(table).batches(types))
    assert max(batch.num_rows for batch in batches) * columns <= 1 << 23
    assert sum(batch.num_rows for batch in batches) == rows
