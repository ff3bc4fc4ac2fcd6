"""`import_run`: a model file of another framework as a run directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastlstm.errors import FormatError, RunDirectoryError, Setting
from fastlstm.exchange.read_model import read_layer_stack
from fastlstm.exchange.text_import import (
    refuse_vocabulary,
    text_files,
    text_parts,
    tokens_of,
)
from fastlstm.exchange.vocabulary import read_vocabulary
from fastlstm.sequence.layer_stack import LayerStack
from fastlstm.training.session import locked_run

Answer = Literal["last", "state", "mean", "max"]


@dataclass(frozen=True)
class ImportedRun:
    """What was imported.

    Attributes:
        path: the run directory.
        kind: "text" or "sequence".
        opened_by: name of the class whose `load` opens it: "LM", "SequenceRegressor" of numbers,
            "SequenceClassifier" of classes.
        made_by: framework that wrote the file, and its version.
        notes: what is different here, and what was left out.
    """

    path: Path
    kind: Literal["text", "sequence"]
    opened_by: str
    made_by: str
    notes: tuple[str, ...]

    def __fspath__(self) -> str:
        return str(self.path)


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
    """Writes a model of another framework as a run: docs/exchange.md says which.

    Args:
        model: the file, as of `import_module`.
        out: the run directory to write.
        text: of a text model, the text it was trained on: its characters in the order of Unicode
            are the vocabulary.
        chars: or its characters, in the order of their numbers.
        vocab: or a JSON file with them, or tokenizer.json of a run.
        activation: see `import_module`.
        answer: of a sequence model whose LSTM writes at every step: what its last layers read, the
            output of the last step, the last state of each way, the mean or the maximum of all
            steps. Default of a state_dict that reads one way: last.
        classes: the outputs are scores of classes before a softmax (one: before a sigmoid), which a
            state_dict does not say. Of a text model: it is opened as a classifier of the next
            token, without a vocabulary.

    Raises:
        FormatError: a damaged file, or a model that no run holds; the layer is named.
        ConfigError: no vocabulary for a text model, or several; an option that is needed, or that
            does not fit.
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
            text_parts(stack)  # before a vocabulary is asked for
            files, notes = text_files(stack, read_vocabulary(size, **given), about)
        else:
            from fastlstm.exchange.sequence_import import sequence_run_files

            files, notes, is_class = sequence_run_files(stack, about, answer, classes)
            opened_by = "SequenceClassifier" if is_class else "SequenceRegressor"
    except FormatError as error:
        hint = [] if size is None else [", ", Setting("classes", True), " a classifier of tokens"]
        raise FormatError(
            f"{path} cannot be a run: ",
            *error.args,
            "; fastlstm.import_module gives a torch module",
            *hint,
        ) from None
    with locked_run(Path(out)) as run:
        assert run is not None
        if run.has_published() or run.checkpoints():
            raise RunDirectoryError(f"'{out}' contains a run; give another ", Setting("out"))
        run.publish(files)
    kind: Literal["text", "sequence"] = "text" if opened_by == "LM" else "sequence"
    return ImportedRun(Path(out), kind, opened_by, stack.made_by, (*stack.notes, *notes))


def _is_next_token(stack: LayerStack, given: Mapping[str, str | None]) -> bool:
    """Whether a model is no text run, and came without a vocabulary: it answers with a token."""
    if any(given.values()) or not stack.answers_once:
        return False
    try:
        text_parts(stack)
    except FormatError:
        return True
    return False
