"""The result of compressing a forecaster: its start, its weights, what config.json says of it."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastlstm.compression.job import Job, method_facts, peak_rate
from fastlstm.compression.options import CompressConfig
from fastlstm.compression.units import without_units
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.files import MODEL_FILE, StoredForecaster
from fastlstm.forecast.model.network import LINEAR, ForecastNetwork
from fastlstm.forecast.train import source_text
from fastlstm.forecast.untrained import fitted_scaler
from fastlstm.forecast.weights_file import Compression
from fastlstm.runs.manifest import FileRecord, read_manifest
from fastlstm.runs.weight_formats import quantize, rounded


def model_record(run: str | Path) -> FileRecord:
    """Returns the size and hash of a run's model."""
    return read_manifest(Path(run)).files[MODEL_FILE]


def start_of(
    config: CompressConfig, source: StoredForecaster, compression: Compression
) -> StoredForecaster:
    """Returns the forecaster that is trained: RUN's, without some units, or a new one."""
    sizes, network = source.network.config, copy.deepcopy(source.network)
    buffers, weights = (
        dict(network.named_buffers()),
        dict[str, torch.Tensor](network.named_parameters()),
    )
    changes: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("hidden_size", "num_layers", "dropout")
        if getattr(config, name) is not None
    }
    if config.prune is not None or config.is_new_student:
        changes.setdefault("dropout", 0.0)  # fewer weights and the teacher are enough
    if config.prune is not None and config.structured == "units":
        weights, smaller = without_units(weights, sizes, config.prune)
        changes["hidden_size"] = smaller.hidden_size
    if changes:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)
            network = ForecastNetwork(dataclasses.replace(sizes, **changes))
        linear = {name: buffers[name] for name in LINEAR if name in buffers}
        own = linear if config.is_new_student else {**buffers, **weights}
        network.load_state_dict(own, strict=not config.is_new_student)
        if config.is_new_student and sizes.linear:
            network.zero_head()
    resolved, given = (dataclasses.replace(c, **changes) for c in (source.config, source.given))
    return dataclasses.replace(
        source, config=resolved, given=given, network=network, compression=compression
    )


def compression_of(
    job: Job, config: CompressConfig, source: StoredForecaster, table: Any
) -> Compression:
    """Returns what config.json says of a compression.

    Args:
        job: what is asked for.
        config: its options; of a resumed compression those it was started with.
        source: RUN's forecaster.
        table: that it is trained or calibrated on, or None.
    """
    record, num_units = model_record(job.run), source.network.config.hidden_size
    teacher = None
    if config.distil is not None:
        teacher = {"path": config.distil, "model_sha256": model_record(config.distil).sha256}
    before = {} if source.compression is None else source.compression.about
    train = {"learning_rate": source.config.learning_rate}
    return Compression(
        {
            **method_facts(config, before, num_units),
            "source": {
                "path": str(job.run),
                "model_sha256": record.sha256,
                "model_bytes": record.size,
                "learning_rate": peak_rate({"compression": before, "train": train}),
                "model": dataclasses.asdict(source.network.config),
            },
            "teacher": teacher,
            "data": None if table is None else source_text(table),
        }
    )


def with_rounded_weights(stored: StoredForecaster) -> StoredForecaster:
    """Returns a forecaster with the weights that its file will give back.

    Raises:
        ConfigError: a weight is too large for the format.
    """
    assert stored.compression is not None
    to, network = stored.compression.weights, copy.deepcopy(stored.network).cpu().eval()
    weights: dict[str, Any] = {n: p.detach().numpy() for n, p in network.named_parameters()}
    matrices = {}
    if to in ("int8", "int4"):
        matrices = {name: quantize(w, to) for name, w in weights.items() if w.ndim == 2}
    floats = rounded({**weights, **matrices}, to)
    network.load_state_dict({n: torch.from_numpy(w) for n, w in floats.items()}, strict=False)
    compression = dataclasses.replace(stored.compression, matrices=matrices)
    return dataclasses.replace(stored, network=network, compression=compression)


def is_own_table(dataset: SeriesDataset, split: Split, source: StoredForecaster) -> bool:
    """Returns whether a table's training rows are as those that a source scales by.

    False where its intervals are of another table than these.
    """
    if not has_own_intervals(source):
        return False
    own, other = source.scaler, fitted_scaler(source.config, dataset, split)
    return np.array_equal(own.mean, other.mean) and np.array_equal(own.std, other.std)


def has_own_intervals(stored: StoredForecaster) -> bool:
    """Returns whether a forecaster is calibrated on the table that it scales by."""
    return stored.compression is None or bool(stored.compression.about.get("has_own_intervals"))


def described(stored: StoredForecaster, **facts: bool) -> StoredForecaster:
    """Returns a compressed forecaster whose config.json says more of its compression."""
    assert stored.compression is not None
    about = {**stored.compression.about, **facts}
    compression = dataclasses.replace(stored.compression, about=about)
    return dataclasses.replace(stored, compression=compression)
