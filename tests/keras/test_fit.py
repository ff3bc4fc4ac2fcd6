import keras
import numpy as np
import pytest
from keras import layers

from fastlstm.keras import LSTM, accelerate
from keras_layers import IGNORED

pytestmark = [pytest.mark.filterwarnings(IGNORED), pytest.mark.usefixtures("fast_kernels")]

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, 10, (32, 6)).astype("int32")
TOKENS[::3, 4:] = 0
TARGETS = RNG.integers(0, 10, (32, 6)).astype("int32")


def model_of():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(10, 5, mask_zero=True),
            layers.LSTM(
                8,
                return_sequences=True,
                dropout=0.2,
                kernel_regularizer="l2",
                recurrent_constraint="max_norm",
                activity_regularizer="l2",
                seed=1,
            ),
            layers.Bidirectional(layers.LSTM(8, return_sequences=True)),
            layers.Dense(10),
        ]
    )


def losses(model, **compile):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.01, clipnorm=1.0), loss=loss, **compile)
    history = model.fit(TOKENS, TARGETS, batch_size=16, epochs=4, shuffle=False, verbose=0)
    found: list[float] = history.history["loss"]
    return found


def test_fit_has_the_losses_of_stock_keras():
    stock, ours = model_of(), accelerate(model_of())
    for layer in ours._flatten_layers():
        if isinstance(layer, LSTM):
            layer.strict = True
    want, found = losses(stock), losses(ours)
    assert found == pytest.approx(want, rel=1e-5)
    assert found[-1] < found[0]
    predicted = stock.predict(TOKENS, verbose=0)
    np.testing.assert_allclose(ours.predict(TOKENS, verbose=0), predicted, atol=1e-4)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_fit_in_mixed_precision(policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        found = losses(accelerate(model_of()))
    finally:
        keras.config.set_dtype_policy(before)
    assert found == pytest.approx(losses(model_of()), rel=0.05)
    assert found[-1] < found[0]


def test_a_stateful_model_trains():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input(batch_shape=(16, 6, 2)), LSTM(8, stateful=True), layers.Dense(1)]
    )
    model.layers[0].strict = True
    model.compile(optimizer="adam", loss="mse")
    x, y = RNG.normal(size=(32, 6, 2)), RNG.normal(size=(32, 1))
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
