import io
import json

import h5py
import numpy as np
import pytest
import torch

import fastlstm
from fastlstm.errors import FormatError
from fastlstm.exchange.import_run import read_layer_stack
from keras_models import archive, keras, outputs, parts_of, saved, sequential, varied

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("converts_here"),
]
layers = keras.layers
RNG = np.random.default_rng(1)
TOKENS = RNG.integers(0, 17, (3, 11))
VALUES = RNG.standard_normal((3, 11, 5)).astype(np.float32)


def assert_same(path, x, expected):
    module = fastlstm.import_module(path)
    got = module(torch.from_numpy(x)).detach()
    got = got.softmax(-1) if module.returns_logits else got
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5, rtol=0)
    return module


def text_model():
    return sequential(
        (None,),
        layers.Embedding(17, 8),
        layers.LSTM(12, return_sequences=True, dropout=0.1),
        layers.Dropout(0.2),
        layers.LSTM(7, return_sequences=True, use_bias=False),
        layers.TimeDistributed(layers.Dense(17, activation="softmax")),
    )


def both_ways():
    return sequential(
        (11, 5),
        layers.Bidirectional(layers.LSTM(6, return_sequences=True)),
        layers.SpatialDropout1D(0.2),
        layers.Bidirectional(layers.LSTM(7, return_sequences=True), merge_mode="ave"),
        layers.LayerNormalization(),
        layers.Bidirectional(layers.LSTM(4), merge_mode="mul"),
        layers.Dense(3, activation="relu"),
        layers.Dense(1),
    )


def backwards():
    return sequential(
        (11, 5),
        layers.LSTM(6, return_sequences=True, go_backwards=True),
        layers.Bidirectional(layers.LSTM(3, return_sequences=True), merge_mode="sum"),
        layers.LSTM(
            4, recurrent_activation="hard_sigmoid", activation="softsign", go_backwards=True
        ),
        layers.Activation("elu"),
        layers.Softmax(),
    )


def graph():
    x = keras.Input((None, 5))
    h, _, _ = layers.LSTM(6, return_sequences=True, return_state=True)(x)
    inner = sequential((None, 6), layers.LSTM(4), layers.Dense(3))
    return keras.Model(x, layers.Dense(2, activation="sigmoid")(inner(h)))


def encoder_and_decoder():
    source, target = keras.Input((None, 5)), keras.Input((None, 3))
    _, *state = layers.LSTM(6, return_state=True)(source)
    y = layers.LSTM(6, return_sequences=True)(target, initial_state=state)
    return keras.Model([source, target], layers.Dense(3)(y))


def encoder_and_decoder_of_one_input():
    x = keras.Input((11, 5))
    y, *state = layers.LSTM(6, return_state=True)(x)
    z = layers.LSTM(6, return_sequences=True)(layers.RepeatVector(4)(y), initial_state=state)
    return keras.Model(x, layers.Dense(3)(z))


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.parametrize(
    ("build", "why"),
    [
        (encoder_and_decoder, "the model has 2 inputs, expected one"),
        (encoder_and_decoder_of_one_input, "reads lstm"),
    ],
)
def test_an_encoder_with_a_decoder_is_refused_in_one_line(build, why, suffix, tmp_path):
    path = saved(build(), tmp_path / f"m{suffix}")
    with pytest.raises(FormatError) as refused:
        fastlstm.import_run(path, out=tmp_path / "run")
    said = str(refused.value)
    assert why in said
    assert "layers in one path are imported" in said
    assert said.endswith("`fastlstm.keras.accelerate(model)` runs its LSTM layers in Keras")
    assert "\n" not in said


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
@pytest.mark.parametrize(
    ("build", "x"),
    [(text_model, TOKENS), (both_ways, VALUES), (backwards, VALUES), (graph, VALUES)],
)
def test_module_computes_what_keras_does(build, x, suffix, tmp_path):
    model = varied(build())
    assert_same(saved(model, tmp_path / f"m{suffix}"), x, outputs(model, x))


def test_stateful_layers_have_states_that_are_no_weights(tmp_path):
    model = varied(
        keras.Sequential(
            [keras.Input((11, 5), batch_size=3), layers.LSTM(6, stateful=True), layers.Dense(2)]
        )
    )
    for suffix in (".keras", ".h5"):
        model.layers[0].reset_state()
        path = saved(model, tmp_path / f"m{suffix}")
        module = assert_same(path, VALUES, outputs(model, VALUES))
        assert "stateful" in module.notes[0]


