"""`export`: the file computes what the run computes, or nothing is written."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.reference
import onnxruntime
import pandas as pd
import pytest
import torch

import fastlstm
from fastlstm.errors import ConfigError, ExportError, MissingExtraError, RunDirectoryError
from fastlstm.exchange import export as export_module
from fastlstm.exchange import targets
from fastlstm.exchange.sequence_source import SequenceSource
from fastlstm.runs.weight_formats import QuantizedMatrix
from fastlstm.sequence.files import read_sequence_model
from fastlstm.text.files import load_language_model

OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "residual, norm": {"num_layers": 2, "residual": True, "output_norm": True},
    "tied": {"embed_size": 24, "tie_weights": True},
    "output of low rank": {"output_rank": 8},
    "wide": {"rnn_size": 70, "embed_size": 33},
}
_CORRUPTED = ("layers.1.weight_hh_l0", "layers.0.bias_ih_l0", "output.weight")
CELLS = {
    "keras": {"activation": "relu", "recurrent_activation": "hard_sigmoid"},
    "softsign": {"activation": "softsign", "recurrent_activation": "relu"},
    "training only": {"recurrent_dropout": 0.3},
}


def expected(run: Path, tokens: np.ndarray, h: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    model = load_language_model(run).model
    with torch.no_grad():
        state = torch.from_numpy(h), torch.from_numpy(c)
        logits, (h_out, c_out) = model(torch.from_numpy(tokens.astype(np.int64)), state)
    return [logits.numpy(), h_out.numpy(), c_out.numpy()]


def inputs(run: Path, T: int, B: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    config = load_language_model(run).model_config
    rng = np.random.default_rng(T)
    shape = (config.num_layers, B, config.rnn_size)
    tokens = rng.integers(0, config.vocab_size, (T, B), dtype=np.int32)
    return tokens, rng.normal(size=shape).astype("f"), rng.normal(size=shape).astype("f")


@pytest.mark.parametrize("options", [*OPTIONS.values(), *CELLS.values()], ids=[*OPTIONS, *CELLS])
def test_onnx_runtime_agrees_with_the_run(
    text_run: Callable[..., Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    run = text_run(**options)
    fastlstm.export(run, to="onnx", out=tmp_path / "out", check=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    for shape in ((1, 1), (7, 3), (100, 64), (2, 1)):
        tokens, h, c = inputs(run, *shape)
        got = session.run(None, {"tokens": tokens, "h": h, "c": c})
        for value, want in zip(got, expected(run, tokens, h, c), strict=True):
            np.testing.assert_allclose(value, want, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"activation": "linear"}, {"recurrent_activation": "linear"}, {"activation": "hard_sigmoid"}],
    ids=str,
)
def test_activations_with_parameters_of_their_own(
    text_run: Callable[..., Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    run = text_run(**options)  # a few steps only: without a bound values grow from step to step
    fastlstm.export(run, to="onnx", out=tmp_path / "out", check=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    tokens, h, c = inputs(run, 3, 2)
    got = session.run(None, {"tokens": tokens, "h": h, "c": c})
    for value, want in zip(got, expected(run, tokens, h, c), strict=True):
        np.testing.assert_allclose(value, want, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_reference_evaluator_of_onnx_agrees(
    text_run: Callable[..., Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    run = text_run(**options)
    fastlstm.export(run, to="onnx", out=tmp_path / "out", check=False)
    evaluator = onnx.reference.ReferenceEvaluator(str(tmp_path / "out" / "model.onnx"))
    tokens, h, c = inputs(run, 5, 3)
    got = evaluator.run(None, {"tokens": tokens, "h": h, "c": c})
    for value, want in zip(got, expected(run, tokens, h, c), strict=True):
        np.testing.assert_allclose(value, want, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_keras_agrees_with_the_run(
    text_run: Callable[..., Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    run = text_run(**options)
    if "residual" in options:
        with pytest.raises(ConfigError, match="Keras has no layer for residual"):
            fastlstm.export(run, to="keras", out=tmp_path / "out")
        return
    report = fastlstm.export(run, to="keras", out=tmp_path / "out")
    assert report.proof is not None
    assert report.proof.max_error < 2e-6
    assert not report.inputs[1:]  # there is no state


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_activations_of_keras(
    text_run: Callable[..., Path], tmp_path: Path, cell: dict[str, Any]
) -> None:
    report = fastlstm.export(text_run(**cell), to="keras", out=tmp_path / "out")
    assert report.proof is not None
    assert report.proof.max_error < 2e-6


@pytest.mark.parametrize("name", ["residual, norm", "tied", "output of low rank"])
def test_torch_agrees_with_the_run(
    text_run: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    run = text_run(**OPTIONS[name])
    fastlstm.export(run, to="torch", out=tmp_path / "out", check=False)
    module = torch.export.load(tmp_path / "out" / "model.pt2").module()
    for shape in ((1, 1), (7, 3), (40, 17)):
        tokens, h, c = inputs(run, *shape)
        got = module(tokens=torch.from_numpy(tokens), h=torch.from_numpy(h), c=torch.from_numpy(c))
        for value, want in zip(got.values(), expected(run, tokens, h, c), strict=True):
            np.testing.assert_allclose(value.numpy(), want, atol=1e-5)


def test_the_state_dict_fits_torchs_own_layers(
    text_run: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    run = text_run(num_layers=2)
    fastlstm.export(run, to="torch", out=tmp_path / "out", check=False)
    module = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(30, 16),
            "lstm": torch.nn.LSTM(16, 24, 2),
            "output": torch.nn.Linear(24, 30),
        }
    )
    module.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    tokens, h, c = inputs(run, 7, 3)
    with torch.no_grad():
        x = module["embedding"](torch.from_numpy(tokens))
        y, _ = module["lstm"](x, (torch.from_numpy(h), torch.from_numpy(c)))
        logits = module["output"](y)
    np.testing.assert_allclose(logits.numpy(), expected(run, tokens, h, c)[0], atol=1e-5)


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_a_step_has_no_axis_of_time(
    text_run: Callable[..., Path], text: Path, tmp_path: Path, to: str
) -> None:
    report = fastlstm.export(text_run(), to=to, out=tmp_path / "out", step=True, check_text=text)
    assert report.is_step
    assert report.inputs[0].shape == ("B",)
    assert report.outputs[0].shape == ("B", 30)
    assert report.proof is not None
    assert report.proof.figures["text"]["agreement"] == 1.0


@pytest.mark.parametrize(("weights", "share"), [("fp16", 0.55), ("int8", 0.45)])
def test_weights_are_stored_in_fewer_bits(
    text_run: Callable[..., Path], tmp_path: Path, weights: str, share: float
) -> None:
    run = text_run(rnn_size=64)
    whole = fastlstm.export(run, to="onnx", out=tmp_path / "whole")
    small = fastlstm.export(run, to="onnx", out=tmp_path / "small", weights=weights)
    assert small.num_bytes < share * whole.num_bytes
    assert small.weights == weights
    assert small.proof is not None
    assert small.proof.max_error < 1e-5


def test_a_compressed_run_keeps_its_own_weights(
    text_run: Callable[..., Path], tmp_path: Path
) -> None:
    fastlstm.compress(text_run(), out=tmp_path / "small", to="int8", observers=())
    report = fastlstm.export(tmp_path / "small", to="onnx", out=tmp_path / "out")
    assert report.weights == "int8"
    model = onnx.load(tmp_path / "out" / "model.onnx")
    codes = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert len(codes) == 4  # embedding, both matrices of the layer, output
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    tokens, h, c = inputs(tmp_path / "small", 5, 2)
    logits = session.run(["logits"], {"tokens": tokens, "h": h, "c": c})[0]
    np.testing.assert_allclose(logits, expected(tmp_path / "small", tokens, h, c)[0], atol=1e-5)


def test_an_int4_run_is_written_in_fp32_and_says_so(
    text_run: Callable[..., Path], tmp_path: Path
) -> None:
    fastlstm.compress(text_run(), out=tmp_path / "small", to="int4", observers=())
    report = fastlstm.export(tmp_path / "small", to="onnx", out=tmp_path / "out")
    assert report.weights == "fp32"
    assert "weights are stored as int4, written as fp32" in report.notes


def test_the_directory_describes_itself(
    text_run: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    run = text_run()
    report = fastlstm.export(run, to="onnx", out=tmp_path / "out", check_text=text)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"model.onnx", "tokenizer.json", "export.json"}
    stored = json.loads((tmp_path / "out" / "export.json").read_text())
    assert stored == json.loads(json.dumps(report.to_dict()))
    bits = stored["proof"]["figures"]["text"]["bits_per_char"]
    assert bits["run"] == bits["fastlstm"]
    assert bits["target"] == pytest.approx(bits["run"], abs=1e-6)
    assert [value["name"] for value in stored["inputs"]] == ["tokens", "h", "c"]
    properties = onnx.load(tmp_path / "out" / "model.onnx").metadata_props
    tokenizer = (run / "tokenizer.json").read_text()
    assert {p.key: p.value for p in properties}["tokenizer.json"] == tokenizer


def test_bits_per_character_are_those_of_the_text(
    text_run: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    run = text_run()
    report = fastlstm.export(run, to="onnx", out=tmp_path / "out", check_text=text)
    assert report.proof is not None
    figures = report.proof.figures["text"]
    whole = fastlstm.LM.load(run).evaluate(text, lanes=16)
    assert figures["bits_per_char"]["target"] == pytest.approx(whole.bits_per_char, abs=0.05)


@pytest.mark.parametrize(
    ("to", "weights", "name"),
    [
        *(("onnx", w, n) for w in ("fp32", "fp16", "int8") for n in _CORRUPTED),
        *(("litert", w, "layers.1.weight_hh_l0") for w in ("fp32", "fp16", "int8")),
        *((to, "fp32", "layers.0.bias_ih_l0") for to in ("torch", "keras")),
    ],
)
def test_a_wrong_weight_is_found_before_anything_is_published(
    text_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    to: str, weights: str, name: str,
) -> None:  # fmt: skip
    target = targets.TARGETS[to]

    def corrupted(source: Any, form: targets.Form) -> targets.Written:
        own = source._weights[name]
        if isinstance(own, QuantizedMatrix):
            scales = own.scales.copy()
            scales[3] *= 1.1
            changed: Any = QuantizedMatrix(own.codes, scales, own.weight_format)
        else:
            changed = own.copy()
            changed.flat[5] += 0.01
        bad = copy.copy(source)
        bad._weights = {**source._weights, name: changed}
        return target.write(bad, form)

    monkeypatch.setitem(targets.TARGETS, to, dataclasses.replace(target, write=corrupted))
    with pytest.raises(ExportError, match=r"is off by .*, the limit is"):
        fastlstm.export(text_run(num_layers=2), to=to, out=tmp_path / "out", weights=weights)
    assert not list(tmp_path.glob("out*"))


def test_layer_norm_in_the_cell_has_a_limit_of_its_own(
    text_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = dataclasses.replace(targets.TARGETS["litert"], limits={"fp32": 1e-20})
    monkeypatch.setitem(targets.TARGETS, "litert", target)
    report = fastlstm.export(text_run(layer_norm=True), to="litert", out=tmp_path / "out")
    assert report.proof is not None
    assert report.proof.limit == 1e-4
    with pytest.raises(ExportError, match="the limit is 1e-20"):
        fastlstm.export(text_run("plain"), to="litert", out=tmp_path / "out 2")


def test_a_file_that_changes_on_disk_is_found(
    text_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = export_module.storage.write_file

    def flipped(path: Path, data: bytes) -> None:
        write(path, data[:-1] + bytes([data[-1] ^ 1]) if path.name == "model.onnx" else data)

    monkeypatch.setattr(export_module.storage, "write_file", flipped)
    with pytest.raises(ExportError, match=r"model\.onnx on disk is not what was written"):
        fastlstm.export(text_run(), to="onnx", out=tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_without_a_check_the_report_says_so(text_run: Callable[..., Path], tmp_path: Path) -> None:
    report = fastlstm.export(text_run(), to="onnx", out=tmp_path / "out", check=False)
    assert report.proof is None
    assert json.loads((tmp_path / "out" / "export.json").read_text())["proof"] is None


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"to": "onx"}, {}, r"to='onx' is unknown \(did you mean 'onnx'\?\); expected one of"),
        ({"to": "torch", "weights": "int8"}, {}, "weights='int8' cannot be held by torch"),
        ({"to": "onnx", "weights": "int3"}, {}, "weights='int3' cannot be held by onnx"),
        ({"to": "onnx"}, {"layer_norm": True}, "ONNX's LSTM has no layer_norm"),
        ({"to": "onnx"}, {"zoneout": (0.1, 0.1)}, "ONNX's LSTM has no zoneout"),
        ({"to": "torch"}, {"activation": "relu"}, "torch's LSTM has no activation relu"),
        ({"to": "onnx", "out": "model.onnx"}, {}, r"names a file; .* give out='model'"),
    ],
)
def test_what_cannot_be_exported_is_named(
    text_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any], options: dict[str, Any], message: str,
) -> None:  # fmt: skip
    run = text_run(**options)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        fastlstm.export(run, **{"out": "out", **fields})
    assert not list(tmp_path.glob("out*"))


def test_a_directory_that_exists_is_left_alone(
    text_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = text_run()
    (tmp_path / "out").mkdir()
    with pytest.raises(RunDirectoryError, match="exists; give another out or remove it"):
        fastlstm.export(run, to="onnx", out=tmp_path / "out")
    with pytest.raises(RunDirectoryError, match="no such run"):
        fastlstm.export(tmp_path / "nothing", to="onnx", out=tmp_path / "new")


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_missing_package_is_one_line(
    text_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    run = text_run()
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(
        MissingExtraError, match=rf"needs {package}: pip install 'fastlstm\[onnx\]'"
    ):
        fastlstm.export(run, to="onnx", out=tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.fixture(scope="module")
def forecaster_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A forecaster of two targets with gaps and a future covariate, stored after two steps."""
    rng = np.random.default_rng(0)
    values = 100 + 3 * rng.normal(size=(300, 3))
    values[rng.random(values.shape) < 0.05] = np.nan
    frame = pd.DataFrame(values, columns=["a", "b", "plan"])
    frame.insert(0, "time", pd.date_range("2026-01-01", periods=300, freq="h"))
    model = fastlstm.Forecaster(
        horizon=7, input_size=12, patch=3, hidden_size=8, target=["a", "b"],
        future=["plan"], steps=2, batch_size=8,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("forecaster")
    model.fit(frame).save(folder / "run")
    return folder / "run"


@pytest.mark.parametrize("to", ["onnx", "litert", "torch"])
def test_a_forecaster(forecaster_run: Path, tmp_path: Path, to: str) -> None:
    report = fastlstm.export(forecaster_run, to=to, out=tmp_path / "out", quantiles=(0.1, 0.5))
    assert report.kind == "forecaster"
    assert [value.name for value in report.inputs] == ["past", "future"]
    assert report.outputs[1].shape == ("B", 7, 2, 2)
    assert report.proof is not None
    assert report.proof.max_error < 1e-5
    assert set(report.proof.figures["windows_per_s"]) == {"1", "64"}


@pytest.mark.parametrize("answers", [[0.5, 1.5] * 4, ["a", "b"] * 4], ids=["numbers", "labels"])
def test_a_sequence_model(tmp_path: Path, answers: list[Any]) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.normal(size=(k + 2, 3)) for k in range(8)]
    kind = fastlstm.SequenceClassifier if "a" in answers else fastlstm.SequenceRegressor
    model = kind(steps=2, hidden_size=8, batch_size=4).fit(sequences, answers)
    model.save(tmp_path / "run")
    report = fastlstm.export(tmp_path / "run", to="onnx", out=tmp_path / "out", weights="fp16")
    assert report.kind == "sequence"
    assert report.proof is not None
    assert report.proof.max_error < 1e-5
    with pytest.raises(ConfigError, match="any number of time steps"):
        fastlstm.export(tmp_path / "run", to="litert", out=tmp_path / "other")


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_module(tmp_path: Path, weights: str) -> None:
    torch.manual_seed(0)
    lstm = fastlstm.LSTM(5, 6, 2, bidirectional=True)
    state = torch.zeros(4, 2, 6), torch.zeros(4, 2, 6)
    report = fastlstm.export(
        lstm, (torch.zeros(3, 2, 5), state), to="onnx", out=tmp_path / "out", weights=weights
    )
    assert (report.kind, report.source) == ("module", "LSTM")
    assert [value.name for value in report.inputs] == ["x", "h0", "c0"]
    assert report.proof is not None
    assert report.proof.max_error < 1e-5


