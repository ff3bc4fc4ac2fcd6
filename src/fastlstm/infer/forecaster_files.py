"""A trained forecaster as files: JSON and safetensors, nothing that can execute."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import FormatError
from fastlstm.infer.forecasts import Calibration
from fastlstm.nn.forecaster import ForecasterConfig, ForecastNetwork
from fastlstm.nn.io import decode_tensors, encode_tensors
from fastlstm.run_directory import RunDirectory
from fastlstm.series.splits import Scaler
from fastlstm.series.timeline import Frequency

_FORMAT = 2
_KIND = "forecaster"
_RESIDUALS = "calibration.residuals"


@dataclass(frozen=True)
class StoredForecaster:
    """What is stored of a forecaster.

    Attributes:
        parameters: of its constructor.
        network: trained.
        scaler: of the columns.
        calibration: of its intervals.
        columns: of the table, in order.
        static_scale: mean and deviation of every static number, shape ``(K, 2)``.
        frequency: of the rows.
        time_zone: of the times, or None.
        categories: names of every categorical column's numbers.
    """

    parameters: dict[str, Any]
    network: ForecastNetwork
    scaler: Scaler
    calibration: Calibration
    columns: tuple[str, ...]
    static_scale: NDArray[np.float32]
    frequency: Frequency
    time_zone: str | None
    categories: dict[str, list[Any]]


def write_forecaster(path: str | Path, stored: StoredForecaster) -> None:
    """Publishes config.json, schema.json, scaler.json and model.safetensors as one set."""
    run = RunDirectory(path)
    run.create()
    config = {
        "format": _FORMAT,
        "kind": _KIND,
        "parameters": stored.parameters,
        "network": dataclasses.asdict(stored.network.config),
    }
    scales = {
        "mean": stored.scaler.mean.tolist(),
        "std": stored.scaler.std.tolist(),
        "static": stored.static_scale.tolist(),
    }
    schema = {
        "columns": stored.columns,
        "frequency": stored.frequency.to_json(),
        "time_zone": stored.time_zone,
        "categories": stored.categories,
    }
    tensors = {f"network.{n}": t for n, t in stored.network.state_dict().items()}
    tensors[_RESIDUALS] = stored.calibration.residuals
    run.publish(
        {
            "config.json": json.dumps(config, indent=1).encode(),
            "schema.json": json.dumps(schema, indent=1).encode(),
            "scaler.json": json.dumps(scales, indent=1).encode(),
            "model.safetensors": encode_tensors(tensors),
        }
    )


def read_forecaster(path: str | Path) -> StoredForecaster:
    """Reads what `write_forecaster` wrote, each file checked against its recorded SHA-256.

    Raises:
        CorruptFileError: a file is damaged; it is named.
        FormatError: it holds something else, or is of a newer format.
    """
    files = RunDirectory(path).read_published()[1]
    config = json.loads(files["config.json"])
    if config.get("kind") != _KIND or config.get("format") != _FORMAT:
        raise FormatError(
            f"{path} holds no forecaster of format {_FORMAT}; a text model is opened by LM.load,"
            " a newer format by a newer fastlstm"
        )
    network = dict(config["network"])
    for name in ("categories", "static_categories"):
        network[name] = tuple(tuple(pair) for pair in network[name])
    model = ForecastNetwork(ForecasterConfig(**network))
    tensors = decode_tensors(files["model.safetensors"], Path(path) / "model.safetensors")
    calibration = Calibration(tensors.pop(_RESIDUALS))
    model.load_state_dict({n.removeprefix("network."): t for n, t in tensors.items()})
    scales = json.loads(files["scaler.json"])
    mean, std = (np.array(scales[name], dtype=np.float32) for name in ("mean", "std"))
    schema = json.loads(files["schema.json"])
    return StoredForecaster(
        config["parameters"],
        model.eval(),
        Scaler(mean, std),
        calibration,
        tuple(schema["columns"]),
        np.array(scales["static"], dtype=np.float32).reshape(-1, 2),
        Frequency(**schema["frequency"]),
        schema["time_zone"],
        schema["categories"],
    )
