"""Parts that were copied, renamed, damaged or forged: refused in one line, and never joined."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv
from pyarrow import parquet as pq

from fastlstm import Forecaster
from fastlstm.cli.main import main
from fastlstm.forecast import backtest, forecast_table, prepared_parts, table_evaluation
from fastlstm.runs import parts as parts_module
from fastlstm.runs.manifest import FileRecord, Manifest
from fastlstm.runs.parts import Part, PartDirectory, StoredPart
from forecast_server import QUICK, everything, waves

COUNT = 3
SUFFIXES = {"forecast": ".arrow", "evaluate": ".sums", "prepare": ".batches"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its table of six series, and parts of each kind."""
    folder = tmp_path_factory.mktemp("forged")
    pq.write_table(waves(120, 6), folder / "table.parquet")
    Forecaster(**QUICK).fit(folder / "table.parquet").save(folder / "run")
    table = folder / "table"
    table.mkdir()
    for number in range(COUNT):
        csv.write_csv(waves(120, 6).slice(240 * number, 240), table / f"f{number}.csv")
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch)
        for verb in SUFFIXES:
            given = [table] if verb == "prepare" else [folder / "run", folder / "table.parquet"]
            for number in range(COUNT):
                out = ["--out", folder / verb, "--shard", f"{number}/{COUNT}"]
                assert main([verb, *map(str, [*given, *out])]) == 0
    return folder


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forecast_table, "SERIES_AT_ONCE", 2)
    for module in (backtest, table_evaluation):
        patch.setattr(module, "windows_at_once", lambda *_: 5)


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch: pytest.MonkeyPatch, made: Path, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    small_blocks(monkeypatch)
    for verb in SUFFIXES:
        shutil.copytree(made / verb, verb)


def merge(verb: str) -> int:
    more = {"forecast": ["--out", "all.csv"], "prepare": ["--cache-dir", "cache"]}
    return main(["merge", verb, *more.get(verb, [])])


def manifest(verb: str, number: int) -> Path:
    return Path(verb, f"{Part(number, COUNT).stem}.json")


def forge(verb: str, number: int, change: Callable[[Manifest], object]) -> None:
    """Changes a manifest, and its own SHA-256 with it."""
    path = manifest(verb, number)
    found = Manifest.from_bytes(path.read_bytes(), path)
    change(found)
    path.write_bytes(found.to_bytes())


def forge_file(verb: str, number: int, data: bytes) -> None:
    file = manifest(verb, number).with_suffix(SUFFIXES[verb])
    file.write_bytes(data)
    forge(verb, number, lambda found: found.files.update({file.name: FileRecord.of(data)}))


@pytest.mark.parametrize("verb", SUFFIXES)
@pytest.mark.parametrize("how", ["copied", "swapped", "linked"])
def test_a_manifest_of_another_part_is_none(
    verb: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the SHA-256 of that part's file, which would be joined twice, or out of order."""
    first, second = manifest(verb, 0), manifest(verb, 1)
    missing = "1 part of 3: 1"
    if how == "copied":
        second.write_bytes(first.read_bytes())
    elif how == "swapped":
        first.rename("first")
        second.rename(first)
        Path("first").rename(second)
        missing = "2 parts of 3: 0-1"
    else:
        second.unlink()
        second.symlink_to(first.name)
    assert merge(verb) == 2
    assert f"{verb} lacks {missing}; start them again" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".json", ".arrow"])
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
def test_a_pipe_or_a_device_is_no_part(suffix: str, kind: str) -> None:
    """Reading it would never end."""
    parts, file = PartDirectory("forecast"), manifest("forecast", 1).with_suffix(suffix)
    whole = file.read_bytes()
    file.unlink()
    os.mkfifo(file) if kind == "pipe" else file.symlink_to(kind)
    assert parts.find(Part(1, COUNT)) is None
    assert merge("forecast") == (2 if suffix == ".json" else 1)
    Path("real").write_bytes(whole)
    file.unlink()
    file.symlink_to(Path("real").absolute())
    assert parts.find(Part(1, COUNT)) is not None


