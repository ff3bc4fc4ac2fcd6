"""A model file of another framework as a run directory, or as a torch module."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch

from fastlstm.errors import (
    ConfigError,
    FormatError,
    RunDirectoryError,
    counted,
    kind_of_value,
)
from fastlstm.exchange.keras_model import read_archive, read_hdf5_model
from fastlstm.exchange.model_file import (
    kind_of_file,
    read_model_file,
    read_onnx,
    read_safetensors,
    read_torch,
)
from fastlstm.exchange.text_import import (
    read_vocabulary,
    refuse_vocabulary,
    text_files,
    text_parts,
    tokens_of,
)
from fastlstm.exchange.torch_state import read_state
from fastlstm.report.html import InNotebook
from fastlstm.report.lines import labelled
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.sequence import layer_stack as ls
from fastlstm.sequence.answers import Answers, Labels, Numbers
from fastlstm.sequence.config import SequenceConfig
from fastlstm.sequence.files import CONFIG_FILE, StoredSequenceModel, sequence_files
from fastlstm.sequence.stack_module import ImportedModel, StackNetwork, check_widths
from fastlstm.system.storage import encode_json
from fastlstm.training.session import locked_run

Answer = Literal["last", "state", "mean", "max"]


@dataclass(frozen=True)
class ImportedRun(InNotebook):
    """An imported run.

    Attributes:
        path: the run directory.
        opened_by: class that loads it: "LM", "SequenceRegressor" or "SequenceClassifier".
        made_by: framework that wrote the file, and its version.
        notes: differences from the file, and what was left out.
    """

    path: Path
    opened_by: str
    made_by: str
    notes: tuple[str, ...]

    @property
    def kind(self) -> Literal["text", "sequence"]:
        """The kind of run."""
        return "text" if self.opened_by == "LM" else "sequence"

    def __fspath__(self) -> str:
        return str(self.path)

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("run", f"{self.path}, {self.kind}, made by {self.made_by}"),
            ("open", f"fastlstm.{self.opened_by}.load({str(self.path)!r})"),
            *labelled("note", list(self.notes)),
        ]


def import_run(
    model: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    text: str | None = None,
    chars: str | None = None,
    vocab: str | None = None,
    activation: str | None = None,
    answer: Answer | None = None,
    classes: bool = False,
) -> ImportedRun:
    """Writes a model of another framework as a run; docs/exchange.md lists the models.

    Args:
        model: the file, as for `import_module`.
        out: the run directory to write.
        text: training text of a text model; its characters in Unicode order are the vocabulary.
        chars: the characters in the order of their numbers, instead of `text`.
        vocab: a JSON file with the characters, or tokenizer.json of a run, instead of `text`.
        activation: see `import_module`.
        answer: what the last layers read if the LSTM writes at every step: the output of the last
            step, the last state of each direction, the mean or the maximum of all steps. Default
            for a one-directional state_dict: last.
        classes: whether the outputs are class scores before a softmax, or one output before a
            sigmoid. A text model becomes a classifier of the next token and needs no vocabulary.

    Raises:
        FormatError: a damaged file, or a model that no run can hold; names the layer.
        ConfigError: no or several vocabularies for a text model; a missing or needless option.
        DataError: a vocabulary of another size.
        RunDirectoryError: `out` holds a run.
        MissingExtraError: h5py (`fastlstm[keras]`) or onnx (`fastlstm[onnx]`) is not installed.
    """
    stack = read_layer_stack(model, activation)
    options = [name for name, value in (("answer", answer), ("classes", classes)) if value]
    size = None if options else tokens_of(stack)
    given = {"text": text, "chars": chars, "vocab": vocab}
    refuse_vocabulary(size, given)
    about = {"path": str(model), "made_by": stack.made_by}
    path, opened_by = Path(model), "LM"
    about["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    try:
        if size is not None and not _is_next_token(stack, given):
            text_parts(stack)  # its errors come before questions for a vocabulary
            files, notes = text_files(stack, read_vocabulary(size, **given), about)
        else:
            files, notes, is_class = sequence_run_files(stack, about, answer, classes)
            opened_by = "SequenceClassifier" if is_class else "SequenceRegressor"
    except FormatError as error:
        hint = "" if size is None else ", `classes=True` a classifier of tokens"
        raise FormatError(
            f"{path} cannot be a run: {error}; fastlstm.import_module gives a torch module{hint}"
        ) from None
    with locked_run(Path(out)) as run:
        assert run is not None
        if run.has_published() or run.checkpoints():
            raise RunDirectoryError(f"'{out}' contains a run; give another `out`")
        run.publish(files)
    return ImportedRun(Path(out), opened_by, stack.made_by, (*stack.notes, *notes))


def _is_next_token(stack: ls.LayerStack, given: Mapping[str, str | None]) -> bool:
    """Whether a model predicts one next token: no vocabulary is given, no text run can hold it."""
    if any(given.values()) or not stack.answers_once:
        return False
    try:
        text_parts(stack)
    except FormatError:
        return True
    return False


def import_module(path: str | os.PathLike[str], *, activation: str | None = None) -> ImportedModel:
    """Returns a model of another framework as a torch module, in evaluation mode.

    Reads `.keras`, `.h5` of Keras 1, 2 and 3, `.onnx` with LSTM operators, and state_dicts of torch
    (`.safetensors`, `.pt`): docs/exchange.md. Keras and TensorFlow are not needed.

    Args:
        path: the file.
        activation: function between the linear layers of a state_dict, such as "relu" or
            "linear".

    Returns:
        A module from `(B, T)` token ids or `(B, T, C)` values to `(B, T, K)` or `(B, K)`. A final
        softmax is left out: the outputs are logits.

    Raises:
        FormatError: a damaged file, or a layer or setting that cannot be imported; names it.
        ConfigError: a missing or needless activation.
        MissingExtraError: h5py (`fastlstm[keras]`) or onnx and onnxruntime (`fastlstm[onnx]`)
            are not installed.
    """
    stack = read_layer_stack(path, activation)
    return ImportedModel(stack)


def read_layer_stack(path: str | os.PathLike[str], activation: str | None = None) -> ls.LayerStack:
    """Returns the layers of a model; raises what `import_module` does."""
    if not isinstance(path, str | os.PathLike):
        raise FormatError(f"the model is {kind_of_value(path)}, expected the path of a file")
    file = Path(path)
    data = b"" if file.is_dir() else read_model_file(file)
    with np.errstate(all="ignore"), _naming(file):  # `_check_finite` refuses NaN and Inf
        kind = "directory" if file.is_dir() else kind_of_file(data, file)
        if activation is not None and kind not in ("safetensors", "torch"):
            raise ConfigError(
                f"`activation` is for a state_dict of torch; {file} describes its layers"
            )
        match kind:
            case "directory":
                raise _directory(file)
            case "keras":
                stack = read_archive(data, file)
            case "hdf5":
                stack = read_hdf5_model(data, file)
            case "safetensors":
                stack = read_state(read_safetensors(data, file), file, activation)
            case "torch":
                stack = read_state(read_torch(data, file), file, activation)
            case "onnx":
                stack = read_onnx(data, file)

    if not stack.logits.layers:
        raise FormatError(f"{file}: the model has no layer but a softmax")

    check_widths(stack)
    _check_finite(stack)
    return stack


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Puts the name of the file before an error that lacks it."""
    try:
        yield
    except FormatError as error:
        if str(file) in str(error):
            raise
        raise FormatError(f"{file}: {error}") from None


