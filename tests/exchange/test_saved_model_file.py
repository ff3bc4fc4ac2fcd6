"""SavedModels come in without TensorFlow, which the tests do without, too."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastlstm
from fastlstm.errors import FormatError
from fastlstm.exchange.checksum import crc32c
from fastlstm.exchange.tensorflow_graph import Node, Scope
from keras_models import keras, outputs, varied
from saved_models import OBJECT_GRAPH, bundle, entry, field, index, write_saved_model

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
KERAS_3 = Path(__file__).with_name("keras3_saved_model.zip")
"""Bidirectional(LSTM(2, hard_sigmoid), sum), LayerNormalization, LSTM(3, backwards, no bias) and
Dense(2, softmax), written by `model.export` of Keras 3.15 with TensorFlow 2.21."""
KERAS_3_ANSWER = [
    [0.45949026942253113, 0.5405097007751465],
    [0.46240317821502686, 0.5375968217849731],
]
SHARD = "variables/variables.data-00000-of-00001"
TOKENS = np.random.default_rng(0).integers(0, 9, (3, 7))


def lstm_config(name: str, units: int) -> dict[str, Any]:
    config = {"name": name, "units": units, "return_sequences": True, "activation": "tanh"}
    return {"class_name": "LSTM", "config": {**config, "recurrent_activation": "sigmoid"}}


def cell(arrays: list[np.ndarray]) -> dict[str, Any]:
    return {"cell": dict(zip(("kernel", "recurrent_kernel", "bias"), arrays, strict=True))}


def parts(dense: int = 9) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, str]]:
    """Returns a model of Keras, and what Keras 2 would write: objects, description, layers."""
    layers = keras.layers
    both = layers.Bidirectional(layers.LSTM(3, return_sequences=True))
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.Embedding(9, 4),
            layers.LSTM(5, return_sequences=True),
            both,
            layers.TimeDistributed(layers.Dense(dense, activation="softmax")),
        ]
    )
    w = varied(model).get_weights()
    ways = {"forward_layer": cell(w[4:7]), "backward_layer": cell(w[7:10])}
    inner = {"layer": {"kernel": w[10], "bias": w[11]}}
    tree = {f"layer-{k}": item for k, item in enumerate(
        [{"embeddings": w[0]}, cell(w[1:4]), ways, inner])}  # fmt: skip
    embedding = {"name": "e", "input_dim": 9, "output_dim": 4}
    shape = {"class_name": "__tuple__", "items": [None, 7]}
    output = {"name": "d", "units": dense, "activation": "softmax"}
    config = [
        {"class_name": "InputLayer", "config": {"name": "i", "batch_input_shape": shape}},
        {"class_name": "Embedding", "config": embedding},
        lstm_config("l", 5),
        {"class_name": "Bidirectional", "config": {"name": "b", "layer": lstm_config("x", 3)}},
        {"class_name": "TimeDistributed", "config": {
            "name": "t", "layer": {"class_name": "Dense", "config": output}}},
    ]  # fmt: skip
    described = {
        "class_name": "Sequential",
        "keras_version": "2.15.0",
        "config": {"layers": config},
    }
    return model, tree, described, {f"root.layer-{k}": name for k, name in enumerate("elbt")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of Keras and the same as a SavedModel."""
    model, *written = parts()
    return model, write_saved_model(tmp_path_factory.mktemp("saved") / "m", *written)


@pytest.fixture
def copied(saved: tuple[Any, Path], tmp_path: Path) -> Path:
    """A SavedModel to be damaged."""
    for path in saved[1].rglob("*"):
        if path.is_file():
            target = tmp_path / "m" / path.relative_to(saved[1])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "m"


def refused(path: Path, said: str) -> None:
    with pytest.raises(FormatError, match=said) as error:
        fastlstm.import_module(path)
    assert "\n" not in str(error.value)


def test_checksum() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    data = np.random.default_rng(0).bytes(5003)  # in lanes, and what is left of them
    state = 0xFFFF_FFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    assert crc32c(data) == state ^ 0xFFFF_FFFF
    assert crc32c(data[1700:], crc32c(data[:1700])) == crc32c(data)


def test_keras_2(saved: tuple[Any, Path]) -> None:
    model, path = saved
    module = fastlstm.import_module(path)
    assert module.made_by == "Keras 2.15.0"
    got = module(torch.from_numpy(TOKENS)).detach().softmax(-1)
    np.testing.assert_allclose(got.numpy(), outputs(model, TOKENS), atol=1e-6)


def test_text_run(tmp_path: Path) -> None:
    _, tree, described, layers = parts()
    del tree["layer-2"], described["config"]["layers"][3], layers["root.layer-2"]
    tree["layer-3"]["layer"]["kernel"] = np.full((5, 9), 0.5, np.float16)
    path = write_saved_model(tmp_path / "m", tree, described, layers)
    run = fastlstm.import_run(path, out=tmp_path / "run", chars="abcdefgh ")
    assert run.kind == "text"
    assert len(fastlstm.LM.load(run).generate("a bad ", 5)) == 5


def unpacked(folder: Path, stored: Path = KERAS_3) -> Path:
    with zipfile.ZipFile(stored) as archive:
        archive.extractall(folder)
    return folder


def test_a_dense_layer_of_its_own_that_reverses_the_steps(tmp_path: Path) -> None:
    own = KERAS_3.with_name("keras3_layer_of_its_own.zip")  # super().call(x[:, ::-1])
    refused(unpacked(tmp_path, own), "'rev_dense' has .*1 StridedSlice")


