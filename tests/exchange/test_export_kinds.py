"""`export` of forecasters, sequence models and modules, and what holds of every kind."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch

import fastlstm
from fastlstm.errors import ConfigError, ExportError
from fastlstm.exchange import export as export_module
from fastlstm.exchange.sequence_source import SequenceSource
from fastlstm.sequence.files import read_sequence_model


@pytest.fixture(scope="module")
def forecaster_run(tmp_path_factory):
    """A forecaster of two targets with gaps and a future covariate, stored after two steps."""
    rng = np.random.default_rng(0)
    values = 100 + 3 * rng.normal(size=(300, 3))
    values[rng.random(values.shape) < 0.05] = np.nan
    frame = pd.DataFrame(values, columns=["a", "b", "plan"])
    frame.insert(0, "time", pd.date_range("2026-01-01", periods=300, freq="h"))
    model = fastlstm.Forecaster(
        horizon=7, input_size=12, patch=3, hidden_size=8, target=["a", "b"],
        future=["plan"], steps=2, batch_size=8, linear=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("forecaster")
    model.fit(frame).save(folder / "run")
    return folder / "run"


def test_every_key_of_the_report_is_documented(text_run, forecaster_run, text, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "exchange.md").read_text()
    table = page.split("**export.json**")[1].split("## Import")[0]
    known = set(re.findall(r"`([a-z0-9_./]+)`", table)) | {"1", "64", "tokens_per_s"}
    known |= {name.lstrip(".").removeprefix("figures.") for name in known}
    text_out, table_out = tmp_path / "text", tmp_path / "table"
    fastlstm.export(text_run(), to="litert", out=text_out, weights="int8", check_text=text)
    fastlstm.export(forecaster_run, to="onnx", out=table_out)
    for out in (text_out, table_out):
        report = json.loads((out / "export.json").read_text())
        proof = report["proof"]
        values = [report, proof, proof["figures"], *proof["figures"].values(), *proof["errors"]]
        values += [*report["files"].values(), *report["inputs"]]
        values += [proof["figures"].get("text", {}).get("bits_per_char", {})]
        keys = {key for value in values if isinstance(value, dict) for key in value}
        assert keys - {"figures"} <= known


@pytest.mark.parametrize("to", ["onnx", "litert", "torch"])
def test_a_forecaster(forecaster_run, tmp_path, to):
    report = fastlstm.export(forecaster_run, to=to, out=tmp_path / "out", quantiles=(0.1, 0.5))
    assert report.kind == "forecaster"
    assert [value.name for value in report.inputs] == ["past", "future"]
    assert report.outputs[1].shape == ("B", 7, 2, 2)
    assert report.proof.max_error < 1e-5
    assert set(report.proof.figures["windows_per_s"]) == {"1", "64"}
    stored = json.loads((tmp_path / "out" / "export.json").read_text())["metadata"]
    assert (stored["columns"], stored["levels"]) == (["a", "b", "plan"], [0.1, 0.5])
    assert (stored["series"], stored["frequency"]) == ([], "1 hour")
    assert "rounding" not in report.proof.figures


def test_the_series_of_a_window_gives_the_forecasts_of_the_table(tmp_path):
    """Of three series, whose levels and noises differ."""
    rng = np.random.default_rng(0)
    names, L = ["u", "v", "w"], 12
    values = np.array([1.0, 40, 900]) * (3 + rng.normal(size=(200, 3)) * [0.01, 0.1, 0.5])
    frame = pd.DataFrame(values, columns=names).assign(time=range(200))
    frame = frame.melt("time", names, "name", "y").sort_values(["name", "time"])
    model = fastlstm.Forecaster(
        horizon=5, input_size=L, patch=3, hidden_size=8, series="name", steps=2, batch_size=8
    ).fit(frame)
    model.save(tmp_path / "run")
    fastlstm.export(tmp_path / "run", to="onnx", out=tmp_path / "out", quantiles=(0.1, 0.9))
    stored = json.loads((tmp_path / "out" / "export.json").read_text())["metadata"]
    assert stored["series"] == names
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    past = values[-L:].T[..., None].astype(np.float32)
    found = session.run(["quantiles"], {"past": past, "series": np.arange(3, dtype=np.int32)})[0]
    due = model.predict_quantiles(quantiles=(0.1, 0.9))
    for k, level in enumerate((0.1, 0.9)):
        expected = due[f"y-q{level}"].to_numpy().reshape(3, 5)
        np.testing.assert_allclose(found[..., 0, k], expected, rtol=1e-5)


def test_the_error_of_rounding_is_told(text_run, forecaster_run, sequence_runs, tmp_path):
    """Of every kind of model: how far rounded weights are from the model's own outputs."""
    example = torch.zeros(2, 3, 5)
    models: list[tuple[Any, ...]] = [
        (forecaster_run,),
        (sequence_runs["numbers"],),
        (torch.nn.LSTM(5, 6), example),
        (text_run(),),
    ]
    for number, model in enumerate(models):
        found = []
        for weights in ("fp16", "int8"):
            out = tmp_path / f"{number}{weights}"
            report = fastlstm.export(*model, to="onnx", out=out, weights=weights)
            found.append(report.proof.figures["rounding"])
            (row,) = [text for name, text in report._rows() if name == "rounding"]
            assert f"{weights} weights move outputs by {found[-1]['rms_error']:.2g} (RMS)" in row
        fp16, int8 = found
        assert 0 < fp16["rms_error"] < int8["rms_error"] < int8["max_error"] < 0.2
        assert fp16["max_error"] < 0.01


