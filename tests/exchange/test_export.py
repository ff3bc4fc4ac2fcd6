"""`export`: the file computes what the run computes, or nothing is written."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import onnx.reference
import onnxruntime
import pytest
import safetensors.torch
import tokenizers
import torch

import fastlstm
from exchange.conftest import CHARACTERS
from fastlstm.errors import ConfigError, ExportError, MissingExtraError
from fastlstm.exchange import export as export_module
from fastlstm.exchange.text_source import TextExport
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.weight_formats import QuantizedMatrix
from fastlstm.text.config import ModelConfig
from fastlstm.text.data.text import prepare_text
from fastlstm.text.data.tokenizer import CharTokenizer, train_bpe
from fastlstm.text.files import load_language_model, save_language_model
from fastlstm.text.model import LanguageModel

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
UNBOUNDED = (
    {"activation": "linear"}, {"recurrent_activation": "linear"}, {"activation": "hard_sigmoid"},
)  # fmt: skip
"""Values grow from step to step."""


def expected(run, tokens, h, c):
    model = load_language_model(run).model
    with torch.no_grad():
        state = torch.from_numpy(h), torch.from_numpy(c)
        logits, (h_out, c_out) = model(torch.from_numpy(tokens.astype(np.int64)), state)
    return [logits.numpy(), h_out.numpy(), c_out.numpy()]


def inputs(run, T, B):
    config = load_language_model(run).model_config
    rng = np.random.default_rng(T)
    shape = (config.num_layers, B, config.rnn_size)
    tokens = rng.integers(0, config.vocab_size, (T, B), dtype=np.int32)
    return tokens, rng.normal(size=shape).astype("f"), rng.normal(size=shape).astype("f")


def onnx_cases():
    """Yields options, shapes to run, and whether onnx's own evaluator knows the cell."""
    shapes = ((1, 1), (7, 3), (100, 64), (2, 1))
    for name, options in OPTIONS.items():
        yield pytest.param(options, shapes, True, id=name)
    for name, options in CELLS.items():
        yield pytest.param(options, shapes, name == "training only", id=name)
    for options in UNBOUNDED:
        yield pytest.param(options, ((3, 2),), False, id=" ".join(*options.items()))


@pytest.mark.parametrize(("options", "shapes", "has_reference"), list(onnx_cases()))
def test_onnx_agrees_with_the_run(text_run, tmp_path, options, shapes, has_reference):
    run = text_run(**options)
    fastlstm.export(run, to="onnx", out=tmp_path / "out", check=False)
    path = str(tmp_path / "out" / "model.onnx")
    runtimes: list[Any] = [(onnxruntime.InferenceSession(path), shape) for shape in shapes]
    if has_reference:
        runtimes.append((onnx.reference.ReferenceEvaluator(path), (5, 3)))
    for runtime, shape in runtimes:
        tokens, h, c = inputs(run, *shape)
        got = runtime.run(None, {"tokens": tokens, "h": h, "c": c})
        for value, want in zip(got, expected(run, tokens, h, c), strict=True):
            np.testing.assert_allclose(value, want, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in (*OPTIONS, *CELLS) if name != "residual, norm"])
def test_keras_agrees_with_the_run(text_run, tmp_path, name):
    run = text_run(**{**OPTIONS, **CELLS}[name])
    report = fastlstm.export(run, to="keras", out=tmp_path / "out")
    assert report.proof.max_error < 2e-6
    assert not report.inputs[1:]  # there is no state


@pytest.mark.parametrize("name", ["residual, norm", "tied", "output of low rank"])
def test_torch_agrees_with_the_run(text_run, tmp_path, name):
    run = text_run(**OPTIONS[name])
    fastlstm.export(run, to="torch", out=tmp_path / "out", check=False)
    module = torch.export.load(tmp_path / "out" / "model.pt2").module()
    for shape in ((1, 1), (7, 3), (40, 17)):
        tokens, h, c = inputs(run, *shape)
        got = module(tokens=torch.from_numpy(tokens), h=torch.from_numpy(h), c=torch.from_numpy(c))
        for value, want in zip(got.values(), expected(run, tokens, h, c), strict=True):
            np.testing.assert_allclose(value.numpy(), want, atol=1e-5)


