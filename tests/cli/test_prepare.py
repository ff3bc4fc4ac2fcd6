"""`fastlstm prepare`: the description of a table as rows and as JSON."""

import json
import re
import subprocess
import sys

import pytest
from pyarrow import parquet as pq

from series_frames import long_table


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "a.parquet"
    pq.write_table(long_table(), found)
    return str(found)


def test_rows_for_people(path, printed):
    shown = printed("prepare", path)
    for part in ("150 in 3 segments without gaps", "y, temp", "1 hour", "1,200 bytes", "M rows/s"):
        assert part in shown
    assert "found in the cache" in printed("prepare", path)


def test_one_object_for_machines(path, printed):
    given = ["--target", "temp", "--ignore", "y", "--gaps", "fill", "--json"]
    found = json.loads(printed("prepare", path, *given))
    assert found["columns"] == ["temp"]
    assert found["dtype"] == "float32"
    assert (found["rows"], found["series"], found["segments"]) == (150, 3, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--target", "z"], "no column 'z'"),
        (["--gaps", "jump"], "expected one of split, fill"),
        (["--missing-value", "none"], "`--missing-value` is 'none'"),
        (["no-such-file.csv"], "there is no file no-such-file.csv"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(path, given, message, refused):
    assert message in refused("prepare", path, *given)


@pytest.mark.parametrize(
    ("limit", "options", "where"),
    [
        (8192, (), "values.f32: cannot write beyond 8,192 bytes"),
        # What is sorted, or has gaps filled, is written through a mapping.
        (70_000, ("--gaps", "fill"), r"\w+.new: cannot reserve [\d,]+ bytes"),
    ],
)
def test_a_file_size_limit_is_reported(tmp_path, limit, options, where):
    times = [f"2024-01-{day:02}T{hour:02}:00" for day in range(1, 11) for hour in range(24)]
    rows = [f"{time},{','.join(['1.5'] * 80)}" for k, time in enumerate(times) if k % 9 != 5]
    names = ",".join(f"c{k}" for k in range(80))
    path = tmp_path / "a.csv"
    path.write_text("\n".join([f"time,{names}", *rows]))
    cache = tmp_path / "cache"
    code = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from fastlstm.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "prepare", str(path), *options]
    found = subprocess.run(
        [*command, "--cache-dir", str(cache)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 1, found.stderr
    assert re.search(f"fastlstm: error: .*{where} .File too large.: .*'ulimit -f'", found.stderr)
    assert [p.name for p in cache.rglob("*") if p.is_file()] == [".lock"]
