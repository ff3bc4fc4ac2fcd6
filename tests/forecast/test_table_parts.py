"""Forecasts and evaluations in parts: merged they have the bytes of the undivided result."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet as pq

from fastlstm import Forecaster
from fastlstm.cli.main import main
from fastlstm.errors import DataError, Stopped
from fastlstm.forecast import backtest, forecast_table, table_evaluation
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.fingerprint import fingerprint
from fastlstm.forecast.table_parts import forecast_part
from fastlstm.forecast.train import train_forecaster
from fastlstm.runs.parts import Part
from forecast_server import QUICK, waves

NUM_SERIES = 11


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run and its table."""
    folder = tmp_path_factory.mktemp("parts")
    pq.write_table(waves(120, NUM_SERIES), folder / "table.parquet")
    Forecaster(**QUICK).fit(folder / "table.parquet").save(folder / "run")
    return folder / "run", folder / "table.parquet"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Six blocks of series, and some sixty of windows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forecast_table, "SERIES_AT_ONCE", 2)
    for module in (backtest, table_evaluation):
        monkeypatch.setattr(module, "windows_at_once", lambda *_: 5)


@pytest.fixture
def shard(made: tuple[Path, Path]) -> Callable[..., int]:
    """Runs one part of forecast, or of the verb given."""

    def run(part: str, *more: str, verb: str = "forecast", out: str = "parts") -> int:
        return main([verb, *map(str, made), "--out", out, "--shard", part, *more])

    return run


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".arrow"])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_merged_forecasts_are_those_of_one_process(
    made: tuple[Path, Path], shard: Callable[..., int], count: int, suffix: str
) -> None:
    """With nine parts of six blocks some are empty."""
    options = ["--quantiles", "0.1,0.5"]
    assert main(["forecast", *map(str, made), "--out", f"one{suffix}", *options]) == 0
    for number in reversed(range(count)):
        assert shard(f"{number}/{count}", *options) == 0
    assert main(["merge", "parts", "--out", f"merged{suffix}"]) == 0
    assert Path(f"merged{suffix}").read_bytes() == Path(f"one{suffix}").read_bytes()