def test_the_state_dict_fits_torchs_own_layers(text_run, tmp_path):
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
def test_a_step_has_no_axis_of_time(text_run, text, tmp_path, to):
    report = fastlstm.export(text_run(), to=to, out=tmp_path / "out", step=True, check_text=text)
    assert report.is_step
    assert report.inputs[0].shape == ("B",)
    assert report.outputs[0].shape == ("B", 30)
    assert report.proof.figures["text"]["agreement"] == 1.0


@pytest.mark.parametrize(("weights", "share"), [("fp16", 0.55), ("int8", 0.45)])
def test_weights_are_stored_in_fewer_bits(text_run, tmp_path, weights, share):
    run = text_run(rnn_size=64)
    whole = fastlstm.export(run, to="onnx", out=tmp_path / "whole")
    small = fastlstm.export(run, to="onnx", out=tmp_path / "small", weights=weights)
    assert small.num_bytes < share * whole.num_bytes
    assert small.weights == weights
    assert small.proof.max_error < 1e-5


def test_a_compressed_run_keeps_its_own_weights(text_run, tmp_path):
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


def test_an_int4_run_is_written_in_fp32_and_says_so(text_run, tmp_path):
    fastlstm.compress(text_run(), out=tmp_path / "small", to="int4", observers=())
    report = fastlstm.export(tmp_path / "small", to="onnx", out=tmp_path / "out")
    assert report.weights == "fp32"
    assert "weights are stored as int4, written as fp32" in report.notes


def test_the_directory_describes_itself(text_run, text, tmp_path):
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
    model = onnx.load(tmp_path / "out" / "model.onnx")
    tokenizer = (run / "tokenizer.json").read_text()
    assert {p.key: p.value for p in model.metadata_props} == {"tokenizer.json": tokenizer}
    assert stored["metadata"] == {}  # tokenizer.json is a file of its own
    assert model.ir_version == 8  # that of opset 17: older readers refuse newer ones


def test_a_bpe_vocabulary_is_written_for_hugging_faces_tokenizers_too(tmp_path):
    text = "the cat sat on the mat, the cat \u00e4te  the rat\n" * 9
    tokenizer = train_bpe([text], 270)
    model = LanguageModel(ModelConfig(rnn_size=8, vocab_size=len(tokenizer.pieces)))
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.publish(save_language_model(model, tokenizer))
    fastlstm.export(run.path, to="onnx", out=tmp_path / "out")
    read = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "hf_tokenizer.json"))
    ids = tokenizer.encode(text).tolist()
    assert read.encode(text).ids == ids
    assert read.decode(ids) == text


def test_bits_per_character_are_those_of_the_text(text_run, text, tmp_path):
    run = text_run()
    report = fastlstm.export(run, to="onnx", out=tmp_path / "out", check_text=text)
    figures = report.proof.figures["text"]
    whole = fastlstm.LM.load(run).evaluate(text, lanes=16, max_tokens=figures["num_tokens"])
    assert figures["bits_per_char"]["target"] == pytest.approx(whole.bits_per_char, abs=2e-3)


def _corrupt(monkeypatch, to, name):
    """Has a weight, or a scale, of every file that is written changed."""
    target = export_module.TARGETS[to]

    def corrupted(graph):
        own = graph.weights[name]
        if isinstance(own, QuantizedMatrix):
            scales = own.scales.copy()
            scales[3] *= 1.1
            changed: Any = QuantizedMatrix(own.codes, scales, own.weight_format)
        else:
            changed = own.copy()
            changed.flat[5] += 0.01
        bad = {**graph.weights, name: changed}
        return target.write(dataclasses.replace(graph, weights=bad))

    monkeypatch.setitem(export_module.TARGETS, to, dataclasses.replace(target, write=corrupted))


