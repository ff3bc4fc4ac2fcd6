import copy
import itertools
import pickle
from typing import Any

import keras
import numpy as np
import pytest
import torch

from fastlstm.errors import KernelError, ShapeError
from fastlstm.keras import LSTM
from fastlstm.ops import packed_weights
from keras_layers import IGNORED, assert_same, pair, results

pytestmark = [pytest.mark.filterwarnings(IGNORED), pytest.mark.usefixtures("fast_kernels")]

B, T, I, H = 4, 7, 5, 8  # noqa: E741
LENGTHS = np.array([7, 3, 0, 1])[:, None]
RNG = np.random.default_rng(1)
X = RNG.normal(size=(B, T, I)).astype("float32")
STATE = [RNG.normal(size=(B, H)).astype("float32") for _ in range(2)]
HOLES = RNG.random((B, T)) < 0.5
HOLES[2] = False
MASKS = {
    "none": None,
    "all": np.ones((B, T), bool),
    "right-padded": np.arange(T) < LENGTHS,
    "left-padded": np.arange(T) >= T - LENGTHS,
    "holes": HOLES,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("sequences", [False, True])
def test_every_mask_gives_keras_own_results(mask, backwards, sequences):
    options = {"go_backwards": backwards, "return_sequences": sequences}
    for zero_others, state in itertools.product([False, True], [None, STATE]):
        stock, ours = pair(I, H, return_state=True, zero_output_for_mask=zero_others, **options)
        call: dict[str, Any] = {"initial_state": state}
        if mask is not None:
            call["mask"] = torch.from_numpy(mask)
        assert_same(results(ours, X, **call), results(stock, X, **call))


def test_padding_is_never_seen():
    _, ours = pair(I, H, return_sequences=True)
    mask = torch.from_numpy(MASKS["right-padded"])
    spoilt = torch.from_numpy(X).where(mask[:, :, None], torch.tensor(float("nan")))
    want = ours(torch.from_numpy(X), mask=mask)
    torch.testing.assert_close(ours(spoilt, mask=mask), want, atol=0, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"use_bias": False},
        {"unroll": True},
        {"implementation": 1},
        {"activation": "relu", "recurrent_activation": "hard_sigmoid"},
        {"activation": "softsign", "recurrent_activation": "linear"},
        {"activation": None},
    ],
    ids=str,
)
def test_options_give_keras_own_results(options):
    stock, ours = pair(I, H, return_sequences=True, return_state=True, **options)
    assert_same(results(ours, 0.3 * X), results(stock, 0.3 * X))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_integers_are_cast(dropout):
    stock, ours = pair(I, H, dropout=dropout, seed=3)
    numbers = np.arange(B * T * I).reshape(B, T, I) % 3
    want = stock(numbers.astype("float32"), training=True)
    tokens = torch.from_numpy(numbers).to(torch.int32)
    torch.testing.assert_close(ours(tokens, training=True), want)


def test_dropout_draws_what_keras_draws():
    stock, ours = pair(I, H, dropout=0.4, return_sequences=True, seed=5)
    for training in (True, False, True):
        call = {"training": training}
        assert_same(results(ours, X, **call), results(stock, X, **call))


def test_a_dropout_of_everything_is_left_alone_as_by_keras_cell():
    _, ours = pair(I, H, dropout=1.0, recurrent_dropout=1.0)
    torch.testing.assert_close(ours(X, training=True), ours(X))


def test_recurrent_dropout_uses_one_mask_for_all_gates(monkeypatch):
    stock, ours = pair(I, H, dropout=0.3, recurrent_dropout=0.5, return_sequences=True)
    one = {size: (torch.rand(B, size) < 0.6).float() / 0.6 for size in (I, H)}
    monkeypatch.setattr(
        type(stock.cell), "_create_dropout_mask", lambda self, x, rate: [one[x.shape[1]]] * 4
    )
    call = {"training": True}
    assert_same(results(ours, X, **call), results(stock, X, **call))
    assert not torch.equal(ours(X, training=True), ours(X))