def test_a_module_of_tokens(tmp_path: Path) -> None:
    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(9, 4)
            self.lstm = torch.nn.LSTM(4, 6, batch_first=True)
            self.head = torch.nn.Linear(6, 3)

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y, _ = self.lstm(self.embedding(tokens))
            return self.head(y), self.head(y[:, -1])

    for to in ("onnx", "torch"):
        report = fastlstm.export(
            Tagger(), torch.arange(8).view(2, 4), to=to, out=tmp_path / to, check=True
        )
        assert report.inputs[0].shape == ("B", "T")
        assert report.proof is not None
        assert report.proof.max_error < 1e-5


def test_missing_targets_make_every_output_of_a_distribution_nan(tmp_path: Path) -> None:
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
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 4)
        self.lstm = torch.nn.LSTM(4, 6)
        self.scale = scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.log(self.lstm(self.embedding(tokens))[0] + self.scale)


def test_every_row_of_an_embedding_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets.TARGETS["onnx"]

    def corrupted(source: Any, form: targets.Form) -> targets.Written:
        bad = copy.copy(source)
        bad._graph = copy.copy(source._graph)
        table = np.array(source._graph.weights["embedding.weight"])
        table[8] += 1
        bad._graph.weights = {**source._graph.weights, "embedding.weight": table}
        return target.write(bad, form)

    monkeypatch.setitem(targets.TARGETS, "onnx", dataclasses.replace(target, write=corrupted))
    example = torch.zeros(2, 3, dtype=torch.long)  # row 0 alone
    with pytest.raises(ExportError, match="is off by"):
        fastlstm.export(Tagger(5.0), example, to="onnx", out=tmp_path / "out")


def test_outputs_without_any_number_are_no_proof(tmp_path: Path) -> None:
    example = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ExportError, match="there are no numbers to compare"):
        fastlstm.export(Tagger(-5.0), example, to="onnx", out=tmp_path / "out")


def test_a_wrong_label_is_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    model = fastlstm.SequenceClassifier(steps=2, hidden_size=8, batch_size=4)
    model.fit([rng.normal(size=(4, 3)) for _ in range(8)], ["a", "b"] * 4).save(tmp_path / "run")
    source = SequenceSource(read_sequence_model(tmp_path / "run"), "fp32")
    outputs = source.run(next(source.cases(targets.Form())))
    assert source.in_units(outputs)["label"].all()
    assert not source.in_units({**outputs, "label": 1 - outputs["label"]})["label"].any()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (3, {}, "the model is an int, expected a run directory or a torch module"),
        (Tagger(), {}, "give an example of the module's arguments"),
        ("run", {"check": False, "check_text": "a.txt"}, "check_text is not read without a check"),
    ],
    ids=["number", "module", "check_text"],
)
def test_what_is_given_wrongly(
    tmp_path: Path, model: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fastlstm.export(model, to="onnx", out=tmp_path / "out", **options)
