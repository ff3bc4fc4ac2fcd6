"""A layer stack as a text run: embedding or one-hot -> LSTM layers -> output.

The file has no vocabulary: the user gives it. A run numbers characters in Unicode order, so the
rows of embedding and output are sorted by `Vocabulary.ids`. Layers of several widths get one width
in `_equal_layers`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fastlstm.errors import (
    ConfigError,
    CorruptFileError,
    DataError,
    FastLSTMError,
    FormatError,
    counted,
    kind_of_value,
)
from fastlstm.exchange.text_source import NORM_EPSILON
from fastlstm.sequence import layer_stack as ls
from fastlstm.system.fields import check_values
from fastlstm.system.storage import parse_json, read_bytes
from fastlstm.text.config import MODEL_BOUNDS, ModelConfig
from fastlstm.text.data.sources import open_source
from fastlstm.text.data.tokenizer import CharTokenizer, Tokenizer, load_tokenizer
from fastlstm.text.files import settings_files
from fastlstm.text.stored_model import MODEL_FILE, parameter_shapes

_MAX_GROWTH, _SPARE_BYTES = 16, 64 << 20
_MAX_BYTES = 64 << 20
_NO_CHARACTER = re.compile(r"|\[\w+\]|<\w+>")
"""Tokens for padding and unknown characters: empty, [UNK], <pad>."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of an imported model.

    Attributes:
        ids: `(V,)` for each token of the tokenizer, its number in the imported model.
        unused: numbers in the imported model that stand for no character.
        data: the text that gave the vocabulary, as config.json describes the text of a run.
    """

    tokenizer: Tokenizer
    ids: NDArray[np.int64]
    unused: tuple[int, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def tokens_of(stack: ls.LayerStack) -> int | None:
    """Returns the number of tokens of a text model, None for a model of other values.

    A text model without an embedding reads one-hot vectors and ends in a softmax as wide as its
    input.
    """
    layers = stack.logits.layers
    first, last = layers[0], layers[-1]
    width = len(last.weight) if isinstance(last, ls.Dense) else 0
    if isinstance(first, ls.Embedding):
        return width if width == len(first.weight) else None
    is_one_hot = isinstance(first, ls.LSTMLayer) and first.input_size == width and width > 1
    return width if is_one_hot and stack.ends_in_softmax else None


def text_files(
    stack: ls.LayerStack, vocabulary: Vocabulary, about: dict[str, Any]
) -> tuple[dict[str, bytes], list[str]]:
    """Returns the files of a text run, and notes for the user."""
    lstms, norms, dense = text_parts(stack)
    notes, V = list[str](), len(vocabulary.ids)
    cells, output = _equal_layers(lstms, dense[0].weight)
    H = cells[0].weight_hh.shape[1]
    first = stack.layers[0]
    embed_size = first.weight.shape[1] if isinstance(first, ls.Embedding) else lstms[0].input_size
    try:
        config = ModelConfig(
            vocab_size=V, embed_size=embed_size, rnn_size=H, num_layers=len(lstms),
            output_rank=len(dense[0].weight) if len(dense) > 1 else 0,
            activation=lstms[0].activation, recurrent_activation=lstms[0].recurrent_activation,
            output_norm=bool(norms),
        )  # fmt: skip
        check_values(config, MODEL_BOUNDS)
    except ConfigError as error:
        raise FormatError(*error.args) from None
    if not isinstance(first, ls.Embedding):
        own_bytes = sum(layer.forward.weight_ih.nbytes for layer in lstms)
        if 4 * V * embed_size > 16 * own_bytes + _SPARE_BYTES:
            raise FormatError(
                f"one-hot input of {counted(V, 'token')}: the identity matrix as embedding would"
                " be many times the model"
            )
        notes.append("one-hot input: the embedding is the identity matrix")
    one_hot = np.eye(embed_size, dtype=np.float32)
    table = first.weight if isinstance(first, ls.Embedding) else one_hot
    tensors: dict[str, ls.Weights] = {"embedding.weight": table[vocabulary.ids]}
    for k, cell in enumerate(cells):
        own = {"weight_ih": cell.weight_ih, "weight_hh": cell.weight_hh, "bias_ih": cell.bias}
        own["bias_hh"] = np.zeros_like(cell.bias)
        tensors |= {f"layers.{k}.{name}_l0": value for name, value in own.items()}
    for k, norm in enumerate(norms):
        tensors |= {f"norms.{k}.weight": norm.weight, f"norms.{k}.bias": norm.bias}
    if len(dense) > 1:
        tensors["projection.weight"], output = output, dense[-1].weight
    tensors["output.weight"] = output[vocabulary.ids]
    tensors["output.bias"] = dense[-1].bias[vocabulary.ids]
    notes += _notes(stack, lstms, vocabulary)
    about = {**about, "window": None if lstms[-1].every_step else stack.window}
    files = settings_files(config, vocabulary.tokenizer, {}, vocabulary.data, **{"import": about})
    packed = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
    assert {n: v.shape for n, v in packed.items()} == parameter_shapes(config)
    weights = safetensors.numpy.save(packed)
    return {**files, MODEL_FILE: weights}, notes


def text_parts(
    stack: ls.LayerStack,
) -> tuple[list[ls.LSTMLayer], list[ls.LayerNorm], list[ls.Dense]]:
    """Returns the LSTM layers, their norms, and the one or two output matrices."""
    layers = [layer for layer in stack.logits.layers if not isinstance(layer, ls.Dropout)]
    if isinstance(layers[0], ls.Embedding):
        layers = layers[1:]
    is_body = [isinstance(layer, ls.LSTMLayer | ls.LayerNorm) for layer in layers]
    num = (*is_body, False).index(False)
    lstms = [layer for layer in layers[:num] if isinstance(layer, ls.LSTMLayer)]
    norms = [layer for layer in layers[:num] if isinstance(layer, ls.LayerNorm)]
    _check_norms(layers[:num])
    dense = [layer for layer in layers[num:] if isinstance(layer, ls.Dense)]
    others = [layer for layer in layers[num:] if not isinstance(layer, ls.Dense)]
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
        raise FormatError("its LSTM layers have different activations; in a run all have the same")
    return lstms, norms, dense


def _check_norms(body: Sequence[ls.Layer]) -> None:
    """Raises FormatError unless a norm follows each LSTM layer, as in a run."""
    norms = [layer for layer in body if isinstance(layer, ls.LayerNorm)]
    behind = [type(layer) for layer in body] == [ls.LSTMLayer, ls.LayerNorm] * len(norms)
    is_one_width = len({la.hidden_size for la in body if isinstance(la, ls.LSTMLayer)}) == 1
    is_ours = all(math.isclose(norm.epsilon, NORM_EPSILON, rel_tol=1e-6) for norm in norms)
    if norms and not (behind and is_one_width and is_ours):
        raise FormatError(
            f"the layer '{norms[0].name}' has no place in a text run: it has none, or one behind"
            f" each LSTM layer, of one width and with the epsilon {NORM_EPSILON:g}"
        )


def _notes(stack: ls.LayerStack, lstms: list[ls.LSTMLayer], vocabulary: Vocabulary) -> list[str]:
    notes, sizes = list[str](), [layer.hidden_size for layer in lstms]
    if min(sizes) < max(sizes):
        notes.append(
            f"LSTM layers of {', '.join(map(str, sizes))} units: all have {max(sizes)} here, filled"
            " with units of zero weights, which change nothing"
        )
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
            f"{len(vocabulary.unused)} of the model's"
            f" {counted(len(vocabulary.unused) + len(vocabulary.ids), 'token')} stand for no"
            f" character in the vocabulary and are left out (number {few}): the run reads and"
            f" writes the other {len(vocabulary.ids)} only, probabilities are over them"
        )
    if any(isinstance(layer, ls.Embedding) and layer.masks_zero for layer in stack.layers):
        notes.append("mask_zero: a text has no padding, token 0 is read like any other")
    rates = [f"{layer.rate:g}" for layer in stack.layers if isinstance(layer, ls.Dropout)]
    if rates:
        notes.append(f"dropout {', '.join(rates)} acted in training only: not imported")
    return notes


def refuse_vocabulary(size: int | None, given: dict[str, Any]) -> None:
    """Raises DataError for a vocabulary given with a model that is no text model."""
    name = next((name for name, value in given.items() if value is not None), None)
    if size is None and name is not None:
        raise DataError(
            f"`{name}` is the vocabulary of a text model, and this model is none: a text model"
            " answers with as many tokens as it reads"
        )


def _equal_layers(
    layers: list[ls.LSTMLayer], head: ls.Weights
) -> tuple[list[ls.CellWeights], ls.Weights]:
    """Returns all cells at the width of the widest, and the output weights `(K, ·)` padded alike.

    Added units have zero weights, and no weight reads their state.
    """
    H = max(layer.hidden_size for layer in layers)
    own = sum(4 * c.forward.weight_ih.size + 4 * c.forward.weight_hh.size for c in layers)
    grown = sum(16 * H * (max(layer.input_size, H) + H) for layer in layers)
    if grown > _MAX_GROWTH * own + _SPARE_BYTES:
        raise FormatError(
            f"its LSTM layers have from {min(la.hidden_size for la in layers)} to {H} units; a run"
            " has layers of one width, and filling them with zeros would take"
            f" {grown / max(own, 1):.0f} times the weights"
        )
    cells = []
    for k, layer in enumerate(layers):
        cell, width = layer.forward, H if k else layer.input_size
        weights = (cell.weight_ih, width), (cell.weight_hh, H), (cell.bias[:, None], 1)
        ih, hh, bias = (
            _padded(weight.reshape(4, layer.hidden_size, -1), (4, H, columns)).reshape(4 * H, -1)
            for weight, columns in weights
        )
        cells.append(ls.CellWeights(ih, hh, bias[:, 0]))
    return cells, _padded(head, (len(head), H))


def _padded(weight: ls.Weights, shape: tuple[int, ...]) -> ls.Weights:
    sizes = zip(weight.shape, shape, strict=True)
    return np.pad(weight, [(0, size - own) for own, size in sizes])


def read_vocabulary(
    size: int, text: str | None, chars: str | None, vocab: str | None
) -> Vocabulary:
    """Returns the vocabulary given by one of three options."""
    given = {"text": text, "chars": chars, "vocab": vocab}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        came = "none came" if not names else f"{' and '.join(names)} came"
        raise ConfigError(
            f"this text model has {counted(size, 'token')}, and its file does not say which: give"
            " one of `text` (the text it was trained on), `chars` (its characters in order) and"
            f" `vocab` (a JSON file); {came}. A classifier of the next token needs none:"
            " `classes=True`"
        )
    if text is not None:
        from fastlstm.text.data.text import prepare_text

        read = prepare_text(open_source(text))  # as training reads it
        assert isinstance(read.tokenizer, CharTokenizer)
        data = {name: getattr(read, name) for name in ("source", "key", "num_bytes", "num_chars")}
        found = _of_characters(sorted(set(read.tokenizer.chars)), size, "text")
        return replace(found, data=data)
    if chars is not None:
        if not isinstance(chars, str):
            raise ConfigError(f"`chars` is {kind_of_value(chars)}, expected a text")
        return _of_characters(list(chars), size, "chars")
    return _of_file(Path(str(vocab)), size)


def _of_characters(listed: list[str], size: int, option: str) -> Vocabulary:
    if len(listed) != size:
        hint = "give the vocabulary that the model was trained with"
        if len(listed) == size - 1:
            hint = (
                "one of them may stand for padding or unknown characters: name the numbers of the"
                ' characters in a JSON file, {"a": 1, …}'
            )
        raise DataError(
            f"`{option}` has {counted(len(listed), 'character')}, the model has"
            f" {counted(size, 'token')}; {hint}"
        )
    return _numbered(dict(enumerate(listed)), size, option)


def _numbered(characters: Mapping[int, str], size: int, option: str) -> Vocabulary:
    """Returns a vocabulary from the characters' numbers in the model."""
    by_char = {char: number for number, char in characters.items()}
    if len(by_char) != len(characters):
        raise DataError(f"`{option}` has the same character twice")
    wrong = next((char for char in by_char if len(char) != 1), None)
    if wrong is not None:
        raise DataError(
            f"`{option}` has {wrong!r:.40}, which is not one character, as a text run has: a model"
            " of words or other pieces is a classifier of the next token with `classes=True`"
        )
    outside = next((number for number in characters if not 0 <= number < size), None)
    if outside is not None:
        raise DataError(
            f"`{option}` has the number {outside}, the model has {counted(size, 'token')}"
        )
    if len(by_char) < 2:
        raise DataError(
            f"`{option}` names {counted(len(by_char), 'character')} of the model's"
            f" {counted(size, 'token')}: give the whole vocabulary"
        )
    ordered = sorted(by_char)
    try:
        "".join(ordered).encode("utf-8")
        tokenizer = CharTokenizer("".join(ordered))
    except ValueError as error:
        raise DataError(f"`{option}` is no vocabulary of characters ({error})") from None
    ids = np.array([by_char[char] for char in ordered], np.int64)
    return Vocabulary(tokenizer, ids, tuple(sorted(set(range(size)) - set(ids.tolist()))))


