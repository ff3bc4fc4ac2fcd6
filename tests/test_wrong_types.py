"""Every public entry point says what came and what is expected, whatever is given to it."""

import numpy as np
import pytest
import torch
from torch import nn

import fastlstm
from fastlstm import LM, LSTM, Forecaster, SequenceClassifier, SequenceRegressor, TrainConfig, train
from fastlstm.compression.session import compress
from fastlstm.errors import FastLSTMError
from fastlstm.exchange.export import _weight_format, export
from fastlstm.text.config import ModelConfig
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.model import LanguageModel
from series_frames import long_table

X, Y = np.zeros((4, 3, 2), np.float32), np.array([0.0, 1.0, 0.0, 1.0])
QUICK = {"input_size": 8, "patch": 4, "horizon": 4, "hidden_size": 4, "steps": 1}


@pytest.fixture(scope="module")
def lm():
    return LM(LanguageModel(ModelConfig(4, 2, 2)), CharTokenizer("\nabc"))


@pytest.fixture(scope="module")
def model():
    return Forecaster(**QUICK, split="60/20/20").fit(long_table(120))


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("a text\n" * 400)
    return path


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda _: train(5), "the source is an int, expected a path or a list of paths"),
        (lambda _: train(None), "the source is None, expected a path"),
        (lambda _: train(["a.txt", 5]), "the source is a list, expected a path or a list of paths"),
        (lambda _: train(long_table(9)), "the source is a Table, expected .*Forecaster"),
        (lambda book: train(book, out=5), "the run directory is an int, expected a path"),
        (lambda book: train(book, config=5), "config is an int, expected a TrainConfig"),
        (lambda book: train(book, observers=5), "observers is an int, expected a list of"),
        (lambda book: train(book, observers=[5]), "observers is a list, expected a list of func"),
        (lambda book: train(book, stop=5), "stop is an int, expected a function"),
        (lambda book: train(book, steps="x"), "`steps` is 'x', expected a whole number"),
        (lambda _: TrainConfig(steps=[]), r"`steps` is \[\], expected a whole number"),
        (lambda _: TrainConfig(vocab=[]), r"`vocab` is \[\], expected one of char"),
    ],
)
def test_train(call, told, book):
    with pytest.raises(FastLSTMError, match=told):
        call(book)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda _: LM(5, None), r"the model is an int, expected a LanguageModel; LM.load\(path\)"),
        (lambda _: LM("run", None), r"is a str, expected a LanguageModel; LM.load\(path\) opens"),
        (lambda _: LM(nn.Linear(2, 2), None), "is a Linear, expected a LanguageModel"),
        (lambda lm: LM(lm.model, lm.tokenizer, weights=5), "weights are 5, expected one of fp32"),
        (lambda _: LM.load(None), "the run directory is None, expected a path"),
        (lambda _: LM.load(5), "the run directory is an int, expected a path"),
        (lambda lm: lm.generate(5), "the prompt is an int, expected a str"),
        (lambda lm: lm.generate("a", "x"), "max_tokens is 'x', expected a whole number"),
        (lambda lm: lm.generate(stop=5), "`stop` is an int, expected a text, or a list of texts"),
        (lambda lm: lm.generate(stop=[5]), "`stop` is 5, expected a non-empty text"),
        (lambda lm: lm.generate(logit_bias=5), "`logit_bias` is an int, expected a dict"),
        (lambda lm: lm.generate(temperature="x"), "`temperature` is 'x', expected a number"),
        (lambda lm: lm.generate(seed="x"), "`seed` is 'x', expected a whole number"),
        (lambda lm: lm.stream(stop=5), "`stop` is an int, expected a text"),
        (lambda lm: lm.generate_batch(5), "prompts is an int, expected a list of texts"),
        (lambda lm: lm.generate_batch(None), "prompts is None, expected a list of texts"),
        (lambda lm: lm.generate_batch([5]), "the prompt is an int, expected a str"),
        (lambda lm: lm.evaluate(5), "the text is an int, expected a str or a pathlib.Path"),
        (lambda lm: lm.evaluate(None), "the text is None, expected a str or a pathlib.Path"),
        (lambda lm: lm.evaluate("abc", unknown=5), "`unknown` is 5, expected one of"),
        (lambda lm: lm.evaluate("abc", lanes="x"), "`lanes` is 'x', expected a whole number"),
        (lambda lm: lm.evaluate("abc", max_tokens=1.5), "`max_tokens` is 1.5, expected a whole"),
        (lambda lm: lm.read(5), "the text is an int, expected a str or a pathlib.Path"),
        (lambda lm: lm.session().read(5), "the prompt is an int, expected a str"),
        (lambda lm: lm.session().write("x"), "max_tokens is 'x', expected a whole number"),
        (lambda lm: lm.session().restore(5), "cannot be used: it is an int, expected the bytes"),
        (lambda lm: lm.session().save(key="x"), "the key is a str, expected bytes"),
    ],
)
def test_lm(call, told, lm):
    with pytest.raises(FastLSTMError, match=told):
        call(lm)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: compress("run", out=5), "the run directory is an int, expected a path"),
        (lambda: compress(5, out="out"), "the run directory is an int, expected a path"),
        (lambda: export("run", to="torch", out=5), "`out` is an int, expected the path of a dir"),
        (lambda: export("run", to=[], out="out"), r"`to=\[\]` is unknown; expected one of"),
        (lambda: export(5, to="torch", out="out"), "the model is an int, expected a run directory"),
        (lambda: _weight_format([], "fp32", "torch"), r"`weights=\[\]` cannot be held by torch"),
    ],
)
def test_compress_and_export(call, told):
    with pytest.raises(FastLSTMError, match=told):
        call()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda _: Forecaster().fit(5), "got an int, expected a path, a pandas, polars or Arrow"),
        (lambda _: Forecaster().fit(None), "got None, expected a path"),
        (lambda _: Forecaster().fit(["a.csv", 5]), "got a list, expected a path"),
        (lambda _: Forecaster().partial_fit(5), "got an int, expected a path"),
        (lambda _: Forecaster(horizon="x").fit("no.csv"), "`horizon` is 'x', expected a whole"),
        (lambda _: Forecaster(horizon=0).fit("no.csv"), "`horizon` is 0, expected a number from 1"),
        (lambda _: Forecaster(target=5).fit("no.csv"), "`target` is 5, expected names of columns"),
        (lambda _: Forecaster(past=[5]).fit("no.csv"), r"`past` is \[5\], expected names of"),
        (lambda _: Forecaster(split=5).fit("no.csv"), "`split` is 5, expected a text"),
        (lambda _: Forecaster(observers=5).fit("no.csv"), "observers is an int, expected a list"),
        (lambda model: model.predict(5), "got an int, expected a path"),
        (lambda model: model.predict(future=5), "fitted without future columns"),
        (lambda model: model.predict_quantiles(quantiles=5), "`quantiles` is 5, expected a list"),
        (lambda model: model.predict_quantiles(quantiles=["x"]), "`quantiles` is .'x'., expected"),
        (lambda model: model.backtest(5), "`part` is 5, expected train, valid or test"),
        (lambda model: model.backtest(stride="x"), "`stride` is 'x', expected 1 or more"),
        (lambda model: model.backtest(season=1.5), "`season` is 1.5, expected 1 or more"),
        (lambda model: model.backtest(frame=5), "got an int, expected a path"),
        (lambda model: model.backtest(quantiles=None), "`quantiles` is None, expected a list"),
        (lambda model: model.score(5), "got an int, expected a path"),
        (lambda model: model.save(5), "the run directory is an int, expected a path"),
        (lambda _: Forecaster.load(5), "the run directory is an int, expected a path"),
        (lambda _: Forecaster.load(None), "the run directory is None, expected a path"),
    ],
)
def test_forecaster(call, told, model):
    with pytest.raises(FastLSTMError, match=told):
        call(model)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"hidden_size": "x"}, "`hidden_size` is 'x', expected a whole number"),
        ({"num_layers": 0}, "`num_layers` is 0, expected a number from 1"),
        ({"dropout": "x"}, "`dropout` is 'x', expected a number"),
        ({"pooling": []}, r"`pooling` is \[\], expected one of last, mean"),
        ({"epochs": "x"}, "`epochs` is 'x', expected a number"),
        ({"epochs": 3, "steps": 4}, "`steps` and `epochs` exclude each other"),
        ({"budget": "soon"}, "`budget` is 'soon', expected a duration"),
        ({"learning_rate": "x"}, "`learning_rate` is 'x', expected a number"),
        ({"optimizer": "adamax"}, "`optimizer` is 'adamax', expected one of muon"),
        ({"warmup": 0.5}, r"`warmup=0\.5` plus `cooldown=0\.7` is more than the whole run"),
        ({"callbacks": [print]}, "callbacks holds a builtin_function_or_method, expected objects"),
        ({"seed": -1}, "`seed` is -1, expected a number from 0"),
        ({"held_out": "x"}, "`held_out` is 'x', expected a number"),
        ({"held_out": 1}, "`held_out` is 1, expected a number from"),
        ({"observers": 5}, "observers is an int, expected a list of"),
    ],
)
def test_arguments_of_sequence_models_are_looked_at_before_the_data(given, told):
    with pytest.raises(FastLSTMError, match=told):
        SequenceRegressor(**given).fit(5, 5)


