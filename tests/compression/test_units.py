"""Removal of hidden units: what belongs to one, and that dead ones change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastlstm.compression.pruning import (
    importance,
    most_important,
    num_units,
    smaller,
    smaller_size,
    unit_groups,
    without_units,
)
from fastlstm.errors import ConfigError
from fastlstm.forecast.model.network import ForecasterConfig, ForecastNetwork
from fastlstm.text.config import ModelConfig
from fastlstm.text.model import LanguageModel

TEXTS: dict[str, dict[str, Any]] = {
    "one layer": {"num_layers": 1},
    "three layers": {},
    "as wide": {"embed_size": 32},
    "tied": {"embed_size": 32, "tie_weights": True},
    "residual": {"residual": True},
    "residual, as wide": {"residual": True, "embed_size": 32},
    "residual, tied": {"residual": True, "embed_size": 32, "tie_weights": True},
    "one layer, residual, tied": {
        "num_layers": 1, "residual": True, "embed_size": 32, "tie_weights": True,
    },
    "low rank": {"output_rank": 5},
    "other functions": {"zoneout": 0.1, "activation": "softsign", "recurrent_dropout": 0.1},
}  # fmt: skip
NORMED: dict[str, dict[str, Any]] = {
    "layer norm": {"layer_norm": True},
    "output norm": {"output_norm": True},
    "both, residual, tied": {
        "layer_norm": True, "output_norm": True, "residual": True, "tie_weights": True,
        "embed_size": 32,
    },
}  # fmt: skip
FORECASTERS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "bidirectional": {"num_layers": 2, "bidirectional": True},
    "stateful": {"num_layers": 2, "stateful": True},
    "columns": {
        "num_targets": 2, "channels": "joint", "num_past": 1, "num_future": 1, "num_static": 2,
        "static_categories": ((1, 5),), "output": "quantiles", "has_missing": True,
    },
}  # fmt: skip


def text_config(**fields):
    return ModelConfig(
        **{"vocab_size": 11, "embed_size": 12, "rnn_size": 32, "num_layers": 3, **fields}
    )


def forecast_config(**fields):
    sizes = {"input_size": 24, "horizon": 10, "patch": 4, "hidden_size": 32, "embed_size": 8}
    return ForecasterConfig(**{**sizes, **fields})


def model_of(config):
    torch.manual_seed(0)
    if isinstance(config, ModelConfig):
        return LanguageModel(config).eval()
    return ForecastNetwork(config).eval()


def outputs(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        if isinstance(model, LanguageModel):
            return [model(torch.randint(11, (7, 3), generator=generator))[0]]
        c = model.config
        columns = c.num_targets + c.num_past + c.num_future
        values = torch.randn(3, c.input_size + c.horizon, columns, generator=generator)
        statics = torch.rand(3, c.num_static, generator=generator).round() if c.num_static else None
        answers = [model(values, statics)]
        if c.stateful:
            answers.append(model.read_chunk(values, statics)[0])
        return answers


def loaded(weights, config):
    model = model_of(config)
    model.load_state_dict(weights)
    return model


def kill(model, keep):
    """Sets all weights that read a unit which does not stay to zero."""
    config = model.config
    H, is_tied = num_units(config), getattr(config, "tie_weights", False)
    for group, units in zip(unit_groups(config), keep, strict=True):
        dead = torch.ones(H, dtype=torch.bool)
        dead[units] = False
        for name, axis, starts in group:
            if axis == 1 and (is_tied or name != "embedding.weight"):
                for start in starts:
                    model.get_parameter(name).data[:, start : start + H][:, dead] = 0.0


def some_units(config, count=16):
    generator = torch.Generator().manual_seed(3)
    H = num_units(config)
    return [
        torch.randperm(H, generator=generator)[:count].sort().values for _ in unit_groups(config)
    ]


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(text_config(**fields), id=f"text {n}") for n, fields in TEXTS.items()),
        *(pytest.param(forecast_config(**fields), id=n) for n, fields in FORECASTERS.items()),
    ],
)
def test_dead_units_change_nothing_when_removed(config):
    model, keep = model_of(config), some_units(config)
    untouched = outputs(model)
    kill(model, keep)
    expected = outputs(model)
    assert not torch.allclose(untouched[0], expected[0], atol=1e-3), "the units counted before"
    weights, small = smaller(model.state_dict(), config, keep)
    assert num_units(small) == 16
    torch.testing.assert_close(outputs(loaded(weights, small)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NORMED)
def test_units_of_a_normalised_layer(name):
    """Every unit stands there twice, so that means and variances stay; one of each is dead."""
    config = text_config(**NORMED[name])
    model = model_of(config)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    first, second = torch.randperm(32, generator=generator).view(2, 16)
    for group in unit_groups(config):
        for part, axis, starts in group:
            for start in starts if axis == 0 else ():
                weight = model.get_parameter(part).data
                weight[start + second] = weight[start + first]
    keep = [first.sort().values for _ in unit_groups(config)]
    kill(model, keep)
    expected = outputs(model)
    weights, small = smaller(model.state_dict(), config, keep)
    torch.testing.assert_close(outputs(loaded(weights, small)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [text_config(), forecast_config(), text_config(residual=True)])
def test_the_smaller_model_has_the_shapes_of_its_configuration(config):
    model = model_of(config)
    for count in (16, 31, 32):
        weights, small = smaller(model.state_dict(), config, some_units(config, count))
        fresh = model_of(small).state_dict()
        assert {n: w.shape for n, w in weights.items()} == {n: w.shape for n, w in fresh.items()}
        assert list(weights) == list(fresh)
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight), "all units stay"
        assert weights[name].data_ptr() != weight.data_ptr()


@pytest.mark.parametrize(
    ("fields", "embed_size"),
    [
        ({}, 12),
        ({"embed_size": 32}, 32),
        ({"embed_size": 32, "tie_weights": True}, 16),
        ({"embed_size": 32, "residual": True}, 16),
        ({"residual": True}, 12),
    ],
)
def test_the_embedding_shrinks_if_its_columns_are_units(fields, embed_size):
    config = text_config(**fields)
    _, small = without_units(model_of(config).state_dict(), config, 0.5)
    assert (small.rnn_size, small.embed_size) == (16, embed_size)


def test_a_residual_model_with_an_embedding_of_its_new_width_is_refused():
    config = text_config(embed_size=16, residual=True)
    with pytest.raises(ConfigError, match="16 hidden units are as many as the embedding is wide"):
        without_units(model_of(config).state_dict(), config, 0.5)
    config = text_config(embed_size=16)
    assert without_units(model_of(config).state_dict(), config, 0.5)[1].rnn_size == 16


@pytest.mark.parametrize(
    ("size", "share", "left"),
    [(512, 0.75, 128), (512, 0.5, 256), (512, 0.99, 16), (100, 0.5, 48), (100, 0.1, 96),
     (64, 0.4, 32), (1024, 0.9, 96), (40, 0.01, 32)],
)  # fmt: skip
def test_a_multiple_of_16_units_stays(size, share, left):
    assert smaller_size(size, share) == left


@pytest.mark.parametrize(("size", "share"), [(16, 0.5), (8, 0.5), (512, 0.01), (32, 0.2)])
def test_a_share_that_removes_no_unit_is_refused(size, share):
    with pytest.raises(ConfigError, match=f"of {size} hidden units removes none"):
        smaller_size(size, share)


def test_importance_is_the_norm_of_the_parameters_of_a_unit():
    config = text_config(num_layers=2, layer_norm=True, output_norm=True)
    weights = model_of(config).state_dict()
    scores = importance(weights, config)
    assert [tuple(score.shape) for score in scores] == [(32,), (32,)]
    for k, reader in ((0, "layers.1.weight_ih_l0"), (1, "output.weight")):
        for unit in (0, 5, 31):
            gates = [unit + 32 * gate for gate in range(4)]
            names = [*("weight_ih", "weight_hh", "bias_ih", "bias_hh", "gamma_ih", "gamma_hh")]
            parts = [weights[f"layers.{k}.{name}_l0"][gates] for name in names]
            parts += [weights[f"layers.{k}.{name}_l0"][unit] for name in ("gamma_c", "beta_c")]
            parts += [weights[f"norms.{k}.{name}"][unit] for name in ("weight", "bias")]
            parts += [weights[f"layers.{k}.weight_hh_l0"][:, unit], weights[reader][:, unit]]
            norm = sum(float(part.double().square().sum()) for part in parts)
            assert float(scores[k][unit]) == pytest.approx(norm)


def test_the_most_important_units_stay():
    scores = [torch.tensor([1.0, 5.0, 3.0, 3.0]), torch.tensor([2.0, 2.0, 2.0, 2.0])]
    assert [units.tolist() for units in most_important(scores, 2)] == [[1, 2], [0, 1]]


def test_unimportant_units_are_removed():
    config = text_config(num_layers=1)
    model = model_of(config)
    weak = torch.randperm(32, generator=torch.Generator().manual_seed(5))[:16]
    for name, axis, starts in unit_groups(config)[0]:
        for start in starts:
            model.get_parameter(name).data.movedim(axis, 0)[start + weak] *= 1e-6
    expected = outputs(model)
    weights, small = without_units(model.state_dict(), config, 0.5)
    torch.testing.assert_close(outputs(loaded(weights, small)), expected, rtol=0.0, atol=1e-4)
