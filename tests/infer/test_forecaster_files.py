"""Stored forecasters whose files contradict each other."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlstm.errors import CorruptFileError
from fastlstm.infer.forecaster_files import read_forecaster
from fastlstm.nn.io import decode_tensors, encode_tensors
from fastlstm.run_directory import RunDirectory
from forecast_server import fit_plain, save


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(fit_plain(), tmp_path_factory.mktemp("stored"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 6000},
            r"cell_hh.weight has the shape \(\d+, \d+\), config.json describes",
        ),
        ({"hidden_size": 10**12}, "config.json: no such network"),
        ({"hidden_size": 10**40}, "config.json: no such network"),
        ({"embed_size": 10**9}, "config.json describes"),
        ({"num_layers": 10**9}, "config.json: no such network"),
        ({"horizon": 10**9}, "config.json describes"),
        ({"bidirectional": True}, "config.json describes"),
    ],
)
def test_a_configuration_takes_no_memory_that_the_weights_do_not(
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


def test_a_weight_that_no_layer_has_is_refused(path: Path, tmp_path: Path) -> None:
    files = RunDirectory(path).read_published()[1]
    tensors = decode_tensors(files["model.safetensors"], path)
    more = encode_tensors({**tensors, "network.spare": torch.zeros(2)})
    forged = RunDirectory(tmp_path / "forged")
    forged.create()
    forged.publish({**files, "model.safetensors": more})
    with pytest.raises(CorruptFileError, match=r"spare has the shape \(2,\), .* describes None"):
        read_forecaster(forged.path)