def _of_file(path: Path, size: int) -> Vocabulary:
    try:
        data = read_bytes(path, _MAX_BYTES)
        value = parse_json(data, path, _MAX_BYTES)
    except (FastLSTMError, OSError) as error:
        raise DataError(f"`vocab`: {path} is no JSON file ({error})") from None
    if isinstance(value, dict) and value.get("format") == "fastlstm-tokenizer":
        try:
            tokenizer = load_tokenizer(data, str(path))
        except CorruptFileError as error:
            raise DataError(f"`vocab`: {error}") from None
        if tokenizer.vocab_size != size:
            raise DataError(
                f"{path} has {counted(tokenizer.vocab_size, 'token')}, the model has {size}"
            )
        return Vocabulary(tokenizer, np.arange(size))
    numbers = _numbers_of(value, path)
    named = {number: char for number, char in numbers.items() if not _NO_CHARACTER.fullmatch(char)}
    return _numbered(named, size, "vocab")


def _numbers_of(value: Any, path: Path) -> dict[int, str]:
    if isinstance(value, list) and all(isinstance(char, str) for char in value):
        return dict(enumerate(value))
    if isinstance(value, dict) and value:
        if all(type(number) is int for number in value.values()):
            found = {number: char for char, number in value.items()}
            if len(found) != len(value):
                raise DataError(f"{path} gives two characters the same number")
            return found
        if all(isinstance(char, str) and number.isdecimal() for number, char in value.items()):
            return {int(number): char for number, char in value.items()}
    raise DataError(
        f"{path} is no vocabulary: expected a JSON list of characters, an object from character to"
        " number or from number to character, or tokenizer.json of a run"
    )
