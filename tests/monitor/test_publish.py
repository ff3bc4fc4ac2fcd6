from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fastlstm.cli.main import main
from fastlstm.errors import ConfigError, RunDirectoryError
from fastlstm.monitor.publish import publish

EVENTS = [
    {"event": "start", "task": "text", "unit": "tokens", "num_units": {}, "resumed_from": None},
    {"event": "step", "step": 5, "loss": 0.1 + 0.2, "lr": 1e-300},
    {"event": "eval", "step": 5, "split": "valid", "loss": 2.5, "is_best": True},
    {"event": "sample", "step": 5, "text": 'He said "no", and\nwent.'},
    {"event": "step", "step": 10, "loss": 9.0},
    {"event": "start", "task": "text", "unit": "tokens", "num_units": {}, "resumed_from": 5},
    {"event": "step", "step": 8, "loss": None, "grad_norm": 3},
]


def make_run(path: Path, events: list[dict[str, object]]) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"format": "fastlstm-run", "format_version": 2}')
    (path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events) + '{"ev')
    return path


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def test_every_value_reads_back_and_repeated_steps_are_the_newer_ones(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "book", EVENTS), tmp_path / "book.csv"
    assert main(["publish", str(run)]) == 0
    first, second = read(out)
    assert list(first) == [
        "run", "step", "train/loss", "train/lr", "valid/loss", "train/grad_norm", "sample",
    ]  # fmt: skip
    assert (first["run"], first["step"]) == ("book", "5")
    assert (float(first["train/loss"]), float(first["train/lr"])) == (0.1 + 0.2, 1e-300)
    assert first["valid/loss"] == "2.5"
    assert first["sample"] == 'He said "no", and\nwent.'
    assert (second["step"], second["train/loss"], second["train/grad_norm"]) == ("8", "", "3.0")


def test_publishing_again_repeats_nothing(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "book", EVENTS), tmp_path / "t.csv"
    publish(run, out=out)
    before = out.read_bytes()
    report = publish(run, out=out)
    assert out.read_bytes() == before
    assert (report.rows, report.last_step) == (2, 8)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    empty = make_run(tmp_path / "empty", [])
    with pytest.raises(RunDirectoryError, match="no step was recorded"):
        publish(empty)
    with pytest.raises(ConfigError, match="expected one of csv"):
        publish(empty, to="excel")
    assert main(["publish", str(tmp_path / "none")]) == 2
    assert not list(tmp_path.glob("*.csv"))