@pytest.mark.parametrize("options", [[], ["--split", "valid", "--scaled", "--stride", "3"]])
def test_merged_figures_are_those_of_one_process(
    made: tuple[Path, Path],
    shard: Callable[..., int],
    options: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in (2, 0, 1, 3):
        assert shard(f"{number}/4", *options, verb="evaluate") == 0
    for form in (["--json"], []):
        capsys.readouterr()
        assert main(["merge", "parts", *form]) == 0
        merged = capsys.readouterr().out
        assert main(["evaluate", *map(str, made), *options, *form]) == 0
        assert merged == capsys.readouterr().out


def test_a_part_that_is_there_is_not_computed_again(
    made: tuple[Path, Path],
    shard: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither by the same command, which loads nothing, nor by another that asks for the same."""
    assert shard("1/4") == 0
    before = {path.name: path.stat().st_mtime_ns for path in Path("parts").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(Forecaster, "load", None)
        assert shard("1/4") == 0
    assert "parts: part 1/4 is there already" in capsys.readouterr().out
    shutil.copy(made[1], "copy.parquet")
    assert main(["forecast", str(made[0]), "copy.parquet", "--out=parts", "--shard=1/4"]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in Path("parts").iterdir()} == before


def test_damaged_and_missing_parts_are_named_and_made_again(
    shard: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(6):
        assert shard(f"{number}/6") == 0
    whole = {path.name: path.read_bytes() for path in Path("parts").iterdir()}
    cut, gone = Path("parts/part-00002-of-00006.arrow"), Path("parts/part-00004-of-00006.json")
    cut.write_bytes(cut.read_bytes()[:-100])
    gone.unlink()
    assert main(["merge", "parts", "--out", "all.csv"]) == 2
    assert "parts lacks 1 part of 6: 4; start them again" in capsys.readouterr().err
    assert shard("4/6") == 0
    assert main(["merge", "parts", "--out", "all.csv"]) == 1
    assert (
        "parts: part 2 of 6 is damaged; compute it again with --shard 2/6"
        in capsys.readouterr().err
    )
    assert not Path("all.csv").exists()
    assert shard("2/6") == 0
    assert main(["merge", "parts", "--out", "all.csv"]) == 0
    assert {path.name: path.read_bytes() for path in Path("parts").iterdir()} == whole
    for number in (1, 2, 4):
        Path(f"parts/part-0000{number}-of-00006.arrow").write_bytes(b"")
    assert main(["merge", "parts", "--out", "all.csv"]) == 1
    told = "parts 1-2, 4 of 6 are damaged; compute each again, the first with --shard 1/6"
    assert told in capsys.readouterr().err


def test_runs_of_missing_parts_are_shortened(
    shard: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert shard("3/9") == 0
    assert main(["merge", "parts", "--out", "all.csv"]) == 2
    shown = capsys.readouterr().err
    assert "parts lacks 8 parts of 9: 0-2, 4-8; start them again with the same --shard 0/9" in shown


@pytest.mark.parametrize("what", ["run", "table", "options", "command"])
def test_parts_of_something_else_are_refused(
    made: tuple[Path, Path],
    shard: Callable[..., int],
    what: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At the start of a part, and where they were written at one time, when they are merged."""
    run, table = map(str, made)
    more: list[str] = []
    if what == "run":
        Forecaster(**{**QUICK, "steps": 6}).fit(table).save("other")
        run = "other"
    elif what == "table":
        pq.write_table(waves(121, NUM_SERIES), "other.parquet")
        table = "other.parquet"
    elif what == "options":
        more = ["--quantiles", "0.5"]
    verb = "evaluate" if what == "command" else "forecast"
    assert shard("0/2") == 0
    for number in (0, 1):
        assert main([verb, run, table, "--out", "parts", "--shard", f"{number}/2", *more]) == 2
        shown = capsys.readouterr().err
        assert "part-00000-of-00002 was made of another " in shown
        assert what in shown
    assert main([verb, run, table, "--out", "others", "--shard", "1/2", *more]) == 0
    for path in Path("others").iterdir():
        path.rename(Path("parts", path.name))
    assert main(["merge", "parts", "--out", "all.csv"]) == 2
    assert "part-00001-of-00002 was made of another" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["forecast", "evaluate"])
def test_a_part_of_a_run_without_a_model_is_refused(
    made: tuple[Path, Path], verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stopped):
        train_forecaster(made[1], ForecastConfig(**QUICK), out="stopped", stop=lambda: True)
    assert main([verb, "stopped", str(made[1]), "--out", "parts", "--shard", "0/2"]) == 2
    assert "stopped has no model yet: training ended before its first" in capsys.readouterr().err


def test_parts_of_two_numbers_are_not_mixed(
    shard: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert shard("0/2") == 0
    assert shard("0/3") == 2
    assert "parts has parts of 2, this is one of 3; give another --out" in capsys.readouterr().err
    assert shard("0/3", out="others") == 0
    for path in Path("others").iterdir():
        path.rename(Path("parts", path.name))
    assert main(["merge", "parts", "--out", "all.csv"]) == 2
    assert "parts has parts of 2 and of 3, expected those of one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["--out", "p", "--shard", "5/4"],
            "--shard 5/4 is out of range: parts are numbered from 0",
        ),
        (["--out", "p", "--shard", "4/4"], "here 0/4 to 3/4"),
        (["--out", "p", "--shard", "0/0"], "has 0 parts, expected 1 to"),
        (["--out", "p", "--shard", "x"], "--shard x is not a part, expected its number from 0"),
        (["--out", "p", "--shard", "-1/4"], "is not a part"),
        (["--shard", "1/4"], "--shard needs --out DIR"),
        (["--out", "p.CSV", "--shard", "1/4"], "--out p.CSV is a file's name; with --shard it is"),
        (["--out", "s3://b/p.arrow", "--shard", "1/4"], "give --out s3://b/p, and fastlstm merge"),
    ],
)
def test_other_parts_are_refused(
    made: tuple[Path, Path], argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("forecast", "evaluate", "prepare"):
        assert main([verb, *map(str, made[verb == "prepare" :]), *argv]) == 2
        assert told in capsys.readouterr().err
    assert not Path("p").exists()
    assert not Path("p.CSV").exists()


def test_a_directory_without_parts_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    for place in ("empty", "nowhere"):
        assert main(["merge", place, "--out", "all.csv"]) == 2
        assert f"{place} has no parts; they are written with --shard" in capsys.readouterr().err


def test_two_processes_with_the_same_part_do_no_harm(made: tuple[Path, Path]) -> None:
    run, table = made
    model = Forecaster.load(run)
    threads = [
        threading.Thread(target=forecast_part, args=(model, table, Part(0, 1), "parts"))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert main(["merge", "parts", "--out", "all.csv"]) == 0
    assert len(os.listdir("parts")) == 2


def test_a_killed_process_leaves_no_part_and_what_it_left_is_removed(
    made: tuple[Path, Path], shard: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
import os, signal, sys
from fastlstm.runs.parts import Part, PartDirectory
def produce(file):
    file.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
PartDirectory("parts").write(Part(0, 1), {}, {}, ".arrow", produce)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir("parts")) == 1
    assert main(["merge", "parts", "--out", "all.csv"]) == 2
    assert "has no parts" in capsys.readouterr().err
    assert shard("0/1") == 0
    assert sorted(os.listdir("parts")) == ["part-00000-of-00001.arrow", "part-00000-of-00001.json"]


@pytest.mark.filterwarnings("always")
def test_other_kernels_are_told(
    shard: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fastlstm.forecast import table_parts

    assert shard("0/2") == 0
    monkeypatch.setattr(table_parts, "_machine", lambda: {"isa": "other", "torch": "1"})
    assert shard("1/2") == 0
    assert main(["merge", "parts", "--out", "all.csv"]) == 0
    shown = capsys.readouterr().err
    assert "several instruction sets" in shown
    assert "equals that of one process but for rounding" in shown


def test_a_table_is_told_by_what_it_holds(made: tuple[Path, Path]) -> None:
    def of(**changes: Any) -> str:
        table = waves(60)
        for name, values in changes.items():
            table = table.set_column(table.column_names.index(name), name, [values])
        dataset: SeriesDataset = model._table(table)[0]
        return fingerprint(dataset)

    model = Forecaster.load(made[0])
    y = waves(60)["y"].to_numpy().copy()
    whole = of()
    assert of() == whole
    y[-1] += 1
    names = np.repeat(["s0", "s1", "x"], 60)
    assert len({whole, of(y=y), of(unique_id=names)}) == 3


def test_an_error_of_the_table_is_that_of_forecast(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(waves(10), "short.parquet")
    argv = ["forecast", str(made[0]), "short.parquet", "--out", "parts", "--shard", "1/4"]
    assert main(argv) == 2
    assert "a forecast reads the last 24" in capsys.readouterr().err
    with pytest.raises(DataError, match="there is no file"):
        forecast_part(Forecaster.load(made[0]), "gone.csv", Part(0, 1), "parts")
    assert not Path("parts").exists()
