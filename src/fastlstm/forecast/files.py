"""A trained forecaster as files: JSON and safetensors, nothing that can execute."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.errors import (
    CorruptFileError,
    FormatError,
    NonFiniteError,
    RunDirectoryError,
    Setting,
)
from fastlstm.forecast.calibration import LEVELS, Calibration, require_known
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.splits import Scaler
from fastlstm.forecast.data.timeline import Frequency
from fastlstm.forecast.model.config import ForecasterConfig
from fastlstm.forecast.model.network import ForecastNetwork
from fastlstm.forecast.table_schema import TableSchema
from fastlstm.runs.find_run import require_run
from fastlstm.runs.manifest import MANIFEST
from fastlstm.runs.run_directory import FORECASTER, TRAINER_FILE, RunDirectory
from fastlstm.runs.stored_values import checked_values, json_object
from fastlstm.runs.tensors import decode_tensors, encode_tensors
from fastlstm.system.fields import built

CONFIG_FILE = "config.json"
SCHEMA_FILE = "schema.json"
SCALER_FILE = "scaler.json"
MODEL_FILE = "model.safetensors"
_FORMAT = 3
_FORMAT_OF_SEGMENTS = 2
"""The format in which what is now `patch` was called `segment`."""
_RESIDUALS = "calibration.residuals"
_MAX_JSON_BYTES = 1 << 28
"""A table may have millions of names."""


@dataclass(frozen=True)
class StoredForecaster:
    """What is stored of a forecaster.

    Attributes:
        config: the configuration, every choice made.
        given: the same as the user gave it.
        network: trained.
        scaler: of the columns.
        calibration: of its intervals.
        static_scale: mean and deviation of every static number, shape ``(K, 2)``.
        schema: what another table must be like.
        key: of the table it was trained on.
    """

    config: ForecastConfig
    given: ForecastConfig
    network: ForecastNetwork
    scaler: Scaler
    calibration: Calibration
    static_scale: NDArray[np.float64]
    schema: TableSchema
    key: str

    def unsupported(self, levels: Sequence[float]) -> str | None:
        """Returns what to say where some of its quantiles are infinite, else None.

        Raises:
            ConfigError: a level that validation says nothing about.
        """
        require_known(levels)
        is_calibrated = self.network.output.is_calibrated
        return self.calibration.unsupported(levels) if is_calibrated else None


def forecaster_files(stored: StoredForecaster) -> dict[str, bytes]:
    """Returns config.json, schema.json, scaler.json and model.safetensors."""
    tensors = {f"network.{n}": t for n, t in stored.network.state_dict().items()}
    tensors[_RESIDUALS] = stored.calibration.residuals
    return {**description_files(stored), MODEL_FILE: encode_tensors(tensors)}


def description_files(stored: StoredForecaster) -> dict[str, bytes]:
    """Returns config.json, schema.json and scaler.json."""
    config = {
        "format": _FORMAT,
        "kind": FORECASTER,
        "train": dataclasses.asdict(stored.config),
        "given": dataclasses.asdict(stored.given),
        "network": dataclasses.asdict(stored.network.config),
        "data": {"key": stored.key},
    }
    scales = {
        "mean": stored.scaler.mean.tolist(),
        "std": stored.scaler.std.tolist(),
        "static": stored.static_scale.tolist(),
    }
    schema = {
        "columns": stored.schema.columns,
        "frequency": stored.schema.frequency.to_json(),
        "time_zone": stored.schema.time_zone,
        "is_wall": stored.schema.is_wall,
        "categories": stored.schema.categories,
    }
    return {
        CONFIG_FILE: json.dumps(config, indent=1).encode(),
        SCHEMA_FILE: json.dumps(schema, indent=1).encode(),
        SCALER_FILE: json.dumps(scales, indent=1).encode(),
    }


def stored_configs(data: bytes, origin: Path) -> tuple[ForecastConfig, ForecastConfig]:
    """Returns the resolved configuration of config.json, and the one that was given.

    Raises:
        CorruptFileError: it makes no sense; `origin` is named.
        FormatError: it is of something else, or of a newer format.
    """
    config = _config(data, origin)
    with checked_values(origin):
        begun, first = (
            built(ForecastConfig, config[name], f"'{name}'") for name in ("train", "given")
        )
    return begun, first


def _config(data: bytes, origin: Path) -> dict[str, Any]:
    """Returns config.json with the keys of the current format."""
    config = json_object(data, origin, _MAX_JSON_BYTES)
    version = config.get("format")
    if config.get("kind") != FORECASTER or version not in (_FORMAT_OF_SEGMENTS, _FORMAT):
        raise FormatError(
            f"{origin} is not of a forecaster of format {_FORMAT}: a text model is opened by"
            " LM.load, another format by the fastlstm that wrote it"
        )
    if version == _FORMAT_OF_SEGMENTS:
        with checked_values(origin):
            for part in ("train", "given", "network"):
                config[part]["patch"] = config[part].pop("segment")
    return config


def read_forecaster(path: str | Path) -> StoredForecaster:
    """Reads the forecaster published in a run directory, each file checked by its SHA-256.

    Raises:
        CorruptFileError: a file is damaged, or makes no sense; it is named.
        FormatError: it holds something else, or is of a newer format.
        NonFiniteError: a weight is NaN or Inf.
        RunDirectoryError: nothing is published there.
    """
    require_run(path, "forecaster")
    run = RunDirectory(path)
    if not run.has_published():
        raise RunDirectoryError(
            f"{path} has no forecaster yet: training ended before its first evaluation; go on with"
            " ",
            Setting("resume", True),
        )
    manifest, files = run.read_published((CONFIG_FILE, SCHEMA_FILE, SCALER_FILE, MODEL_FILE))
    if TRAINER_FILE in manifest.files:
        raise FormatError(
            f"{path} is a checkpoint of a forecaster, which only ",
            Setting("resume", True),
            f" goes on from; give its run, {Path(path).absolute().parent}",
        )
    for name in (CONFIG_FILE, SCHEMA_FILE, SCALER_FILE, MODEL_FILE):
        if name not in files:
            raise FormatError(f"{Path(path) / MANIFEST}: lists no {name}: this is no forecaster")
    return _assembled(files, Path(path))


def _network(
    config: ForecasterConfig, tensors: dict[str, torch.Tensor], path: Path
) -> ForecastNetwork:
    """Returns the network that stored tensors are the weights of.

    No memory is taken for what the file does not hold: the shapes are compared before.

    Raises:
        CorruptFileError: config.json describes another network.
        NonFiniteError: a weight is NaN or Inf.
    """
    weights = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    # Each has several, and would take time.
    parts = config.num_layers, len(config.categories), len(config.static_categories)
    if max(parts) > len(found):
        raise CorruptFileError(f"{path / CONFIG_FILE}: no such network ({max(parts)} parts)")
    try:
        with torch.device("meta"):
            described = ForecastNetwork(config).state_dict()
    except (ValueError, TypeError, RuntimeError) as error:  # sizes that no memory has
        reason = str(error).splitlines()[0][:200]
        raise CorruptFileError(f"{path / CONFIG_FILE}: no such network ({reason})") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in described.items()}
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            raise CorruptFileError(
                f"{path / MODEL_FILE}: {name:.80} has the shape {found.get(name)},"
                f" {CONFIG_FILE} describes {shapes.get(name)}; put the right file back"
            )
    for name, tensor in weights.items():
        if tensor.dtype != described[name].dtype:
            raise CorruptFileError(
                f"{path / MODEL_FILE}: {name} is {tensor.dtype}, expected {described[name].dtype}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(f"{path / MODEL_FILE}: {name} is NaN or Inf; train it again")
    with torch.random.fork_rng(devices=[]):  # loading must not move the caller's random numbers
        network = ForecastNetwork(config)
    network.load_state_dict(weights)
    return network


def _assembled(files: dict[str, bytes], path: Path) -> StoredForecaster:
    config = _config(files[CONFIG_FILE], path / CONFIG_FILE)
    configs = stored_configs(files[CONFIG_FILE], path / CONFIG_FILE)
    with checked_values(path / CONFIG_FILE):
        sizes = dict(config["network"])
        for name in ("categories", "static_categories"):
            sizes[name] = tuple(tuple(pair) for pair in sizes[name])
        network_config = ForecasterConfig(**sizes)
        key = _text(config["data"]["key"])
        for name in ("horizon", "input_size", "patch", "output"):
            if getattr(configs[0], name) != sizes[name]:
                raise ValueError(f"{name} of 'train' and of 'network' differ")
        if len(configs[0].static) != network_config.num_static:
            raise ValueError(f"'network' reads {network_config.num_static} static columns")
    tensors = decode_tensors(files[MODEL_FILE], path / MODEL_FILE)
    with checked_values(path / MODEL_FILE):
        calibration = _calibration(tensors.pop(_RESIDUALS), network_config)
    network = _network(network_config, tensors, path)
    with checked_values(path / SCHEMA_FILE):
        values = json_object(files[SCHEMA_FILE], path / SCHEMA_FILE, _MAX_JSON_BYTES)
        schema = _schema(values, network_config, configs[0])
    with checked_values(path / SCALER_FILE):
        scales = json_object(files[SCALER_FILE], path / SCALER_FILE, _MAX_JSON_BYTES)
        scaler, static = _scales(scales, network_config)
    begun, given = (dataclasses.replace(one, cache_dir=None) for one in configs)  # of that machine
    return StoredForecaster(begun, given, network.eval(), scaler, calibration, static, schema, key)


def _schema(values: dict[str, Any], sizes: ForecasterConfig, config: ForecastConfig) -> TableSchema:
    """Returns what schema.json holds; raises ValueError where it is of another forecaster."""
    columns = tuple(_text(name) for name in values["columns"])
    num = sizes.num_targets + sizes.num_past + sizes.num_future
    ahead = columns[len(columns) - sizes.num_future :]
    if len(set(columns)) != num or len(columns) != num or ahead != config.future:
        raise ValueError(
            f"its {len(columns)} columns are not the {num} that {CONFIG_FILE} describes"
        )
    categories = values["categories"]
    counts = {columns[place]: size for place, size in sizes.categories}
    counts |= {config.static[place]: size for place, size in sizes.static_categories}
    if {name: len(names) for name, names in categories.items()} != counts or not all(
        isinstance(name, str | int | float) for names in categories.values() for name in names
    ):
        raise ValueError(f"its categories are not those that {CONFIG_FILE} describes")
    zone, is_wall = values["time_zone"], values.get("is_wall")
    if is_wall is not None and type(is_wall) is not bool:
        raise ValueError(f"is_wall is {is_wall!r:.80}, expected true or false")
    frequency = Frequency.from_json(values["frequency"])
    zone = None if zone is None else _text(zone)
    return TableSchema(columns, frequency, zone, categories, sizes.has_missing, is_wall)


def _calibration(residuals: torch.Tensor, sizes: ForecasterConfig) -> Calibration:
    shape = len(LEVELS), sizes.horizon, sizes.num_targets
    if residuals.shape != shape or residuals.dtype != torch.float32 or residuals.isnan().any():
        raise ValueError(f"{_RESIDUALS} is expected to be {shape} float32 numbers")
    return Calibration(residuals)


def _scales(scales: dict[str, Any], sizes: ForecasterConfig) -> tuple[Scaler, NDArray[np.float64]]:
    """Returns what scaler.json holds; raises ValueError where it makes no sense."""
    num = sizes.num_targets + sizes.num_past + sizes.num_future
    mean = _numbers(scales["mean"], (num,), "mean")
    std = _numbers(scales["std"], (num,), "std", True)
    static = _numbers(scales["static"], (sizes.num_static, 2), "static")
    _numbers(static[:, 1], (len(static),), "a deviation of static", True)
    names = [place for place, _ in sizes.categories]
    static_names = [place for place, _ in sizes.static_categories]
    if mean[names].any() or (std[names] != 1).any() or (static[static_names] != (0, 1)).any():
        raise ValueError("a column of names is scaled")
    return Scaler(mean, std), static


def _numbers(
    values: Any, shape: tuple[int, ...], name: str, is_positive: bool = False
) -> NDArray[np.float64]:
    found = np.asarray(values)
    if found.size == 0:
        found = found.reshape(shape)
    with np.errstate(over="ignore"):  # windows are scaled in float32
        small = found.astype(np.float32) if found.dtype.kind in "iuf" else np.float32("nan")
    is_good = found.shape == shape and bool(np.isfinite(small).all())
    if not is_good or (is_positive and (small <= 0).any()):
        above = " above 0" if is_positive else ""
        raise ValueError(f"{name} is expected to be {shape} numbers of float32{above}")
    return found.astype(np.float64)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} came, expected a text")
    return value
