"""A `state_dict` of torch as a layer stack: its tensors are matched by shape and by name.

A state_dict has tensors but no computation. Only one form is read: optional embedding -> LSTM
layers -> linear layers. Tensors that fit in two ways are refused by name; the user gives the
function between linear layers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fastlstm.errors import ConfigError, FormatError, counted
from fastlstm.sequence import layer_stack as ls

_LSTM_TENSOR = re.compile(r"(weight_ih|weight_hh|bias_ih|bias_hh)_l(\d+)(_reverse)?")
_NOTE = (
    "a state_dict does not say what is computed between its tensors: read as tanh and sigmoid"
    " cells, the output of every step, {} functions between layers"
)
_MAX_ORDERS = 500
_KINDS = {3: "nn.GRU", 1: "nn.RNN"}
"""Number of gates -> module with the same names of tensors."""
_READ = "expected a model of embedding, LSTM and linear layers"


class _StateModule(NamedTuple):
    """Tensors with one prefix, by the rest of their names; `layers` if it is an LSTM."""

    prefix: str
    tensors: Mapping[str, ls.Weights]
    layers: tuple[ls.LSTMLayer, ...] = ()

    @property
    def weight(self) -> ls.Weights:
        return self.tensors["weight"]

    def named(self, name: str) -> str:
        return f"'{self.prefix}.{name}'" if self.prefix else f"'{name}'"


def read_state(
    arrays: Mapping[str, ls.Weights], path: object, activation: str | None = None
) -> ls.LayerStack:
    """Returns the layers of a state_dict; `activation`, one of `FUNCTIONS`, is between linear
    layers."""
    found: dict[str, dict[str, ls.Weights]] = {}
    for name, array in arrays.items():
        prefix, _, rest = name.rpartition(".")
        found.setdefault(prefix, {})[rest] = array
    modules = [_module(_StateModule(prefix, found[prefix]), path) for prefix in sorted(found)]
    if not any(module.layers for module in modules):
        raise FormatError(f"{path} has no tensor weight_ih_l0: it is no state_dict with an LSTM")
    order = _order(modules, path)
    layers: list[ls.Layer] = []
    linears = [module for module in order[1:] if not module.layers]
    for k, module in enumerate(order):
        if module.layers:
            layers += module.layers
        elif k == 0:
            layers.append(ls.Embedding(module.prefix, module.weight))
        else:
            bias = module.tensors.get("bias", np.zeros(len(module.weight), np.float32))
            if isinstance(layers[-1], ls.Dense) and _between(linears, activation) != "linear":
                layers.append(ls.Function(layers[-1].name, str(activation)))
            layers.append(ls.Dense(module.prefix, module.weight, bias))
    if len(linears) < 2 and activation is not None:
        raise ConfigError(
            "`activation` is the function between linear layers, and this state_dict has"
            f" {counted(len(linears), 'linear layer')}; leave it out"
        )
    note = _NOTE.format(activation if len(linears) > 1 else "no")
    return ls.LayerStack(tuple(layers), "torch", notes=(note,))


def _between(linears: Sequence[_StateModule], activation: str | None) -> str:
    if activation in ls.FUNCTIONS:
        return str(activation)
    names = " and ".join(f"'{g.prefix}'" for g in linears)
    came = "" if activation is None else f"; {activation!r:.40} came"
    raise ConfigError(
        f"{names} follow each other, and a state_dict does not say which function is between them:"
        f" give `activation`, one of {', '.join(ls.FUNCTIONS)}{came}"
    )


def _order(modules: list[_StateModule], path: object) -> list[_StateModule]:
    """Returns the modules in the only order in which each reads the output of the one before it.

    Of several orders it takes the one whose embedding is named so, then the one with ascending
    numbers."""
    lstms = [module for module in modules if module.layers]
    natural = [*(m for m in modules if not m.layers), *(_numbered(lstms) or lstms)]
    orders = [*itertools.islice(_orders(natural, None, False), _MAX_ORDERS)]
    likely_ones: tuple[Callable[[list[_StateModule]], bool], ...] = (
        lambda order: not order[0].layers and "emb" in order[0].prefix.lower(),
        lambda order: _is_numbered([m for m in order[1:] if not m.layers]),
        lambda order: _is_numbered([m for m in order if m.layers]),
    )
    for is_likely in likely_ones:
        likely = [order for order in orders if is_likely(order)]
        orders = likely if len(orders) > 1 and likely else orders
    if len(orders) == 1:
        return orders[0]
    others = [module for module in modules if not module.layers]
    if orders and len({tuple(m.prefix for m in order if m.layers) for order in orders}) < 2:
        names = " and ".join(sorted(module.named("weight") for module in others))
        raise FormatError(
            f"{path}: {names} fit in several orders, as an embedding or as linear layers; save a"
            " state_dict in which the name of the embedding contains 'embedding' and linear layers"
            " are numbered"
        )
    if orders or not any(True for _ in _orders(lstms, None, False)):
        names = ", ".join(f"'{module.prefix}'" for module in lstms[:8])
        why = "fit in several orders" if orders else "do not follow each other"
        raise FormatError(f"{path}: the LSTMs {names} {why}; save the LSTMs of one model, numbered")
    first, width = lstms[0].layers[0].input_size, lstms[-1].layers[-1].output_size
    ends = [m for m in others if m.weight.shape[1] == width]
    tables = [m for m in others if m.weight.shape[1] == first and m not in ends]
    if len(ends) > 1:
        names = " and ".join(module.named("weight") for module in ends)
        raise FormatError(
            f"{path}: {names} both fit as the output layer; save a state_dict with one"
        )
    left = next(m for m in (*(m for m in others if m not in (*ends, *tables)), *others))
    raise FormatError(
        f"{path}: {left.named('weight')} {left.weight.shape} belongs to no embedding of {first}"
        f" columns and to no linear layers on {width}; {_READ}"
    )


def _orders(
    left: list[_StateModule], width: int | None, is_behind: bool
) -> Iterator[list[_StateModule]]:
    """Yields orders of modules after `width` output columns; `is_behind`: after an LSTM."""
    if not left and is_behind:
        yield []
    for module in left:
        rest = [other for other in left if other is not module]
        if module.layers:
            fits = width in (None, module.layers[0].input_size)
            reads, behind = module.layers[-1].output_size, True
        elif is_behind:
            fits, reads, behind = module.weight.shape[1] == width, len(module.weight), True
            rest = [other for other in rest if not other.layers] if fits else rest
            fits = fits and len(rest) == len(left) - 1  # LSTMs come before linear layers
        else:
            fits = width is None and module.tensors.keys() == {"weight"}
            reads, behind = module.weight.shape[1], False
        if fits:
            for order in _orders(rest, reads, behind):
                yield [module, *order]


def _numbered(modules: Sequence[_StateModule]) -> list[_StateModule]:
    """Returns modules sorted by the numbers in their names, or [] if the names differ otherwise."""
    if len({re.sub(r"\d+", "#", module.prefix) for module in modules}) > 1:
        return []
    return sorted(modules, key=lambda m: [int(n[-9:]) for n in re.findall(r"\d+", m.prefix)])


def _is_numbered(modules: list[_StateModule]) -> bool:
    return len(modules) < 2 or modules == _numbered(modules)


def _module(module: _StateModule, path: object) -> _StateModule:
    if any(name.startswith("weight_ih_l") for name in module.tensors):
        return module._replace(layers=tuple(_lstm_layers(module)))
    weight, names = module.tensors.get("weight"), module.tensors.keys()
    kind = None
    if "running_mean" in names:
        kind = "a BatchNorm"
    elif weight is not None and weight.ndim > 2:
        kind = f"an nn.Conv{weight.ndim - 2}d"
    elif weight is not None and weight.ndim == 1:
        kind = "a normalization, whose place is not known"
    if kind is not None:
        raise FormatError(f"{path}: '{module.prefix}' is {kind}; {_READ}")
    bias = module.tensors.get("bias")
    if (
        weight is None
        or weight.ndim != 2
        or names - {"weight", "bias"}
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        raise FormatError(
            f"{path}: {module.named(min(names))} belongs to no embedding and to no linear layer;"
            f" {_READ}"
        )
    return module


def _lstm_layers(module: _StateModule) -> Iterator[ls.LSTMLayer]:
    for name in module.tensors:
        if _LSTM_TENSOR.fullmatch(name) is None:
            what = "a projection (proj_size)" if "weight_hr" in name else "no part of torch's LSTM"
            raise FormatError(f"{module.named(name)} is {what}, which cannot be imported")
    ways = ("", "_reverse") if "weight_ih_l0_reverse" in module.tensors else ("",)
    width, used, k = None, 0, 0
    while f"weight_ih_l{k}" in module.tensors:
        cells = []
        for way in ways:
            cell, num = _cell(module, f"l{k}{way}")
            width = width or cell.weight_ih.shape[1]
            if cell.weight_ih.shape[1] != width:
                raise FormatError(
                    f"{module.named(f'weight_ih_l{k}{way}')} reads {cell.weight_ih.shape[1]}"
                    f" columns, the layer before it writes {width}"
                )
            cells.append(cell)
            used += num
        backward = cells[1] if len(cells) == 2 else None
        layer = ls.LSTMLayer(f"{module.prefix}.l{k}".lstrip("."), cells[0], backward)
        width, k = layer.output_size, k + 1
        yield layer
    if used != len(module.tensors):
        raise FormatError(f"'{module.prefix}' has tensors of layers that are not complete")


def _cell(module: _StateModule, suffix: str) -> tuple[ls.CellWeights, int]:
    """Returns the weights of one layer and direction, and how many tensors they are."""
    ih, hh = (module.tensors.get(f"{name}_{suffix}") for name in ("weight_ih", "weight_hh"))
    if ih is None or hh is None:
        raise FormatError(f"'{module.prefix}' lacks weight_ih or weight_hh of {suffix}")
    H = hh.shape[-1] if hh.ndim == 2 else 0
    gates = len(hh) // H if H else 0
    if gates in _KINDS and hh.shape == (gates * H, H):
        raise FormatError(f"'{module.prefix}' is {_KINDS[gates]}; expected nn.LSTM")
    if H < 1 or hh.shape != (4 * H, H) or ih.ndim != 2 or ih.shape[0] != 4 * H or not ih.shape[1]:
        raise FormatError(
            f"{module.named(f'weight_hh_{suffix}')} has the shape {hh.shape} and weight_ih"
            f" {ih.shape}, expected (4H, H) and (4H, I)"
        )
    bias, num = np.zeros(4 * H, np.float32), 2
    for name in (f"bias_ih_{suffix}", f"bias_hh_{suffix}"):
        part = module.tensors.get(name)
        if part is not None:
            if part.shape != (4 * H,):
                raise FormatError(
                    f"{module.named(name)} has the shape {part.shape}, not ({4 * H},)"
                )
            bias, num = bias + part, num + 1
    return ls.CellWeights(ih, hh, bias), num