@pytest.mark.parametrize("verb", SUFFIXES)
def test_parts_written_anew_while_they_are_joined_are_not_mixed(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here the last two, by another run, after the first was read."""
    reading, new = PartDirectory.reading, FileRecord.of(b"of another run")

    def late(self: PartDirectory, stored: StoredPart) -> Any:
        if stored.part.number == 1:
            for number in (1, 2):
                forge(
                    verb, number, lambda found: found.files.update(dict.fromkeys(found.files, new))
                )
        return reading(self, stored)

    monkeypatch.setattr(PartDirectory, "reading", late)
    assert merge(verb) == 2
    which = "part 1" if verb == "prepare" else "parts 1-2"
    assert f"{verb}: {which} of 3 changed while being joined; start" in capsys.readouterr().err
    assert not Path("all.csv").exists()


@pytest.mark.parametrize("value", [None, 3, "x", [1], {}])
@pytest.mark.parametrize("field", ["work", "facts"])
@pytest.mark.parametrize("verb", SUFFIXES)
def test_forged_manifests_are_refused(
    verb: str, field: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(COUNT):
        forge(verb, number, lambda found: found.extra.update({field: value}))
    assert merge(verb) != 0
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["files", "columns", "schemas", "streams", "tables"])
@pytest.mark.parametrize("value", [None, 3, "x", [[10**25, -1, True]], ["../../etc/passwd"]])
def test_forged_facts_of_a_table_are_refused(
    name: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    forge("prepare", 0, lambda found: found.extra["facts"].update({name: value}))
    assert merge("prepare") != 0
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize("verb", SUFFIXES)
@pytest.mark.parametrize("data", [b"x", b"ARROW1\0\0" + bytes(90), b"[" * 9000, b"{}", b"half"])
def test_forged_files_are_named(verb: str, data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    whole = manifest(verb, 1).with_suffix(SUFFIXES[verb]).read_bytes()
    forge_file(verb, 1, whole[: len(whole) // 2] if data == b"half" else data)
    assert merge(verb) == 1
    told = "part 1 of 3 is damaged; compute it again with --shard 1/3"
    assert told in capsys.readouterr().err
    assert not Path("all.csv").exists()


@pytest.mark.parametrize("value", [-1, 0.5, "-0x1", True, None])
@pytest.mark.parametrize("place", ["num_values", "sums", "inside"])
def test_forged_sums_are_refused(
    place: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = json.loads(manifest("evaluate", 1).with_suffix(".sums").read_bytes())
    if place == "num_values":
        sums["scores"]["naive"][place] = value
    elif place == "inside":
        sums["quantiles"][place][0] = value
    else:
        sums["scores"]["naive"][place]["mse"][0] = hex(value) if type(value) is int else value
    forge_file("evaluate", 1, json.dumps(sums).encode())
    assert merge("evaluate") == 1
    assert "part 1 of 3 is damaged" in capsys.readouterr().err


def test_times_are_written_as_all_parts_say(capsys: pytest.CaptureFixture[str]) -> None:
    forge("forecast", 1, lambda found: found.extra["facts"].update(whole_seconds=[]))
    assert merge("forecast") == 1
    assert "forecast: part 1 of 3 is damaged; compute it again" in capsys.readouterr().err


def test_other_names_of_a_part_are_not_one(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (
        "part-00003-of-00003.json",
        "part-00000-of-00000.json",
        "part-٠٠٠٠٧-of-٠٠٠٠٩.json",
    ):
        Path("forecast", name).write_bytes(manifest("forecast", 0).read_bytes())
    assert merge("forecast") == 0
    assert main(["merge", ""]) == 2
    assert "the directory of all parts is '', expected a name" in capsys.readouterr().err


def test_the_joined_file_does_not_replace_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    part = manifest("forecast", 1).with_suffix(".arrow")
    whole = part.read_bytes()
    assert main(["merge", "forecast", "--out", str(part)]) == 2
    assert f"--out {part} has the name of a part; give another name" in capsys.readouterr().err
    assert part.read_bytes() == whole


def test_a_manifest_that_could_not_be_read_back_is_not_written(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts_module, "MAX_JSON_BYTES", 1000)
    assert main(["prepare", str(made / "table"), "--out", "large", "--shard", "0/1"]) == 2
    assert "expected at most 1,000: too many files in one part; give mo" in capsys.readouterr().err


def test_a_changed_file_of_the_same_size_and_time_is_seen(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the machine that read it; others compare size and time of change only."""
    shutil.copytree(made / "table", "table")
    argv = ["prepare", "table", "--out", "parts", "--shard"]
    assert [main([*argv, f"{number}/2"]) for number in (0, 1)] == [0, 0]
    file = Path("table/f1.csv")
    before, text = file.stat(), file.read_text()
    file.write_text(text[:-2] + ("1" if text[-2] != "1" else "2") + "\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    capsys.readouterr()
    assert main(["merge", "parts", "--cache-dir", "cache"]) == 2
    assert "1 file changed since the parts were computed" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(prepared_parts, "machine_id", lambda: "another")
        assert main([*argv, "1/2"]) == 0
    assert "is there already" in capsys.readouterr().out
    assert main([*argv, "1/2"]) == 0
    assert "is there already" not in capsys.readouterr().out
    assert main(["merge", "parts", "--cache-dir", "cache"]) == 0


def test_a_bracket_in_the_directory_is_no_pattern(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("a[1]", "b*")
    shutil.copytree(made / "table", folder / "table")
    monkeypatch.chdir(folder)
    assert main(["prepare", "table/*.csv", "--out", "parts", "--shard", "0/1"]) == 0
    monkeypatch.chdir("table")
    assert main(["merge", "../parts", "--cache-dir", "cache"]) == 0


def test_parts_without_series_need_no_future_rows() -> None:
    roles: dict[str, Any] = {"future": ["price", "kind"], "categorical": ["kind", "place", "sky"]}
    roles |= {"past": ["temp", "sky"], "static": ["size", "place"]}
    past = everything()
    pq.write_table(past, "past.parquet")
    Forecaster(**QUICK, **roles).fit("past.parquet").save("run")
    times = past["ds"].to_numpy()
    later = pa.array(times + (times[1] - times[0]) * (len(past) // 3))
    future = past.set_column(1, "ds", later).select(["unique_id", "ds", "price", "kind"])
    csv.write_csv(future, "future.csv")
    argv = ["forecast", "run", "past.parquet", "--future", "future.csv", "--out"]
    assert main([*argv, "one.csv"]) == 0
    assert [main([*argv, "parts", "--shard", f"{n}/4"]) for n in range(4)] == [0] * 4
    assert main(["merge", "parts", "--out", "all.csv"]) == 0
    assert Path("all.csv").read_bytes() == Path("one.csv").read_bytes()


def test_two_columns_of_one_name_and_names_of_other_bytes_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("twice").mkdir()
    for name in ("a", "b"):
        Path(f"twice/{name}.csv").write_text("ds,y,y\n1,2,3\n")
    Path("bytes").mkdir()
    Path(os.fsdecode(b"bytes/\xff.csv")).write_text("ds,y\n1,2\n")
    for table, told in {
        "twice": "twice/a.csv has two columns called 'y'; rename one",
        "bytes": "the name is not UTF-8; rename the file",
    }.items():
        assert main(["prepare", table]) == 2
        assert told in capsys.readouterr().err
        assert main(["prepare", table, "--out", "parts", "--shard", "0/1"]) == 2
        assert told in capsys.readouterr().err


def test_parts_below_a_file_url(made: Path, tmp_path: Path) -> None:
    """Its directory is made, as that of a path is."""
    url = f"file://{tmp_path}/new/parts"
    assert main(["prepare", str(made / "table"), "--out", url, "--shard", "0/1"]) == 0
    assert main(["merge", url, "--cache-dir", "cache"]) == 0
