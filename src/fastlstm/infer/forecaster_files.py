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

from fastlstm.config import built
from fastlstm.errors import CorruptFileError, FormatError, RunDirectoryError, Setting
from fastlstm.find_run import require_run
from fastlstm.forecast_config import ForecastConfig
from fastlstm.infer.fitted_table import Fit
from fastlstm.infer.forecasts import Calibration, require_known
from fastlstm.nn.forecaster import ForecastNetwork
from fastlstm.nn.forecaster_config import ForecasterConfig
from fastlstm.nn.io import decode_tensors, encode_tensors
from fastlstm.run_directory import FORECASTER, TRAINER_FILE, RunDirectory
from fastlstm.series.splits import Scaler
from fastlstm.series.timeline import Frequency

CONFIG_FILE = "config.json"
_FORMAT = 2
_RESIDUALS = "calibration.residuals"


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
        fit: what another table must be like.
        key: of the table it was trained on.
    """

    config: ForecastConfig
    given: ForecastConfig
    network: ForecastNetwork
    scaler: Scaler
    calibration: Calibration
    static_scale: NDArray[np.float64]
    fit: Fit
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
    return {**description_files(stored), "model.safetensors": encode_tensors(tensors)}


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
        "columns": stored.fit.columns,
        "frequency": stored.fit.frequency.to_json(),
        "time_zone": stored.fit.time_zone,
        "is_wall": stored.fit.is_wall,
        "categories": stored.fit.categories,
    }
    return {
        CONFIG_FILE: json.dumps(config, indent=1).encode(),
        "schema.json": json.dumps(schema, indent=1).encode(),
        "scaler.json": json.dumps(scales, indent=1).encode(),
    }


def stored_configs(data: bytes) -> tuple[ForecastConfig, ForecastConfig]:
    """Returns the resolved configuration of config.json, and the one that was given.

    Raises:
        FormatError: it is of something else, or of a newer format.
    """
    config = json.loads(data)
    if config.get("kind") != FORECASTER or config.get("format") != _FORMAT:
        raise FormatError(
            f"config.json is not of a forecaster of format {_FORMAT}: a text model is opened by"
            " LM.load, another format by the fastlstm that wrote it"
        )
    begun, first = (built(ForecastConfig, config[name], CONFIG_FILE) for name in ("train", "given"))
    return begun, first


def read_forecaster(path: str | Path) -> StoredForecaster:
    """Reads the forecaster published in a run directory, each file checked by its SHA-256.

    Raises:
        CorruptFileError: a file is damaged; it is named.
        FormatError: it holds something else, or is of a newer format.
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
    files = run.read_published()[1]
    if TRAINER_FILE in files:
        raise FormatError(
            f"{path} is a checkpoint of a forecaster, which only ",
            Setting("resume", True),
            f" goes on from; give its run, {Path(path).absolute().parent}",
        )
    given = stored_configs(files.get(CONFIG_FILE, b"{}"))
    try:
        return _assembled(files, given, Path(path))
    except (KeyError, TypeError) as error:
        raise CorruptFileError(f"{path}: {error} is missing in its files") from None


def _network(
    config: ForecasterConfig, tensors: dict[str, torch.Tensor], path: Path
) -> ForecastNetwork:
    """Returns the network that stored tensors are the weights of.

    No memory is taken for what the file does not hold: the shapes are compared before.

    Raises:
        CorruptFileError: config.json describes another network.
    """
    weights = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    try:
        if config.num_layers > len(found):  # each has several, and would take time
            raise ValueError(f"{config.num_layers} layers")
        with torch.device("meta"):
            described = ForecastNetwork(config).state_dict()
    except (ValueError, TypeError, RuntimeError) as error:  # sizes that no memory has
        reason = str(error).splitlines()[0][:200]
        raise CorruptFileError(f"{path / CONFIG_FILE}: no such network ({reason})") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in described.items()}
    for name in sorted(shapes.keys() | found.keys()):
        if shapes.get(name) != found.get(name):
            raise CorruptFileError(
                f"{path / 'model.safetensors'}: {name} has the shape {found.get(name)},"
                f" {CONFIG_FILE} describes {shapes.get(name)}; put the right file back"
            )
    with torch.random.fork_rng(devices=[]):  # loading must not move the caller's random numbers
        network = ForecastNetwork(config)
    network.load_state_dict(weights)
    return network


def _assembled(
    files: dict[str, bytes], configs: tuple[ForecastConfig, ForecastConfig], path: Path
) -> StoredForecaster:
    config: dict[str, Any] = json.loads(files[CONFIG_FILE])
    sizes = dict(config["network"])
    for name in ("categories", "static_categories"):
        sizes[name] = tuple(tuple(pair) for pair in sizes[name])
    tensors = decode_tensors(files["model.safetensors"], path / "model.safetensors")
    calibration = Calibration(tensors.pop(_RESIDUALS))
    network = _network(ForecasterConfig(**sizes), tensors, path)
    scales = json.loads(files["scaler.json"])
    mean, std = (np.array(scales[name], dtype=np.float64) for name in ("mean", "std"))
    schema = json.loads(files["schema.json"])
    fit = Fit(
        tuple(schema["columns"]), Frequency(**schema["frequency"]), schema["time_zone"],
        schema["categories"], network.config.has_missing, schema.get("is_wall"),
    )  # fmt: skip
    static = np.array(scales["static"], dtype=np.float64).reshape(-1, 2)
    begun, given = (dataclasses.replace(one, cache_dir=None) for one in configs)  # of that machine
    return StoredForecaster(
        begun, given, network.eval(), Scaler(mean, std), calibration, static, fit,
        config["data"]["key"],
    )  # fmt: skip
