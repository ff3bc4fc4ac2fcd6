"""`import_run`: a model file of another framework as a run directory."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastlstm.errors import FormatError, RunDirectoryError, Setting
from fastlstm.exchange.layer_stack import Embedding, LayerStack
from fastlstm.exchange.read_model import read_layer_stack
from fastlstm.exchange.saved_model_file import SAVED_MODEL_FILES
from fastlstm.exchange.text_import import refuse_vocabulary, text_files, tokens_of
from fastlstm.exchange.vocabulary import Vocabulary, read_vocabulary
from fastlstm.training.session import locked_run


@dataclass(frozen=True)
class ImportedRun:
    """What was imported.

    Attributes:
        path: the run directory.
        kind: "text" (`LM.load`), or "sequence" (`SequenceRegressor.load` of numbers,
            `SequenceClassifier.load` of classes).
        made_by: framework that wrote the file, and its version.
        notes: what is different here, and what was left out.
    """

    path: Path
    kind: Literal["text", "sequence"]
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
) -> ImportedRun:
    """Writes a model of another framework as a run: docs/exchange.md says which.

    Args:
        model: the file or directory, as of `import_module`.
        out: the run directory to write.
        text: of a text model, the text it was trained on: its characters in the order of Unicode
            are the vocabulary.
        chars: or its characters, in the order of their numbers.
        vocab: or a JSON file with them, or tokenizer.json of a run.

    Raises:
        FormatError: a damaged file, or a model that no run holds; the layer is named.
        ConfigError: no vocabulary for a text model, or several.
        DataError: a vocabulary of another size.
        RunDirectoryError: `out` holds a run.
        MissingExtraError: h5py (`fastlstm[keras]`) or onnx (`fastlstm[onnx]`) is not installed.
    """
    stack = read_layer_stack(model)
    size, given = tokens_of(stack), {"text": text, "chars": chars, "vocab": vocab}
    refuse_vocabulary(size, given)
    vocabulary = None if size is None else read_vocabulary(size, **given)
    about = {"path": str(model), "made_by": stack.made_by}
    kind, files, notes = _files(stack, vocabulary, about, Path(model))
    with locked_run(Path(out)) as run:
        assert run is not None
        if run.has_published() or run.checkpoints():
            raise RunDirectoryError(f"'{out}' contains a run; give another ", Setting("out"))
        run.publish(files)
    return ImportedRun(Path(out), kind, stack.made_by, (*stack.notes, *notes))


def _files(
    stack: LayerStack, vocabulary: Vocabulary | None, about: dict[str, Any], path: Path
) -> tuple[Literal["text", "sequence"], dict[str, bytes], list[str]]:
    """Returns the kind of run, its files, and notes."""
    files = [path / name for name in SAVED_MODEL_FILES] if path.is_dir() else [path]
    content = b"".join(file.read_bytes() for file in files)
    about = {**about, "sha256": hashlib.sha256(content).hexdigest()}
    try:
        if vocabulary is not None:
            return "text", *text_files(stack, vocabulary, about)
        if isinstance(stack.layers[0], Embedding):
            raise FormatError(
                f"the embedding has {len(stack.layers[0].weight)} tokens and the model does not"
                " answer with as many: it is no model that writes text"
            )

        from fastlstm.exchange.sequence_import import sequence_run_files

        return "sequence", *sequence_run_files(stack, about)
    except FormatError as error:
        raise FormatError(
            f"{path} cannot be a run: ",
            *error.args,
            "; fastlstm.import_module gives a torch module",
        ) from None
