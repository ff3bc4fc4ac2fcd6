"""A `state_dict` of torch as a layer stack: its tensors are matched by shape and by name.

A state_dict says what tensors there are, not what is computed with them. So only one reading is
accepted: (embedding or nothing) -> LSTM layers -> (one linear layer or nothing). What allows two is
refused by name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fastlstm.errors import FormatError
from fastlstm.exchange.layer_stack import (
    CellWeights,
    Dense,
    Embedding,
    Layer,
    LayerStack,
    LSTMLayer,
    Weights,
)

_LSTM_TENSOR = re.compile(r"(weight_ih|weight_hh|bias_ih|bias_hh|weight_hr)_l(\d+)(_reverse)?")
_NOTE = (
    "a state_dict does not say what is computed between its tensors: read as tanh and sigmoid"
    " cells, the output of every step, no functions between layers"
)


@dataclass(frozen=True)
class _Group:
    """Tensors below one prefix, by the rest of their names."""

    prefix: str
    tensors: Mapping[str, Weights]

    @property
    def is_lstm(self) -> bool:
        return "weight_ih_l0" in self.tensors


def read_state(arrays: Mapping[str, Weights], path: object) -> LayerStack:
    """Returns the layers of a state_dict.

    Raises:
        FormatError: tensors that no such model has, or that can be read in two ways.
    """
    groups = _groups(arrays)
    lstms = _in_order([group for group in groups if group.is_lstm], path)
    layers: list[Layer] = [layer for group in lstms for layer in _lstm_layers(group)]
    first, last = layers[0], layers[-1]
    assert isinstance(first, LSTMLayer)
    assert isinstance(last, LSTMLayer)
    before, after = _ends([g for g in groups if not g.is_lstm], first, last, path)
    return LayerStack((*before, *layers, *after), "torch", notes=(_NOTE,))


def _groups(arrays: Mapping[str, Weights]) -> list[_Group]:
    found: dict[str, dict[str, Weights]] = {}
    for name, array in arrays.items():
        prefix, _, rest = name.rpartition(".")
        found.setdefault(prefix, {})[rest] = array
    return [_Group(prefix, found[prefix]) for prefix in sorted(found)]


# LSTM layers ------------------------------------------------------------------------------------


def _in_order(groups: list[_Group], path: object) -> list[_Group]:
    """Returns the LSTM modules in the one order in which the output of each fits the next.

    Raises:
        FormatError: there is none, or names and shapes allow several orders.
    """
    if not groups:
        raise FormatError(f"{path} has no tensor weight_ih_l0: it is no state_dict with an LSTM")
    if len(groups) == 1:
        return groups
    if len({re.sub(r"\d+", "#", group.prefix) for group in groups}) == 1:  # layers.0, layers.1, …
        ordered = sorted(groups, key=lambda g: [int(n[-9:]) for n in re.findall(r"\d+", g.prefix)])
        if _fits(ordered):
            return ordered
    names = ", ".join(f"'{group.prefix}'" for group in groups[:8])
    orders = (
        [order for order in itertools.permutations(groups) if _fits(order)]
        if len(groups) < 6
        else []
    )
    if len(orders) == 1:
        return list(orders[0])
    why = "fit in several orders" if orders else "do not follow each other"
    raise FormatError(f"{path}: the LSTMs {names} {why}; save those of one model, numbered")


def _fits(groups: list[_Group] | tuple[_Group, ...]) -> bool:
    widths = [(_lstm_layers(g)[0].input_size, _lstm_layers(g)[-1].output_size) for g in groups]
    return all(a[1] == b[0] for a, b in itertools.pairwise(widths))


def _lstm_layers(group: _Group) -> list[LSTMLayer]:
    """Returns the layers of one `nn.LSTM`.

    Raises:
        FormatError: tensors missing, too many or of wrong shapes.
    """
    for name in group.tensors:
        match = _LSTM_TENSOR.fullmatch(name)
        if match is None or match[1] == "weight_hr":
            what = "a projection (proj_size)" if match else "no part of torch's LSTM"
            raise FormatError(f"{_full(group, name)} is {what}, which cannot be imported")
    layers: list[LSTMLayer] = []
    is_both = "weight_ih_l0_reverse" in group.tensors
    used = 0
    while f"weight_ih_l{len(layers)}" in group.tensors:
        k = len(layers)
        forward, num = _cell(group, f"l{k}")
        backward = None
        if is_both:
            backward, more = _cell(group, f"l{k}_reverse")
            num += more
            if backward.weight_ih.shape != forward.weight_ih.shape:
                raise FormatError(f"{_full(group, f'weight_ih_l{k}_reverse')} differs in shape")
        layer = LSTMLayer(f"{group.prefix}.l{k}".lstrip("."), forward, backward)
        if layers and layer.input_size != layers[-1].output_size:
            raise FormatError(
                f"{_full(group, f'weight_ih_l{k}')} reads {layer.input_size} columns, the layer"
                f" before it writes {layers[-1].output_size}"
            )
        layers.append(layer)
        used += num
    if used != len(group.tensors):
        raise FormatError(f"'{group.prefix}' has tensors of layers that are not complete")
    return layers


def _cell(group: _Group, suffix: str) -> tuple[CellWeights, int]:
    """Returns the weights of one layer and direction, and the number of its tensors."""
    found = {name: group.tensors.get(f"{name}_{suffix}") for name in ("weight_ih", "weight_hh")}
    ih, hh = found["weight_ih"], found["weight_hh"]
    if ih is None or hh is None:
        raise FormatError(f"'{group.prefix}' lacks weight_ih or weight_hh of {suffix}")
    H = hh.shape[-1] if hh.ndim == 2 else 0
    if H < 1 or hh.shape != (4 * H, H) or ih.ndim != 2 or ih.shape[0] != 4 * H or not ih.shape[1]:
        raise FormatError(
            f"{_full(group, f'weight_hh_{suffix}')} has the shape {hh.shape} and weight_ih"
            f" {ih.shape}, expected (4H, H) and (4H, I)"
        )
    bias, num = np.zeros(4 * H, np.float32), 2
    for name in (f"bias_ih_{suffix}", f"bias_hh_{suffix}"):
        part = group.tensors.get(name)
        if part is not None:
            if part.shape != (4 * H,):
                raise FormatError(
                    f"{_full(group, name)} has the shape {part.shape}, not ({4 * H},)"
                )
            bias, num = bias + part, num + 1
    return CellWeights(ih, hh, bias), num


def _full(group: _Group, name: str) -> str:
    return f"'{group.prefix}.{name}'" if group.prefix else f"'{name}'"


# before and after -------------------------------------------------------------------------------


def _ends(
    groups: list[_Group], first: LSTMLayer, last: LSTMLayer, path: object
) -> tuple[list[Layer], list[Layer]]:
    """Returns the embedding and the linear layer, each in a list of one or none."""
    embeddings = [g for g in groups if _is_embedding(g, first.input_size)]
    linears = [g for g in groups if _is_linear(g, last.output_size)]
    both = [g for g in embeddings if g in linears]
    if len(both) == 1 and len(embeddings) + len(linears) > 2:  # the other one is decided
        taken = both[0]
        if len(embeddings) > 1 and len(linears) == 1:
            embeddings.remove(taken)
        elif len(linears) > 1 and len(embeddings) == 1:
            linears.remove(taken)
    if len(both) == 2 and len(embeddings) == len(linears) == 2:
        named = [g for g in both if "emb" in g.prefix.lower()]
        if len(named) == 1:
            embeddings, linears = named, [g for g in both if g is not named[0]]
    for what, found in (("the embedding", embeddings), ("the output layer", linears)):
        if len(found) > 1:
            names = " and ".join(f"'{g.prefix}.weight'" for g in found)
            raise FormatError(f"{path}: {names} both fit as {what}; save a state_dict with one")
    if embeddings and embeddings == linears:
        raise FormatError(
            f"{path}: '{embeddings[0].prefix}.weight' fits as the embedding and as the output"
            " layer; save a state_dict in which its name contains 'embedding', or with both"
        )
    rest = [g for g in groups if g not in embeddings and g not in linears]
    if rest:
        name, tensor = next(iter(rest[0].tensors.items()))
        raise FormatError(
            f"{path}: {_full(rest[0], name)} {tensor.shape} belongs to no embedding of"
            f" {first.input_size} columns and to no linear layer on {last.output_size}; imported"
            " are models of embedding, LSTM and one linear layer"
        )
    before: list[Layer] = [Embedding(g.prefix, g.tensors["weight"]) for g in embeddings]
    after: list[Layer] = []
    for g in linears:
        weight = g.tensors["weight"]
        after.append(
            Dense(g.prefix, weight, g.tensors.get("bias", np.zeros(len(weight), np.float32)))
        )
    return before, after


def _is_embedding(group: _Group, width: int) -> bool:
    weight = group.tensors.get("weight")
    alone = group.tensors.keys() == {"weight"}
    return alone and weight is not None and weight.ndim == 2 and weight.shape[1] == width


def _is_linear(group: _Group, width: int) -> bool:
    weight, bias = group.tensors.get("weight"), group.tensors.get("bias")
    if weight is None or weight.ndim != 2 or weight.shape[1] != width:
        return False
    if group.tensors.keys() - {"weight", "bias"}:
        return False
    return bias is None or bias.shape == weight.shape[:1]