def test_a_stateful_layer_continues_from_its_state():
    stock, ours = (keras.layers.LSTM(H, stateful=True), LSTM(H, stateful=True))
    for layer in (stock, ours):
        layer.build((B, T, I))
    ours.set_weights(stock.get_weights())
    for _ in range(3):  # ours with gradients; Keras' own fails at those of a stateful layer
        torch.testing.assert_close(results(ours, X)[0], stock(X))
    assert_same([s.value for s in ours.states], [s.value for s in stock.states])
    ours.reset_state()
    assert not ours.states[0].value.any()


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_bfloat16", 0.05), ("mixed_float16", 5e-3), ("bfloat16", 0.05)]
)
def test_low_precision(policy, tolerance):
    exact, _ = pair(I, H, return_sequences=True, return_state=True)
    ours = LSTM(
        H,
        return_sequences=True,
        return_state=True,
        dtype=policy,
        recurrent_initializer="glorot_uniform",  # torch has no orthogonal one in bfloat16
    )
    ours.build((None, None, I))
    ours.set_weights([w.value.detach().numpy() for w in exact.weights])
    ours.strict = True
    found, want = results(ours, X), results(exact, X)
    dtype = getattr(torch, ours.compute_dtype)
    assert {t.dtype for t in found[:3]} == {dtype}
    assert found[-1].dtype == getattr(torch, ours.variable_dtype)
    assert_same([t.float() for t in found], want, tolerance)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_weights_are_laid_out_once(mode, monkeypatch):
    stock, ours = pair(I, H)
    laid_out = []
    own = packed_weights._pack
    monkeypatch.setattr(
        packed_weights, "_pack", lambda *args: (laid_out.append(1), own(*args))[1]
    )  # fmt: skip
    for times in (1, 2):
        with mode():
            for _ in range(3):
                torch.testing.assert_close(ours(X), stock(X), atol=1e-5, rtol=1e-5)
        assert len(laid_out) == times
        for layer in (stock, ours):
            layer.cell.kernel.assign(layer.cell.kernel * 2)
    with mode():
        for layer in (stock, ours):
            layer.cell.bias.value.mul_(-1)
        torch.testing.assert_close(ours(X), stock(X), atol=1e-5, rtol=1e-5)


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        stock, ours = pair(I, H)
        for layer in (stock, ours):
            layer(X)
            layer.cell.kernel.value.view(-1)[3] += 1
        torch.testing.assert_close(ours(X), stock(X), atol=1e-5, rtol=1e-5)


def test_another_layout_of_the_same_memory_is_seen():
    stock, ours = pair(4 * H, H)  # the kernel is square
    x = torch.randn(B, T, 4 * H)
    with torch.no_grad():
        ours(x)
        for layer in (stock, ours):
            layer.cell.kernel.value.data = layer.cell.kernel.value.data.t()
        torch.testing.assert_close(ours(x), stock(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("x", "call", "text"),
    [
        (
            X[:, :, 1:],
            {},
            r"the layer 'lstm\w*' got an input of shape .*, expected \(batch, timesteps, ",
        ),
        (X, {"mask": np.ones((B, T - 1), bool)}, r"mask has shape .*, expected"),
        (X, {"mask": np.ones((B - 1, T), bool)}, r"mask has shape .*, expected"),
        (X, {"initial_state": [np.zeros((B, H - 1), "float32")] * 2}, r"h0 has shape .*, expected"),
        (X, {"initial_state": [np.zeros((B - 1, H), "float32")] * 2}, r"h0 has shape .*, expected"),
    ],
    ids=["width", "short mask", "mask of fewer", "narrow state", "state of fewer"],
)
def test_shapes_that_do_not_fit_are_refused(x, call, text):
    _, ours = pair(I, H)
    with pytest.raises(ShapeError, match=text):
        ours(x, **call)


def test_one_state_or_mask_for_all_sequences():
    stock, ours = pair(I, H)
    state = [np.full((1, H), value, "float32") for value in (0.3, -0.6)]
    mask = (np.arange(T) < T - 2)[None]
    for call in ({"initial_state": state}, {"mask": mask}):
        assert_same(results(ours, X, **call), results(stock, X, **call))


def test_arrays_of_stateless_calls():
    stock, ours = pair(I, H)
    groups = stock.trainable_variables, stock.non_trainable_variables
    values = [[v.value for v in group] for group in groups]
    call = {"initial_state": [np.zeros((B, H), "float32")] * 2}
    outputs = [layer.stateless_call(*values, X, **call)[0] for layer in (ours, stock)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


def swish(x):
    return x * keras.ops.sigmoid(x)


def test_a_users_activation_runs_keras_loop_with_one_warning():
    stock, ours = pair(I, H, activation=swish, return_sequences=True)
    ours.strict = False
    with pytest.warns(UserWarning, match="Keras' own loop") as caught:
        found = results(ours, X)
    assert_same(found, results(stock, X))
    results(ours, X)
    want = (
        f"LSTM '{ours.name}' is computed by Keras' own loop: activation swish is none of sigmoid,"
        " tanh, hard_sigmoid, relu, softsign, linear"
    )
    assert [str(w.message) for w in caught] == [want]
    ours.strict = True
    with pytest.raises(KernelError, match=r"activation swish is none of .*; change that or leave"):
        ours(X)


def test_float64_runs_keras_loop():
    ours = LSTM(H, dtype="float64")
    with pytest.warns(UserWarning, match="Keras' own loop: native: these kernels compute in"):
        assert ours(X.astype("float64")).dtype == torch.float64


def test_copies_and_pickles_are_the_same_layer():
    _, ours = pair(I, H, recurrent_activation="hard_sigmoid")
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(twin) is LSTM
        assert torch.equal(twin(X), ours(X))


def test_frozen_weights_get_no_gradient():
    _, ours = pair(I, H)
    ours.trainable = False
    x = torch.from_numpy(X).requires_grad_()
    ours(x).sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    assert all(w.value.grad is None for w in ours.weights)