@pytest.fixture(scope="module")
def sequence_runs(tmp_path_factory):
    """A regressor and a classifier, stored after two steps."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("sequences")
    sequences = [rng.normal(size=(k + 2, 3)) for k in range(8)]
    kinds = {"numbers": fastlstm.SequenceRegressor, "labels": fastlstm.SequenceClassifier}
    answers: dict[str, Any] = {"numbers": [0.5, 1.5] * 4, "labels": ["a", "b"] * 4}
    for name, kind in kinds.items():
        model = kind(steps=2, hidden_size=8, batch_size=4)
        model.fit(sequences, answers[name]).save(folder / name)
    return {name: folder / name for name in kinds}


@pytest.mark.parametrize(
    ("answers", "to", "options"),
    [
        ("numbers", "onnx", {"weights": "fp16"}), ("labels", "onnx", {}), ("labels", "torch", {}),
        ("labels", "litert", {"length": 9}), ("numbers", "litert", {"length": 1}),
    ],
)  # fmt: skip
def test_a_sequence_model(sequence_runs, tmp_path, answers, to, options):
    report = fastlstm.export(sequence_runs[answers], to=to, out=tmp_path / "out", **options)
    assert report.kind == "sequence"
    assert report.inputs[0].shape == ("B", options.get("length", "T"), 3)
    assert report.proof.max_error < 1e-5


@pytest.mark.parametrize(
    ("answers", "fields", "message"),
    [
        (
            "numbers",
            {"to": "litert"},
            "any number of time steps, .*: give it as `length`, or export to onnx",
        ),
        ("numbers", {"to": "onnx", "length": 3}, "is for sequence models and modules that go"),
        ("numbers", {"to": "litert", "length": 0}, "`length=0` is no number of steps"),
        ("numbers", {"to": "litert", "length": 10**9}, "no number of steps, expected 1 to 65536"),
        ("text", {"to": "litert", "length": 3}, "is for sequence models and modules that go"),
        ("numbers", {"to": "keras"}, "Keras files hold text models, and this is a sequence"),
    ],
)
def test_options_sequence_models_refuse(
    sequence_runs, text_run, tmp_path, answers, fields, message
):
    run = text_run() if answers == "text" else sequence_runs[answers]
    with pytest.raises(ConfigError, match=message):
        fastlstm.export(run, out=tmp_path / "other", **fields)


def test_a_layer_with_lengths_goes_to_torch(tmp_path):
    """From a state of its own, with sequences of no steps (`ModuleSource.cases`)."""
    torch.manual_seed(0)
    lstm = fastlstm.LSTM(5, 6, 2, bidirectional=True, bias=False)
    state = torch.zeros(4, 2, 6), torch.zeros(4, 2, 6)
    example = {"input": torch.zeros(3, 2, 5), "hx": state, "lengths": torch.tensor([3, 1])}
    report = fastlstm.export(lstm, example, to="torch", out=tmp_path / "out")
    assert [value.name for value in report.inputs] == ["x", "h0", "c0", "lengths"]
    assert [value.name for value in report.outputs] == ["output", "h_n", "c_n"]
    assert report.proof.max_error < 1e-5


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_module(tmp_path, weights):
    torch.manual_seed(0)
    lstm = fastlstm.LSTM(5, 6, 2, bidirectional=True)
    state = torch.zeros(4, 2, 6), torch.zeros(4, 2, 6)
    report = fastlstm.export(
        lstm, (torch.zeros(3, 2, 5), state), to="onnx", out=tmp_path / "out", weights=weights
    )
    assert (report.kind, report.source) == ("module", "LSTM")
    assert [value.name for value in report.inputs] == ["x", "h0", "c0"]
    assert report.proof.max_error < 1e-5


def test_a_module_of_tokens(tmp_path):
    class Tagger(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(9, 4)
            self.lstm = torch.nn.LSTM(4, 6, batch_first=True)
            self.head = torch.nn.Linear(6, 3)

        def forward(self, tokens):
            y, _ = self.lstm(self.embedding(tokens))
            return self.head(y), self.head(y[:, -1])

    for to in ("onnx", "torch"):
        report = fastlstm.export(
            Tagger(), torch.arange(8).view(2, 4), to=to, out=tmp_path / to, check=True
        )
        assert report.inputs[0].shape == ("B", "T")
        assert report.proof.max_error < 1e-5


@pytest.mark.filterwarnings("ignore:The tensor attributes", "ignore:`isinstance.treespec")
def test_an_export_to_torch_and_other_exports_do_not_change_each_other(tmp_path):
    """torch caches the kernel that an export of an LSTM has taken."""
    example = torch.randn(4, 3, 5)

    def kinds_of_nodes():
        program = torch.export.export(torch.nn.LSTM(5, 7).eval(), (example,), strict=False)
        return [str(node.target) for node in program.graph.nodes]

    before = kinds_of_nodes()
    module = torch.nn.LSTM(4, 6, batch_first=True)
    report = fastlstm.export(module, torch.randn(2, 4, 4), to="torch", out=tmp_path / "out")
    assert report.inputs[0].shape[:2] == ("B", "T")
    assert kinds_of_nodes() == before


def test_missing_targets_make_every_output_of_a_distribution_nan(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=300)})
    frame.insert(0, "time", pd.date_range("2026-01-01", periods=300, freq="h"))
    model = fastlstm.Forecaster(
        horizon=4, input_size=12, patch=3, hidden_size=8, output="student_t", steps=2, batch_size=8
    )
    model.fit(frame).save(tmp_path / "run")
    report = fastlstm.export(tmp_path / "run", to="onnx", out=tmp_path / "out")
    names = [value.name for value in report.outputs]
    assert names == ["forecast", "degrees_of_freedom", "scale"]
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    past = np.zeros((1, 12, 1), np.float32)
    past[0, 3] = np.nan
    assert all(np.isnan(value).all() for value in session.run(None, {"past": past}))


class Tagger(torch.nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 4)
        self.lstm = torch.nn.LSTM(4, 6)
        self.scale = scale

    def forward(self, tokens):
        return torch.log(self.lstm(self.embedding(tokens))[0] + self.scale)


def test_every_row_of_an_embedding_is_checked(tmp_path, monkeypatch):
    target = export_module.TARGETS["onnx"]

    def corrupted(graph):
        table = np.array(graph.weights["embedding.weight"])
        table[8] += 1
        bad = {**graph.weights, "embedding.weight": table}
        return target.write(dataclasses.replace(graph, weights=bad))

    monkeypatch.setitem(export_module.TARGETS, "onnx", dataclasses.replace(target, write=corrupted))
    example = torch.zeros(2, 3, dtype=torch.long)  # row 0 alone
    with pytest.raises(ExportError, match="is off by"):
        fastlstm.export(Tagger(5.0), example, to="onnx", out=tmp_path / "out")


def test_outputs_without_any_number_are_no_proof(tmp_path):
    example = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ExportError, match="there are no numbers to compare"):
        fastlstm.export(Tagger(-5.0), example, to="onnx", out=tmp_path / "out")


def test_a_wrong_label_is_found(sequence_runs):
    source = SequenceSource(read_sequence_model(sequence_runs["labels"]), "fp32")
    outputs = source.run(next(source.cases()))
    assert source.in_units(outputs)["label"].all()
    assert not source.in_units({**outputs, "label": 1 - outputs["label"]})["label"].any()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (3, {}, "the model is an int, expected a run directory or a torch module"),
        (Tagger(), {}, "give an example of the module's arguments"),
        ("run", {"check": False, "check_text": "a.txt"}, "`check_text` is not read without a"),
    ],
    ids=["number", "module", "check_text"],
)
def test_wrong_arguments(tmp_path, model, options, message):
    with pytest.raises(ConfigError, match=message):
        fastlstm.export(model, to="onnx", out=tmp_path / "out", **options)


@pytest.mark.parametrize("has_lengths", [False, True])
def test_a_module_for_litert_has_a_length(tmp_path, has_lengths):
    torch.manual_seed(0)
    lstm, D = fastlstm.LSTM(5, 6, 2, bidirectional=not has_lengths), 1 if has_lengths else 2
    state = torch.zeros(2 * D, 2, 6), torch.ones(2 * D, 2, 6)
    example: dict[str, Any] = {"input": torch.zeros(3, 2, 5), "hx": state}
    example |= {"lengths": [3, 1]} if has_lengths else {}
    with pytest.raises(ConfigError, match=r"'x' has any .*: give it as `length`"):
        fastlstm.export(lstm, example, to="litert", out=tmp_path / "out")
    report = fastlstm.export(
        lstm, example, to="litert", out=tmp_path / "out", length=4, weights="int8"
    )
    assert [value.shape for value in report.inputs[:2]] == [(4, "B", 5), (2 * D, "B", 6)]
    assert report.proof.figures["max_error_without_rounding"] < 1e-5
