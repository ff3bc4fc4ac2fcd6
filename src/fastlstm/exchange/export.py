"""`export()`: a trained model as a file of another runtime, checked in that runtime."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fastlstm.errors import (
    ConfigError,
    ExportError,
    RunDirectoryError,
    Setting,
    kind_of_value,
    nearest_hint,
)
from fastlstm.exchange.forecast_source import ForecastSource
from fastlstm.exchange.graph import Value
from fastlstm.exchange.module_source import ModuleSource
from fastlstm.exchange.proof import LAYER_NORM_LIMIT, Proof, compare, prove
from fastlstm.exchange.sequence_source import SequenceSource
from fastlstm.exchange.source import Source
from fastlstm.exchange.staged_directory import staged_directory
from fastlstm.exchange.targets import TARGETS, Form, Target
from fastlstm.exchange.text_source import TextSource
from fastlstm.forecast.files import read_forecaster
from fastlstm.runs.find_run import require_run
from fastlstm.runs.manifest import FileRecord
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.sequence.files import read_sequence_model
from fastlstm.system import storage
from fastlstm.system.fields import is_whole
from fastlstm.text.stored_model import load_stored_model

REPORT_FILE = "export.json"


@dataclass(frozen=True)
class ExportReport:
    """Result of an export, as export.json holds it.

    Attributes:
        source: run directory, or class of the module.
        kind: "text", "forecaster", "sequence" or "module".
        target: "onnx", "litert", …
        path: of the directory that was written.
        model: name of the model's file, or folder, in it.
        num_bytes: of the model.
        weights: format of the weights in that file.
        is_step: it computes one step per call.
        files: name -> size and SHA-256.
        inputs: names, types and shapes; lengths that callers choose are letters.
        outputs: as `inputs`.
        proof: how far the target's runtime is from fastlstm; None where it was not checked.
        notes: for the user.
    """

    source: str
    kind: str
    target: str
    path: str
    model: str
    num_bytes: int
    weights: str
    is_step: bool
    files: dict[str, dict[str, Any]]
    inputs: list[Value]
    outputs: list[Value]
    proof: Proof | None
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        values = dataclasses.asdict(self)
        if self.proof is not None:
            own = {"max_error": self.proof.max_error, "is_good": self.proof.is_good}
            values["proof"] = {**values["proof"], **own}
        return values


def export(
    model: str | os.PathLike[str] | nn.Module,
    example: Any = None,
    *,
    to: str,
    out: str | os.PathLike[str],
    weights: str | None = None,
    step: bool = False,
    length: int | None = None,
    quantiles: Sequence[float] | None = None,
    check_text: Any = None,
    check: bool = True,
) -> ExportReport:
    """Writes a trained model for another runtime, and checks the file there.

    The directory `out` gets the model's file, what is needed beside it (a text's tokenizer.json)
    and export.json, this function's result. They are put there together, after the check.

    Args:
        model: a run directory, or of a text model one of its checkpoints; or a torch module made of
            LSTM, Linear, Embedding, LayerNorm, Dropout and activations.
        example: of a module: the argument of a call, a tuple of them, or a dict by name.
        to: target, one of `TARGETS`: "keras", "litert", "onnx", "saved-model", "torch".
        out: directory to write; it must not exist yet.
        weights: "fp32", "fp16" or "int8"; default is the run's own format, fp32 of an int4 run.
        step: of a text model: one token per call, without a time axis.
        length: of a sequence model for "litert": steps of the longest sequence. Shorter ones are
            padded at the end.
        quantiles: levels, of a forecaster; default 0.025, 0.1, 0.5, 0.9 and 0.975, of a
            distribution none: its parameters are outputs.
        check_text: text that the outputs are compared on; default is the run's validation part.
        check: run the file in the target's runtime. Without, nothing is known of its outputs.

    Returns:
        What was written and measured.

    Raises:
        ConfigError: an unknown target or format, or a model that the target cannot hold.
        MissingExtraError: the writer or the runtime is not installed.
        ExportError: the target's runtime computes something else; nothing is written.
        RunDirectoryError: no run, or `out` exists.
    """
    target = _target(to)
    path = _checked_out(out, target)
    if check_text is not None and not check:
        raise ConfigError(Setting("check_text"), " is not read without a check; leave it out")
    if isinstance(model, nn.Module):
        if example is None:
            raise ConfigError("give an example of the module's arguments: export(module, example)")
        _refuse_options("module", check_text=check_text, quantiles=quantiles)
        name = type(model).__name__
        source: Source = ModuleSource(model, example, _weight_format(weights, "fp32", target))
    elif not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"the model is {kind_of_value(model)}, expected a run directory or a torch module"
        )
    else:
        name = os.fspath(model)
        source = _source(model, weights, check_text, quantiles, target)
    return _published(name, source, target, _form(source, target, step, length), path, check)


def _form(source: Source, target: Target, step: bool, length: int | None) -> Form:
    if length is not None and (source.kind != "sequence" or target.has_loops):
        raise ConfigError(
            Setting("length", length), " is for sequence models that go to litert; leave it out"
        )
    if length is not None and not (is_whole(length) and length > 0):
        raise ConfigError(Setting("length", length), " is no number of steps, expected 1 or more")
    is_step = source.kind == "text" and (step or not target.has_loops)
    if step and not is_step:
        raise ConfigError(Setting("step", True), f" is for text models; this is a {source.kind}")
    if is_step and not target.has_state:
        raise ConfigError(
            Setting("step", True), f" needs the state as an input, which {target.name} has not got"
        )
    return Form(is_step, target.has_state, length)


def _published(
    name: str, source: Source, target: Target, form: Form, path: Path, check: bool
) -> ExportReport:
    """Writes beside `path`, checks, and gives it that name."""
    with (
        storage.storage_errors(path, "write the export"),
        staged_directory(path) as staged,
    ):
        written = target.write(source, form)
        files = {**written.files, **source.files()}
        for file, data in files.items():
            (staged / file).parent.mkdir(parents=True, exist_ok=True)
            storage.write_file(staged / file, data)
        proof = _proof(source, target, staged, files, form) if check else None
        report = ExportReport(
            source=name, kind=source.kind, target=target.name, path=os.fspath(path),
            model=target.model, num_bytes=_size(written.files, target.model),
            weights=source.weight_format, is_step=form.is_step,
            files={n: dataclasses.asdict(FileRecord.of(data)) for n, data in files.items()},
            inputs=written.inputs, outputs=written.outputs, proof=proof, notes=source.notes,
        )  # fmt: skip
        storage.write_json(staged / REPORT_FILE, report.to_dict())
    return report


def _size(files: Mapping[str, bytes], model: str) -> int:
    """Returns the bytes of a file, or of all files of a folder."""
    own = (data for name, data in files.items() if f"{name}/".startswith(f"{model}/"))
    return sum(map(len, own))


def _target(name: str) -> Target:
    if name not in TARGETS:
        raise ConfigError(
            Setting("to", name), f" is unknown{nearest_hint(name, TARGETS)}; expected one of"
            f" {', '.join(TARGETS)}",
        )  # fmt: skip
    return TARGETS[name]


def _checked_out(out: str | os.PathLike[str], target: Target) -> Path:
    path = Path(out)
    if path.suffix and path.suffix == Path(target.model).suffix:
        raise ConfigError(
            Setting("out", os.fspath(out)), f" names a file; an export is a directory that holds"
            f" {target.model}: give ", Setting("out", os.fspath(path.with_suffix(""))),
        )  # fmt: skip
    if os.path.lexists(path):
        raise RunDirectoryError(f"{path} exists; give another ", Setting("out"), " or remove it")
    return path


def _source(
    run: str | os.PathLike[str],
    weights: str | None,
    check_text: Any,
    quantiles: Sequence[float] | None,
    target: Target,
) -> Source:
    require_run(run)
    kind = kind_of_run(run)
    _refuse_options(kind, check_text=check_text, quantiles=quantiles)
    source: Source
    note = None
    if kind == "text":
        text = load_stored_model(run)
        own, note = text.weight_format, text.note
        source = TextSource(text, _weight_format(weights, own, target), check_text)
    elif kind == "forecaster":
        stored = read_forecaster(Path(run))
        own = "fp32" if stored.compression is None else stored.compression.weights
        source = ForecastSource(stored, _weight_format(weights, own, target), quantiles)
    else:
        own = "fp32"
        sequences = read_sequence_model(Path(run))
        source = SequenceSource(sequences, _weight_format(weights, own, target))
    if note is not None:
        source.notes.append(note)
    if source.weight_format != own and own != "fp32":
        source.notes.append(f"weights are stored as {own}, written as {source.weight_format}")
    return source


def _refuse_options(kind: str | None, **options: Any) -> None:
    """Raises ConfigError for an option that models of this kind do not have."""
    owners = {"check_text": "text", "quantiles": "forecaster"}
    for name, value in options.items():
        if value is not None and owners[name] != kind:
            raise ConfigError(Setting(name), f" has no meaning for a {kind}; leave it out")


def _weight_format(asked: str | None, own: str, target: Target) -> str:
    """Returns the format to write, by default that of the run where the target has it."""
    if asked is None:
        return own if own in target.limits else "fp32"
    if asked not in target.limits:
        raise ConfigError(
            Setting("weights", asked), f" cannot be held by {target.name}, which holds"
            f" {', '.join(target.limits)}",
        )  # fmt: skip
    return asked


def _proof(
    source: Source, target: Target, directory: Path, files: dict[str, bytes], form: Form
) -> Proof:
    """Runs what the disk holds.

    Raises:
        ExportError: it is not what was written, or computes something else.
    """
    for name, data in files.items():
        if storage.read_bytes(directory / name) != data:
            raise ExportError(f"{name} on disk is not what was written: nothing is exported")
    path, limits, exact = directory / target.model, target.limits, None
    if target.exact_runner is not None and source.weight_format == "int8":
        exact = compare(source, target.exact_runner(path), form, limits["fp32"])
        _refuse_wrong(exact)
    limit = limits[source.weight_format]
    if any(node.kind == "lstm" and node.attributes["options"].layer_norm
           for node in source.graph(form).nodes):  # fmt: skip
        limit = max(limit, LAYER_NORM_LIMIT)
    proof = prove(source, target.runner(path), form, limit)
    _refuse_wrong(proof)
    if exact is not None:
        proof.figures["max_error_without_rounding"] = exact.max_error
    return proof


def _refuse_wrong(proof: Proof) -> None:
    if np.isnan(proof.max_error):
        raise ExportError(
            f"{proof.runtime} gives NaN or another shape where fastlstm gives numbers, or there are"
            " no numbers to compare: nothing is exported"
        )
    if not proof.is_good:
        raise ExportError(
            f"{proof.runtime} is off by {proof.max_error:.3g}, the limit is {proof.limit:g}:"
            " nothing is exported; please report it with config.json of the run"
        )
