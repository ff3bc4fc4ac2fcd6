"""A layer stack as a run of `SequenceRegressor` or `SequenceClassifier`.

Their network embeds a step by a linear layer and ReLU before the LSTM. A model may have the same, a
Dense layer with relu. An LSTM that reads the values themselves is the same with an embedding of
twice the columns: of a step x it makes max(x, 0) and max(-x, 0), and the LSTM reads the first with
its weights W, the second with -W.
"""

from __future__ import annotations

import json
from functools import reduce
from itertools import takewhile
from typing import Any, cast

import numpy as np
import torch

from fastlstm.errors import FormatError, counted
from fastlstm.exchange.equal_layers import equal_layers
from fastlstm.exchange.layer_stack import (
    CellWeights,
    Dense,
    Dropout,
    Function,
    LayerStack,
    LSTMLayer,
)
from fastlstm.sequence.answers import Answers, Labels, Numbers
from fastlstm.sequence.config import ARCHITECTURE, SequenceConfig
from fastlstm.sequence.files import CONFIG_FILE, StoredSequenceModel, sequence_files
from fastlstm.sequence.model import NetworkConfig, SequenceNetwork
from fastlstm.system.storage import encode_json


def sequence_run_files(
    stack: LayerStack, about: dict[str, Any]
) -> tuple[dict[str, bytes], list[str]]:
    """Returns the files of a sequence run, and what the user should know.

    Raises:
        FormatError: a model that no such run holds.
    """
    front, lstms, dense, last = _parts(stack)
    answers = _answers(len(dense.weight), last)
    head, bias = dense.weight, dense.bias
    if len(answers) > len(head):  # two classes of one sigmoid: the first one's logit is 0
        head = np.concatenate([np.zeros_like(head), head])
        bias = np.concatenate([np.zeros_like(bias), bias])
    equal = equal_layers(lstms, head)
    if front is None:
        both = np.eye(lstms[0].input_size, dtype=np.float32)
        both = np.concatenate([both, -both])
        front = Dense("", both, np.zeros(len(both), np.float32))
        equal.cells[0] = tuple(
            CellWeights(np.concatenate([c.weight_ih, -c.weight_ih], 1), c.weight_hh, c.bias)
            for c in equal.cells[0]
        )
    d, C = front.weight.shape
    sizes = NetworkConfig(
        num_columns=C, num_outputs=len(head), hidden_size=equal.hidden_size, num_layers=len(lstms),
        embed_size=d, bidirectional=lstms[0].backward is not None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        network = SequenceNetwork(sizes)
    network.load_state_dict(_state(front, equal.cells, equal.head, bias))
    config = SequenceConfig(**{name: getattr(sizes, name) for name in ARCHITECTURE})
    ones = torch.ones(C, dtype=torch.float64)
    stored = StoredSequenceModel(
        config, config, network, torch.zeros_like(ones), ones, answers, "imported"
    )
    files = sequence_files(stored)
    written = {**json.loads(files[CONFIG_FILE]), "import": {**about, "window": stack.window}}
    return {**files, CONFIG_FILE: encode_json(written)}, _notes(stack, answers, equal.is_padded)


def _parts(
    stack: LayerStack,
) -> tuple[Dense | None, list[LSTMLayer], Dense, str | None]:
    """Returns the Dense layer with relu in front, LSTM layers, the last layer, its function.

    Several linear layers at the end are one.

    Raises:
        FormatError: other layers, or in another order.
    """
    layers = [layer for layer in stack.layers if not isinstance(layer, Dropout)]
    end = layers[-1] if layers and isinstance(layers[-1], Function) else None
    layers = layers[:-1] if end is not None else layers
    front, second = [*layers, None, None][:2]
    is_relu = isinstance(second, Function) and second.function == "relu"
    embed = front if isinstance(front, Dense) and is_relu else None
    layers = layers if embed is None else layers[2:]
    ends = list(takewhile(lambda layer: isinstance(layer, Dense), reversed(layers)))[::-1]
    lstms = layers[: len(layers) - len(ends)]
    for layer in lstms:
        if not isinstance(layer, LSTMLayer):
            raise FormatError(
                f"the layer '{layer.name}' has no place in a sequence run, which is LSTM layers and"
                " one Dense layer on windows of numbers"
            )
    if not ends or not lstms:
        name = stack.layers[-1].name
        raise FormatError(
            f"the model ends with the layer '{name}'; a sequence run is LSTM layers and one Dense"
            " layer"
        )
    if stack.is_time_major:
        raise FormatError("the model is time-major; a sequence run reads (B, T, C)")
    found = cast("list[LSTMLayer]", lstms)
    _check_lstms(found)
    dense = reduce(_product, cast("list[Dense]", ends))
    return embed, found, dense, None if end is None else end.function


def _product(first: Dense, second: Dense) -> Dense:
    """Returns the one layer that computes what two do."""
    own = first.weight.size + second.weight.size
    if len(second.weight) * first.weight.shape[1] > 16 * own + (1 << 24):
        raise FormatError(f"the layers '{first.name}' and '{second.name}' are too large as one")
    weight = second.weight.astype(np.float64) @ first.weight
    bias = second.weight.astype(np.float64) @ first.bias + second.bias
    with np.errstate(over="ignore"):
        one = Dense(second.name, weight.astype(np.float32), bias.astype(np.float32))
    if not (np.isfinite(one.weight).all() and np.isfinite(one.bias).all()):
        raise FormatError(
            f"the layers '{first.name}' and '{second.name}' become one, and their product is too"
            " large for float32"
        )
    return one


def _check_lstms(lstms: list[LSTMLayer]) -> None:
    for layer in lstms:
        options = layer.activation, layer.recurrent_activation
        if options != ("tanh", "sigmoid"):
            raise FormatError(
                f"the layer '{layer.name}' has the activations {' and '.join(options)}; those of a"
                " sequence run are tanh and sigmoid"
            )
        if layer.reverses:
            raise FormatError(f"the layer '{layer.name}' reads from the end (go_backwards)")
    if len({layer.backward is None for layer in lstms}) > 1:
        raise FormatError("some of its LSTM layers read one way and some both")
    if lstms[-1].every_step:
        raise FormatError(
            f"the layer '{lstms[-1].name}' writes at every step; a sequence run answers once for a"
            " sequence"
        )


def _answers(num: int, function: str | None) -> Answers:
    if function in (None, "linear"):
        return Numbers(np.zeros(num), np.ones(num), is_flat=num == 1)
    if function == "softmax" and num > 1:
        return Labels(np.arange(num))
    if function == "sigmoid" and num == 1:
        return Labels(np.arange(2))
    raise FormatError(
        f"{counted(num, 'output')} with the activation {function}; a sequence run has numbers"
        " without one, classes with softmax, or one output with sigmoid"
    )


def _state(
    front: Dense, cells: list[tuple[CellWeights, ...]], head: Any, bias: Any
) -> dict[str, torch.Tensor]:
    """Returns the state_dict of a `SequenceNetwork`."""
    state = {"embed.weight": front.weight, "embed.bias": front.bias}
    for k, ways in enumerate(cells):
        for cell, suffix in zip(ways, (f"l{k}", f"l{k}_reverse"), strict=False):
            state[f"lstm.weight_ih_{suffix}"] = cell.weight_ih
            state[f"lstm.weight_hh_{suffix}"] = cell.weight_hh
            state[f"lstm.bias_ih_{suffix}"] = cell.bias
            state[f"lstm.bias_hh_{suffix}"] = np.zeros_like(cell.bias)
    state |= {"head.weight": head, "head.bias": bias}
    return {name: torch.from_numpy(np.array(value, np.float32)) for name, value in state.items()}


def _notes(stack: LayerStack, answers: Answers, is_padded: bool) -> list[str]:
    notes = [
        "values are read as they come: scale them as the model's training did, and answers back"
    ]
    if isinstance(answers, Labels):
        notes.append(f"classes are numbered from 0 to {len(answers) - 1}, as the file has no names")
    if stack.window is not None:
        notes.append(f"trained on windows of {counted(stack.window, 'step')}")
    if stack.shape is not None:
        sizes = ", ".join(map(str, stack.shape))
        notes.append(f"answers are flat: .reshape(-1, {sizes}) gives them the shape of the model's")
    if is_padded:
        notes.append("LSTM layers of different widths are filled with units of zero weights")
    return notes
