import json
import shutil

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch

import fastlstm
from fastlstm.cli.main import main
from fastlstm.errors import ConfigError, DataError, FormatError, RunDirectoryError, ShapeError
from keras_models import keras, outputs, saved, sequential, varied

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
layers = keras.layers
CHARS = " abcdefgh"


def letters(V=9, units=(12, 7), **options):
    middle = [layers.LSTM(n, return_sequences=True, **options) for n in units]
    ends = [layers.Embedding(V, 6), *middle, layers.Dense(V, activation="softmax")]
    return varied(sequential((None,), *ends))


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    model = letters()
    return model, saved(model, tmp_path_factory.mktemp("text") / "m.keras")


def probabilities(lm, ids):
    """Returns what a run predicts after every token, `(T, V)`."""
    logits, _ = lm.model(torch.as_tensor(ids)[:, None])
    return logits[:, 0].softmax(-1).detach().numpy()


def test_text_run_predicts_what_keras_does(text_model, tmp_path):
    model, path = text_model
    run = fastlstm.import_run(path, out=tmp_path / "run", chars=CHARS)
    assert run.kind == "text"
    assert "12, 7 units: all have 12" in run.notes[0]
    lm = fastlstm.LM.load(run)
    ids = np.array([0, 2, 5, 8, 1, 1, 3])
    expected = outputs(model, ids[None])[0]
    np.testing.assert_allclose(probabilities(lm, ids), expected, atol=1e-5)
    assert lm.tokenizer.encode("bed").tolist() == [2, 5, 4]
    assert set(lm.generate("abc", max_tokens=40, seed=1)) <= set(CHARS)
    stored = json.loads((tmp_path / "run/config.json").read_text())
    assert stored["import"]["window"] is None
    with pytest.raises(RunDirectoryError, match="contains a run; give another"):
        fastlstm.import_run(path, out=tmp_path / "run", chars=CHARS)


