"""`train` and `evaluate` choose texts or tables by options, sources and runs."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastlstm.cli import evaluate, forecast, train
from fastlstm.cli.command import HelpRequested, help_text
from fastlstm.cli.inputs import require_tables
from fastlstm.cli.training import command_for, parse_for_run
from fastlstm.errors import DataError, FastLSTMError, UsageError
from fastlstm.forecast.data.records import require_files
from fastlstm.text.data.source_kind import kind_of_source
from fastlstm.text.data.sources import open_source

CSV = "date,y\n" + "".join(f"2020-01-{day:02},{day}\n" for day in range(1, 29))
PROSE = "One day, 1 of 3, it rained.\nThe next 2 days, too.\nThen, on the 4th, it was dry.\n" * 9


def meant(verb, argv):
    if verb == "train":
        return command_for(argv, train.COMMAND, train.TABLE_COMMAND)
    try:
        return parse_for_run(argv, evaluate.COMMANDS)[1].command
    except HelpRequested as asked:
        found = evaluate.COMMANDS.values()
        return next(c for c in found if help_text(c, shows_all=False) == str(asked))


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text(CSV)
    Path("numbers.txt").write_text(CSV)
    Path("book.txt").write_text(PROSE)
    Path("data.parquet").write_bytes(b"PAR1")
    for name, content in (("mixed/a.csv", CSV), ("mixed/notes.md", PROSE), ("tables/a.csv", CSV)):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    Path("rows.jsonl").write_text('{"ds": 1, "y": 2}\n')
    Path("stories").mkdir()
    pq.write_table(pa.table({"text": ["a", "b"], "stars": [1, 2]}), "stories/0.parquet")
    pq.write_table(
        pa.table({"id": ["x", "y"], "body": ["a" * 40, None], "stars": [1, 2]}), "bodies.parquet"
    )
    Path("c.yaml").write_text("horizon: 4\n")
    Path("texts").mkdir()
    Path("texts/a.txt").write_text(PROSE)
    configs = {"started": '{"kind": "forecaster"}', "book": '{"format": "fastlstm-run"}'}
    for name, config in configs.items():
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
        ["data.csv", "--out", "started", "--resume"],
        ["data.csv", "--out", "new", "--start", "started"],
        ["--out", "started", "--resume", "data.csv"],
        ["mixed", "--horizon", "4", "--out", "r"],
        ["--horizon", "4", "--help"],
        ["data.csv", "--help-all"],
        ["data.csv", "--no-bidirectional", "--out", "r"],
        ["data.parquet", "missing.txt", "--out", "r"],
        ["stories/0.parquet", "--horizon", "4", "--out", "r"],
    ],
)
def test_the_command_for_tables_is_chosen(argv):
    assert meant("train", argv) is train.TABLE_COMMAND


@pytest.mark.parametrize(
    "argv",
    [
        *(["book.txt", "--out", "r"], ["book.txt", "--out", "x.parquet"], ["texts", "--out", "r"]),
        *(["python-docs", "--out", "r"], ["-", "--out", "r"]),
        *(["data.csv", "--as-text", "--out", "r"], ["--as-text", "data.parquet", "--out", "r"]),
        *(["mixed", "--as-text", "--out", "r"], ["data.csv", "--out", "book", "--resume"]),
        *(["missing.csv", "--out", "r"], ["--help"]),
        *(["stories", "--out", "r"], ["stories/0.parquet", "book.txt", "--out", "r"]),
        ["bodies.parquet", "--text-field", "body", "--out", "r"],
    ],
)
def test_the_command_for_texts_is_chosen(argv):
    assert meant("train", argv) is train.COMMAND


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["data.csv"], ["data.csv is a table", "--horizon N", "--as-text"]),
        (["--json", "data.csv"], ["data.csv is a table"]),
        (["numbers.txt"], ["numbers.txt is a table", "--horizon N", "--as-text"]),
        (["data.csv", "--vocab", "byte"], ["data.csv is a table", "--as-text"]),
        (["tables"], ["tables is a table", "--horizon N", "--as-text"]),
        (["t*s/*.csv"], ["t*s/*.csv is a table", "--horizon N"]),
        (["mixed"], ["tables (a.csv)", "texts (notes.md)", "--horizon N", "--as-text"]),
        (["book.txt", "--horizon", "4"], ["book.txt is a text", "leave out --horizon", "a table"]),
        (["rows.jsonl", "--horizon", "4"], ["read_json('rows.jsonl', lines=True).to_parquet("]),
        (["book.txt", "--out", "started"], ["book.txt is a text", "another --out"]),
        (
            ["book.txt", "--start", "started", "--out", "r"],
            ["book.txt is a text", "the run in --start is a forecaster", "another --start"],
        ),
        (["data.csv", "--as-text", "--horizon", "4"], ["--as-text", "--horizon", "one of"]),
        (["data.parquet", "book.txt"], ["data.parquet is a table", "book.txt is a text"]),
        (["bodies.parquet", "--vocab", "byte"], ["--horizon N", "--text-field body"]),
        (["bodies.parquet", "--text-field", "bodi"], ["--horizon N", "--text-field body"]),
        (["book.txt", "--hidden-size", "4"], ["leave out --hidden-size", "mean '--rnn-size'?"]),
        (["book.txt", "--output", "r"], ["leave out --output", "mean '--out'?"]),
        (
            ["data.csv", "--horizon", "4", "--vocab", "byte"],
            ["--vocab is not an option for a forecaster; leave it out"],
        ),
        (["data.parquet", "--rnn-size", "4"], ["--rnn-size is not an", "mean '--hidden-size'?"]),
        (["book.txt", "--config", "c.yaml"], ["'horizon' in c.yaml is for a table"]),
        (["data.csv", "--lr", "4"], ["unknown flag '--lr' (did you mean '--learning-rate'?)"]),
        (["data.csv", "--horizonn", "4"], ["unknown flag '--horizonn'", "'--horizon'"]),
    ],
)
def test_unclear_sources_are_refused_with_the_options(argv, parts):
    with pytest.raises(UsageError) as caught:
        meant("train", argv)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_evaluate_chooses_the_command_by_its_first_argument():
    assert meant("evaluate", ["--json", "started", "data.csv"]) is evaluate.TABLE_COMMAND
    assert meant("evaluate", ["book", "started"]) is evaluate.COMMAND
    assert meant("evaluate", ["started", "--help"]) is evaluate.TABLE_COMMAND
    assert meant("evaluate", ["--help"]) is evaluate.COMMAND


@pytest.mark.parametrize(
    ("run", "flag", "said"),
    [
        ("started", "--lanes=4", "--lanes is not an option for a forecaster; leave it out"),
        ("book", "--scaled", "--scaled is not an option for a text; leave it out"),
    ],
)
def test_the_error_of_an_option_for_the_other_kind_says_so(run, flag, said):
    with pytest.raises(UsageError, match=said):
        meant("evaluate", [run, "data", flag])
    assert meant("evaluate", [run, "data", flag, "--help"])


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        (evaluate, ["book", "book"]),
        (train, ["book", "--out", "new"]),
        (forecast, ["started", "started"]),
    ],
)
def test_a_run_is_no_source(module, argv):
    Path("book/metrics.jsonl").write_text('{"event": "start"}\n')
    with pytest.raises(DataError, match=f"^{argv[0]} is a run, expected a text or a table"):
        module.run(argv)


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["evaluate", "book.txt", "book"], "fastlstm evaluate book book.txt"),
        (["evaluate", "data.csv", "started"], "fastlstm evaluate started data.csv"),
        (["forecast", "data.csv", "started"], "fastlstm forecast started data.csv"),
    ],
)
def test_a_run_comes_before_the_data(argv, command, refused):
    assert f"{argv[1]} is a file; the run comes first: {command}" in refused(*argv)


def test_scoring_a_table_as_a_text_gives_a_warning():
    """Scoring a large one takes long; that it is a table is said first."""
    with (
        pytest.warns(UserWarning, match="data.csv is a table; its characters are read"),
        pytest.raises(FastLSTMError),  # the run of this test is not whole
    ):
        evaluate.run(["book", "data.csv"])


def test_a_key_of_a_file_may_have_dashes():
    Path("dashed.yaml").write_text("input-size: 24\n")
    argv = ["data.csv", "--config", "dashed.yaml", "--out", "r"]
    assert meant("train", argv) is train.TABLE_COMMAND


def test_a_binary_table_that_is_not_there_is_looked_for_as_a_table(refused):
    assert "there is no file dat.parquet" in refused("train", "dat.parquet", "--out", "r")


def test_a_misspelt_table_is_named():
    with pytest.raises(DataError, match=r"no file dat\.csv \(did you mean 'data\.csv'\?\)"):
        require_tables(["dat.csv"])


@pytest.mark.parametrize("name", ["~odd.txt", "~odd.csv"])
def test_a_name_may_begin_with_a_tilde(name):
    Path(name).write_text(PROSE if name.endswith("txt") else CSV)
    assert kind_of_source(name) == ("text" if name.endswith("txt") else "csv")
    assert [document.path for document in open_source(name).documents] == [Path(name)]
    assert require_files(name) == [Path(name)]


@pytest.mark.parametrize(
    "argv",
    [
        *(["train", "", "--out", "r"], ["train", "", "--out", "r", "--horizon", "4"]),
        *(["train", "book.txt", "--out", ""], ["prepare", ""], ["generate", ""]),
        ["forecast", "started", ""],
    ],
)
def test_an_empty_name_is_refused_in_one_line(argv, refused):
    """The path of an empty name, as of a variable that is not set, is the current directory."""
    before = sorted(Path().rglob("*"))
    refused(*argv)
    assert sorted(Path().rglob("*")) == before


def test_tables_are_named_by_a_pattern_too():
    Path("tables/b.CSV").write_text(CSV)
    found = [Path("tables/a.csv"), Path("tables/b.CSV")]
    require_tables(["tabl*/*"])
    for source in ("tabl*/*", "tables", ["tables/a.csv", "tables/b.*"]):
        assert require_files(source) == found
    assert require_files("mix*/*") == [Path("mixed/a.csv")]  # as of the directory
    with pytest.raises(DataError, match="there is no file"):
        require_tables(["tabl*/*.pq"])
    with pytest.raises(DataError, match=r"book\.txt is a text, expected a table: CSV"):
        require_tables(["book.txt"])


def test_an_empty_name_is_not_the_current_directory(monkeypatch, refused):
    monkeypatch.chdir("tables")
    assert "there is no file ''" in refused("prepare", "")
    with pytest.raises(DataError, match="there is no file ''"):
        require_files("")
