import keras
import numpy as np
import pytest
import torch
from keras import layers

import fastlstm
from fastlstm.errors import UsageError
from fastlstm.keras import LSTM, accelerate, restore
from keras_layers import IGNORED

pytestmark = pytest.mark.filterwarnings(IGNORED)

TOKENS = np.array([[1, 2, 3, 0, 0], [3, 4, 0, 0, 0]])


def sequential(*, is_built):
    first = [keras.Input((5,), dtype="int32")] if is_built else []
    return keras.Sequential(
        [
            *first,
            layers.Embedding(10, 5, mask_zero=True),
            layers.Bidirectional(layers.LSTM(6, return_sequences=True)),
            layers.Dropout(0.1),
            layers.LSTM(4),
        ]
    )


def functional():
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(10, 5)(tokens)
    x = layers.TimeDistributed(layers.LSTM(3))(keras.ops.expand_dims(x, -1))
    inner = keras.Sequential([layers.LSTM(4, return_sequences=True), layers.LSTM(3)])
    return keras.Model(tokens, inner(x))


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(10, 5)
        self.stack = [layers.LSTM(4, return_sequences=True)]
        self.named = {"last": layers.LSTM(3)}

    def call(self, tokens):
        return self.named["last"](self.stack[0](self.embedding(tokens)))


MODELS = {
    "built": lambda: sequential(is_built=True),
    "unbuilt": lambda: sequential(is_built=False),
    "functional": functional,
    "subclassed": Subclassed,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_every_lstm_becomes_ours_and_keras_again(make):
    model = make()
    before = model(TOKENS) if model.built else None
    found = [x for x in model._flatten_layers() if isinstance(x, layers.LSTM)]
    assert len(found) >= 2
    assert accelerate(model) is model
    assert [type(x) for x in found] == [LSTM] * len(found)
    ours = model(TOKENS)
    if before is not None:
        torch.testing.assert_close(ours, before)
    report = fastlstm.explain(model)
    assert [line.backend for line in report] == ["native"] * len(found)
    found[0].strict = True
    assert restore(model) is model
    assert [type(x) for x in found] == [layers.LSTM] * len(found)
    assert "strict" not in vars(found[0])
    torch.testing.assert_close(model(TOKENS), ours)
    assert {line.backend for line in fastlstm.explain(model)} == {"keras"}


def test_layers_left_to_keras_are_named():
    class Mine(layers.LSTM):  # type: ignore[misc]
        pass

    rnn = layers.RNN(layers.LSTMCell(3), return_sequences=True, name="cells")
    model = keras.Sequential(
        [layers.GRU(3, return_sequences=True, name="gru"), rnn, Mine(2, name="mine")]
    )
    with pytest.warns(UserWarning, match="left to Keras") as caught:
        accelerate(model)
    (warning,) = caught
    assert str(warning.message) == (
        "accelerate left to Keras: 'gru' (keras.layers.GRU: the kernels run keras.layers.LSTM"
        " only); 'cells' (keras.layers.RNN: the kernels run keras.layers.LSTM only); 'mine' (Mine:"
        " Mine is a subclass of keras.layers.LSTM, what it computes may be its own)"
    )
    assert [(line.module, line.backend, line.kernel) for line in fastlstm.explain(model)] == [
        ("gru", "keras", "keras.layers.GRU"),
        ("cells", "keras", "keras.layers.RNN"),
        ("mine", "keras", "Mine"),
    ]


def test_a_model_without_an_lstm_is_a_warning():
    with pytest.warns(UserWarning, match=r"accelerate found no keras.layers.LSTM in Sequential"):
        accelerate(keras.Sequential([layers.Dense(2)]))


def test_other_objects_are_refused():
    for convert in (accelerate, restore):
        with pytest.raises(UsageError, match="the model is a Linear, expected a Keras model or"):
            convert(torch.nn.Linear(2, 2))


def test_torchs_accelerate_names_kerass():
    with pytest.warns(UserWarning, match=r"'lstm' \(keras.layers.LSTM: fastlstm.keras.accelerate"):
        fastlstm.accelerate(keras.Sequential([layers.LSTM(3, name="lstm")]))


def test_explain_says_what_keras_computes_and_why():
    model = keras.Sequential(
        [keras.Input((5, 3)), LSTM(4, return_sequences=True), LSTM(4, activation="gelu")]
    )
    first, second = fastlstm.explain(model, T=5, B=2)
    assert first.call is not None
    assert (first.call.I, first.call.H, first.call.T, first.call.B) == (3, 4, 5, 2)
    assert first.backend == "native"
    assert (second.backend, second.kernel, second.is_fast) == ("keras", "keras.layers.LSTM", False)
    assert second.why.startswith("activation gelu is none of")


def test_keras_layers_within_a_torch_module_are_found():
    module = torch.nn.ModuleDict({"a": keras.Sequential([keras.Input((5, 3)), LSTM(4, name="x")])})
    (line,) = fastlstm.explain(module)
    assert line.module == "a.x"