@pytest.mark.parametrize(
    ("to", "weights", "name"),
    [
        *(("onnx", w, n) for w in ("fp32", "fp16", "int8") for n in _CORRUPTED),
        *(("litert", w, "layers.1.weight_hh_l0") for w in ("fp32", "fp16", "int8")),
        *((to, "fp32", "layers.0.bias_ih_l0") for to in ("torch", "keras")),
    ],
)
def test_a_wrong_weight_is_found_before_anything_is_published(
    text_run, tmp_path, monkeypatch, to, weights, name
):
    _corrupt(monkeypatch, to, name)
    with pytest.raises(ExportError, match=r"is off by .*, the limit is"):
        fastlstm.export(text_run(num_layers=2), to=to, out=tmp_path / "out", weights=weights)
    assert not list(tmp_path.glob("out*"))


def test_layer_norm_in_the_cell_has_a_limit_of_its_own(text_run, tmp_path, monkeypatch):
    target = dataclasses.replace(export_module.TARGETS["litert"], limits={"fp32": 1e-20})
    monkeypatch.setitem(export_module.TARGETS, "litert", target)
    report = fastlstm.export(text_run(layer_norm=True), to="litert", out=tmp_path / "out")
    assert report.proof.limit == 1e-4
    with pytest.raises(ExportError, match="the limit is 1e-20"):
        fastlstm.export(text_run("plain"), to="litert", out=tmp_path / "out 2")


@pytest.mark.parametrize(
    ("to", "weights"), [("onnx", "fp32"), ("litert", "int8"), ("torch", "fp32"), ("keras", "fp32")]
)
def test_a_file_that_changes_on_disk_is_found_before_a_runtime_reads_it(
    text_run, tmp_path, monkeypatch, to, weights
):
    write, target = export_module.storage.write_file, export_module.TARGETS[to]
    data = b"x" * 1000
    plain = dataclasses.replace(
        target, write=lambda graph: {target.model: data},
        runner=None, exact_runner=None,  # either would be a TypeError
    )  # fmt: skip
    monkeypatch.setitem(export_module.TARGETS, to, plain)

    def flipped(path, data):
        write(path, data[:-1] + bytes([data[-1] ^ 1]) if path.name == target.model else data)

    monkeypatch.setattr(export_module.storage, "write_file", flipped)
    with pytest.raises(ExportError, match=rf"{target.model} on disk is not what was written"):
        fastlstm.export(text_run(), to=to, out=tmp_path / "out", weights=weights)
    assert not list(tmp_path.glob("out*"))


def test_a_model_whose_rounding_grows_is_compared_in_parts(text_run, text, tmp_path, monkeypatch):
    run = text_run(recurrent_gain=6)
    whole = fastlstm.export(run, to="onnx", out=tmp_path / "out", check_text=text)
    assert whole.proof.max_error < 1e-5
    steps = [case["shapes"]["tokens"] for case in whole.proof.errors]
    assert sum(T for T, B in steps if B == 64) == 100  # every step, from equal states
    assert max(T for T, B in steps if B == 64) > 1
    assert any("rounding grows from step to step" in note for note in whole.notes)
    _corrupt(monkeypatch, "onnx", "layers.0.weight_hh_l0")
    with pytest.raises(ExportError, match=r"is off by .*, the limit is"):
        fastlstm.export(run, to="onnx", out=tmp_path / "other", check_text=text)


def test_a_text_that_has_changed_is_not_compared_on(text_run, text, tmp_path):
    data = prepare_text(text, tokenizer=CharTokenizer(CHARACTERS))
    about = {"source": str(text), "key": data.key}
    run = text_run(data=about)
    report = fastlstm.export(run, to="onnx", out=tmp_path / "out")
    assert report.proof.figures["text"]["num_tokens"] > 50
    text.write_text("another text. " * 90)
    report = fastlstm.export(run, to="onnx", out=tmp_path / "other")
    assert "text" not in report.proof.figures
    assert any("text.txt has changed since the run was trained" in note for note in report.notes)


