"""Files of forecasters: round trips, and contradictory or damaged ones."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlstm.compression.forecast import with_rounded_weights
from fastlstm.compression.pruning import mask_of, prunable
from fastlstm.errors import CorruptFileError, FormatError, NonFiniteError
from fastlstm.forecast.files import Compression, forecaster_files, read_forecaster
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.weight_formats import num_gates
from fastlstm.system.tensors import decode_tensors, encode_tensors
from forecast_server import fit_everything, fit_plain, save


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(fit_plain(), tmp_path_factory.mktemp("stored"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 6000},
            r"cell_hh.weight is \(\d+, \d+\) torch.float32, config.json describes",
        ),
        ({"hidden_size": 10**12}, "config.json: `hidden_size` is 1000000000000, expected a number"),
        ({"hidden_size": 10**40}, "config.json: `hidden_size` is 10+, expected a number from 1 to"),
        ({"embed_size": 10**9}, "config.json: `embed_size` is 10+, expected a number from 1 to"),
        ({"embed_size": 60_000}, "config.json describes"),
        ({"num_layers": 10**9}, "config.json: `num_layers` is 10+, expected a number from 1 to"),
        ({"num_layers": 60}, r"config.json: no such network \(60 parts\)"),
        ({"horizon": 10**9}, "config.json: `horizon` is 10+, expected a number from 1 to"),
        ({"num_past": 10**6}, "config.json describes"),
        ({"categories": [[0, 5]] * 1000}, r"config.json: categories holds \(0, 5\), expected the"),
        (
            {"categories": [[k, 5] for k in range(999)], "num_past": 998},
            r"config.json: no such network \(999 parts\)",
        ),
        ({"bidirectional": True}, "config.json describes"),
    ],
)
def test_a_forged_configuration_takes_no_memory(
    path: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    read_forecaster(path)  # what loading takes by itself
    files = RunDirectory(path).read_published()[1]
    config = json.loads(files["config.json"])
    config["network"] |= changes
    forged = RunDirectory(tmp_path / "forged")
    forged.create()
    forged.publish({**files, "config.json": json.dumps(config).encode()})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptFileError, match=message):
        read_forecaster(forged.path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def test_a_weight_of_no_layer_is_refused(path: Path, tmp_path: Path) -> None:
    files = RunDirectory(path).read_published()[1]
    tensors = decode_tensors(files["model.safetensors"], path)
    more = encode_tensors({**tensors, "network.spare": torch.zeros(2)})
    forged = RunDirectory(tmp_path / "forged")
    forged.create()
    forged.publish({**files, "model.safetensors": more})
    with pytest.raises(CorruptFileError, match=r"spare is \(2,\) torch.float32, .* describes None"):
        read_forecaster(forged.path)


SENSELESS: list[tuple[str, tuple[str, ...], Any, str]] = [
    ("config.json", ("network",), [], "config.json: "),
    ("config.json", ("network", "patch"), 6.0, "`patch` is 6.0, expected a whole number"),
    ("config.json", ("network", "patch"), "6", "`patch` is '6', expected a whole number"),
    ("config.json", ("network", "categories"), [[0]], "config.json: categories holds"),
    ("config.json", ("network", "spare"), 1, "config.json: .*unexpected keyword argument 'spare'"),
    ("config.json", ("network", "output"), "<script>", "`output` is '<script>', expected one of"),
    ("config.json", ("train",), 5, "config.json: "),
    ("config.json", ("train", "spare"), 5, "config.json: 'train': unknown key 'spare'"),
    ("config.json", ("train", "horizon"), 5, "config.json: horizon of 'train' and of 'network'"),
    ("config.json", ("train", "horizon"), -5, "config.json: `horizon` is -5, expected a number"),
    ("config.json", ("train", "future"), ["temp"], "schema.json: its 2 columns are not the 2"),
    ("config.json", ("train", "static"), ["temp"], "config.json: 'network' reads 0 static"),
    ("config.json", ("given",), None, "config.json: "),
    ("config.json", ("data",), [], "config.json: "),
    ("config.json", ("data", "key"), 5, "config.json: data.key is 5, expected a text"),
    ("schema.json", ("columns",), ["y"], "schema.json: its 1 columns are not the 2"),
    ("schema.json", ("columns",), ["y", "y"], "schema.json: its 2 columns are not the 2"),
    ("schema.json", ("columns",), ["y", 5], "schema.json: a column is 5, expected a text"),
    ("schema.json", ("columns",), 5, "schema.json: "),
    ("schema.json", ("frequency",), 5, "schema.json: a frequency has"),
    ("schema.json", ("frequency", "step"), 0, "schema.json: .* is not a frequency"),
    ("schema.json", ("frequency", "step"), 10**30, "schema.json: .* is not a frequency"),
    ("schema.json", ("frequency", "unit"), ["us"], "schema.json: .* is not a frequency"),
    ("schema.json", ("categories",), {"y": ["a"]}, "schema.json: its categories are not the ones"),
    ("schema.json", ("categories",), [], "schema.json: "),
    ("schema.json", ("time_zone",), 5, "schema.json: time_zone is 5, expected a text"),
    ("schema.json", ("is_wall",), "yes", "schema.json: is_wall is 'yes', expected true or false"),
    ("scaler.json", ("std",), [1.0, 0.0], r"scaler.json: std is expected to be \(2,\) .* above 0"),
    ("scaler.json", ("std",), [1.0, 1e300], "scaler.json: std is expected to be"),
    ("scaler.json", ("std",), [1.0, 1e-300], "scaler.json: std is expected to be"),
    ("scaler.json", ("std",), [1.0, -1.0], "scaler.json: std is expected to be"),
    ("scaler.json", ("std",), [1.0], "scaler.json: std is expected to be"),
    ("scaler.json", ("mean",), [1.0, float("nan")], "scaler.json: not valid JSON .NaN is not JSON"),
    ("scaler.json", ("mean",), [1.0, 10**400], "scaler.json: "),
    ("scaler.json", ("mean",), ["1", "2"], "scaler.json: mean is expected to be"),
    ("scaler.json", ("mean",), {}, "scaler.json: mean is expected to be"),
    ("scaler.json", ("static",), [[0.0, 1.0]], "scaler.json: static is expected to be"),
]


@pytest.mark.parametrize(("name", "keys", "value", "message"), SENSELESS)
def test_an_invalid_value_is_named(
    path: Path, tmp_path: Path, name: str, keys: tuple[str, ...], value: Any, message: str
) -> None:
    files = RunDirectory(path).read_published()[1]
    whole = changed = json.loads(files[name])
    for key in keys[:-1]:
        changed = changed[key]
    changed[keys[-1]] = value
    forged = publish(tmp_path, {**files, name: json.dumps(whole).encode()})
    with pytest.raises(CorruptFileError, match=message):
        read_forecaster(forged)
    del changed[keys[-1]]
    if keys[-1] not in ("is_wall", "spare", "patch", "categories", "output", "future", "static"):
        forged = publish(tmp_path, {**files, name: json.dumps(whole).encode()})
        with pytest.raises(CorruptFileError, match=name):
            read_forecaster(forged)


@pytest.mark.parametrize("data", [b"", b"[]", b"5", b"\xff", b"[" * 10**5 + b"]" * 10**5])
@pytest.mark.parametrize("name", ["config.json", "schema.json", "scaler.json"])
def test_a_file_without_a_json_object_is_named(
    path: Path, tmp_path: Path, name: str, data: bytes
) -> None:
    files = RunDirectory(path).read_published()[1]
    forged = publish(tmp_path, {**files, name: data})
    with pytest.raises(CorruptFileError, match=name):
        read_forecaster(forged)


def test_a_missing_file_is_named(path: Path, tmp_path: Path) -> None:
    files = RunDirectory(path).read_published()[1]
    del files["schema.json"]
    with pytest.raises(FormatError, match=r"lists no schema\.json, expected a forecaster"):
        read_forecaster(publish(tmp_path, files))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("network.head.weight", float("nan"), r"model\.safetensors: head\.weight is NaN or Inf"),
        (
            "network.head.weight",
            None,
            r"head\.weight is .* torch\.float64, config.json describes .*float32",
        ),
        (
            "calibration.residuals",
            float("nan"),
            r"residuals is expected to be \(25, 6, 1\) float32",
        ),
        ("calibration.residuals", None, "residuals is expected to be"),
    ],
)
def test_invalid_tensors_are_named(
    path: Path, tmp_path: Path, name: str, value: float | None, message: str
) -> None:
    files = RunDirectory(path).read_published()[1]
    tensors = decode_tensors(files["model.safetensors"], path)
    tensors[name] = tensors[name].double() if value is None else tensors[name] * value
    forged = publish(tmp_path, {**files, "model.safetensors": encode_tensors(tensors)})
    with pytest.raises((CorruptFileError, NonFiniteError), match=message):
        read_forecaster(forged)


def test_other_files_are_not_read(path: Path, tmp_path: Path) -> None:
    files = RunDirectory(path).read_published()[1]
    forged = publish(tmp_path, {**files, "more.bin": b"x"})
    (forged / "more.bin").unlink()
    read_forecaster(forged)


def publish(folder: Path, files: dict[str, bytes]) -> Path:
    """Returns a run directory with these files and a valid manifest."""
    run = RunDirectory(folder / f"forged-{len(list(folder.iterdir()))}")
    run.create()
    run.publish(files)
    return run.path


@pytest.mark.parametrize(
    ("name", "value"),
    [("mean", [0.0, 0.0, 1.0, 0.0, 0.0]), ("std", [1.0, 1.0, 2.0, 1.0, 1.0]), ("static", None)],
)
def test_names_are_not_scaled(tmp_path: Path, name: str, value: list[float] | None) -> None:
    files = RunDirectory(save(fit_everything(), tmp_path)).read_published()[1]
    read_forecaster(publish(tmp_path, files))
    assert json.loads(files["schema.json"])["columns"] == ["y", "temp", "sky", "price", "kind"]
    scales = json.loads(files["scaler.json"])
    scales[name] = [scales[name][0], [0.0, 2.0]] if value is None else value
    forged = publish(tmp_path, {**files, "scaler.json": json.dumps(scales).encode()})
    with pytest.raises(CorruptFileError, match=r"scaler\.json: a column of names is scaled"):
        read_forecaster(forged)


def compressed(
    folder: Path, weights: str, prune: float | None = None, structured: str | None = None
) -> dict[str, bytes]:
    """Returns the files of a compressed forecaster with every kind of column."""
    model = fit_everything()
    about = {
        "weights": weights, "prune": prune, "structured": structured, "options": {},
        "source": {"path": "runs/x", "model_sha256": "0"},
    }  # fmt: skip
    stored = dataclasses.replace(model.stored_, compression=Compression(about))
    if structured == "blocks":
        for name, matrix in prunable(stored.network).items():
            mask = mask_of(matrix.detach(), 0.75, "blocks", num_gates(name, len(matrix)))
            matrix.data.masked_fill_(mask, 0.0)
    return forecaster_files(with_rounded_weights(stored))


FORMATS = [
    ("fp32", None, None), ("fp16", None, None), ("int8", None, None), ("int4", None, None),
    ("fp32", 0.75, "blocks"), ("int8", 0.75, "blocks"), ("int4", 0.5, "none"),
    ("fp16", 0.5, "units"),
]  # fmt: skip


@pytest.mark.parametrize(("weights", "prune", "structured"), FORMATS)
def test_a_compressed_forecaster_survives_a_round_trip(
    tmp_path: Path, weights: str, prune: float | None, structured: str | None
) -> None:
    files = compressed(tmp_path, weights, prune, structured)
    stored = read_forecaster(publish(tmp_path, files))
    assert stored.compression is not None
    assert (stored.compression.weights, stored.compression.about["prune"]) == (weights, prune)
    assert forecaster_files(stored)["model.safetensors"] == files["model.safetensors"]
    config = json.loads(files["config.json"])
    assert (config["format"], config["compression"]["structured"]) == (4, structured)
    tensors = decode_tensors(files["model.safetensors"], tmp_path)
    assert tensors["calibration.residuals"].dtype == torch.float32
    assert tensors["network.past.embeddings.0.is_trained"].dtype == torch.bool
    name = "network.lstm.weight_hh_l0"
    assert (f"{name}.blocks" in tensors) == (structured == "blocks")
    assert (f"{name}.scales" in tensors) == (weights in ("int8", "int4"))
    if f"{name}.blocks" in tensors:
        assert len(tensors[f"{name}.blocks"]) == 4  # of 4 gates of 16 x 16: 16 blocks
    window = torch.randn(2, 30, 5).round().abs().clamp(max=1)
    statics = torch.zeros(2, 2)
    with torch.no_grad():
        assert stored.network(window, statics).isfinite().all()


def test_a_changed_weight_is_rounded_again(tmp_path: Path) -> None:
    stored = read_forecaster(publish(tmp_path, compressed(tmp_path, "int8")))
    with torch.no_grad():
        stored.network.head.weight[0, 0] = 3.0
    again = read_forecaster(publish(tmp_path, forecaster_files(stored)))
    assert again.network.head.weight[0, 0].item() == pytest.approx(3.0)
    for name, weight in stored.network.state_dict().items():
        if name != "head.weight":
            assert torch.equal(weight, again.network.state_dict()[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "int5"}, "compression.weights is 'int5', expected one of fp32, fp16"),
        ({"weights": None}, "compression.weights is None, expected"),
        ({"weights": ["int8"]}, "compression.weights is"),
        ({"weights": "fp16"}, "in a model in fp16"),
        ({"weights": "int4"}, "in a model in int4"),
        ({"weights": "fp32"}, "in a model in fp32"),
        ({"prune": "much"}, "compression.prune is 'much' and .* expected a share"),
        ({"prune": 1.5, "structured": "none"}, "compression.prune is 1.5"),
        ({"prune": 0.5, "structured": "some"}, "structured 'some'"),
        ({"source": 5}, "config.json: "),
        ({"source": {}}, "compression.source.path is None"),
    ],
)
def test_an_invalid_compression_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    files = compressed(tmp_path, "int8")
    config = json.loads(files["config.json"])
    config["compression"] |= changes
    forged = publish(tmp_path, {**files, "config.json": json.dumps(config).encode()})
    with pytest.raises((CorruptFileError, FormatError), match=message):
        read_forecaster(forged)


@pytest.mark.parametrize("value", [None, 5, [], "int8"])
def test_compression_is_an_object_of_format_4(tmp_path: Path, value: Any) -> None:
    files = compressed(tmp_path, "int8")
    config = json.loads(files["config.json"])
    for changes, message in (
        ({"compression": value}, "compression is"),
        ({"format": 3}, "not of a forecaster of format 4"),
        ({"format": 5}, "not of a forecaster of format 4"),
    ):
        data = json.dumps({**config, **changes}).encode()
        with pytest.raises((CorruptFileError, FormatError), match=message):
            read_forecaster(publish(tmp_path, {**files, "config.json": data}))
    del config["compression"]
    with pytest.raises(FormatError, match="not of a forecaster of format 3"):
        read_forecaster(publish(tmp_path, {**files, "config.json": json.dumps(config).encode()}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "network.lstm.weight_hh_l0",
            torch.full((64, 16), -128, dtype=torch.int8),
            "codes outside",
        ),
        ("network.lstm.weight_hh_l0", torch.zeros(64, 16), "is .* F32, expected .* I8"),
        (
            "network.lstm.weight_hh_l0.scales",
            torch.full((64,), math.nan),
            "negative, NaN, Inf or too large",
        ),
        (
            "network.lstm.weight_hh_l0.scales",
            torch.full((64,), -1.0),
            "negative, NaN, Inf or too large",
        ),
        ("network.lstm.weight_hh_l0.scales", None, "lacks 'network.lstm.weight_hh_l0.scales'"),
        ("network.lstm.weight_hh_l0", None, "lacks 'network.lstm.weight_hh_l0'"),
        ("network.lstm.bias_ih_l0", torch.full((64,), math.inf), "bias_ih_l0 is NaN or Inf"),
        ("network.past.embeddings.0.is_trained", None, "is_trained is None"),
        (
            "network.past.embeddings.0.is_trained",
            torch.zeros(4),
            r"is_trained is \(4,\) torch.float",
        ),
        ("calibration.residuals", None, "'calibration.residuals' is missing"),
        ("calibration.residuals", torch.zeros(25, 6, 1).half(), "expected to be .* float32"),
        ("network.spare", torch.zeros(2), "'network.spare' that a model in int8 lacks"),
    ],
)
def test_an_invalid_tensor_of_a_compressed_file_is_named(
    tmp_path: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    files = compressed(tmp_path, "int8")
    tensors = {**decode_tensors(files["model.safetensors"], tmp_path), name: value}
    left = {n: t for n, t in tensors.items() if t is not None}
    forged = publish(tmp_path, {**files, "model.safetensors": encode_tensors(left)})
    with pytest.raises((CorruptFileError, FormatError, NonFiniteError), match=message) as caught:
        read_forecaster(forged)
    assert "model.safetensors" in str(caught.value)


def test_one_changed_byte_of_a_compressed_file_is_named(tmp_path: Path) -> None:
    path = publish(tmp_path, compressed(tmp_path, "int4"))
    data = bytearray((path / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
        read_forecaster(path)