def test_token_zero_of_a_masking_embedding_is_refused(tmp_path):
    model = varied(
        sequential(
            (None,), layers.Embedding(17, 8, mask_zero=True), layers.LSTM(5, return_sequences=True)
        )
    )
    path = saved(model, tmp_path / "m.keras")
    module = assert_same(path, 1 + TOKENS % 16, outputs(model, 1 + TOKENS % 16))
    with pytest.raises(fastlstm.ShapeError, match="mask_zero"):
        module(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(fastlstm.ShapeError, match="`lengths` is for a model that answers once"):
        module(torch.ones(2, 3, dtype=torch.long), lengths=torch.tensor([3, 2]))


def test_token_zero_of_a_masking_embedding_is_left_out_of_one_answer(tmp_path):
    x = 1 + TOKENS % 16
    x[0, 4:], x[1, :2], x[2] = 0, 0, 0
    for ends in (
        [layers.LSTM(5), layers.Dense(2)],
        [layers.Bidirectional(layers.LSTM(4, return_sequences=True)), layers.LSTM(3)],
        [layers.LSTM(5, return_sequences=True), layers.GlobalAveragePooling1D()],
    ):
        table = layers.Embedding(17, 8, mask_zero=True)
        model = sequential((None,), table, *ends)
        path = saved(varied(model), tmp_path / "m.keras")
        if isinstance(ends[-1], layers.GlobalAveragePooling1D):
            assert np.isnan(outputs(model, x)[2]).all()
            with pytest.raises(fastlstm.ShapeError, match="mean of a sequence without steps"):
                fastlstm.import_module(path)(torch.as_tensor(x))
        else:
            assert_same(path, x, outputs(model, x))


# other ages ---------------------------------------------------------------------------------------


def hdf5_file(path, config, arrays, version=None):
    """Writes a model as Keras wrote it: arrays by layer, in order."""
    with h5py.File(path, "w") as file:
        file.attrs["model_config"] = json.dumps(config).encode()
        if version is not None:
            file.attrs["keras_version"] = version.encode()
        root = file.create_group("model_weights")
        root.attrs["layer_names"] = [name.encode() for name in arrays]
        for name, values in arrays.items():
            group = root.create_group(name)
            names = [f"{name}_W{k}" for k in range(len(values))]
            group.attrs["weight_names"] = [n.encode() for n in names]
            for weight, value in zip(names, values, strict=True):
                group[weight] = value
    return path


def lstm_arrays(cell):
    """Returns kernel, recurrent kernel and bias of a Keras 3 layer, each as four gates i f c o."""
    return [np.split(np.asarray(w), 4, axis=-1) for w in cell.get_weights()]


def old_hard_sigmoid(x):
    return keras.ops.clip(0.2 * x + 0.5, 0.0, 1.0)


def reference(**options):
    model = sequential(
        (11, 5),
        layers.LSTM(6, return_sequences=True, **options),
        layers.Dense(4, activation=old_hard_sigmoid),
    )
    return varied(model)


def test_keras_1_with_twelve_arrays_and_its_hard_sigmoid(tmp_path):
    model = reference(recurrent_activation=old_hard_sigmoid)
    W, U, b = lstm_arrays(model.layers[0])
    ifco = [[W[k], U[k], b[k]] for k in range(4)]
    icfo = [array for k in (0, 2, 1, 3) for array in ifco[k]]
    config = {
        "class_name": "Sequential",
        "config": [
            {
                "class_name": "LSTM",
                "config": {
                    "name": "lstm_1", "output_dim": 6, "input_dim": 5, "init": "glorot_uniform",
                    "batch_input_shape": [None, 11, 5], "return_sequences": True,
                    "inner_activation": "hard_sigmoid", "activation": "tanh", "dropout_U": 0.0,
                    "consume_less": "cpu", "go_backwards": False, "stateful": False,
                },
            },
            {
                "class_name": "TimeDistributedDense",
                "config": {"name": "d", "output_dim": 4, "activation": "hard_sigmoid"},
            },
        ],
    }  # fmt: skip
    arrays = {"lstm_1": icfo, "d": model.layers[1].get_weights()}
    path = hdf5_file(tmp_path / "old.h5", config, arrays)
    module = assert_same(path, VALUES, outputs(model, VALUES))
    assert module.made_by == "Keras 1"
    assert read_layer_stack(path).window == 11
    # the same file as Keras 3 would read it is another model
    newer = hdf5_file(tmp_path / "new.h5", config, arrays, "3.5.0")
    other = fastlstm.import_module(newer)(torch.from_numpy(VALUES)).detach().numpy()
    assert np.abs(other - outputs(model, VALUES)).max() > 1e-3


def keras_2_lstm(kind, **config):
    own = {"name": "l", "units": 6, "batch_input_shape": [None, 11, 5], "return_sequences": True}
    dense = {"name": "d", "units": 4, "activation": "hard_sigmoid", "use_bias": True}
    described = [(kind, {**own, **config}), ("Dense", dense)]
    listed = [{"class_name": name, "config": values} for name, values in described]
    return {"class_name": "Sequential", "config": {"name": "s", "layers": listed}}


def test_cudnn_layout(tmp_path):
    model = reference()
    W, U, b = lstm_arrays(model.layers[0])
    # of every gate cuDNN stores the (H, I) matrix in the memory that Keras calls (I, H)
    kernel = np.hstack([gate.T.reshape(gate.shape) for gate in W])
    recurrent = np.hstack([gate.T for gate in U])
    parts = RNG.standard_normal((2, 24)).astype(np.float32)
    parts[1] = np.concatenate(b) - parts[0]
    arrays = {"l": [kernel, recurrent, parts.reshape(-1)], "d": model.layers[1].get_weights()}
    path = hdf5_file(tmp_path / "m.h5", keras_2_lstm("CuDNNLSTM"), arrays, "2.2.4")
    assert_same(path, VALUES, outputs(model, VALUES))


def test_keras_2_keys_that_stop_keras_3(tmp_path):
    model = reference(recurrent_activation=old_hard_sigmoid)
    config = keras_2_lstm(
        "LSTM", time_major=True, implementation=2, recurrent_activation="hard_sigmoid"
    )
    arrays = {layer: m.get_weights() for layer, m in zip("ld", model.layers, strict=True)}
    path = hdf5_file(tmp_path / "m.h5", config, arrays, "2.4.0")
    x = np.ascontiguousarray(VALUES.transpose(1, 0, 2))
    assert_same(path, x, outputs(model, VALUES).transpose(1, 0, 2))


def test_names_of_layers_do_not_say_which_weights_are_theirs(tmp_path):
    model = sequential(
        (11, 5), layers.LSTM(5, name="lstm_1", return_sequences=True), layers.LSTM(5, name="lstm")
    )
    assert_same(saved(varied(model), tmp_path / "m.keras"), VALUES, outputs(model, VALUES))


def test_root_of_keras_2_12(tmp_path):
    model = varied(both_ways())
    path = saved(model, tmp_path / "m.keras")
    parts, target = parts_of(path), io.BytesIO()
    with h5py.File(io.BytesIO(parts["model.weights.h5"])) as old, h5py.File(target, "w") as new:
        old.copy("layers", new, "_layer_checkpoint_dependencies")
    path.write_bytes(archive({**parts, "model.weights.h5": target.getvalue()}))
    assert_same(path, VALUES, outputs(model, VALUES))


# what is refused ----------------------------------------------------------------------------------


class OwnLSTM(keras.layers.LSTM):
    pass


def refusals():
    x = keras.Input((None, 5))
    h = layers.LSTM(5, return_sequences=True)(x)
    yield keras.Model(x, layers.Add()([x, h])), r"'add\w*' reads input_layer"
    y = keras.Input((None, 5))
    yield keras.Model([x, y], layers.LSTM(5)(x)), "m.keras: the model has 2 inputs, expected one"
    always = layers.Dropout(0.5)(layers.LSTM(5)(x), training=True)
    yield keras.Model(x, layers.Dense(2)(always)), r"'dropout\w*' is called with training=True"
    flat = layers.Reshape((2, 5))
    for ends, said in (
        ([layers.LSTM(10), flat], r"'reshape\w*' is a Reshape to \[2, 5\]"),
        ([layers.LSTM(3), layers.Dense(10), flat, layers.Dense(2)], "behind a Reshape"),
        ([layers.Dense(10), flat], "a layer that writes every step"),
    ):
        yield sequential((1, 5), *ends), said
    for layer, said in (
        (layers.GRU(4), r"m.keras: the layer 'gru\w*' is a GRU, .*fastlstm.keras.accelerate"),
        (layers.Lambda(lambda v: 2 * v), r"'lambda\w*' is a Lambda"),
        (OwnLSTM(4), r"'own_lstm\w*' is of a class of its own"),
        (layers.LSTM(4, activation=old_hard_sigmoid), "old_hard_sigmoid"),
        (layers.LSTM(4, activation="gelu"), "is gelu"),
        (layers.Dense(4, activation="leaky_relu"), "is leaky_relu"),
        (layers.Bidirectional(layers.GRU(4)), "wraps a GRU"),
        (layers.TimeDistributed(layers.Conv1D(2, 1)), "a Conv1D to every step"),
        (layers.Masking(), "is a Masking"),
    ):
        first = (None, None, 5) if "Conv1D" in said else (None, 5)
        yield keras.Sequential([keras.Input(first), layer]), said


@pytest.mark.parametrize(("model", "said"), list(refusals()))
def test_layers_that_cannot_be_imported_are_named(model, said, tmp_path):
    path = saved(model, tmp_path / "m.keras")
    with pytest.raises(FormatError, match=said) as error:
        fastlstm.import_module(path)
    assert "\n" not in str(error.value)


def test_dropout_of_keras_2_that_is_always_active_is_refused(tmp_path):
    """Its nodes hold the arguments of a call beside the name of what is read."""
    x = keras.Input((None, 5))
    model = keras.Model(x, layers.Dropout(0.5, name="drops")(layers.LSTM(4, name="lstm")(x)))
    path = saved(model, tmp_path / "m.keras")
    parts = parts_of(path)
    config = json.loads(parts["config.json"])
    last = config["config"]["layers"][-1]
    last["inbound_nodes"] = [[["lstm", 0, 0, {"training": True}]]]
    path.write_bytes(archive({**parts, "config.json": json.dumps(config)}))
    with pytest.raises(FormatError, match="'drops' is called with training=True"):
        fastlstm.import_module(path)
    last["inbound_nodes"] = [[["lstm", 0, 0, {"training": False}]]]
    path.write_bytes(archive({**parts, "config.json": json.dumps(config)}))
    fastlstm.import_module(path)


def test_lambda_code_is_never_loaded(tmp_path, monkeypatch):
    import marshal

    path = saved(sequential((None, 5), layers.Lambda(lambda v: v)), tmp_path / "m.h5")
    monkeypatch.setattr(marshal, "loads", lambda *_: pytest.fail("code of the file was loaded"))
    with pytest.raises(FormatError, match="Lambda"):
        fastlstm.import_module(path)


def test_weights_of_another_size_are_named(tmp_path):
    model = reference()
    arrays = {layer: m.get_weights() for layer, m in zip("ld", model.layers, strict=True)}
    config = keras_2_lstm("LSTM", units=7)
    path = hdf5_file(tmp_path / "m.h5", config, arrays, "2.4.0")
    with pytest.raises(FormatError, match=r"kernel of the layer 'l' \(LSTM\) has the shape \(5"):
        fastlstm.import_module(path)
    arrays["l"].append(arrays["l"][-1])
    path = hdf5_file(tmp_path / "n.h5", keras_2_lstm("LSTM"), arrays, "2.4.0")
    with pytest.raises(FormatError, match="'l' has too many weights"):
        fastlstm.import_module(path)


def test_weights_without_a_model(tmp_path):
    path = tmp_path / "m.weights.h5"
    text_model().save_weights(path)
    with pytest.raises(FormatError, match="weights without a model"):
        fastlstm.import_module(path)


def nested(**second):
    inner = [keras.Input((11, 5)), layers.LSTM(8, return_sequences=True, trainable=False)]
    return sequential((11, 5), keras.Sequential([*inner, layers.LSTM(8, **second)]))


def one_way_frozen():
    model = sequential((11, 5), layers.Bidirectional(layers.LSTM(6)))
    model.layers[0].forward_layer.trainable = False
    return model


@pytest.mark.parametrize("build", [nested, one_way_frozen])
def test_layers_that_are_partly_frozen_change_the_order_in_h5(build, tmp_path):
    model = varied(build())
    with pytest.raises(FormatError, match="is frozen, which changes the order"):
        fastlstm.import_module(saved(model, tmp_path / "m.h5"))
    assert_same(saved(model, tmp_path / "m.keras"), VALUES, outputs(model, VALUES))


def test_layers_that_are_all_frozen_are_read_from_h5(tmp_path):
    model = varied(nested(trainable=False))
    assert_same(saved(model, tmp_path / "m.h5"), VALUES, outputs(model, VALUES))


def test_a_model_of_a_softmax_alone_is_refused(tmp_path):
    model = sequential((8,), layers.Activation("softmax"))
    with pytest.raises(FormatError, match="no layer but a softmax"):
        fastlstm.import_module(saved(model, tmp_path / "m.keras"))


def test_arrays_that_two_layers_name_are_refused(tmp_path):
    model = sequential((11, 5), layers.LSTM(5, return_sequences=True))
    path = saved(model, tmp_path / "m.h5")
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        config["config"]["layers"].append(config["config"]["layers"][-1])
        file.attrs["model_config"] = json.dumps(config)
    with pytest.raises(FormatError, match="belongs to two layers"):
        fastlstm.import_module(path)


def test_numbers_without_bound_are_refused(tmp_path):
    model = sequential((11, 5), layers.LSTM(5), layers.Dropout(0.5))
    path = saved(model, tmp_path / "m.h5")
    with h5py.File(path, "r+") as file:
        text = file.attrs["model_config"].replace('"rate": 0.5', '"rate": 1' + 400 * "0")
        file.attrs["model_config"] = text
        file.attrs["keras_version"] = "9" * 5000
    with pytest.raises(FormatError, match="too large a number"):
        fastlstm.import_module(path)
