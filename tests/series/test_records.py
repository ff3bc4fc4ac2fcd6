"""Files that were damaged or made to do harm: an error, never a crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from fastlstm.errors import DataError
from fastlstm.series.dataset import PrepareOptions, prepare_table
from fastlstm.series.roles import RoleRequest

ROWS = 600
OPTIONS = PrepareOptions(RoleRequest(series="store", target=("y",), categorical=("kind",)))


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
    with pytest.raises(DataError, match=r"cannot be read .*; is it whole"):
        prepare_table(source, OPTIONS, tmp_path / "cache")


def test_mutated_arrow_files_crash_nothing(tmp_path: Path) -> None:
    (tmp_path / "good.arrow").write_bytes(content())
    code = """
import sys
from pathlib import Path
import numpy as np
from fastlstm.errors import FastLSTMError
from fastlstm.series.dataset import PrepareOptions, prepare_table
from fastlstm.series.roles import RoleRequest

folder, rng, refused = Path(sys.argv[1]), np.random.default_rng(0), 0
good = (folder / "good.arrow").read_bytes()
options = PrepareOptions(RoleRequest(series="store", target=("y",), categorical=("kind",)))
for number in range(300):
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
        prepare_table(path, options, folder / "cache")
    except FastLSTMError:
        refused += 1
print(refused)
"""
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert int(found.stdout) > 30


def test_times_beyond_the_year_9999_are_shown(tmp_path: Path) -> None:
    seconds = [2**40 + 3600 * k for k in (0, 1, 3, 2, 4)]
    table = pa.table({"time": pa.array(seconds, pa.timestamp("s")), "y": np.arange(5) * 0.5})
    with pytest.raises(DataError, match="row 4, 36812-02-20 02:36:16"):
        prepare_table(table, PrepareOptions(RoleRequest(target=("y",))), tmp_path / "cache")
