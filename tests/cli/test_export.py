"""`fastlstm export`: from the command line to a directory, and what it refuses."""

import json

import pytest

from fastlstm.cli.export import COMMAND
from fastlstm.exchange.export import TARGETS


def test_the_report(tiny_run, tmp_path, refused, printed):
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("the cat sat on a mat. " * 20)
    command = ["export", str(tiny_run), "--to", "onnx", "--out", str(out)]
    lines = dict(
        line.split("  ", 1) for line in printed(*command, "--check-text", text).splitlines()
    )
    assert lines["written"].strip().startswith(f"{out}/model.onnx, ")
    assert lines["inputs"].strip().startswith("tokens (T, B) int32; h (1, B, 16) float32")
    assert lines["checked in"].strip().startswith("onnxruntime ")
    assert "limit 1e-05" in lines["max error"]
    assert "the likeliest token is the same at 100.00% of" in lines["on text"]
    assert "tokens/s there" in lines["one stream"]
    assert f"{out} exists; give another `--out` or remove it" in refused(*command)


def test_json_without_a_check(tiny_run, tmp_path, printed):
    out = tmp_path / "out"
    command = ["export", str(tiny_run), "--to", "onnx", "--out", str(out), "--no-check", "--json"]
    (line,) = printed(*command).splitlines()
    assert json.loads(line) == json.loads((out / "export.json").read_text())
    assert json.loads(line)["proof"] is None


def test_all_targets_are_offered():
    option = next(option for option in COMMAND.options if option.name == "to")
    assert set(option.type.__args__) == {*TARGETS, "tflite"}, "tflite is the older name of litert"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--to", "coreml"], "coreml"),
        (["--to", "onnx", "--weights", "int4"], "int4"),
        (["--to", "onnx", "--quantiles", "0.1"], "`quantiles` has no meaning for a text"),
        (["--to", "keras", "--step"], "`--step` needs the state as an input"),
        (["--to", "onnx", "--check-text", "nothing.txt"], "nothing.txt"),
    ],
)
def test_bad_arguments_are_refused(tiny_run, tmp_path, more, message, refused):
    (line,) = refused("export", tiny_run, "--out", tmp_path / "out", *more).splitlines()
    assert message in line
    assert not list(tmp_path.glob("out*"))


def test_export_of_a_foreign_model_points_to_import(tmp_path, refused):
    path = tmp_path / "m.keras"
    path.write_bytes(b"")
    assert f"fastlstm import {path} --out RUN" in refused(
        "export", path, "--to", "onnx", "--out", tmp_path / "out"
    )