def test_a_scope_tells_what_moves_values_from_what_moves_sizes() -> None:
    nodes = [
        Node("a/d/Shape", "Shape", ("before",)), Node("a/d/size", "StridedSlice", ("a/d/Shape:0",)),
        Node("a/d/part", "StridedSlice", ("before:0", "a/d/begin")),
        Node("a/d/Reshape", "Reshape", ("a/d/part", "a/d/size")),
    ]  # fmt: skip
    scope = Scope("a/d", nodes, reads={"before"})
    assert scope.moves() == {"StridedSlice": 1, "Reshape": 1}


def test_keras_3(tmp_path: Path) -> None:
    module = fastlstm.import_module(unpacked(tmp_path))
    x = torch.linspace(-2, 2, 2 * 7 * 3).reshape(2, 7, 3)
    np.testing.assert_allclose(module(x).detach().softmax(-1), KERAS_3_ANSWER, atol=1e-6)
    assert "read from the operations of its graph" in module.notes[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"Relu6", b"Relu7", "'forward_lstm' has .*3 Relu7"),
        (b"Softmax", b"Softmin", "'dense' has .*1 Softmin"),
        (b"SquaredDifference", b"SquaredSomething!", "'layer_normalization' has"),
        (b"ReverseV2", b"ReverseV3", "'backward_lstm' has .*ReverseV3"),
        (b"serving_default", b"serving_another", "0 outputs in its signature"),
        (b"sequential_1/dense_1/BiasAdd:", b"sequential_1/lstm_1_1/while:", "output by 1 While"),
        (b":\n" + b"\xff" * 9 + b"\1", b":\n\x81" + b"\x80" * 8 + b"\0", "an axis that is not"),
        (np.float32(6).tobytes(), np.float32(7).tobytes(), "hard_sigmoid of other numbers"),
    ],
)
def test_graphs_that_compute_something_else(
    old: bytes, new: bytes, said: str, tmp_path: Path
) -> None:
    path = unpacked(tmp_path) / "saved_model.pb"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new[: len(old)].ljust(len(old), b"_")))
    refused(tmp_path, said)


def test_other_directories(tmp_path: Path) -> None:
    refused(tmp_path, "a directory without saved_model.pb")
    weights = {"layers_0_weight_ih_l0": np.zeros((8, 2), np.float32)}
    path = write_saved_model(tmp_path / "m", {"weights": weights}, {}, {})
    refused(path, "exported by fastlstm; import is not needed")


@pytest.mark.parametrize(
    "name", ["saved_model.pb", "keras_metadata.pb", "variables/variables.index", SHARD]
)
def test_links_are_not_followed(name: str, copied: Path, tmp_path: Path) -> None:
    path = copied / name
    (tmp_path / "elsewhere").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    if name == "saved_model.pb":  # not read where the layers are described
        (copied / "keras_metadata.pb").unlink()
    refused(copied, "symbolic link")


def test_cut_and_changed_files(copied: Path) -> None:
    for path in sorted(p for p in copied.rglob("*") if p.is_file() and p.name != "saved_model.pb"):
        data = path.read_bytes()
        for size in (0, 7, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:size])
            refused(copied, "m")
        if path.parent != copied:
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
            refused(copied, "checksum")
        path.unlink()
        if path.name != "keras_metadata.pb":
            refused(copied, "cannot be read")
        path.write_bytes(data)


FIRST = "model/layer-0/embeddings/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.mark.parametrize(
    ("content", "changed", "said"),
    [
        (None, entry(bytes(10**6), (9, 4), 1, 0, 0), "claims more than its file"),
        (None, entry(bytes(144), (9, 4), 1, 1 << 62, 0), "claims more than its file"),
        (None, entry(bytes(144), (9, 1 << 40), 1, 0, 0), "144 bytes for the shape"),
        (None, entry(bytes(144), (9, 4), 3, 0, 0), "no array of floats"),
        (None, entry(bytes(144), (9, 4), 1, 0, 0), "another checksum"),
        (None, field(1, 1) + field(3, 5), "part 5 of 1"),
        (index({OBJECT_GRAPH: b""}, num_shards=1 << 40), b"", "parts"),
        (index({}, kind=1), b"", "compressed with Snappy"),
        (index({}), b"", "lacks _CHECKPOINTABLE_OBJECT_GRAPH"),
        (b"\0" * 100, b"", "no table"),
    ],
    ids=["size", "offset", "shape", "dtype", "checksum", "shard", "shards", "snappy", "graph", "x"],
)
def test_an_index_that_claims_what_is_not_there(
    content: bytes | None, changed: bytes, said: str, copied: Path
) -> None:
    if content is None:
        content = index({**bundle(parts()[1])[0], FIRST: changed})
    (copied / "variables/variables.index").write_bytes(content)
    refused(copied, f"m is damaged: .*{said}")


def test_weights_that_the_description_does_not_fit(tmp_path: Path) -> None:
    _, tree, described, layers = parts()
    described["config"]["layers"][2] = lstm_config("l", 6)
    refused(write_saved_model(tmp_path / "a", tree, described, layers), "has the shape")
    described["config"]["layers"][2] = {"class_name": "Lambda", "config": {"name": "l"}}
    refused(write_saved_model(tmp_path / "b", tree, described, layers), "Lambda, which cannot")
