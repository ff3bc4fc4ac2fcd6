"""Models made like those that people publish: each is a run that computes what its framework does,
or one line that says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fastlstm
from fastlstm.cli.main import main
from fastlstm.errors import ConfigError, CorruptFileError, DataError, FormatError
from fastlstm.runs.run_directory import RunDirectory
from keras_models import keras, outputs, saved, sequential, varied

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("converts_here"),
]
layers = keras.layers
LSTM, Dense = layers.LSTM, layers.Dense
RNG = np.random.default_rng(3)
VALUES = RNG.standard_normal((5, 8, 3)).astype(np.float32)
TOKENS = RNG.integers(1, 9, (5, 8))
CHARS = " abcdefgh"


def read(run, x):
    """Returns what a sequence run answers, `(N, K)`; of two classes by a sigmoid the second."""
    model: Any = getattr(fastlstm, run.opened_by).load(run)
    if run.opened_by == "SequenceRegressor":
        answers = model.predict(x)
        return np.asarray(answers.reshape(len(x), -1))
    return np.asarray(model.predict_proba(x))


def assert_answers(run, x, expected):
    expected = expected.reshape(len(x), -1)
    if run.opened_by == "SequenceClassifier" and expected.shape[1] == 1:
        expected = np.hstack([1 - expected, expected])
    np.testing.assert_allclose(read(run, x), expected, atol=1e-5)


# Keras --------------------------------------------------------------------------------------------


def values(*middle):
    return sequential((8, 3), *middle)


def tokens(*middle, mask=False):
    table = layers.Embedding(9, 4, mask_zero=mask)
    return sequential((None,), table, *middle)


def squeezed():
    x = keras.Input((None, 3))
    return keras.Model(x, keras.ops.squeeze(Dense(1, activation="relu")(LSTM(6)(x)), -1))


KERAS: dict[str, Callable[[], Any]] = {
    "price": lambda: values(LSTM(6, return_sequences=True), LSTM(5), Dense(4), Dense(1)),
    "dense relu": lambda: values(LSTM(6), Dense(5, activation="relu"), Dense(1)),
    "dense relu, tanh, two outputs": lambda: values(
        LSTM(6), Dense(5, activation="relu"), layers.Dropout(0.2), Dense(4, activation="tanh"),
        Dense(4, activation="hard_sigmoid"), Dense(2),
    ),
    "relu cell": lambda: values(LSTM(6, activation="relu"), Dense(1)),
    "relu cells": lambda: values(
        LSTM(6, activation="relu", return_sequences=True), LSTM(4, activation="relu"), Dense(1)
    ),
    "hard_sigmoid cell": lambda: values(LSTM(6, recurrent_activation="hard_sigmoid"), Dense(2)),
    "activity of columns": lambda: values(
        LSTM(6), layers.Dropout(0.5), Dense(5, activation="relu"), Dense(4, activation="softmax")
    ),
    "anomaly": lambda: values(LSTM(6), Dense(4, activation="elu"), Dense(1, activation="sigmoid")),
    "several labels": lambda: values(LSTM(6), Dense(3, activation="sigmoid")),
    "output relu": lambda: values(LSTM(6), Dense(1, activation="relu")),
    "both ways": lambda: values(
        layers.Bidirectional(LSTM(5, return_sequences=True)), layers.Bidirectional(LSTM(4)),
        Dense(4, activation="relu"), Dense(1),
    ),
    "backwards": lambda: values(LSTM(5, go_backwards=True), Dense(2)),
    "multiplied ways": lambda: values(
        layers.Bidirectional(LSTM(5), merge_mode="mul"), layers.LayerNormalization(), Dense(2)
    ),
    "pooled": lambda: values(
        layers.Bidirectional(LSTM(5, return_sequences=True)), layers.GlobalMaxPooling1D(),
        Dense(4, activation="relu"), Dense(1, activation="sigmoid"),
    ),
    "averaged and added ways": lambda: values(
        layers.Bidirectional(LSTM(8, return_sequences=True), merge_mode="ave"),
        layers.Bidirectional(LSTM(6), merge_mode="sum"), Dense(2),
    ),
    "dense before": lambda: values(
        layers.TimeDistributed(Dense(7, activation="relu")), LSTM(5), Dense(4), Dense(3), Dense(2),
    ),
    "squeezed": lambda: squeezed(),
    "reshape": lambda: values(LSTM(5), Dense(6), layers.Reshape((3, 2))),
    "sentiment": lambda: tokens(LSTM(6), Dense(1, activation="sigmoid")),
    "sentiment, masked": lambda: tokens(LSTM(6), Dense(1, activation="sigmoid"), mask=True),
    "topics, both ways, masked, mean": lambda: tokens(
        layers.Bidirectional(LSTM(4, return_sequences=True)), layers.GlobalAveragePooling1D(),
        Dense(5, activation="relu"), Dense(3, activation="softmax"), mask=True,
    ),
    "next word": lambda: tokens(
        LSTM(6, return_sequences=True), LSTM(6), Dense(7, activation="relu"),
        Dense(9, activation="softmax"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERAS)
def test_a_model_of_keras_predicts_what_keras_does(name, tmp_path):
    suffix = (".keras", ".h5")[list(KERAS).index(name) % 2]
    model = varied(KERAS[name]())
    x = VALUES if model.input_shape[-1] == 3 else TOKENS.copy()
    if "masked" in name:
        x[0, :3], x[1, 4:], x[2, 2] = 0, 0, 0
    run = fastlstm.import_run(saved(model, tmp_path / f"m{suffix}"), out=tmp_path / "run")
    assert_answers(run, x, outputs(model, x))
    lists = [row[: 3 + k] for k, row in enumerate(x)]  # of different lengths
    if "masked" not in name:
        each = [outputs(model, row[None])[0] for row in lists]
        assert_answers(run, lists, np.stack(each))  # type: ignore[arg-type]
    stored: Any = getattr(fastlstm, run.opened_by).load(run)
    stored.save(tmp_path / "again")
    again = getattr(fastlstm, run.opened_by).load(tmp_path / "again")
    assert (stored.predict(x) == again.predict(x)).all()


# torch --------------------------------------------------------------------------------------------


class Torch(nn.Module):
    """An LSTM with linear layers, as scripts on the web have it."""

    def __init__(self, head, both=False, read="last"):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(3, 6, 2, batch_first=True, bidirectional=both)
        sizes = (12 if both else 6, *head)
        for k in range(len(head)):
            self.add_module(f"fc{k + 1}", nn.Linear(sizes[k], sizes[k + 1]))
        self.num, self.read = len(head), read

    def forward(self, x):
        y, (h, _) = self.lstm(x)
        match self.read:
            case "last":
                y = y[:, -1]
            case "state":
                y = torch.cat([h[-2], h[-1]], 1)
            case "mean":
                y = y.mean(1)
            case "max":
                y = y.amax(1)
        for k in range(self.num):
            y = getattr(self, f"fc{k + 1}")(y.relu() if k else y)
        return y


TORCH: dict[str, tuple[Callable[[], Torch], dict[str, Any]]] = {
    "last step": (lambda: Torch((1,)), {}),
    "two linear layers": (lambda: Torch((6, 1)), {"activation": "relu"}),
    "three linear layers": (lambda: Torch((5, 4, 2)), {"activation": "relu"}),
    "square linear layers": (lambda: Torch((6, 6, 2)), {"activation": "relu"}),
    "classes": (lambda: Torch((5, 4)), {"activation": "relu", "classes": True}),
    "one logit": (lambda: Torch((1,)), {"classes": True}),
    **{
        f"both ways, {read}": (lambda read=read: Torch((2,), True, read), {"answer": read})
        for read in ("last", "state", "mean", "max")
    },
}


@pytest.mark.parametrize("name", TORCH)
def test_a_state_dict_of_torch_predicts_what_torch_does(name, tmp_path):
    make, options = TORCH[name]
    form = {"last step": "pt", "two linear layers": "legacy"}.get(name, "safetensors")
    model, path = make(), tmp_path / "m.pt"
    if form == "safetensors":
        safetensors.torch.save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=form == "pt")
    run = fastlstm.import_run(path, out=tmp_path / "run", **options)
    with torch.no_grad():
        expected = model(torch.from_numpy(VALUES))
    if options.get("classes"):
        expected = expected.softmax(1) if expected.shape[1] > 1 else expected.sigmoid()
    assert_answers(run, VALUES, expected.numpy())


class Words(nn.Module):
    """A classifier of token ids."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 4, padding_idx=0)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        y: Tensor = self.fc(self.lstm(self.embedding(x))[1][0][-1])
        return y.softmax(-1)


