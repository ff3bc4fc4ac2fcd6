"""Stored values and weights: what does not fit is named before it is used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fastlstm.errors import CorruptFileError, NonFiniteError
from fastlstm.runs.stored_values import (
    checked_values,
    json_object,
    require_same,
    restored_network,
    stored_options,
    stored_text,
)

FILE, CONFIG = Path("model.safetensors"), Path("config.json")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("a"), "config.json: 'a' is missing"),
        (ValueError("one\ntwo"), "config.json: one; put the right file back"),
        (TypeError("x" * 999), f"config.json: {'x' * 200}; put the right file back"),
        (OverflowError("big"), "config.json: big; put the right file back"),
    ],
)
def test_errors_of_values_name_the_file(error, text):
    with pytest.raises(CorruptFileError) as caught, checked_values(CONFIG):
        raise error
    assert str(caught.value) == text


def test_other_errors_are_not_changed():
    with pytest.raises(RuntimeError), checked_values(CONFIG):
        raise RuntimeError


def test_a_json_object_of_bounded_size():
    assert json_object(b'{"a": 1}', CONFIG) == {"a": 1}
    with pytest.raises(CorruptFileError, match="holds list, expected a JSON object"):
        json_object(b"[1]", CONFIG)
    with pytest.raises(CorruptFileError, match="expected at most 4 of JSON"):
        json_object(b'{"a": 1}', CONFIG, limit=4)


@dataclass
class Options:
    size: int = 1


def test_options_are_resolved_and_as_given_beside_the_key():
    config: dict[str, Any] = {"train": {"size": 2}, "given": {}, "data": {"key": "k"}}
    assert stored_options(config, Options, CONFIG) == (Options(2), Options(), "k")
    for change in ({"train": {"sise": 2}}, {"given": None}, {"data": {}}, {"data": {"key": 5}}):
        with pytest.raises(CorruptFileError, match=r"^config\.json: "):
            stored_options({**config, **change}, Options, CONFIG)


def test_a_text_and_equal_fields():
    assert stored_text("a", "data.key") == "a"
    with pytest.raises(TypeError, match=r"data\.key is 5, expected a text"):
        stored_text(5, "data.key")
    require_same(Options(2), SimpleNamespace(size=2), ["size"])
    with pytest.raises(ValueError, match="size of 'train' and of 'network' differ"):
        require_same(Options(2), SimpleNamespace(size=3), ["size"])


def restored(weights: dict[str, torch.Tensor], num_parts: int = 1, **sizes: Any) -> nn.Linear:
    size = {"in_features": 3, "out_features": 2, **sizes}
    return restored_network(lambda: nn.Linear(**size), weights, FILE, CONFIG, num_parts)


def test_a_network_has_its_weights_and_draws_no_random_numbers():
    state, before = nn.Linear(3, 2).state_dict(), torch.get_rng_state()
    network = restored(state)
    assert torch.equal(torch.get_rng_state(), before)
    assert not network.training
    assert all(torch.equal(network.state_dict()[name], t) for name, t in state.items())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bias": None}, r"bias is None, config\.json describes \(2,\) torch\.float32"),
        ({"more": torch.ones(1)}, r"more is \(1,\) torch\.float32, config\.json describes None"),
        ({"weight": torch.ones(3, 2)}, r"weight is \(3, 2\) torch\.float32"),
        ({"bias": torch.ones(2, dtype=torch.int64)}, r"bias is \(2,\) torch\.int64"),
    ],
)
def test_weights_of_another_network_are_refused(change, text):
    weights = {**nn.Linear(3, 2).state_dict(), **change}
    with pytest.raises(CorruptFileError, match=rf"^model\.safetensors: {text}"):
        restored({name: t for name, t in weights.items() if t is not None})


def test_weights_that_are_nan_are_refused():
    weights = {**nn.Linear(3, 2).state_dict(), "bias": torch.tensor([1.0, float("nan")])}
    with pytest.raises(NonFiniteError, match="bias is NaN or Inf"):
        restored(weights)


def test_a_network_that_no_memory_has_is_refused():
    weights = nn.Linear(3, 2).state_dict()
    with pytest.raises(CorruptFileError, match=r"config\.json: no such network \(99 parts\)"):
        restored(weights, num_parts=99)
    with pytest.raises(CorruptFileError, match=r"config\.json: no such network"):
        restored(weights, in_features=-1)
