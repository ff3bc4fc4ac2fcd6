"""Removes hidden units: the parameters of a unit, its importance, and the smaller model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastlstm.errors import ConfigError
from fastlstm.forecast.model.network import ForecasterConfig
from fastlstm.text.config import ModelConfig

MULTIPLE = 16
"""A smaller model has a multiple of so many units, because the kernels prefer multiples."""

Weights = Mapping[str, Tensor]
Config = ModelConfig | ForecasterConfig
ConfigT = TypeVar("ConfigT", bound=Config)


class UnitAxis(NamedTuple):
    """An axis of a parameter that holds hidden units, from each of `starts` on (one per gate)."""

    name: str
    axis: int
    starts: tuple[int, ...]


Group = list[UnitAxis]
"""The parameters of the same H units: of one layer and direction, or of layers that are added to
each other. A unit is removed from all of them."""


def unit_groups(config: Config) -> list[Group]:
    """Returns the groups of hidden units of a model; each may lose other units.

    A unit of a layer has four gate rows in both matrices and biases (and in parameters of cell
    options), a column of `weight_hh`, and a column of each matrix that reads the layer. Layers with
    residual connections share one group, with the columns of an embedding of the same width. A tied
    embedding belongs to the last layer. In a forecaster, each direction of a layer is a group. The
    decoder belongs to the last layer, or is a group if the layers are bidirectional.
    """
    if isinstance(config, ModelConfig):
        return _text_groups(config)
    return _forecast_groups(config)


def _text_groups(config: ModelConfig) -> list[Group]:
    H, L = config.rnn_size, config.num_layers
    layers: list[Group] = []
    for k in range(L):
        cell = {n: length for n, (length, _) in config.parameters.items()}
        layer = _cell(f"layers.{k}.", "_l0", H, cell)
        if config.output_norm:
            layer += [UnitAxis(f"norms.{k}.{name}", 0, (0,)) for name in ("weight", "bias")]
        if k + 1 < L:
            layer.append(UnitAxis(f"layers.{k + 1}.weight_ih_l0", 1, (0,)))
        layers.append(layer)
    if not config.tie_weights:
        reader = "projection.weight" if config.output_rank else "output.weight"
        layers[-1].append(UnitAxis(reader, 1, (0,)))
    if _follows(config):
        layers[-1] += [
            UnitAxis("embedding.weight", 1, (0,)),
            UnitAxis("layers.0.weight_ih_l0", 1, (0,)),
        ]
    if not config.residual:
        return layers
    return [list(dict.fromkeys(part for layer in layers for part in layer))]


def _follows(config: ModelConfig) -> bool:
    """Returns whether the columns of the embedding are the units of the last layer."""
    return config.tie_weights or (config.residual and config.embed_size == config.rnn_size)


def _forecast_groups(config: ForecasterConfig) -> list[Group]:
    H, L = config.hidden_size, config.num_layers
    ways = ("", "_reverse") if config.bidirectional else ("",)
    last = ("hidden_of_both.weight", "cell_of_both.weight") if config.bidirectional else ()
    groups: list[Group] = []
    for k in range(L):
        readers = last if k + 1 == L else [f"lstm.weight_ih_l{k + 1}{way}" for way in ways]
        for at, way in enumerate(ways):
            columns = [UnitAxis(name, 1, (at * H,)) for name in readers]
            groups.append([*_cell("lstm.", f"_l{k}{way}", H, {}), *columns])
    gates = tuple(k * H for k in range(4))
    decoder = [
        UnitAxis(name, 0, gates) for name in ("cell_ih.weight", "cell_ih.bias", "cell_hh.weight")
    ]
    decoder += [UnitAxis(name, 1, (0,)) for name in ("cell_hh.weight", "head.weight")]
    for reader in (*last, *(["cell_of_hidden.weight"] if config.stateful else [])):
        decoder += [UnitAxis(reader, 0, (0,)), UnitAxis(reader.replace("weight", "bias"), 0, (0,))]
    if config.bidirectional:
        return [*groups, decoder]
    if config.stateful:
        decoder.append(UnitAxis("cell_of_hidden.weight", 1, (0,)))
    groups[-1] += decoder  # it starts from the state of the last layer
    return groups


def _cell(prefix: str, suffix: str, H: int, more: Mapping[str, int]) -> Group:
    """Returns the gate rows of a layer and the columns of its recurrent matrix.

    `more` are the parameters of cell options by name, with their length in units of H.
    """
    lengths = {**dict.fromkeys(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), 4), **more}
    rows = [
        UnitAxis(f"{prefix}{name}{suffix}", 0, tuple(k * H for k in range(length)))
        for name, length in lengths.items()
    ]
    return [*rows, UnitAxis(f"{prefix}weight_hh{suffix}", 1, (0,))]


def num_units(config: Config) -> int:
    """Returns H, the hidden units of a layer."""
    return config.rnn_size if isinstance(config, ModelConfig) else config.hidden_size


def smaller_size(size: int, share: float) -> int:
    """Returns the number of units that stay: the nearest multiple of 16, at least 16."""
    left = max(MULTIPLE, round((1.0 - share) * size / MULTIPLE) * MULTIPLE)
    if left >= size:
        raise ConfigError(
            f"`prune={share!r}` of {size} hidden units removes none: a multiple of {MULTIPLE}"
            " stays; give a larger share"
        )
    return left


def importance(weights: Weights, config: Config) -> list[Tensor]:
    """Returns the squared norm of the parameters of each unit, `(H,)` float64 for every group."""
    H, scores = num_units(config), []
    for group in unit_groups(config):
        score = torch.zeros(H, dtype=torch.float64)
        for name, axis, starts in group:
            value = weights[name].detach().square().double().cpu()
            sums = value if value.dim() == 1 else value.sum(1 - axis)
            for start in starts:
                score += sums[start : start + H]
        scores.append(score)
    return scores


def most_important(scores: Sequence[Tensor], count: int) -> list[Tensor]:
    """Returns the `count` units of each group to keep, ascending; ties keep the first."""
    return [
        score.sort(descending=True, stable=True).indices[:count].sort().values for score in scores
    ]


def smaller(
    weights: Weights, config: ConfigT, keep: Sequence[Tensor]
) -> tuple[dict[str, Tensor], ConfigT]:
    """Returns the weights and the configuration of a model with some of its hidden units.

    If the removed units change nothing, the smaller model computes the same, unless normalisation
    counts them. `keep` has, for every group of `unit_groups`, the units that stay, ascending; each
    group keeps as many.
    """
    groups, (size,) = unit_groups(config), {len(units) for units in keep}
    rows: dict[tuple[str, int], dict[int, Tensor]] = {}
    for group, units in zip(groups, keep, strict=True):
        for name, axis, starts in group:
            rows.setdefault((name, axis), {}).update((start, start + units) for start in starts)
    result = {name: weight.detach().clone() for name, weight in weights.items()}
    for (name, axis), by_start in rows.items():
        index = torch.cat([by_start[start] for start in sorted(by_start)])
        result[name] = result[name].index_select(axis, index.to(result[name].device))
    sizes: dict[str, Any] = _sizes(config, size)
    return result, dataclasses.replace(config, **sizes)


def _sizes(config: Config, size: int) -> dict[str, int]:
    """Returns the fields of a configuration that change with the number of hidden units."""
    if isinstance(config, ForecasterConfig):
        return {"hidden_size": size}
    if _follows(config):
        return {"rnn_size": size, "embed_size": size}
    if config.residual and config.embed_size == size:
        raise ConfigError(
            f"{size} hidden units are as many as the embedding is wide, and with residual"
            " connections the embedding would be added to them; give another share"
        )
    return {"rnn_size": size}


def without_units(
    weights: Weights, config: ConfigT, share: float
) -> tuple[dict[str, Tensor], ConfigT]:
    """Returns a model without a share of its hidden units, the least important ones."""
    count = smaller_size(num_units(config), share)
    return smaller(weights, config, most_important(importance(weights, config), count))
