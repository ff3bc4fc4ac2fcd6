"""`fastlstm compress`: from the command line to a run, and what it refuses."""

import json

import pytest

from fastlstm.cli.compress import COMMAND, TABLE_COMMAND
from fastlstm.cli.main import main
from fastlstm.compression.options import CompressConfig

TEXT = "the cat sat on a mat. " * 200
MISLEADING = "ab " * 1200 + "xyz." * 225
"""Who learns its first part gets worse at its validation part, the next 15 %."""


def test_rounding(tiny_run, tmp_path, printed, refused):
    out, text = tmp_path / "small", tmp_path / "text.txt"
    text.write_text(TEXT)
    command = ["compress", str(tiny_run), "--out", str(out), "--to", "int8", "--data", str(text)]
    shown = printed(*command)
    lines = dict(line.split("  ", 1) for line in shown.splitlines())
    assert lines["result"].strip().startswith(f"{out}, model ")
    assert lines["methods"].strip() == "int8, rounded to the nearest"
    assert f"tokens of {text}" in lines["bits/char"]
    assert (out / "model.safetensors").exists()
    assert "already contains a model" in refused(*command)


@pytest.mark.filterwarnings("always")
def test_a_table_is_read_as_a_text_with_a_warning(tiny_run, tmp_path, capsys):
    out, table = tmp_path / "small", tmp_path / "data.csv"
    table.write_text("a,b\n" + "1,2\n" * 200)
    command = ["compress", str(tiny_run), "--out", str(out), "--to", "int8", "--data", str(table)]
    assert main(command) == 0
    text = f"warning: {table} is a table; its characters are read as a text\n"
    assert capsys.readouterr().err.count(text) == 1


def test_json(tiny_run, tmp_path, printed):
    out = tmp_path / "small"
    (line,) = printed("compress", tiny_run, "--out", out, "--to", "fp16", "--json").splitlines()
    facts = json.loads(line)
    assert facts.pop("event") == "compression"
    assert facts == json.loads((out / "compression.json").read_text())
    assert facts["not_measured"] == "the run does not name its text"


def test_training(tiny_run, tmp_path, capsys, printed):
    (tmp_path / "text.txt").write_text(MISLEADING)
    command = [
        *("compress", str(tiny_run), "--out", str(tmp_path / "small"), "--steps", "2"),
        *("--data", str(tmp_path / "text.txt"), "--distil", str(tiny_run), "--precision", "fp32"),
        *("--no-tensorboard", "--batch-size", "2", "--seq-length", "8", "--threads", "1"),
    ]
    assert main([*command, "--max-loss", "0"]) == 2
    shown = capsys.readouterr().out
    assert "fastlstm generate" not in shown
    assert "next: the same command with --resume and a larger --max-loss, or more" in shown
    assert "not published: the loss is above the limit" in shown
    assert main([*command, "--max-loss", "0", "--resume", "--json"]) == 2
    output = capsys.readouterr()
    assert "more than `--max-loss 0`; nothing is published in" in output.err
    facts = json.loads(output.out.splitlines()[-1])
    assert facts["event"] == "compression"
    assert not facts["is_published"]
    assert facts["training"]["steps"] == 2
    assert not (tmp_path / "small/model.safetensors").exists()
    shown = printed(*command, "--max-loss", "100", "--resume")
    assert "next: fastlstm generate" in shown
    assert "distilled from" in shown
    assert (tmp_path / "small/model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "int8"], "--out is missing"),
        (["--out", "x"], "there is nothing to do; give `--to` (fp16, int8 or int4), `--prune`"),
        (["--out", "x", "--prune", "1.0"], "`--prune` is 1.0, expected a number from 0.001"),
        (["--out", "x", "--to", "int2"], "--to is 'int2', expected one of fp32, fp16, int8, int4"),
        (
            ["--out", "x", "--to", "int4", "--prune", "0.9", "--structured", "blocks"],
            "`--to int4` has no block-sparse form; give `--to int8` with `--structured blocks`",
        ),
        (
            ["--out", "x", "--hidden-size", "8"],
            "--hidden-size is not an option for a text; leave it out (did you mean '--rnn-size'?)",
        ),
        (["--out", "x", "--horizon", "8", "--to", "int8"], "unknown flag '--horizon'"),
        (["--out", "x", "--to", "int8", "--data", "gone.txt"], "gone.txt"),
        (["--out", "x", "--distil", "gone"], "gone: no such run"),
        (["--out", "x", "--prune", "0.5"], "does not name its text; give it as"),
    ],
)
def test_refusals(arguments, message, tiny_run, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    assert message in refused("compress", tiny_run, *arguments)
    assert not (tmp_path / "x").exists()


def test_a_run_comes_first(tmp_path, tiny_run, refused):
    assert "no such run" in refused("compress", tmp_path / "none", "--out", "x", "--to", "int8")
    arguments = ["compress", str(tiny_run), "--out", "x", "--to", "int8", "--data", str(tiny_run)]
    assert "is a run, expected a text or a table" in refused(*arguments)
    assert "the run to compress" in refused("compress", tiny_run, "--out", tiny_run, "--to", "int8")


def test_every_option_has_a_flag():
    flags = {option.name for command in (COMMAND, TABLE_COMMAND) for option in command.options}
    assert flags == {*CompressConfig.__dataclass_fields__, "out", "data", "resume", "json"}
    assert "hidden_size" not in {option.name for option in COMMAND.options}
    assert "rnn_size" not in {option.name for option in TABLE_COMMAND.options}