def test_a_classifier_of_token_ids_of_torch(tmp_path):
    model = Words()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "m.pt")
    run = fastlstm.import_run(tmp_path / "m.pt", out=tmp_path / "run", classes=True)
    assert "sequences are token ids from 0 to 8" in " ".join(run.notes)
    expected = model(torch.from_numpy(TOKENS)).detach().numpy()
    assert_answers(run, TOKENS, expected)
    classifier = fastlstm.SequenceClassifier.load(run)
    for wrong, said in (
        ([[1, 9]], "sequence 0, step 1 is 9, expected a token id from 0 to 8"),
        ([[1.5]], "is 1.5, expected a token id"),
        (VALUES, r"expected numbers of shape \(N, T\)"),
    ):
        with pytest.raises(DataError, match=said):
            classifier.predict(wrong)


# one clear line -----------------------------------------------------------------------------------


def refused_models():
    def of_keras(*middle):
        return lambda folder: saved(varied(values(*middle)), folder / "m.keras")

    def of_torch(save):
        def write(folder):
            save(folder / "m.pt")
            return folder / "m.pt"

        return write

    def states(**modules):
        state = nn.ModuleDict(modules).state_dict()
        return of_torch(lambda path: safetensors.torch.save_file(state, path))

    script = "if you trust it, save its state_dict: model = torch.jit.load"
    module = "an object of .*Linear, which is not unpickled; if you trust it, save its state_dict"
    lstm = nn.LSTM(3, 6)
    return {
        "SimpleRNN": (of_keras(layers.SimpleRNN(4), Dense(1)), {}, "is a SimpleRNN, which cannot"),
        "Conv1D": (of_keras(layers.Conv1D(4, 3), LSTM(4), Dense(1)), {}, "is a Conv1D, which"),
        "Flatten": (
            of_keras(LSTM(4, return_sequences=True), layers.Flatten(), Dense(1)), {},
            "is a Flatten, which cannot",
        ),
        "every step": (
            of_keras(LSTM(4, return_sequences=True), Dense(1)), {},
            "'lstm.*' writes at every step; .* say with `answer` which output counts",
        ),
        "GRU of torch": (states(rnn=nn.GRU(3, 6)), {}, "'rnn' is nn.GRU; expected nn.LSTM"),
        "Conv1d": (states(conv=nn.Conv1d(3, 3, 3), lstm=lstm), {}, "'conv' is an nn.Conv1d"),
        "BatchNorm": (states(bn=nn.BatchNorm1d(6), lstm=lstm), {}, "'bn' is a BatchNorm"),
        "LayerNorm": (states(norm=nn.LayerNorm(6), lstm=lstm), {}, "'norm' is a normalization"),
        "no activation": (
            states(lstm=lstm, fc1=nn.Linear(6, 5), fc2=nn.Linear(5, 1)), {},
            "'fc1' and 'fc2' follow each other.*give `activation`, one of linear, relu",
        ),
        "wrong activation": (
            states(lstm=lstm, fc1=nn.Linear(6, 5), fc2=nn.Linear(5, 1)), {"activation": "x"},
            "; 'x' came",
        ),
        "needless activation": (
            states(lstm=lstm, fc=nn.Linear(6, 1)), {"activation": "relu"},
            "this state_dict has 1 linear layer; leave it out",
        ),
        "activation of Keras": (of_keras(LSTM(4), Dense(1)), {"activation": "relu"}, "describes"),
        "needless answer": (of_keras(LSTM(4), Dense(1)), {"answer": "last"}, "this one answers on"),
        "both ways": (
            states(lstm=nn.LSTM(3, 6, bidirectional=True), fc=nn.Linear(12, 1)), {},
            "'lstm.l0' reads both ways, and a state_dict does not say which output counts: give",
        ),
        "pickled module": (of_torch(lambda path: torch.save(nn.Linear(2, 2), path)), {}, module),
        "TorchScript": (
            of_torch(lambda path: torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)), {},
            f"it is TorchScript, which is not run here; {script}",
        ),
        "tflite": (
            of_torch(lambda path: path.write_bytes(b"\x1c\0\0\0TFL3" + bytes(99))), {},
            "LiteRT model.*import the Keras model that it was converted from",
        ),
        "number": (of_torch(lambda path: torch.save(3, path)), {}, "it holds int, expected a"),
    }  # fmt: skip


