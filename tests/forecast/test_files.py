"""Files of forecasters: round trips, and contradictory or damaged ones."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlstm import Forecaster
from fastlstm.compression.forecast import with_rounded_weights
from fastlstm.compression.pruning import mask_of, prunable
from fastlstm.errors import CorruptFileError, FormatError, NonFiniteError
from fastlstm.forecast.files import Compression, forecaster_files, read_forecaster
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.weight_formats import num_gates
from fastlstm.system.tensors import decode_tensors, encode_tensors
from forecast_server import fit_everything, fit_plain, save


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a forecaster."""
    path = save(fit_plain(), tmp_path_factory.mktemp("stored"))
    return RunDirectory(path).read_published()[1]


@pytest.fixture(scope="module")
def everything() -> Forecaster:
    return fit_everything()


@pytest.fixture(scope="module")
def int8(everything: Forecaster) -> dict[str, bytes]:
    return compressed(everything, "int8")


def publish(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Returns a run directory with these files and a valid manifest."""
    run = RunDirectory(folder / f"forged-{len(list(folder.iterdir()))}")
    run.create()
    run.publish(files)
    return run.path


def require_refused(folder: Path, files: Mapping[str, bytes], message: str) -> str:
    forged = publish(folder, files)
    message = message.replace("json: ", r"json: (?:it holds invalid values \()?")
    with pytest.raises((CorruptFileError, FormatError, NonFiniteError), match=message) as caught:
        read_forecaster(forged)
    return str(caught.value)


def with_config(files: Mapping[str, bytes], part: str, changes: dict[str, Any]) -> dict[str, bytes]:
    """Returns files with other values in a part of config.json."""
    config = json.loads(files["config.json"])
    config[part] |= changes
    return {**files, "config.json": json.dumps(config).encode()}


def with_tensors(files: Mapping[str, bytes], changes: dict[str, Any]) -> dict[str, bytes]:
    """Returns files with other tensors; a tensor that is None is left out."""
    tensors = {**decode_tensors(files["model.safetensors"], Path("files")), **changes}
    left = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return {**files, "model.safetensors": encode_tensors(left)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 6000}, r"cell_hh.weight is .* torch.float32, config.json describes"),
        ({"hidden_size": 10**12}, "config.json: `hidden_size` is 1000000000000, expected a number"),
        ({"hidden_size": 10**40}, "config.json: `hidden_size` is 10+, expected a number from 1 to"),
        ({"embed_size": 10**9}, "config.json: `embed_size` is 10+, expected a number from 1 to"),
        ({"embed_size": 60_000}, "config.json describes"),
        ({"num_layers": 10**9}, "config.json: `num_layers` is 10+, expected a number from 1 to"),
        ({"num_layers": 60}, r"config.json: no such network \(60 parts\)"),
        ({"horizon": 10**9}, "config.json: `horizon` is 10+, expected a number from 1 to"),
        ({"num_past": 10**6}, "config.json describes"),
        ({"categories": [[0, 5]] * 1000}, r"config.json: categories holds \(0, 5\), expected the"),
        ({"categories": [[k, 5] for k in range(999)], "num_past": 998}, "no such network"),
        ({"bidirectional": True}, "config.json describes"),
    ],
)
def test_a_forged_configuration_takes_no_memory(
    plain: dict[str, bytes], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    read_forecaster(publish(tmp_path, plain))  # what loading takes by itself
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    require_refused(tmp_path, with_config(plain, "network", changes), message)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


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
    plain: dict[str, bytes],
    tmp_path: Path,
    name: str,
    keys: tuple[str, ...],
    value: Any,
    message: str,
) -> None:
    whole = changed = json.loads(plain[name])
    for key in keys[:-1]:
        changed = changed[key]
    changed[keys[-1]] = value
    require_refused(tmp_path, {**plain, name: json.dumps(whole).encode()}, message)
    del changed[keys[-1]]
    if keys[-1] not in ("is_wall", "spare", "patch", "categories", "output", "future", "static"):
        require_refused(tmp_path, {**plain, name: json.dumps(whole).encode()}, name)


@pytest.mark.parametrize("data", [b"", b"[]", b"5", b"\xff", b"[" * 10**5 + b"]" * 10**5])
@pytest.mark.parametrize("name", ["config.json", "schema.json", "scaler.json"])
def test_a_file_without_a_json_object_is_named(
    plain: dict[str, bytes], tmp_path: Path, name: str, data: bytes
) -> None:
    require_refused(tmp_path, {**plain, name: data}, name)


def test_a_missing_file_is_named(plain: dict[str, bytes], tmp_path: Path) -> None:
    files = {name: data for name, data in plain.items() if name != "schema.json"}
    require_refused(tmp_path, files, r"lists no schema\.json, expected a forecaster")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("network.head.weight", lambda t: t * math.nan, "model.safetensors: head.weight is NaN or"),
        ("network.head.weight", lambda t: t.double(), "torch.float64, config.json describes .*32"),
        ("network.spare", lambda _: torch.zeros(2), r"spare is \(2,\) torch.float32, .* None"),
        ("calibration.residuals", lambda t: t * math.nan, r"expected to be \(25, 6, 1\) float32"),
        ("calibration.residuals", lambda t: t.double(), "residuals is expected to be"),
    ],
)
def test_invalid_tensors_are_named(
    plain: dict[str, bytes], tmp_path: Path, name: str, change: Any, message: str
) -> None:
    tensor = decode_tensors(plain["model.safetensors"], tmp_path).get(name)
    require_refused(tmp_path, with_tensors(plain, {name: change(tensor)}), message)


def test_other_files_are_not_read(plain: dict[str, bytes], tmp_path: Path) -> None:
    forged = publish(tmp_path, {**plain, "more.bin": b"x"})
    (forged / "more.bin").unlink()
    read_forecaster(forged)


@pytest.mark.parametrize(
    ("name", "value"),
    [("mean", [0.0, 0.0, 1.0, 0.0, 0.0]), ("std", [1.0, 1.0, 2.0, 1.0, 1.0]), ("static", None)],
)
def test_names_are_not_scaled(
    everything: Forecaster, tmp_path: Path, name: str, value: list[float] | None
) -> None:
    files = forecaster_files(everything.stored_)
    assert json.loads(files["schema.json"])["columns"] == ["y", "temp", "sky", "price", "kind"]
    scales = json.loads(files["scaler.json"])
    scales[name] = [scales[name][0], [0.0, 2.0]] if value is None else value
    scaled = {**files, "scaler.json": json.dumps(scales).encode()}
    require_refused(tmp_path, scaled, r"scaler\.json: a column of names is scaled")


def compressed(
    model: Forecaster, weights: str, prune: float | None = None, structured: str | None = None
) -> dict[str, bytes]:
    """Returns the files of a compressed forecaster."""
    about = {
        "weights": weights, "prune": prune, "structured": structured, "options": {},
        "source": {"path": "runs/x", "model_sha256": "0"},
    }  # fmt: skip
    network = copy.deepcopy(model.network_)
    if structured == "blocks":
        for name, matrix in prunable(network).items():
            mask = mask_of(matrix.detach(), 0.75, "blocks", num_gates(name, len(matrix)))
            matrix.data.masked_fill_(mask, 0.0)
    stored = dataclasses.replace(model.stored_, network=network, compression=Compression(about))
    return forecaster_files(with_rounded_weights(stored))


FORMATS = [
    ("fp32", None, None), ("fp16", None, None), ("int8", None, None), ("int4", None, None),
    ("fp32", 0.75, "blocks"), ("int8", 0.75, "blocks"), ("int4", 0.5, "none"),
    ("fp16", 0.5, "units"),
]  # fmt: skip


@pytest.mark.parametrize(("weights", "prune", "structured"), FORMATS)
def test_a_compressed_forecaster_survives_a_round_trip(
    everything: Forecaster,
    tmp_path: Path,
    weights: str,
    prune: float | None,
    structured: str | None,
) -> None:
    files = compressed(everything, weights, prune, structured)
    stored = read_forecaster(publish(tmp_path, files))
    assert stored.compression is not None
    assert (stored.compression.weights, stored.compression.about["prune"]) == (weights, prune)
    assert forecaster_files(stored)["model.safetensors"] == files["model.safetensors"]
    config = json.loads(files["config.json"])
    assert (config["format"], config["compression"]["structured"]) == (6, structured)
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


def test_a_changed_weight_is_rounded_again(int8: dict[str, bytes], tmp_path: Path) -> None:
    stored = read_forecaster(publish(tmp_path, int8))
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
    int8: dict[str, bytes], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    require_refused(tmp_path, with_config(int8, "compression", changes), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"compression": value}, "compression is") for value in (None, 5, [], "int8")),
        ({"format": 5}, "not of a forecaster of format 6"),
        ({"format": 7}, "not of a forecaster of format 6"),
        ({}, "not of a forecaster of format 5"),
    ],
)
def test_compression_is_an_object_of_format_6(
    int8: dict[str, bytes], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads(int8["config.json"]) | changes
    if not changes:
        del config["compression"]
    require_refused(tmp_path, {**int8, "config.json": json.dumps(config).encode()}, message)


TRAINED = "network.past.embeddings.0.is_trained"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("network.lstm.bias_ih_l0", torch.full((64,), math.inf), "bias_ih_l0 is NaN or Inf"),
        (TRAINED, None, "is_trained is None"),
        (TRAINED, torch.zeros(4), r"is_trained is \(4,\) torch.float"),
        ("calibration.residuals", None, "'calibration.residuals' is missing"),
        ("calibration.residuals", torch.zeros(25, 6, 1).half(), "expected to be .* float32"),
    ],
)
def test_an_invalid_tensor_of_a_compressed_file_is_named(
    int8: dict[str, bytes], tmp_path: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    told = require_refused(tmp_path, with_tensors(int8, {name: value}), message)
    assert "model.safetensors" in told
