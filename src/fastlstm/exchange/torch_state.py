"""A `state_dict` of torch as a layer stack: its tensors are matched by shape and by name.

A state_dict says what tensors there are, not what is computed with them. So only one reading is
accepted: (embedding or nothing) -> LSTM layers -> linear layers. What allows two is refused by
name; the function between linear layers is asked for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fastlstm.errors import ConfigError, FormatError, Setting, counted
from fastlstm.sequence.layer_stack import (
    FUNCTIONS,
    CellWeights,
    Dense,
    Embedding,
    Function,
    Layer,
    LayerStack,
    LSTMLayer,
    Weights,
)

_LSTM_TENSOR = re.compile(r"(weight_ih|weight_hh|bias_ih|bias_hh|weight_hr)_l(\d+)(_reverse)?")
_NOTE = (
    "a state_dict does not say what is computed between its tensors: read as tanh and sigmoid"
    " cells, the output of every step, {}"
)
_MAX_LINEAR = 5
_KINDS = {3: "nn.GRU", 1: "nn.RNN"}
"""Modules with the names of an LSTM's tensors, by the gates of their cell."""


@dataclass(frozen=True)
class _Group:
    """Tensors below one prefix, by the rest of their names."""

    prefix: str
    tensors: Mapping[str, Weights]

    @property
    def is_lstm(self) -> bool:
        return "weight_ih_l0" in self.tensors


def read_state(
    arrays: Mapping[str, Weights], path: object, activation: str | None = None
) -> LayerStack:
    """Returns the layers of a state_dict.

    Args:
        arrays: its tensors.
        path: for messages.
        activation: between linear layers, one of `FUNCTIONS`.

    Raises:
        FormatError: tensors that no such model has, or that can be read in two ways.
        ConfigError: no activation for several linear layers, or one for none or a single one.
    """
    groups = _groups(arrays)
    lstms = _in_order([group for group in groups if group.is_lstm], path)
    layers: list[Layer] = [layer for group in lstms for layer in _lstm_layers(group)]
    first, last = layers[0], layers[-1]
    assert isinstance(first, LSTMLayer)
    assert isinstance(last, LSTMLayer)
    table, linears = _ends([g for g in groups if not g.is_lstm], first, last, path)
    before = [] if table is None else [Embedding(table.prefix, table.tensors["weight"])]
    after: list[Layer] = []
    for k, g in enumerate(linears):
        weight = g.tensors["weight"]
        after.append(Dense(g.prefix, weight, g.tensors.get("bias", np.zeros(len(weight), "f4"))))
        if k < len(linears) - 1 and _between(linears, activation) != "linear":
            after.append(Function(g.prefix, str(activation)))
    if len(linears) < 2 and activation is not None:
        raise ConfigError(
            Setting("activation"), " is the function between linear layers, and this state_dict has"
            f" {counted(len(linears), 'linear layer')}; leave it out",
        )  # fmt: skip
    between = activation if len(linears) > 1 else "no"
    note = _NOTE.format(f"{between} functions between layers")
    return LayerStack((*before, *layers, *after), "torch", notes=(note,))


def _between(linears: Sequence[_Group], activation: str | None) -> str:
    if activation in FUNCTIONS:
        return str(activation)
    names = " and ".join(f"'{g.prefix}'" for g in linears)
    came = "" if activation is None else f"; {activation!r:.40} came"
    raise ConfigError(
        f"{names} follow each other, and a state_dict does not say which function is between them:"
        " give ", Setting("activation"), f", one of {', '.join(FUNCTIONS)}{came}",
    )  # fmt: skip


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
    ordered = _numbered(groups)  # layers.0, layers.1, …
    if ordered and _fits(ordered):
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
    gates = len(hh) // H if H else 0
    if gates in _KINDS and hh.shape == (gates * H, H):
        raise FormatError(f"'{group.prefix}' is {_KINDS[gates]}; imported is nn.LSTM")
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
) -> tuple[_Group | None, tuple[_Group, ...]]:
    """Returns the embedding, if there is one, and the linear layers in their order."""
    for group in groups:
        _refuse_others(group, path)
    tables = [g for g in groups if _is_embedding(g, first.input_size)]
    found = [
        (table, chain)
        for table in (None, *tables)
        for chain in _chains([g for g in groups if g is not table], last.output_size)
    ]
    for is_likely in (_has_embeddings_name, lambda way: list(way[1]) == _numbered(way[1])):
        likely = [way for way in found if is_likely(way)]
        found = likely if len(found) > 1 and likely else found
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(sorted(_full(g, "weight") for g in groups))
        raise FormatError(
            f"{path}: {names} fit in several orders, as an embedding or as linear layers; save a"
            " state_dict in which the name of the embedding contains 'embedding' and linear layers"
            " are numbered"
        )
    ends = [g for g in groups if _is_linear(g, last.output_size) and g not in tables]
    if len(ends) > 1:
        names = " and ".join(_full(g, "weight") for g in ends)
        raise FormatError(
            f"{path}: {names} both fit as the output layer; save a state_dict with one"
        )
    left = next(g for g in (*(g for g in groups if g not in (*tables, *ends)), *groups))
    raise FormatError(
        f"{path}: {_full(left, 'weight')} {left.tensors['weight'].shape} belongs to no embedding of"
        f" {first.input_size} columns and to no linear layers on {last.output_size}; imported are"
        " models of embedding, LSTM and linear layers"
    )


def _chains(groups: list[_Group], width: int) -> Iterator[tuple[_Group, ...]]:
    """Yields the orders in which each linear layer reads what the one before it writes."""
    if not groups:
        yield ()
    if len(groups) > _MAX_LINEAR:
        return
    for group in groups:
        if _is_linear(group, width):
            rest = [g for g in groups if g is not group]
            for chain in _chains(rest, len(group.tensors["weight"])):
                yield group, *chain


def _has_embeddings_name(way: tuple[_Group | None, tuple[_Group, ...]]) -> bool:
    return way[0] is not None and "emb" in way[0].prefix.lower()


def _numbered(groups: Sequence[_Group]) -> list[_Group]:
    """Returns modules whose names differ in numbers only in the order of these, else none."""
    if len({re.sub(r"\d+", "#", group.prefix) for group in groups}) > 1:
        return []
    return sorted(groups, key=lambda g: [int(n[-9:]) for n in re.findall(r"\d+", g.prefix)])


def _refuse_others(group: _Group, path: object) -> None:
    """Raises FormatError for tensors that neither an embedding nor a linear layer has."""
    weight, names = group.tensors.get("weight"), group.tensors.keys()
    kind = None
    if "running_mean" in names:
        kind = "a BatchNorm"
    elif weight is not None and weight.ndim > 2:
        kind = f"an nn.Conv{weight.ndim - 2}d"
    elif weight is not None and weight.ndim == 1:
        kind = "a normalization, whose place is not known"
    elif weight is None or names - {"weight", "bias"}:
        name = min(names)
        raise FormatError(
            f"{path}: {_full(group, name)} belongs to no embedding and to no linear layer; imported"
            " are models of embedding, LSTM and linear layers"
        )
    if kind is not None:
        raise FormatError(
            f"{path}: '{group.prefix}' is {kind}; imported are models of embedding, LSTM and linear"
            " layers"
        )


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