def _directory(folder: Path) -> FormatError:
    if kind_of_run(folder) is not None:
        return FormatError(f"{folder} is a run already, which needs no import")
    if (folder / "saved_model.pb").exists():
        return FormatError(
            f"{folder} is a SavedModel of TensorFlow, which is not imported: save the Keras model"
            " itself, model.save('model.keras'), and import that file"
        )
    return FormatError(
        f"{folder} is a directory; expected a file: .keras, .h5, .onnx, .safetensors or .pt"
    )


def _check_finite(stack: ls.LayerStack) -> None:
    for layer in stack.layers:
        cells = [getattr(layer, name, None) for name in ("forward", "backward")]
        for part in (layer, *filter(None, cells)):
            for name, value in vars(part).items():
                if isinstance(value, np.ndarray) and not np.isfinite(value).all():
                    raise FormatError(f"{name} of the layer '{layer.name}' is NaN or Inf")


def sequence_run_files(
    stack: ls.LayerStack, about: dict[str, Any], answer: str | None = None, classes: bool = False
) -> tuple[dict[str, bytes], list[str], bool]:
    """Returns the files of a sequence run, notes for the user, and whether it is a classifier.

    `answer` and `classes` are options of `import_run`.
    """
    stack = _answering(stack, answer)
    if classes:
        stack = _with_classes(stack)
    if stack.is_time_major:
        raise FormatError("the model is time-major; a sequence run reads (B, T, C)")
    layers = tuple(layer for layer in stack.layers if not isinstance(layer, ls.Dropout))
    plain, is_class = _with_logits(replace(stack, layers=layers, shape=None, notes=()))
    network = StackNetwork(plain)
    num, C = network.config.num_outputs, network.config.num_columns
    answers: Answers = Numbers(np.zeros(num), np.ones(num), is_flat=num == 1)
    if is_class:
        answers = Labels(np.arange(num))
    config, ones = SequenceConfig(), torch.ones(C, dtype=torch.float64)
    stored = StoredSequenceModel(
        config, config, network, torch.zeros_like(ones), ones, answers, "imported"
    )
    files = sequence_files(stored)
    written = {**json.loads(files[CONFIG_FILE]), "import": {**about, "window": stack.window}}
    files[CONFIG_FILE] = encode_json(written)
    return files, _notes(stack, answers, network.config.num_tokens), is_class