def test_vocabulary_in_another_order_and_with_numbers_of_no_character(text_model, tmp_path):
    model, path = text_model
    numbers = {"h": 1, "a": 8, "c": 3, "b": 5, " ": 2}
    back = {str(number): char for char, number in numbers.items()}
    listed = ["[UNK]", "h", " ", "c", "<pad>", "b", "", "<go>", "a"]
    for name, value in (("forth", numbers), ("back", back), ("listed", listed)):
        vocab = tmp_path / f"{name}.json"
        vocab.write_text(json.dumps(value))
        run = fastlstm.import_run(path, out=tmp_path / name, vocab=str(vocab))
        assert "4 of the model's 9 tokens stand for no character" in " ".join(run.notes)
        lm = fastlstm.LM.load(run)
        text = "ah cab"
        full = outputs(model, np.array([[numbers[c] for c in text]]))[0]
        kept = full[:, [numbers[c] for c in " abch"]]
        expected = kept / kept.sum(1, keepdims=True)
        got = probabilities(lm, lm.tokenizer.encode(text).astype(np.int64))
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_text_gives_the_characters_that_training_reads(text_model, tmp_path):
    _, path = text_model
    file = tmp_path / "book.txt"
    file.write_bytes(b"\xef\xbb\xbf" + 60 * b"hag bed  fc")
    run = fastlstm.import_run(path, out=tmp_path / "run", text=str(file))
    assert fastlstm.LM.load(run).tokenizer.chars == CHARS
    report = fastlstm.export(run, to="onnx", out=tmp_path / "onnx")
    assert report.proof.figures["text"]["num_tokens"] > 0  # the text is known


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({}, ConfigError, "has 9 tokens, and its file does not say which.*none came"),
        ({"chars": "ab", "text": "x"}, ConfigError, "text and chars came"),
        ({"chars": CHARS[:-1]}, DataError, "has 8 characters, the model has 9 tokens; one of them"),
        ({"chars": "aacdefgh "}, DataError, "same character twice"),
        ({"vocab": {"a": 3}}, DataError, "names 1 character of the model's 9 tokens"),
        ({"vocab": {"a": 9}}, DataError, "has the number 9, the model has 9 tokens"),
        ({"vocab": {"the": 1}}, DataError, "'the', which is not one character"),
        ({"vocab": {"a": 1, "b": 1}}, DataError, "same number"),
        ({"vocab": [*"abcdefg ", "the"]}, DataError, "'the', which is not one character"),
        ({"vocab": 3}, DataError, "no vocabulary: expected a JSON list"),
    ],
)
def test_the_vocabulary_is_required_and_checked(given, kind, said, text_model, tmp_path):
    if "vocab" in given:
        path = tmp_path / "vocab.json"
        path.write_text(json.dumps(given["vocab"]))
        given = {"vocab": str(path)}
    with pytest.raises(kind, match=said):
        fastlstm.import_run(text_model[1], out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_windowed_one_hot_model(tmp_path):
    ends = [layers.LSTM(11), layers.Dense(9), layers.Activation("softmax")]
    model = varied(sequential((7, 9), *ends))
    path = saved(model, tmp_path / "m.h5")
    run = fastlstm.import_run(path, out=tmp_path / "run", chars=CHARS)
    assert "windows of 7 tokens" in " ".join(run.notes)
    assert json.loads((tmp_path / "run/config.json").read_text())["import"]["window"] == 7
    ids = np.array([0, 2, 5, 8, 1, 1, 3])
    expected = outputs(model, np.eye(9, dtype=np.float32)[ids][None])[0]
    got = probabilities(fastlstm.LM.load(run), ids)[-1]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_low_rank_output_and_other_gates(tmp_path):
    lstm = layers.LSTM(12, return_sequences=True, recurrent_activation="hard_sigmoid")
    ends = [layers.Embedding(9, 6), lstm, layers.Dense(4, use_bias=False), layers.Dense(9)]
    model = varied(sequential((None,), *ends))
    run = fastlstm.import_run(saved(model, tmp_path / "m.keras"), out=tmp_path / "r", chars=CHARS)
    lm = fastlstm.LM.load(run)
    assert lm.model.config.output_rank == 4
    logits, _ = lm.model(torch.arange(9)[:, None])
    expected = outputs(model, np.arange(9)[None])[0]
    np.testing.assert_allclose(logits[:, 0].detach().numpy(), expected, atol=1e-5)


def test_state_dict_of_a_run_comes_back_with_its_tokenizer(text_model, tmp_path):
    run = fastlstm.import_run(text_model[1], out=tmp_path / "run", chars=CHARS)
    path, tokenizer = tmp_path / "run/model.safetensors", tmp_path / "run/tokenizer.json"
    again = fastlstm.import_run(path, out=tmp_path / "again", vocab=str(tokenizer))
    first, second = fastlstm.LM.load(run), fastlstm.LM.load(again)
    ids = np.arange(9)
    assert (probabilities(first, ids) == probabilities(second, ids)).all()


@pytest.mark.parametrize(
    "options",
    [{"num_layers": 2}, {"embed_size": 24, "tie_weights": True}, {"output_rank": 8}],
    ids=str,
)
def test_run_to_keras_and_back_is_bit_equal(options, text_run, tmp_path):
    run = text_run(**options)
    fastlstm.export(run, to="keras", out=tmp_path / "out", check=False)
    folder = tmp_path / "out"
    vocab = str(folder / "tokenizer.json")
    again = fastlstm.import_run(folder / "model.keras", out=tmp_path / "again", vocab=vocab)
    first, second = fastlstm.LM.load(run), fastlstm.LM.load(again)
    tokens = np.random.default_rng(0).integers(0, first.tokenizer.vocab_size, 50)
    assert (probabilities(first, tokens) == probabilities(second, tokens)).all()
    settings = {"max_tokens": 60, "seed": 3, "temperature": 0.8}
    assert first.generate("the ", **settings) == second.generate("the ", **settings)


SHORT = {"batch_size": 2, "seq_length": 16, "sample_every": 0, "observers": ()}


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("a bad cab had a beef " * 200)
    return path


def test_imported_run_is_scored_trained_on_and_compressed(text_model, book, tmp_path):
    run = fastlstm.import_run(text_model[1], out=tmp_path / "run", chars=CHARS)
    lm = fastlstm.LM.load(run)
    before = lm.evaluate(book.read_text()).bits_per_char
    trained = fastlstm.train(book, out=tmp_path / "on", start=run, steps=20, **SHORT)
    assert trained.bits_per_char < before
    report = fastlstm.compress(run, out=tmp_path / "small", to="int8", observers=())
    assert report.result.path == str(tmp_path / "small")


def test_training_on_is_resumed_with_and_without_the_first_run(text_model, book, tmp_path):
    run = fastlstm.import_run(text_model[1], out=tmp_path / "run", chars=CHARS)
    out = tmp_path / "on"
    book.write_text("a bad cab, had a beef? " * 200)  # two characters that the model lacks
    for steps in (1, 2):
        fastlstm.train(book, out=out, resume=True, start=run, steps=steps, **SHORT)
    shutil.rmtree(tmp_path / "run")
    fastlstm.train(book, out=out, resume=True, steps=4, **SHORT)
    fastlstm.train(book, out=out, resume=True, start=run, steps=6, **SHORT)
    assert (out / "checkpoint-6").is_dir()


def test_a_text_without_a_known_character_is_refused(text_model, tmp_path):
    run = fastlstm.import_run(text_model[1], out=tmp_path / "run", chars=CHARS)
    book = tmp_path / "book.txt"
    book.write_text("日本語" * 200)
    with pytest.raises(fastlstm.DataError):
        fastlstm.train(book, out=tmp_path / "on", start=run, steps=2, observers=())


def test_more_layers_than_a_run_holds_are_refused(tmp_path):
    lstms = [layers.LSTM(2, return_sequences=True) for _ in range(65)]
    model = sequential((None,), layers.Embedding(5, 2), *lstms, layers.Dense(5))
    path = saved(model, tmp_path / "m.keras")
    with pytest.raises(fastlstm.FormatError, match="num_layers"):
        fastlstm.import_run(path, out=tmp_path / "run", chars="abcde")


# sequences ----------------------------------------------------------------------------------------

VALUES = np.random.default_rng(0).standard_normal((4, 10, 3)).astype(np.float32)


@pytest.mark.parametrize("target", [(4, 3), (-1, 3)])
def test_forecasts_of_several_rows_and_columns(target, tmp_path):
    """The usual model of a table in Keras: Dense(rows * columns), then Reshape."""
    ends = [layers.LSTM(5), layers.Dense(12), layers.Reshape(target)]
    model = sequential((10, 3), *ends)
    path = saved(varied(model), tmp_path / "m.keras")
    run = fastlstm.import_run(path, out=tmp_path / "run")
    assert "answers are flat: .reshape(-1, 4, 3) gives them the shape of the model's" in run.notes
    expected = outputs(model, VALUES)
    answers = fastlstm.SequenceRegressor.load(run).predict(VALUES).reshape(-1, 4, 3)
    np.testing.assert_allclose(answers, expected, atol=1e-5)
    module = fastlstm.import_module(path)
    found = module(torch.as_tensor(VALUES)).detach()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    report = fastlstm.export(module, torch.as_tensor(VALUES), to="torch", out=tmp_path / "torch")
    assert report.outputs[0].shape == ("B", 4, 3)


@pytest.fixture(scope="module")
def number_model(tmp_path_factory):
    """Two LSTM layers and two Dense layers in a file, and the model's answers to `VALUES`."""
    ends = [layers.LSTM(6), layers.Dense(4, activation="relu"), layers.Dense(2)]
    model = sequential((10, 3), layers.LSTM(5, return_sequences=True), *ends)
    path = saved(varied(model), tmp_path_factory.mktemp("numbers") / "m.keras")
    return path, outputs(model, VALUES)


def test_a_module_of_keras_layers_is_exported(number_model, tmp_path):
    module = fastlstm.import_module(number_model[0])
    example = torch.as_tensor(VALUES)
    report = fastlstm.export(module, example, to="onnx", out=tmp_path / "onnx")
    assert report.proof.max_error < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "onnx/model.onnx")
    for x, expected in ((VALUES, number_model[1]), (VALUES[:1, :3], None)):
        expected = module(torch.as_tensor(x)).detach() if expected is None else expected
        np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, atol=1e-5)
    report = fastlstm.export(module, example, to="litert", length=6, out=tmp_path / "litert")
    assert report.inputs[0].shape == ("B", 6, 3)
    assert report.proof.max_error < 1e-5
    with pytest.raises(ShapeError, match=r"a ndarray, expected .* \(B, T, C\); torch\.as_tensor"):
        module(VALUES)


