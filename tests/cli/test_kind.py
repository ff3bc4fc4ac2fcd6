"""Whether `train` and `evaluate` are about a text or a table: by the options and what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastlstm.cli.kind import module_of
from fastlstm.data.source_kind import kind_of_source
from fastlstm.errors import UsageError

CSV = "date,y\n" + "".join(f"2020-01-{day:02},{day}\n" for day in range(1, 29))
PROSE = "One day, 1 of 3, it rained.\nThe next 2 days, too.\nThen, on the 4th, it was dry.\n" * 9


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text(CSV)
    Path("numbers.txt").write_text(CSV)
    Path("book.txt").write_text(PROSE)
    Path("data.parquet").write_bytes(b"PAR1")
    for name, content in (("mixed/a.csv", CSV), ("mixed/notes.md", PROSE), ("tables/a.csv", CSV)):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    Path("c.yaml").write_text("horizon: 4\n")
    Path("texts").mkdir()
    Path("texts/a.txt").write_text(PROSE)
    for name, config in (
        ("begun", '{"kind": "forecaster"}'),
        ("book", '{"format": "fastlstm-run"}'),
    ):
        Path(name).mkdir()
        Path(name, "config.json").write_text(config)


@pytest.mark.parametrize(
    "argv",
    [
        ["data.parquet", "--out", "r"],
        ["--json", "data.parquet", "--out", "r"],
        ["--resume", "data.parquet", "--out", "r"],
        ["--no-tensorboard", "data.parquet", "--out", "r"],
        ["--strict-kernels", "--json", "data.parquet", "--out=r"],
        ["data.csv", "--horizon", "4", "--out", "r"],
        ["numbers.txt", "--target=y", "--out", "r"],
        ["data.csv", "--out", "begun", "--resume"],
        ["--out", "begun", "--resume", "data.csv"],
        ["mixed", "--horizon", "4", "--out", "r"],
        ["--horizon", "4", "--help"],
        ["data.csv", "--no-bidirectional", "--out", "r"],
        ["data.parquet", "missing.txt", "--out", "r"],
    ],
)
def test_a_forecaster_is_meant(argv: list[str]) -> None:
    assert module_of("train", argv) == "train_series"


@pytest.mark.parametrize(
    "argv",
    [
        ["book.txt", "--out", "r"],
        ["book.txt", "--out", "x.parquet"],
        ["texts", "--out", "r"],
        ["python-docs", "--out", "r"],
        ["-", "--out", "r"],
        ["data.csv", "--as-text", "--out", "r"],
        ["--as-text", "data.parquet", "--out", "r"],
        ["mixed", "--as-text", "--out", "r"],
        ["data.csv", "--out", "book", "--resume"],
        ["missing.csv", "--out", "r"],
        ["--help"],
    ],
)
def test_a_text_model_is_meant(argv: list[str]) -> None:
    assert module_of("train", argv) == "train"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["data.csv"], ["data.csv holds a table", "--horizon N", "--as-text"]),
        (["--json", "data.csv"], ["data.csv holds a table"]),
        (["numbers.txt"], ["numbers.txt holds a table", "--horizon N", "--as-text"]),
        (["data.csv", "--vocab", "byte"], ["data.csv holds a table", "--as-text"]),
        (["tables"], ["tables holds a table", "--horizon N", "--as-text"]),
        (["t*s/*.csv"], ["t*s/*.csv holds a table", "--horizon N"]),
        (["mixed"], ["tables (a.csv)", "texts (notes.md)", "--horizon N", "--as-text"]),
        (["book.txt", "--horizon", "4"], ["book.txt is a text", "leave out --horizon", "a table"]),
        (["book.txt", "--out", "begun"], ["book.txt is a text", "another --out"]),
        (["data.csv", "--as-text", "--horizon", "4"], ["--as-text", "--horizon", "one of"]),
        (["data.parquet", "book.txt"], ["data.parquet is a table", "book.txt is a text"]),
        (["book.txt", "--hidden-size", "4"], ["leave out --hidden-size", "mean '--rnn-size'?"]),
        (["book.txt", "--config", "c.yaml"], ["'horizon' in c.yaml is for a table"]),
        (["data.csv", "--lr", "4"], ["unknown flag '--lr' (did you mean '--learning-rate'?)"]),
        (["data.csv", "--horizonn", "4"], ["unknown flag '--horizonn'", "'--horizon'"]),
    ],
)
def test_what_is_not_clear_is_refused_with_the_ways_out(argv: list[str], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        module_of("train", argv)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_what_is_evaluated_is_the_first_argument() -> None:
    assert module_of("evaluate", ["--json", "begun", "data.csv"]) == "evaluate_series"
    assert module_of("evaluate", ["book", "begun"]) == "evaluate"


@pytest.mark.parametrize(
    ("source", "kind"),
    [("book.txt", "text"), ("numbers.txt", "csv"), ("nothing.md", "unknown"), ("mixed", "mixed")],
)
def test_what_a_source_holds(source: str, kind: str) -> None:
    assert kind_of_source(source) == kind