def _answering(stack: ls.LayerStack, answer: str | None) -> ls.LayerStack:
    """Returns a stack with one output per sequence."""
    if stack.answers_once:
        if answer is not None:
            raise ConfigError(
                "`answer` is for a model that writes at every step; this one answers once"
            )
        return stack
    layers = list(stack.layers)
    place, lstm = max(
        (k, layer) for k, layer in enumerate(layers) if isinstance(layer, ls.LSTMLayer)
    )
    if answer is None and (lstm.backward is not None or stack.made_by != "torch"):
        if stack.made_by != "torch":
            raise FormatError(
                f"its layer '{lstm.name}' writes at every step; a sequence run answers once for a"
                " sequence: say with `answer` which output counts"
            )
        raise ConfigError(
            f"'{lstm.name}' reads both ways, and a state_dict does not say which output counts:"
            " give `answer` last (y[:, -1]), state (the last of each way), mean or max"
        )
    if answer == "state" or (answer in (None, "last") and lstm.backward is None):
        layers[place] = replace(lstm, every_step=False)
    else:
        layers.insert(place + 1, ls.Steps(lstm.name, cast("Any", answer)))
    note = "answers are of the last step" if answer is None else f"answers are of the {answer}"
    return replace(stack, layers=tuple(layers), notes=(*stack.notes, note))


def _with_classes(stack: ls.LayerStack) -> ls.LayerStack:
    if isinstance(stack.layers[-1], ls.Function):
        end = stack.layers[-1].function
        if end in ("softmax", "log_softmax", "sigmoid"):
            return stack
        raise ConfigError(f"`classes` does not fit: the model ends with {end}")
    end = "softmax" if check_widths(stack)[1] > 1 else "sigmoid"
    return replace(stack, layers=(*stack.layers, ls.Function("classes", end)))


def _with_logits(stack: ls.LayerStack) -> tuple[ls.LayerStack, bool]:
    """Returns a stack with class logits if its last function gives probabilities."""
    if stack.ends_in_softmax:
        if check_widths(stack)[1] < 2:
            raise FormatError("the model has one output with softmax, which is always 1")
        return stack.logits, True
    dense, end = (None, *stack.layers)[-2:]
    is_sigmoid = isinstance(end, ls.Function) and end.function == "sigmoid"
    if not is_sigmoid or not isinstance(dense, ls.Dense) or len(dense.weight) > 1:
        return stack, False
    both = (np.concatenate([np.zeros_like(a), a]) for a in (dense.weight, dense.bias))
    logits = ls.Dense(dense.name, *both)  # the logit of the first class is 0
    return replace(stack, layers=(*stack.layers[:-2], logits)), True


def _notes(stack: ls.LayerStack, answers: Answers, num_tokens: int) -> list[str]:
    if num_tokens:
        notes = [f"sequences are token ids from 0 to {num_tokens - 1}: an array (N, T), or lists"]
    else:
        notes = ["values are read as they come: scale them as training did, and answers back"]
    if stack.masks_zero:
        notes.append(
            "token 0 is padding, which is left out (mask_zero); an exported file leaves out what is"
            " behind `lengths` instead"
        )
    if isinstance(answers, Labels):
        notes.append(f"classes are numbered from 0 to {len(answers) - 1}, as the file has no names")
    if stack.window is not None:
        notes.append(f"trained on windows of {counted(stack.window, 'step')}")
    if stack.shape:
        sizes = ", ".join(map(str, stack.shape))
        notes.append(f"answers are flat: .reshape(-1, {sizes}) gives them the shape of the model's")
    return notes