def test_a_refusal_leaves_no_directories(text_run, tmp_path):
    with pytest.raises(ConfigError, match="ONNX's LSTM has no `layer_norm`"):
        fastlstm.export(text_run(layer_norm=True), to="onnx", out=tmp_path / "a" / "b" / "out")
    assert not (tmp_path / "a").exists()


def test_too_many_bytes_are_refused(text_run, tmp_path, monkeypatch):
    monkeypatch.setattr("fastlstm.exchange.onnx_format.LARGEST_FILE", 1 << 20)
    with pytest.raises(ConfigError, match=r"bytes of weights are more than an \.onnx file can"):
        fastlstm.export(text_run(), to="onnx", out=tmp_path / "out")


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"to": "onx"}, {}, r"`to='onx'` is unknown \(did you mean 'onnx'\?\); expected one of"),
        ({"to": "torch", "weights": "int8"}, {}, "`weights='int8'` cannot be held by torch"),
        ({"to": "onnx", "weights": "int3"}, {}, "`weights='int3'` cannot be held by onnx"),
        ({"to": "onnx"}, {"layer_norm": True}, "ONNX's LSTM has no `layer_norm`"),
        ({"to": "onnx"}, {"zoneout": (0.1, 0.1)}, "ONNX's LSTM has no `zoneout`"),
        (
            {"to": "keras"},
            {"num_layers": 2, "residual": True},
            "Keras has no layer for `residual`; export to another target",
        ),
        ({"to": "torch"}, {"activation": "relu"}, "torch's LSTM has no activation relu"),
        ({"to": "onnx", "out": "caf\udce9"}, {}, "`out` is caf.*: the name is not UTF-8"),
        ({"to": "onnx", "out": "model.onnx"}, {}, r"names a file; .* give `out='model'`"),
    ],
)
def test_what_cannot_be_exported_is_named(
    text_run, tmp_path, monkeypatch, fields, options, message
):
    run = text_run(**options)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        fastlstm.export(run, **{"out": "out", **fields})
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_missing_package_is_one_line(text_run, tmp_path, monkeypatch, package):
    run = text_run()
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"needs {package}: pip install 'fastlstm\[onnx"):
        fastlstm.export(run, to="onnx", out=tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_the_limit_of_logits_follows_the_size_of_their_weights(tmp_path, monkeypatch):
    """Units in pairs that almost cancel: rounding of the state is as large as their weights."""
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    lstm, output = torch.nn.LSTM(8, 64), torch.nn.Linear(64, 9)
    with torch.no_grad():
        for weight in lstm.parameters():
            pairs = weight.view(4, 32, 2, -1).normal_(0, 0.3)
            pairs[:, :, 1] = pairs[:, :, 0] + pairs[:, :, 1] * 1e-4
        lstm.bias_ih_l0[64:128] = -20.0  # nothing is left of a state that differs
        output.weight.view(9, 32, 2).copy_(torch.randn(9, 32, 1) * torch.tensor([100.0, -100.0]))
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(9, 8), "lstm": lstm, "fc": output})
    safetensors.torch.save_file(model.state_dict(), tmp_path / "m.safetensors")
    run = fastlstm.import_run(tmp_path / "m.safetensors", out=tmp_path / "run", chars="abcdefghi")
    report = fastlstm.export(run, to="onnx", out=tmp_path / "out")
    assert report.proof.is_good
    monkeypatch.setattr(TextExport, "in_units", lambda source, outputs: outputs)
    with pytest.raises(ExportError, match="the limit is 1e-05"):
        fastlstm.export(run, to="onnx", out=tmp_path / "plain")
