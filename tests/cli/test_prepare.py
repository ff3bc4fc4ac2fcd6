"""`fastlstm prepare`: what a table holds, in rows for people and one object for machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet as pq

from fastlstm.cli.main import main
from series_frames import long_table


@pytest.fixture
def path(tmp_path: Path) -> str:
    found = tmp_path / "a.parquet"
    pq.write_table(long_table(), found)
    return str(found)


def test_rows_for_people(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", path]) == 0
    shown = capsys.readouterr().out
    for part in ("150 in 3 stretches", "y, temp", "1 hour", "float32, 1,200 bytes", "M rows/s"):
        assert part in shown
    assert main(["prepare", path]) == 0
    assert "found in the cache" in capsys.readouterr().out


def test_one_object_for_machines(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--target", "temp", "--ignore", "y", "--dtype", "int16", "--gaps", "fill", "--json"]
    assert main(["prepare", path, *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["columns"] == ["temp"]
    assert found["dtype"] == "int16"
    assert (found["rows"], found["series"], found["segments"]) == (150, 3, 3)
    assert any("largest error" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--target", "z"], "no column 'z'"),
        (["--dtype", "int8"], "expected one of auto, float32, float16, int16"),
        (["--gaps", "jump"], "expected one of split, fill"),
        (["--missing-value", "none"], "--missing-value"),
        (["no-such-file.csv"], "there is no file no-such-file.csv"),
    ],
)
def test_bad_usage_is_one_line_and_two(
    path: str, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", path, *given]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_without_pyarrow_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from fastlstm.cli.main import main\n"
        "sys.exit(main(['prepare', 'a.csv']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'fastlstm[series]'" in done.stderr
    assert done.stderr.count("\n") == 1
