"""The options of the cell in language models: trained, stored, resumed and written with."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch

import fastlstm
from fastlstm.errors import ConfigError, Stopped
from fastlstm.text.config import TrainConfig
from fastlstm.text.files import load_language_model
from fastlstm.text.loading import load_decoder
from golden import material
from golden.courses import Stop

CONFIG: dict[str, Any] = {
    "rnn_size": 8, "embed_size": 6, "num_layers": 2, "batch_size": 4, "seq_length": 8, "seed": 3,
    "split": "60/20/20", "dropout": 0.0, "precision": "fp32", "device": "cpu", "threads": 1,
    "tensorboard": False, "sample_every": 0, "log_every": 1, "eval_every": 4,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "layer_norm": {"layer_norm": True},
    "recurrent_dropout": {"recurrent_dropout": 0.3},
    "zoneout": {"zoneout": (0.2, 0.1)},
    "activation": {"activation": "softsign"},
    "recurrent_activation": {"recurrent_activation": "hard_sigmoid"},
    "output_rank": {"output_rank": 5},
    "all": {
        "layer_norm": True, "recurrent_dropout": 0.3, "zoneout": (0.2, 0.1),
        "activation": "softsign", "recurrent_activation": "hard_sigmoid",
        "output_norm": True, "output_rank": 7, "weight_drop": 0.2,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*text is written on torch")
        yield


def train(folder, stop=None, **fields):
    source, events = folder / "text.txt", []
    source.write_text(material.text(700), encoding="utf-8")
    observers = [events.append, *([] if stop is None else [stop.observe])]
    fields = {**CONFIG, "steps": 8, **fields}
    run = fastlstm.train(source, out=folder / "run", observers=observers, stop=stop, **fields)
    return run, events


@pytest.mark.isa
@pytest.mark.parametrize("name", OPTIONS)
def test_a_model_is_trained_natively_stored_and_written_with(name, tmp_path):
    options = OPTIONS[name]
    run, events = train(tmp_path, **options)
    start = next(e for e in events if e["event"] == "start")
    assert all("native, fused LSTM fp32" in line for line in start["kernels"]), start["kernels"]
    losses = [e["loss"] for e in events if e["event"] == "eval"]
    assert losses[-1] < losses[0]
    stored = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
    assert stored["format_version"] == 2
    config = load_language_model(run.path).model.config
    for field, value in options.items():
        assert getattr(config, field) == value
        assert stored["train"][field] == (list(value) if isinstance(value, tuple) else value)
    lm = fastlstm.LM.load(run.path)
    written = lm.generate("the ", 20, seed=1)
    assert lm.generate("the ", 20, seed=1) == written
    assert load_decoder(run.path).decoder.model_hash == lm.decoder.model_hash
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    assert lm.evaluate(text).bits_per_char < 6


def test_every_option_changes_what_is_trained(tmp_path):
    found = {}
    for name, options in {"torch's": {}, **OPTIONS}.items():
        folder = tmp_path / name.replace("'", "")
        folder.mkdir()
        _, events = train(folder, steps=2, **options)
        found[name] = next(e["loss"] for e in events[::-1] if e["event"] == "step")
    assert len(set(found.values())) == len(found), found


def test_a_resumed_run_keeps_them(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    run, _ = train(whole, **OPTIONS["all"])
    stop = Stop(4)
    with pytest.raises(Stopped):
        train(tmp_path, stop=stop, **OPTIONS["all"])
    again, _ = train(tmp_path, resume=True, **OPTIONS["all"])
    one, two = (load_language_model(r.path).model.state_dict() for r in (run, again))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_strict_kernels_refuse_samples_on_torch():
    with pytest.raises(ConfigError, match="has no zoneout: samples would be written on torch"):
        TrainConfig(zoneout=0.1, strict_kernels=True)
    TrainConfig(zoneout=0.1, strict_kernels=True, sample_every=0)
    TrainConfig(recurrent_dropout=0.1, strict_kernels=True)
    TrainConfig(activation="softsign", strict_kernels=True)  # the native decoder has it
    with pytest.raises(ConfigError, match="has no activation relu"):
        TrainConfig(activation="relu", strict_kernels=True)


def test_both_directions_are_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match="a language model reads forward only"):
        train(tmp_path, bidirectional=True)


def test_bad_values_are_named():
    for fields in ({"recurrent_dropout": 1.0}, {"zoneout": "0.1"}, {"weight_drop": 1.0}):
        ((name, value),) = fields.items()
        with pytest.raises(ConfigError, match=f"`{name}` is {value!r}, expected"):
            TrainConfig(**fields)