def test_info_counts_the_layers_of_an_imported_model_once(number_model, tmp_path, capsys):
    run = fastlstm.import_run(number_model[0], out=tmp_path / "run")
    assert main(["info", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert "LSTM, LSTM, Dense, relu, Dense\n" in shown
    assert "1 LSTM layer" not in shown


def test_an_imported_network_is_not_replaced_by_fit(number_model, tmp_path, capsys):
    run = fastlstm.import_run(number_model[0], out=tmp_path / "run")
    model = fastlstm.SequenceRegressor.load(run)
    with pytest.raises(ConfigError, match=r"would replace .*fastlstm\.import_module"):
        model.fit(VALUES, number_model[1])
    np.testing.assert_allclose(model.predict(VALUES), number_model[1], atol=1e-5)
    np.savez(tmp_path / "new.npz", X=VALUES, y=number_model[1])
    argv = ["train", tmp_path / "new.npz", "--start", tmp_path / "run", "--out", tmp_path / "new"]
    assert main([str(word) for word in argv]) == 2
    ways = "Keras (`fastlstm.keras.accelerate`) or by a loop over the torch module"
    assert ways in capsys.readouterr().err


def not_runs():
    x, tokens = keras.Input((10, 3)), keras.Input((None,), dtype="int32")
    lstm = layers.LSTM
    for first, middle, said in (
        (x, [lstm(5, return_sequences=True), layers.Dense(1)], "writes at every step"),
        (x, [lstm(5), layers.Dense(1, activation="softmax")], "one output with softmax"),
        (
            tokens,
            [layers.Embedding(9, 4), layers.Bidirectional(lstm(5)), layers.Dense(9)],
            "text is written forward",
        ),
    ):
        yield keras.Sequential([first, *middle]), said


@pytest.mark.parametrize(("model", "said"), list(not_runs()))
def test_models_that_no_run_can_hold_are_modules(model, said, tmp_path):
    path = saved(varied(model), tmp_path / "m.keras")
    given = {"chars": CHARS} if "written forward" in said else {}
    with pytest.raises(FormatError, match=f"{said}.*; fastlstm.import_module gives a torch"):
        fastlstm.import_run(path, out=tmp_path / "run", **given)
    assert isinstance(fastlstm.import_module(path), torch.nn.Module)


def test_widths_that_need_much_padding_are_refused(tmp_path):
    narrow = [torch.nn.LSTM(1, 1).state_dict() for _ in range(60)]
    wide = torch.nn.LSTM(1, 1500).state_dict()
    wide["weight_hh_l0"] = wide["weight_hh_l0"]
    state = {f"lstm.{k}.{n}": t for k, lstm in enumerate(narrow) for n, t in lstm.items()}
    state |= {f"lstm.60.{n}": t for n, t in wide.items()}
    state |= {"embed.weight": torch.zeros(3, 1), "out.weight": torch.zeros(3, 1500)}
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(state, path)
    with pytest.raises(FormatError, match="filling them with zeros would take"):
        fastlstm.import_run(path, out=tmp_path / "run", chars="abc")


@pytest.mark.parametrize("to", ["onnx", "saved-model"])
def test_a_classifier_with_mask_zero_is_exported_by_lengths(tmp_path, to):
    tf = pytest.importorskip("tensorflow") if to == "saved-model" else None
    ends = [layers.LSTM(5), layers.Dense(3, activation="softmax")]
    table = layers.Embedding(9, 4, mask_zero=True)
    model = varied(sequential((6,), table, *ends))
    run = fastlstm.import_run(saved(model, tmp_path / "m.keras"), out=tmp_path / "run")
    assert "behind `lengths`" in " ".join(run.notes)
    report = fastlstm.export(run, to=to, out=tmp_path / "out")
    assert "not by token 0 (mask_zero)" in report.notes[0]
    given = {
        "tokens": np.array([[3, 1, 8, 2, 5, 4], [7, 2, 0, 0, 0, 0]], np.int32),
        "lengths": np.array([6, 2], np.int32),
    }
    if tf is None:
        session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx")
        got = session.run(["probabilities"], given)[0]
    else:
        called = tf.saved_model.load(str(tmp_path / "out/1")).signatures["serving_default"]
        got = called(**{name: tf.constant(array) for name, array in given.items()})["probabilities"]
    np.testing.assert_allclose(got, outputs(model, given["tokens"]), atol=1e-5)


def test_a_stateful_note_holds_for_every_kind_of_run(tmp_path):
    ends = [
        layers.LSTM(5, return_sequences=True, stateful=True),
        layers.Dense(9, activation="softmax"),
    ]
    first = [keras.Input(batch_shape=(1, 7), dtype="int32"), layers.Embedding(9, 4)]
    path = saved(varied(keras.Sequential([*first, *ends])), tmp_path / "m.keras")
    run = fastlstm.import_run(path, out=tmp_path / "run", chars=CHARS)
    assert "a text run carries the state" in run.notes[0]
