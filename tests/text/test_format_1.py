"""config.json of format 1: what a text model then called `layer_norm` is no option of the cell."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlstm.cli.config_file import read_config_file
from fastlstm.cli.options import TEXT_OPTIONS
from fastlstm.cli.parser import parse
from fastlstm.cli.train import COMMAND
from fastlstm.errors import FormatError
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.text.config import ModelConfig, TrainConfig, in_todays_names
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.files import load_language_model, save_language_model
from fastlstm.text.model import LanguageModel
from fastlstm.text.train import stored_configs
from fastlstm.training.checkpoint import Checkpoint

FIELDS = {"vocab_size": 4, "embed_size": 3, "rnn_size": 5, "num_layers": 2}


def files_of_format_1(model: LanguageModel) -> dict[str, bytes]:
    """The files of a model with the names that a fastlstm of format 1 gave them."""
    files = save_language_model(model, CharTokenizer("\nabc"), train={"output_norm": True})
    text = files["config.json"].decode()
    for new, old in (("weight_drop", "recurrent_dropout"), ("output_norm", "layer_norm")):
        config = json.loads(text)
        for part in ("model", "train", "given"):
            if part != "model" and new not in config[part]:
                continue
            config[part].pop(old, None)
            config[part][old] = config[part].pop(new)
        text = json.dumps(config)
    config = json.loads(text) | {"format_version": 1}
    for name in ("zoneout", "activation", "recurrent_activation"):
        del config["model"][name]
    return {**files, "config.json": json.dumps(config).encode()}


def test_a_layer_norm_of_format_1_is_an_output_norm(tmp_path: Path) -> None:
    model = LanguageModel(ModelConfig(**FIELDS, output_norm=True, weight_drop=0.25)).eval()
    run = RunDirectory(tmp_path / "run")
    run.create()
    files = files_of_format_1(model)
    old = json.loads(files["config.json"])["model"]
    assert (old["layer_norm"], old["recurrent_dropout"], "output_norm" in old) == (
        True,
        0.25,
        False,
    )
    run.publish(files)
    loaded = load_language_model(run.path)
    assert loaded.model.config == model.config
    assert (loaded.model.config.layer_norm, loaded.model.config.recurrent_dropout) == (False, 0.0)
    assert [n for n, _ in loaded.model.named_parameters()] == [
        n for n, _ in model.named_parameters()
    ]
    tokens = torch.tensor([[1], [3], [2]])
    assert torch.equal(loaded.model(tokens)[0], model(tokens)[0])
    assert loaded.config["model"]["output_norm"] is True
    assert loaded.config["train"] == {"output_norm": True}


def test_in_format_2_it_is_the_cells(tmp_path: Path) -> None:
    model = LanguageModel(ModelConfig(**FIELDS, layer_norm=True))
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.publish(save_language_model(model, CharTokenizer("\nabc")))
    loaded = load_language_model(run.path).model
    assert (loaded.config.layer_norm, loaded.config.output_norm) == (True, False)
    assert "layers.1.gamma_hh_l0" in dict(loaded.named_parameters())


def checkpoint(config: dict[str, Any]) -> Checkpoint:
    files = {"config.json": json.dumps(config).encode()}
    return Checkpoint(Path("checkpoint-1"), 1, {}, {}, files, True)


def test_the_configuration_of_a_checkpoint() -> None:
    old = {"layer_norm": True, "recurrent_dropout": 0.1}
    config = {"format_version": 1, "train": old, "given": {**old, "seed": 1}}
    started, given = stored_configs(checkpoint(config))
    assert started == TrainConfig(output_norm=True, weight_drop=0.1)
    assert given == TrainConfig(output_norm=True, weight_drop=0.1, seed=1)
    started, given = stored_configs(checkpoint({**config, "format_version": 2}))
    assert started == TrainConfig(layer_norm=True, recurrent_dropout=0.1)


def test_the_config_json_of_a_run_as_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {"format": "fastlstm-run", "format_version": 1, "train": {"layer_norm": True}}
    path.write_text(json.dumps(config), encoding="utf-8")
    assert read_config_file(path, TEXT_OPTIONS) == {"output_norm": True}
    path.write_text(json.dumps({**config, "format_version": 2}), encoding="utf-8")
    assert read_config_file(path, TEXT_OPTIONS) == {"layer_norm": True}


@pytest.mark.parametrize("version", [None, 0, 3, "1", True])
def test_other_formats_are_refused(version: object) -> None:
    with pytest.raises(FormatError, match=f"has format version {version}, .* up to 2"):
        in_todays_names({"format_version": version, "model": {}})


def test_names_of_format_1_have_fields_of_today() -> None:
    old = {"recurrent_dropout": 0.1, "layer_norm": True}
    found = in_todays_names({"format_version": 1, "model": old, "train": old})
    for part, kind in (("model", ModelConfig), ("train", TrainConfig)):
        assert found[part].keys() <= {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("written", ["zoneout: 0.2", "zoneout: [0.2, 0.1]", "zoneout: 0.2,0.1"])
def test_zoneout_in_a_file_and_on_the_command_line(written: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(written, encoding="utf-8")
    pair = (0.2, 0.1) if "1" in written else (0.2, 0.2)
    assert TrainConfig(**read_config_file(path, TEXT_OPTIONS)).zoneout == pair
    flag = f"--zoneout={written.partition(': ')[2].strip('[]').replace(' ', '')}"
    parsed = parse(COMMAND, ["book.txt", "--out", "r", flag])
    assert TrainConfig(zoneout=parsed.values["zoneout"]).zoneout == pair
