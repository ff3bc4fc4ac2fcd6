import io
import json
import os
import pickle
import struct
import zipfile

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch

import fastlstm
from fastlstm.errors import FormatError, MissingExtraError
from keras_models import archive, keras, parts_of, saved

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
    """One model in every format."""
    folder = tmp_path_factory.mktemp("models")
    layers = keras.layers
    model = keras.Sequential([keras.Input((9, 3)), layers.LSTM(4), layers.Dense(2)])
    saved(model, folder / "m.keras")
    saved(model, folder / "m.h5")
    state = torch.nn.LSTM(3, 4).state_dict()
    torch.save(state, folder / "m.pt")
    safetensors.torch.save_file(state, folder / "m.safetensors")
    return folder


def refused(data, path, said):
    path.write_bytes(data)
    with pytest.raises(FormatError, match=said) as error:
        fastlstm.import_module(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["m.keras", "m.h5", "m.pt", "m.safetensors"])
def test_cut_files(name, model_files, tmp_path):
    data = (model_files / name).read_bytes()
    for size in (0, 7, 100, len(data) // 2, len(data) - 1):
        refused(data[:size], tmp_path / name, "m\\.")


def test_other_files(tmp_path):
    refused(b"text", tmp_path / "m.keras", "no model that can be imported")
    refused(pickle.dumps([1]), tmp_path / "m.pt", "no model that can be imported")
    with pytest.raises(FormatError, match=r"n\.keras: no such file \(did you mean 'm\.keras'\?\)"):
        fastlstm.import_module(tmp_path / "n.keras")
    with pytest.raises(FormatError, match=r"is a directory; expected a file: \.keras"):
        fastlstm.import_module(tmp_path)
    (tmp_path / "saved_model.pb").write_bytes(b"")
    with pytest.raises(FormatError, match=r"SavedModel .* model\.save\('model\.keras'\)"):
        fastlstm.import_module(tmp_path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "C:\\x", "..\\x"])
def test_paths_out_of_an_archive(name, model_files, tmp_path):
    parts = parts_of(model_files / "m.keras")
    refused(archive({**parts, name: b"x"}), tmp_path / "m.keras", "is not read")


def test_archives_that_unpack_to_much_more(model_files, tmp_path):
    parts = parts_of(model_files / "m.keras")
    for name in ("model.weights.h5", "config.json"):
        bomb = archive({**parts, name: bytes(64 << 20)}, zipfile.ZIP_DEFLATED)
        assert len(bomb) < 1 << 20
        refused(bomb, tmp_path / "m.keras", rf"{name} claims more bytes")
    tensors = parts_of(model_files / "m.pt")
    refused(archive(tensors, zipfile.ZIP_DEFLATED), tmp_path / "m.pt", "compressed")


def test_archives_without_a_part(model_files, tmp_path):
    parts = parts_of(model_files / "m.keras")
    for name in ("metadata.json", "model.weights.h5"):
        left = {other: part for other, part in parts.items() if other != name}
        refused(archive(left), tmp_path / "m.keras", f"lacks {name}")
    refused(archive({**parts, "config.json": b"[1]"}), tmp_path / "m.keras", "no JSON object")
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    refused(archive({**parts, "config.json": deep}), tmp_path / "m.keras", "no JSON")


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles_are_not_run(model_files, tmp_path):
    torch.save({"w": Runs(tmp_path / "made")}, tmp_path / "m.pt")
    with pytest.raises(
        FormatError, match=r"an object of posix.mkdir, which is not unpickled; if you trust it"
    ):
        fastlstm.import_module(tmp_path / "m.pt")
    torch.save(torch.nn.LSTM(3, 4), tmp_path / "whole.pt")
    with pytest.raises(FormatError, match=r"an object of torch\.nn\.modules\.rnn\.LSTM, which is"):
        fastlstm.import_module(tmp_path / "whole.pt")
    assert not (tmp_path / "made").exists()


class Fills:
    """Unpickled, it is 10 GB of zeros, which torch's safe reader allows."""

    def __reduce__(self):
        return bytearray, (10**10,)


def test_pickles_that_fill_memory(tmp_path):
    torch.save({"w": torch.zeros(2), "more": Fills()}, tmp_path / "m.pt")
    with pytest.raises(FormatError, match="claims to hold more than the file does"):
        fastlstm.import_module(tmp_path / "m.pt")


def test_one_text_of_an_hdf5_file_listed_thousands_of_times(tmp_path):
    short, size = "y" * 17, 4_000_037

    def texts(group):
        values = np.array(["x" * size, *[short] * 3000], dtype=object)
        group.attrs.create("weight_names", values, dtype=h5py.string_dtype())

    data = bytearray(hdf5(texts))
    at = data.find(size.to_bytes(4, "little"))
    first = data[at : at + 16]  # length and place
    while data[at + 16 : at + 20] == len(short).to_bytes(4, "little"):
        at += 16
        data[at : at + 16] = first
    assert data.count(bytes(first)) == 3001
    refused(bytes(data), tmp_path / "m.h5", "memory allocation failed|more than the file does")


def test_tensors_that_claim_more_than_their_file(tmp_path):
    wide = torch.zeros(1).expand(100_000, 100_000)  # one number, 40 GB of tensor
    torch.save({"rnn.weight_ih_l0": wide}, tmp_path / "m.pt")
    with pytest.raises(FormatError, match="weight_ih_l0' claims"):
        fastlstm.import_module(tmp_path / "m.pt")
    header = {"a": {"dtype": "F32", "shape": [10**9, 10**3], "data_offsets": [0, 4 * 10**12]}}
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(8)
    refused(data, tmp_path / "m.safetensors", "not a valid safetensors file")


def hdf5(change):
    """Returns a file whose group 'g' was changed."""
    data = io.BytesIO()
    with h5py.File(data, "w") as file:
        file.attrs["model_config"] = "{}"
        change(file.create_group("g"))
    return data.getvalue()


def virtual(group):
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("/tmp/other.h5", "x", (4,))
    group.create_virtual_dataset("x", layout)


def looped(group):
    group["again"] = group


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda g: g.update({"x": h5py.ExternalLink("/tmp/other.h5", "x")}), "a link to another"),
        (lambda g: g.update({"x": h5py.SoftLink("/g/y")}), "'g/x' is a link"),
        (virtual, "in another file"),
        (
            lambda g: g.create_dataset("x", (4,), "f4", external=[("/etc/hostname", 0, 16)]),
            "in another file",
        ),
        (
            lambda g: g.create_dataset("x", data=np.zeros(10**6, "f4"), compression="gzip"),
            "chunks or compressed",
        ),
        (lambda g: g.create_dataset("x", (10**6, 10**6), "f4"), "more than the file holds"),
        (lambda g: g.create_dataset("x", (10**6, 10**6), "f4", chunks=(1, 9)), "chunks"),
        (looped, "linked twice"),
    ],
    ids=["external", "soft", "virtual", "raw", "gzip", "huge", "chunks", "loop"],
)
def test_hdf5_with_links_or_false_sizes(change, said, tmp_path):
    refused(hdf5(change), tmp_path / "m.h5", said)


def test_without_h5py_the_extra_is_named(model_files, monkeypatch):
    monkeypatch.setattr("fastlstm.exchange.model_file.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fastlstm\[keras\]'"):
        fastlstm.import_module(model_files / "m.h5")
