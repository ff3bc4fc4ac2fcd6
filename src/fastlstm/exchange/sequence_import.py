"""A layer stack as a run of `SequenceRegressor` or `SequenceClassifier`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from fastlstm.errors import ConfigError, FormatError, counted
from fastlstm.sequence import layer_stack as ls
from fastlstm.sequence.answers import Answers, Labels, Numbers
from fastlstm.sequence.config import SequenceConfig
from fastlstm.sequence.files import CONFIG_FILE, StoredSequenceModel, sequence_files
from fastlstm.sequence.stack_module import StackNetwork, check_widths
from fastlstm.system.storage import encode_json


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
