"""`StoredForecaster`: a trained forecaster, and its files: JSON and safetensors, not executable."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import CorruptFileError, FormatError
from fastlstm.forecast.calibration import LEVELS, Calibration
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.calendar import calendar_names
from fastlstm.forecast.data.scaled_windows import ScaledWindows, SeriesScale
from fastlstm.forecast.data.splits import Scaler
from fastlstm.forecast.data.timeline import Frequency, Timeline
from fastlstm.forecast.model.network import FIXED, ForecasterConfig, ForecastNetwork
from fastlstm.forecast.table_schema import TableSchema
from fastlstm.report.lines import Row, model_rows
from fastlstm.runs.find_run import read_model
from fastlstm.runs.run_directory import FORECASTER
from fastlstm.runs.stored_values import (
    checked_values,
    described_state,
    json_object,
    require_same,
    restored_network,
    stored_options,
    stored_text,
)
from fastlstm.runs.weight_formats import (
    QuantizedMatrix,
    as_floats,
    block_grid,
    checked_compression,
    decode_weights,
    encode_weights,
    may_be_blocks,
    num_gates,
)
from fastlstm.system.tensors import decode_tensors, encode_tensors

if TYPE_CHECKING:
    from fastlstm.training.checkpoint import Checkpoint

CONFIG_FILE = "config.json"
SCHEMA_FILE = "schema.json"
SCALER_FILE = "scaler.json"
MODEL_FILE = "model.safetensors"
FILES = (CONFIG_FILE, SCHEMA_FILE, SCALER_FILE, MODEL_FILE)
_FORMAT = 5
_FORMAT_OF_COMPRESSED = 6
"""Format of forecasters with `compression` in config.json."""
_MAX_JSON_BYTES = 1 << 28
"""Large, because a table may have millions of names."""
_RESIDUALS = "calibration.residuals"
_NETWORK = "network."
_MIN_ZERO_BLOCKS = 0.05
"""From this share of zero blocks on, a matrix is stored as places and values of other blocks."""


@dataclass(frozen=True)
class Compression:
    """How a forecaster was compressed.

    Attributes:
        about: `compression` in config.json; see docs/compress.md.
        matrices: the quantized matrices of the file, by name; the network has their values.
    """

    about: Mapping[str, Any]
    matrices: Mapping[str, QuantizedMatrix] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        """Format of the stored weights, one of `FORMATS_IN_FILES`."""
        return str(self.about["weights"])

    @property
    def note(self) -> str | None:
        """A line that says how forecasts are computed; None for plain fp32 weights."""
        how = [] if self.weights == "fp32" else [f"weights are stored as {self.weights}"]
        if self.about["structured"] in ("none", "blocks"):
            how.append(f"{100 * self.about['prune']:g} % of the weights are zero")
        if not how:
            return None
        return f"{', '.join(how)}; forecasts are computed in fp32 with all of them: no faster"


@dataclass(frozen=True)
class StoredForecaster:
    """A trained forecaster with everything that it needs to forecast other tables.

    Attributes:
        config: the configuration with every choice made.
        given: the configuration as the user gave it.
        series: level and spread of the targets of every series; None for one series and for counts,
            which use `scaler`.
        static_scale: mean and deviation of every static number, shape ``(K, 2)``.
        key: hash of the training table.
        is_recalibrated: the calibration is from a later table, not from the validation part.
    """

    config: ForecastConfig
    given: ForecastConfig
    network: ForecastNetwork
    scaler: Scaler
    calibration: Calibration
    static_scale: NDArray[np.float64]
    schema: TableSchema
    key: str
    compression: Compression | None = None
    series: SeriesScale | None = None
    is_recalibrated: bool = False

    @property
    def columns(self) -> dict[str, Any]:
        """Targets and past covariates, given or chosen at fit."""
        sizes, names = self.network.config, self.schema.columns
        num = sizes.num_targets
        return {"target": names[:num], "past": names[num : num + sizes.num_past]}

    def rows(self) -> list[Row]:
        """Returns targets, time between steps, other columns, layers and size, with labels."""
        every, targets = str(self.schema.timeline.frequency), ", ".join(self.columns["target"])
        others = ", ".join(self.schema.columns[len(self.columns["target"]) :])
        every = "" if every == "rows" else f", every {every.removeprefix('1 ')}"
        num_parameters = sum(p.numel() for p in self.network.parameters())
        facts = {"model": self.network.config.__dict__, "num_parameters": num_parameters}
        read = [("reads also", others)] if others else []
        if self.network.effects is not None:
            read.append(("effects", "of the columns known ahead, learned before the LSTM"))
        return [("forecasts", targets + every), *read, *model_rows(facts)]

    def unsupported(self, levels: Sequence[float]) -> str | None:
        """Returns a warning if some quantiles are infinite, else None."""
        is_calibrated = self.network.output.is_calibrated
        return self.calibration.unsupported(levels) if is_calibrated else None

    def quantiles(
        self,
        parameters: Tensor,
        values: Tensor,
        places: NDArray[np.int64] | None,
        levels: Sequence[float],
    ) -> Tensor:
        """Returns scaled quantiles ``(B, h, C, len(levels))`` for the output of the network,
        ``(B, h, C, num_parameters)``; see `Calibration.width` and `Calibration.quantiles`."""
        width = self.calibration.width(values, self.network.config, places)
        found = self.calibration.quantiles(self.network.output, parameters, width, levels)
        return self.network.bounded(found)

    def answer(
        self,
        values: Tensor,
        statics: Tensor | None,
        levels: Sequence[float] = (),
        places: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Returns scaled forecasts ``(B, h, C, 1)`` of scaled windows, or their `quantiles`."""
        parameters = self.network.answers(values, statics)
        if len(levels) == 0:
            return self.network.output.center(parameters)[..., None]
        return self.quantiles(parameters, values, places, levels)

    def forecast(
        self, inputs: ScaledWindows, rows: NDArray[np.int64], levels: Sequence[float] = ()
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns forecasts ``(N, h, C, 1)``, or quantiles ``(N, h, C, len(levels))``, and actual
        values ``(N, h, C)`` of the windows that begin at `rows`, in the table's units."""
        config, done, parts = self.network.config, 0, list[tuple[Tensor, Tensor]]()
        segments = inputs.table.segments.of_rows(rows)
        for values, statics in inputs.read(rows, config):
            places = inputs.places(segments[done : done + len(values)])
            done += len(values)
            target = values[:, config.input_size :, : config.num_targets, None].clone()
            parts.append((self.answer(values, statics, levels, places), target))
        mean, std = (s[:, None, : config.num_targets, None] for s in inputs.scales(segments))
        found, actual = (
            torch.cat(part).double().numpy() * std + mean for part in zip(*parts, strict=True)
        )
        return found, actual[..., 0]


def forecaster_files(stored: StoredForecaster) -> dict[str, bytes]:
    """Returns config.json, schema.json, scaler.json and model.safetensors."""
    return {**description_files(stored), MODEL_FILE: _weights_file(stored)}


def _weights_file(stored: StoredForecaster) -> bytes:
    """Returns model.safetensors: float32, or parameters in a format of `runs.weight_formats`."""
    network, compression = stored.network, stored.compression
    state = {_NETWORK + name: tensor for name, tensor in network.state_dict().items()}
    if compression is None:
        return encode_tensors({**state, _RESIDUALS: stored.calibration.residuals})
    weights: dict[str, Any] = {}
    for name, parameter in network.named_parameters():
        values, matrix = parameter.detach().cpu().numpy(), compression.matrices.get(name)
        is_same = matrix is not None and np.array_equal(matrix.dequantized(), values)
        weights[_NETWORK + name] = matrix if is_same else values
    sparse = compression.about["structured"] == "blocks" and compression.weights != "int4"
    blocks = {name for name, w in weights.items() if sparse and _is_shorter_as_blocks(name, w)}
    data = encode_weights(weights, compression.weights, blocks)
    others = {name: t.cpu().numpy() for name, t in state.items() if name not in weights}
    others[_RESIDUALS] = stored.calibration.residuals.numpy()
    return bytes(safetensors.numpy.save({**safetensors.numpy.load(data), **others}))


def _is_shorter_as_blocks(name: str, matrix: Any) -> bool:
    values = matrix.codes if isinstance(matrix, QuantizedMatrix) else matrix
    if not may_be_blocks(values):
        return False
    is_zero = (block_grid(values, num_gates(name, len(values))) == 0).all(axis=(2, 3))
    return bool(is_zero.mean() > _MIN_ZERO_BLOCKS)


def description_files(stored: StoredForecaster) -> dict[str, bytes]:
    """Returns config.json, schema.json and scaler.json."""
    config = {
        "format": _FORMAT if stored.compression is None else _FORMAT_OF_COMPRESSED,
        "kind": FORECASTER,
        "train": dataclasses.asdict(stored.config),
        "given": dataclasses.asdict(stored.given),
        "network": dataclasses.asdict(stored.network.config),
        "data": {"key": stored.key},
    }
    if stored.compression is not None:
        config["compression"] = dict(stored.compression.about)
    scales = {
        "mean": stored.scaler.mean.tolist(),
        "std": stored.scaler.std.tolist(),
        "static": stored.static_scale.tolist(),
    }
    if stored.series is not None:
        noise = stored.calibration.noise
        own = {} if noise is None else {"noise": noise.tolist()}
        scales["series"] = stored.series.to_json() | own
    if stored.is_recalibrated:
        scales["is_recalibrated"] = True
    timeline = stored.schema.timeline
    schema = {
        "columns": stored.schema.columns,
        "frequency": timeline.frequency.to_json(),
        "time_zone": timeline.time_zone,
        "is_wall": timeline.is_wall,
        "categories": stored.schema.categories,
    }
    return {
        CONFIG_FILE: json.dumps(config, indent=1).encode(),
        SCHEMA_FILE: _json(schema),
        SCALER_FILE: _json(scales),
    }


def _json(values: Mapping[str, Any]) -> bytes:
    """Returns JSON with a line per key; `indent` writes one per number, and takes 7 times as long
    because it runs in Python: seconds for the scales of 200,000 series."""
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    return ("{\n" + ",\n".join(lines) + "\n}").encode()


def read_options(checkpoint: Checkpoint) -> tuple[ForecastConfig, ForecastConfig, str]:
    """Returns the options of a checkpoint, resolved and as given, and the key of the table.

    Raises:
        CorruptFileError: an invalid value; the message names the file.
        FormatError: the checkpoint is not of a forecaster, or of another format.
    """
    origin = checkpoint.path / CONFIG_FILE
    config = _config(checkpoint.files[CONFIG_FILE], origin)
    return stored_options(config, ForecastConfig, origin)


def _config(data: bytes, origin: Path) -> dict[str, Any]:
    """Returns config.json; raises FormatError unless it describes a forecaster."""
    config = json_object(data, origin, _MAX_JSON_BYTES)
    expected = _FORMAT_OF_COMPRESSED if "compression" in config else _FORMAT
    if config.get("kind") != FORECASTER or config.get("format") != expected:
        raise FormatError(
            f"{origin} is not of a forecaster of format {expected}; open a text model by LM.load,"
            " another format by the fastlstm that wrote it"
        )
    return config


def read_forecaster(path: str | Path) -> StoredForecaster:
    """Reads the published forecaster of a run directory; checks the SHA-256 of each file.

    Raises:
        CorruptFileError: a damaged file or an invalid value; the message names the file.
        FormatError: another kind of model, or another format.
        NonFiniteError: a weight is NaN or Inf.
        RunDirectoryError: nothing is published there.
    """
    return forecaster_of(read_model(path, "forecaster", FILES), Path(path))


def forecaster_of(files: Mapping[str, bytes], path: Path) -> StoredForecaster:
    """Returns the forecaster of the files of a directory; without `MODEL_FILE`, as those of a
    checkpoint, with initial weights, not calibrated."""
    origin = path / CONFIG_FILE
    config = _config(files[CONFIG_FILE], origin)
    resolved, given, key = stored_options(config, ForecastConfig, origin)
    with checked_values(origin):
        values = dict(config["network"])
        for name in ("categories", "static_categories"):
            values[name] = tuple(tuple(pair) for pair in values[name])
        sizes = ForecasterConfig(**values)
        require_same(resolved, sizes, ("horizon", "input_size", "patch", "output"))
        if len(resolved.static) != sizes.num_static:
            raise ValueError(f"'network' reads {sizes.num_static} static columns")
        compression = None
        if config["format"] == _FORMAT_OF_COMPRESSED:
            compression = Compression(checked_compression(config["compression"]))
    if (weights := files.get(MODEL_FILE)) is None:
        network, calibration = ForecastNetwork(sizes), Calibration.none(sizes)
    else:
        network, calibration, compression = _read_weights(weights, sizes, compression, path)
    with checked_values(path / SCHEMA_FILE):
        values = json_object(files[SCHEMA_FILE], path / SCHEMA_FILE, _MAX_JSON_BYTES)
        schema = _schema(values, sizes, resolved)
    with checked_values(path / SCALER_FILE):
        scales = json_object(files[SCALER_FILE], path / SCALER_FILE, _MAX_JSON_BYTES)
        scaler, static = _scales(scales, sizes)
        series = None
        if "series" in scales:
            series = SeriesScale.from_json(scales["series"], sizes.num_targets)
            if "noise" in scales["series"]:
                noise = _numbers(scales["series"]["noise"], series.mean.shape, "noise", True)
                calibration = dataclasses.replace(
                    calibration, noise=torch.from_numpy(noise.astype(np.float32))
                )
    # The cache was on the machine of the training.
    resolved, given = (dataclasses.replace(c, cache_dir=None) for c in (resolved, given))
    return StoredForecaster(
        resolved, given, network, scaler, calibration, static, schema, key, compression, series,
        scales.get("is_recalibrated") is True,
    )  # fmt: skip


def _read_weights(
    data: bytes, sizes: ForecasterConfig, compression: Compression | None, path: Path
) -> tuple[ForecastNetwork, Calibration, Compression | None]:
    """Returns the network, its calibration, and the compression with its matrices."""
    origin, build = path / MODEL_FILE, partial(ForecastNetwork, sizes)
    num_parts = max(sizes.num_layers, len(sizes.categories), len(sizes.static_categories))
    tensors = decode_tensors(data, origin)
    if compression is not None:
        described = described_state(build, len(tensors), path / CONFIG_FILE, num_parts)
        tensors, compression = _decompressed(tensors, described, compression, origin)
    if _RESIDUALS not in tensors:
        raise CorruptFileError(f"{origin}: '{_RESIDUALS}' is missing")
    residuals = tensors.pop(_RESIDUALS)
    weights = {name.removeprefix(_NETWORK): tensor for name, tensor in tensors.items()}
    network = restored_network(build, weights, origin, path / CONFIG_FILE, num_parts)
    shape = len(LEVELS), sizes.horizon, sizes.num_targets
    with checked_values(origin):
        if residuals.shape != shape or residuals.dtype != torch.float32 or residuals.isnan().any():
            raise ValueError(f"{_RESIDUALS} is expected to be {shape} float32 numbers")
    return network, Calibration(residuals), compression


def _decompressed(
    tensors: Mapping[str, Tensor],
    described: Mapping[str, Tensor],
    compression: Compression,
    origin: Path,
) -> tuple[dict[str, Tensor], Compression]:
    """Returns the tensors as they are in a file without compression."""
    stored = {name: tensor.numpy() for name, tensor in tensors.items()}
    shapes = {
        _NETWORK + name: tuple(tensor.shape)
        for name, tensor in described.items()
        if tensor.is_floating_point() and not name.startswith(FIXED)
    }
    exact = {_NETWORK + name for name in described} - shapes.keys() | {_RESIDUALS}
    others = {name: torch.from_numpy(stored.pop(name)) for name in exact & stored.keys()}
    data = bytes(safetensors.numpy.save(stored))
    weights = decode_weights(data, shapes, compression.weights, origin)
    matrices = {
        name.removeprefix(_NETWORK): w
        for name, w in weights.items()
        if isinstance(w, QuantizedMatrix)
    }
    floats = {name: torch.from_numpy(w.copy()) for name, w in as_floats(weights).items()}
    return {**floats, **others}, Compression(compression.about, matrices)


def _schema(values: dict[str, Any], sizes: ForecasterConfig, config: ForecastConfig) -> TableSchema:
    """Returns the schema of schema.json; raises ValueError if it contradicts config.json."""
    columns = tuple(stored_text(name, "a column") for name in values["columns"])
    num = sizes.num_targets + sizes.num_past + sizes.num_future
    ahead = columns[len(columns) - sizes.num_future :]
    known = (*config.future, *calendar_names(config.calendar or ()))
    if len(set(columns)) != num or len(columns) != num or ahead != known:
        raise ValueError(
            f"its {len(columns)} columns are not the {num} that {CONFIG_FILE} describes"
        )
    categories = values["categories"]
    counts = {columns[place]: size for place, size in sizes.categories}
    counts |= {config.static[place]: size for place, size in sizes.static_categories}
    if {name: len(names) for name, names in categories.items()} != counts or not all(
        isinstance(name, str | int | float) for names in categories.values() for name in names
    ):
        raise ValueError(f"its categories are not the ones {CONFIG_FILE} describes")
    zone, is_wall = values["time_zone"], values.get("is_wall")
    if is_wall is not None and type(is_wall) is not bool:
        raise ValueError(f"is_wall is {is_wall!r:.80}, expected true or false")
    frequency = Frequency.from_json(values["frequency"])
    zone = None if zone is None else stored_text(zone, "time_zone")
    timeline = Timeline(frequency, zone, is_wall, sizes.has_missing)
    return TableSchema(columns, timeline, categories)


def _scales(scales: dict[str, Any], sizes: ForecasterConfig) -> tuple[Scaler, NDArray[np.float64]]:
    """Returns the scaler and the static scale of scaler.json; raises ValueError if invalid."""
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
    array = np.asarray(values)
    if array.size == 0:
        array = array.reshape(shape)
    with np.errstate(over="ignore"):  # scaling computes in float32
        small = array.astype(np.float32) if array.dtype.kind in "iuf" else np.float32("nan")
    is_good = array.shape == shape and bool(np.isfinite(small).all())
    if not is_good or (is_positive and (small <= 0).any()):
        above = " above 0" if is_positive else ""
        raise ValueError(f"{name} is expected to be {shape} numbers of float32{above}")
    return array.astype(np.float64)