REFUSED = refused_models()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_no_run_can_hold_are_refused_in_one_line(name, tmp_path):
    write, options, said = REFUSED[name]
    path = write(tmp_path)
    with pytest.raises((FormatError, ConfigError), match=said) as error:
        fastlstm.import_run(path, out=tmp_path / "run", **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_text_model_can_be_a_classifier_of_the_next_token(tmp_path):
    model = varied(tokens(LSTM(6), Dense(9, activation="softmax")))
    path = saved(model, tmp_path / "m.keras")
    with pytest.raises(ConfigError, match=r"needs none: `classes=True`"):
        fastlstm.import_run(path, out=tmp_path / "no")
    assert fastlstm.import_run(path, out=tmp_path / "text", chars=CHARS).opened_by == "LM"
    run = fastlstm.import_run(path, out=tmp_path / "run", classes=True)
    assert_answers(run, TOKENS, outputs(model, TOKENS))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda stack: stack["layers"][0].update(kind="replace"), "no such network"),
        (lambda stack: stack["layers"].pop(), "the weights are of different models"),
        (lambda stack: stack["layers"][1].update(every_step=True), "different models"),
        (lambda stack: stack.update(more=1), "no such network"),
    ],
)
def test_a_description_that_makes_no_sense_is_named(change, said, tmp_path):
    path, run = tmp_path / "m.safetensors", tmp_path / "run"
    safetensors.torch.save_file(Torch((1,)).state_dict(), path)
    fastlstm.import_run(path, out=run)
    config = json.loads((run / "config.json").read_text())
    change(config["network"]["stack"])
    RunDirectory(run).publish({"config.json": json.dumps(config).encode()})
    with pytest.raises(CorruptFileError, match=said):
        fastlstm.SequenceRegressor.load(run)