def test_data_of_sequence_models():
    for kind in (SequenceRegressor, SequenceClassifier):
        for call, told in (
            (lambda k=kind: k().fit(5, 5), r"X has shape \(\) and dtype int64, expected numbers"),
            (lambda k=kind: k().fit(X, 5), "y is an int, expected 4 answers"),
            (lambda k=kind: k(epochs=1).fit(X, Y).predict("x"), "X has shape .*, expected numbers"),
            (lambda k=kind: k(epochs=1).fit(X, Y).score(X, 5), "y (is an int|has shape)"),
            (lambda k=kind: k(epochs=1).fit(X, Y).score(X, Y, "x"), "`sample_weight` is not"),
        ):
            with pytest.raises(FastLSTMError, match=told):
                call()


def test_numbers_of_numpy_are_numbers():
    assert TrainConfig(steps=np.int64(5)).steps == 5
    assert type(TrainConfig(epochs=np.float32(0.5)).epochs) is float
    assert SequenceRegressor(epochs=np.int64(1), hidden_size=np.int32(4)).fit(X, Y).fitted_.epochs


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        (("x",), {}, "input_size is 'x', expected a whole number"),
        ((3.5, 4), {}, "input_size is 3.5, expected a whole number"),
        ((3, 4.5), {}, "hidden_size is 4.5, expected a whole number"),
        ((3, 4), {"num_layers": "x"}, "num_layers is 'x', expected a whole number"),
        ((3, 4), {"proj_size": "x"}, "proj_size is 'x', expected a whole number"),
        ((), {}, "input_size"),
        ((3, 4), {"units": 5}, "units"),
    ],
)
def test_where_torch_has_a_type_error_so_has_the_drop_in_in_words(given, options, told):
    with pytest.raises(TypeError):
        nn.LSTM(*given, **options)
    with pytest.raises(TypeError, match=told):
        LSTM(*given, **options)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: LSTM(2, 3, zoneout="x"), "`zoneout` is 'x', expected a probability"),
        (lambda: LSTM(2, 3, max_activation_bytes="x"), "max_activation_bytes is 'x', expected a"),
        (lambda: LSTM(2, 3)(torch.zeros(4, 2, 2), lengths="x"), "lengths is a str, expected 2"),
        (lambda: LSTM(2, 3)(torch.zeros(4, 2, 2), lengths=5), r"lengths (is|are) .*, expected 2"),
        (lambda: fastlstm.accelerate(5), "the model is an int, expected an nn.Module"),
        (lambda: fastlstm.restore(None), "the model is None, expected an nn.Module"),
        (lambda: fastlstm.explain("x"), "the model is a str, expected an nn.Module"),
        (lambda: fastlstm.explain(LSTM(2, 3), 5), "the input is an int, expected a tensor"),
        (lambda: fastlstm.explain(LSTM(2, 3), T="x"), "T is 'x', expected a whole number"),
        (lambda: fastlstm.select(5), "the call is an int, expected an LSTMCall"),
    ],
)
def test_layers(call, told):
    with pytest.raises(FastLSTMError, match=told):
        call()


def test_what_is_refused_changes_no_layer():
    model = nn.Sequential(nn.LSTM(2, 3))
    with pytest.raises(FastLSTMError, match="max_activation_bytes is -1, expected a whole"):
        fastlstm.accelerate(model, max_activation_bytes=-1)
    assert type(model[0]) is nn.LSTM
