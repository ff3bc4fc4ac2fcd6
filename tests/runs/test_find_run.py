"""What was named as a run: said before torch is loaded, with what to do."""

import errno
import re
from pathlib import Path

import pytest

from fastlstm.errors import RunDirectoryError, StorageError, UsageError
from fastlstm.runs.find_run import require_run
from test_light_import import loaded_by


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    configs = {"book": '{"format": "fastlstm-run"}', "etth": '{"kind": "forecaster"}'}
    for name, config in configs.items():
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.json").write_text(config)
        Path("runs", name, "manifest.json").write_text("{}")
    Path("empty").mkdir()
    Path("book.txt").write_text("a text\n" * 99)
    Path("table.csv").write_text("ds,y\n2020-01-01,1\n")


@pytest.mark.parametrize(
    ("path", "wanted", "parts"),
    [
        (
            "runs/bok",
            "text",
            ["runs/bok: no such run (did you mean 'book'?)", "fastlstm train SOURCE --out"],
        ),
        ("none", "forecaster", ["none: no such run", "DATA --horizon N --out none"]),
        ("nowhere/none", "text", ["nowhere/none: no such run; train one"]),
        ("book.txt", "text", ["book.txt is a file", "fastlstm train book.txt --out RUN"]),
        ("table.csv", "forecaster", ["is a file", "train table.csv --horizon N --out RUN"]),
        ("runs/book/config.json", "text", ["is a file of a run, expected the run: ", "runs/book"]),
        ("runs", "text", ["runs is not a run", "runs/book, runs/etth"]),
        ("empty", None, ["empty: has no model and no checkpoint", "fastlstm train SOURCE"]),
        ("runs/etth", "text", ["is a forecaster", "or `fastlstm forecast` opens it"]),
        ("runs/book", "forecaster", ["is a text model", "LM.load` or `fastlstm generate` opens"]),
    ],
)
def test_another_path_than_a_run_is_refused_with_advice(path, wanted, parts):
    with pytest.raises(UsageError) as caught:
        require_run(path, wanted)  # type: ignore[arg-type]
    shown = str(caught.value)
    assert [part for part in parts if part not in shown] == []


@pytest.mark.parametrize(
    ("path", "wanted", "told"),
    [
        ("none", "sequence", "`fastlstm.SequenceRegressor().fit(X, y, out='none')`"),
        (None, "text", "the run directory is None, expected a path"),
        (5, "forecaster", "the run directory is an int, expected a path"),
    ],
)
def test_other_values_than_paths_and_kinds_without_a_command(path, wanted, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        require_run(path, wanted)


def test_the_right_run_passes():
    require_run("runs/book", "text")
    require_run("runs/etth", "forecaster")
    require_run(Path("runs/book"))
    Path("killed/checkpoint-5").mkdir(parents=True)  # `info` says what is wrong with it
    require_run("killed")


REFUSED = (
    "generate book.txt", "generate runs/etth", "generate missing", "evaluate missing book.txt",
    "evaluate runs/book missing.txt", "evaluate runs/etth book.txt", "forecast runs/book table.csv",
    "forecast runs/etth missing.csv", "info book.txt", "serve book.txt", "prepare book.txt",
    "train missing.txt --out runs/book", "train missing.csv --horizon 4 --out runs/etth",
)  # fmt: skip


def test_the_command_line_needs_no_torch_to_say_so():
    code = f"""
import sys
from fastlstm.cli.main import main
for line in {REFUSED!r}:
    assert (main(line.split()), "torch" in sys.modules) == (2, False), line
"""
    loaded_by(code)


def test_an_unreadable_directory_is_named(tmp_path, monkeypatch):
    """It was an internal error of every verb that takes a run."""
    closed, listed = tmp_path / "closed", Path.iterdir
    closed.mkdir()

    def refused(path):
        if path == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(StorageError, match=r"closed: cannot read \(Permission denied\)"):
        require_run(closed)
    with pytest.raises(RunDirectoryError, match="no such run"):
        require_run(tmp_path / "close")
