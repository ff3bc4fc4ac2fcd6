"""A layer stack as a text run: embedding or one-hot -> LSTM layers -> output."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors.numpy

from fastlstm.errors import ConfigError, DataError, FormatError, Setting, counted
from fastlstm.exchange.equal_layers import equal_layers
from fastlstm.exchange.text_graph import NORM_EPSILON
from fastlstm.exchange.vocabulary import Vocabulary
from fastlstm.sequence.layer_stack import (
    CellWeights,
    Dense,
    Dropout,
    Embedding,
    Layer,
    LayerNorm,
    LayerStack,
    LSTMLayer,
    Weights,
)
from fastlstm.system.fields import check_values
from fastlstm.system.storage import encode_json
from fastlstm.text.config import ModelConfig
from fastlstm.text.files import settings_files
from fastlstm.text.stored_model import CONFIG_FILE, MODEL_BOUNDS, MODEL_FILE, parameter_shapes

_SPARE_BYTES = 64 << 20


def tokens_of(stack: LayerStack) -> int | None:
    """Returns the tokens of a text model, None of a model that reads other values.

    One without an embedding reads one-hot vectors: it ends in a softmax as wide as its input.
    """
    layers = stack.logits.layers
    first, last = layers[0], layers[-1]
    width = len(last.weight) if isinstance(last, Dense) else 0
    if isinstance(first, Embedding):
        return width if width == len(first.weight) else None
    is_one_hot = isinstance(first, LSTMLayer) and first.input_size == width and width > 1
    return width if is_one_hot and stack.ends_in_softmax else None


def text_files(
    stack: LayerStack, vocabulary: Vocabulary, about: dict[str, Any]
) -> tuple[dict[str, bytes], list[str]]:
    """Returns the files of a text run, and what the user should know.

    Args:
        stack: a model that `tokens_of` finds tokens in.
        vocabulary: its tokens.
        about: for the key `import` of config.json.

    Raises:
        FormatError: a model that no text run holds.
    """
    lstms, norms, dense = text_parts(stack)
    notes, V = list[str](), len(vocabulary.ids)
    head = dense[-1].weight
    equal = equal_layers(lstms, dense[0].weight)
    first = stack.layers[0]
    embed_size = first.weight.shape[1] if isinstance(first, Embedding) else lstms[0].input_size
    try:
        config = ModelConfig(
            vocab_size=V, embed_size=embed_size, rnn_size=equal.hidden_size, num_layers=len(lstms),
            output_rank=len(dense[0].weight) if len(dense) > 1 else 0,
            activation=lstms[0].activation, recurrent_activation=lstms[0].recurrent_activation,
            output_norm=bool(norms),
        )  # fmt: skip
        check_values(config, MODEL_BOUNDS)
    except ConfigError as error:
        raise FormatError(*error.args) from None
    if not isinstance(first, Embedding):
        _check_growth(config, lstms)
        notes.append("one-hot input: the embedding is the identity matrix")
    table = first.weight if isinstance(first, Embedding) else np.eye(embed_size, dtype=np.float32)
    tensors: dict[str, Weights] = {"embedding.weight": table[vocabulary.ids]}
    for k, (cell,) in enumerate(equal.cells):
        tensors |= _layer_tensors(k, cell, norms[k] if norms else None)
    if len(dense) > 1:
        tensors["projection.weight"], output = equal.head, head
    else:
        output = equal.head
    tensors["output.weight"] = output[vocabulary.ids]
    tensors["output.bias"] = dense[-1].bias[vocabulary.ids]
    if equal.is_padded:
        sizes = ", ".join(str(layer.hidden_size) for layer in lstms)
        notes.append(
            f"LSTM layers of {sizes} units: all have {equal.hidden_size} here, filled with units of"
            " zero weights, which change nothing"
        )
    notes += _notes(stack, lstms, vocabulary)
    about = {**about, "window": _window(stack, lstms)}
    files = settings_files(config, vocabulary.tokenizer, {}, {})
    written = {**json.loads(files[CONFIG_FILE]), "import": about}
    packed = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
    assert {n: v.shape for n, v in packed.items()} == parameter_shapes(config)
    weights = safetensors.numpy.save(packed)
    return {**files, CONFIG_FILE: encode_json(written), MODEL_FILE: weights}, notes


def _layer_tensors(k: int, cell: CellWeights, norm: LayerNorm | None) -> dict[str, Weights]:
    tensors = {
        f"layers.{k}.weight_ih_l0": cell.weight_ih,
        f"layers.{k}.weight_hh_l0": cell.weight_hh,
        f"layers.{k}.bias_ih_l0": cell.bias,
        f"layers.{k}.bias_hh_l0": np.zeros_like(cell.bias),
    }
    if norm is not None:
        tensors |= {f"norms.{k}.weight": norm.weight, f"norms.{k}.bias": norm.bias}
    return tensors


def text_parts(stack: LayerStack) -> tuple[list[LSTMLayer], list[LayerNorm], list[Dense]]:
    """Returns the LSTM layers, the norms behind them, the one or two matrices of the output.

    Raises:
        FormatError: other layers, or in another order.
    """
    layers = [layer for layer in stack.logits.layers if not isinstance(layer, Dropout)]
    if isinstance(layers[0], Embedding):
        layers = layers[1:]
    is_body = [isinstance(layer, LSTMLayer | LayerNorm) for layer in layers]
    num = (*is_body, False).index(False)
    lstms = [layer for layer in layers[:num] if isinstance(layer, LSTMLayer)]
    norms = [layer for layer in layers[:num] if isinstance(layer, LayerNorm)]
    _check_norms(layers[:num], lstms, norms)
    dense = [layer for layer in layers[num:] if isinstance(layer, Dense)]
    others = [layer for layer in layers[num:] if not isinstance(layer, Dense)]
    if not lstms or not dense or others or len(dense) > 2:
        wrong = (others or dense[2:] or layers)[0]
        raise FormatError(
            f"the layer '{wrong.name}' has no place in a text run, which is embedding, LSTM layers,"
            " one Dense layer and a softmax"
        )
    if len(dense) == 2 and (
        dense[0].bias.any()
        or len(dense[0].weight) >= min(len(dense[1].weight), lstms[-1].hidden_size)
    ):
        raise FormatError(
            f"the layer '{dense[0].name}' has no place in a text run: before the output matrix"
            " there may be a narrower Dense layer without bias and activation"
        )
    options = {(la.activation, la.recurrent_activation) for la in lstms}
    for layer in lstms:
        if layer.backward is not None or layer.reverses:
            raise FormatError(
                f"the layer '{layer.name}' reads from the end of the text; text is written forward"
            )
    if len(options) > 1:
        raise FormatError("its LSTM layers have different activations; those of a run are the same")
    return lstms, norms, dense


def _check_norms(body: Sequence[Layer], lstms: list[LSTMLayer], norms: list[LayerNorm]) -> None:
    """Raises FormatError where norms are not one behind each LSTM layer, as those of a run."""
    behind = [type(layer) for layer in body] == [LSTMLayer, LayerNorm] * len(lstms)
    is_one_width = len({layer.hidden_size for layer in lstms}) == 1
    if norms and not (
        behind
        and is_one_width
        and all(math.isclose(n.epsilon, NORM_EPSILON, rel_tol=1e-6) for n in norms)
    ):
        raise FormatError(
            f"the layer '{norms[0].name}' has no place in a text run: it has none, or one behind"
            f" each LSTM layer, of one width and with the epsilon {NORM_EPSILON:g}"
        )


def _check_growth(config: ModelConfig, lstms: list[LSTMLayer]) -> None:
    own = sum(layer.forward.weight_ih.nbytes for layer in lstms)
    if 4 * config.vocab_size * config.embed_size > 16 * own + _SPARE_BYTES:
        raise FormatError(
            f"one-hot input of {counted(config.vocab_size, 'token')}: the identity matrix as"
            " embedding would be many times the model"
        )


def _window(stack: LayerStack, lstms: list[LSTMLayer]) -> int | None:
    """Returns the tokens that the model reads to write one, None of one that writes at each."""
    return None if lstms[-1].every_step else stack.window


def _notes(stack: LayerStack, lstms: list[LSTMLayer], vocabulary: Vocabulary) -> list[str]:
    notes = []
    if stack.ends_in_softmax:
        notes.append("the softmax at the end is left out: the run's outputs are logits")
    if not lstms[-1].every_step:
        size = "" if stack.window is None else f" of {counted(stack.window, 'token')}"
        notes.append(
            f"trained on windows{size}, each from a zero state: here the state is carried on, which"
            " training did not show it; config.json has the window as import.window"
        )
    if vocabulary.unused:
        few = ", ".join(map(str, vocabulary.unused[:5])) + (
            ", …" if len(vocabulary.unused) > 5 else ""
        )
        notes.append(
            f"{counted(len(vocabulary.unused), 'token')} of the model stand for no character and"
            f" are left out (number {few}): probabilities are over the others"
        )
    if any(isinstance(layer, Embedding) and layer.masks_zero for layer in stack.layers):
        notes.append("mask_zero: a text has no padding, token 0 is read like any other")
    rates = [f"{layer.rate:g}" for layer in stack.layers if isinstance(layer, Dropout)]
    if rates:
        notes.append(f"dropout {', '.join(rates)} acted in training only: not imported")
    return notes


def refuse_vocabulary(size: int | None, given: dict[str, Any]) -> None:
    """Raises DataError where a vocabulary is given for a model that has none."""
    name = next((name for name, value in given.items() if value is not None), None)
    if size is None and name is not None:
        raise DataError(
            Setting(name), " is the vocabulary of a text model, and this model is none: a text"
            " model answers with as many tokens as it reads",
        )  # fmt: skip