def test_a_text_model_with_a_function_in_its_head(tmp_path):
    """A state_dict does not say the function: the next token is another one with it."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(9, 4), "lstm": nn.LSTM(4, 6, batch_first=True),
         "fc1": nn.Linear(6, 8), "fc2": nn.Linear(8, 9)}
    )  # fmt: skip
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    with pytest.raises(ConfigError, match="does not say which function is between them"):
        fastlstm.import_run(path, out=tmp_path / "no", chars=CHARS)
    with pytest.raises(FormatError, match=r"'fc1' has no place in a text run.*`classes=True`"):
        fastlstm.import_run(path, out=tmp_path / "no", activation="relu")
    run = fastlstm.import_run(path, out=tmp_path / "run", activation="relu", classes=True)
    with torch.no_grad():
        read = model["lstm"](model["embedding"](torch.from_numpy(TOKENS)))[0][:, -1]
        expected = model["fc2"](model["fc1"](read).relu()).softmax(-1)
    assert_answers(run, TOKENS, expected.numpy())


def test_the_command_says_how_the_run_is_opened(tmp_path, capsys):
    path, run = tmp_path / "m.pt", tmp_path / "run"
    safetensors.torch.save_file(Torch((5, 4)).state_dict(), path)
    command = ["import", str(path), "--out", str(run), "--activation", "relu", "--classes"]
    assert main(command) == 0
    assert f"fastlstm.SequenceClassifier.load('{run}')" in capsys.readouterr().out
    assert main(["info", str(run)]) == 0
    assert "LSTM, LSTM, Dense, relu, Dense" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["dense relu, tanh, two outputs", "anomaly", "both ways", "sentiment", "next word"]
)
def test_an_imported_model_is_exported(name, tmp_path):
    pytest.importorskip("onnxruntime")
    path = saved(varied(KERAS[name]()), tmp_path / "m.keras")
    run = fastlstm.import_run(path, out=tmp_path / "run")
    report = fastlstm.export(run, to="onnx", out=tmp_path / "out")
    assert report.proof.is_good
