"""`export()`: a trained model as a file of another runtime, checked in that runtime.

An `ExportSource` is the model and gives a `Graph`. A `Target` is the kind of file and writes the
graph. `prove` compares the file in the target's runtime with fastlstm's network.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fastlstm.errors import (
    ConfigError,
    ExportError,
    RunDirectoryError,
    counted,
    kind_of_value,
    nearest_hint,
)
from fastlstm.exchange.forecast_graph import ForecastExport
from fastlstm.exchange.graph import Graph, Value
from fastlstm.exchange.keras_format import KerasRunner, write_keras
from fastlstm.exchange.litert_format import LitertRunner, write_litert
from fastlstm.exchange.module_source import ModuleSource
from fastlstm.exchange.onnx_format import OnnxRunner, write_onnx
from fastlstm.exchange.saved_model_format import SavedModelRunner, write_saved_model
from fastlstm.exchange.sequence_source import SequenceSource
from fastlstm.exchange.source import Arrays, ExportSource, differences, largest_error
from fastlstm.exchange.text_source import TEXT_GRAPH, TextExport
from fastlstm.exchange.torch_format import TorchRunner, state_dict_file, write_torch
from fastlstm.forecast.files import read_forecaster
from fastlstm.report.html import InNotebook
from fastlstm.report.lines import Row, joined, labelled
from fastlstm.report.terminal import short_bytes, short_count
from fastlstm.runs.find_run import require_run
from fastlstm.runs.manifest import FileRecord
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.sequence.files import read_sequence_model
from fastlstm.system import storage
from fastlstm.system.fields import is_whole
from fastlstm.text.stored_model import load_stored_model
from fastlstm.training.signals import ended_like_ctrl_c

REPORT_FILE = "export.json"
LAYER_NORM_LIMIT = 1e-4
"""The limit for layer norm in the cell, which amplifies rounding wherever a cell is small, so that
two libraries differ by up to 5e-5."""


class Runner(Protocol):
    """A written model in its target's runtime; `version` has the runtime's name and version."""

    version: str

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Returns the outputs by name."""


@dataclass(frozen=True)
class Target:
    """A kind of file.

    Attributes:
        model: name of the model's file or folder in the exported directory.
        write: returns the files of a model.
        runner: loads the model.
        limits: weight format -> largest error of an output, relative to the largest value of that
            output or 1, whichever is larger.
        has_loops: whether one call runs any number of steps; otherwise a text model computes one
            step.
        has_state: a text model has its state as input and output.
        exact_runner: runs the same int8 weights without rounded products, within the limit of
            fp32; None if the runtime rounds nothing.
    """

    model: str
    write: Callable[[Graph], dict[str, bytes]]
    runner: Callable[[Path], Runner]
    limits: Mapping[str, float]
    has_loops: bool = True
    has_state: bool = True
    exact_runner: Callable[[Path], Runner] | None = None


def _torch(graph: Graph) -> dict[str, bytes]:
    files = {"model.pt2": write_torch(graph)}
    if graph.name == TEXT_GRAPH:  # the names are those of text models
        files["model.safetensors"] = state_dict_file(graph)
    return files


_MOST_STEPS = 65_536
"""Of a fixed `length`; the tensors of a larger one fill the memory."""
_EXACT = {"fp32": 1e-5, "fp16": 1e-5, "int8": 1e-5}
_LITERT = {"fp32": 1e-4, "fp16": 1e-4, "int8": 0.1}
"""For int8 weights, LiteRT's kernels round the activations too."""
TARGETS = {
    "keras": Target(
        "model.keras", lambda graph: {"model.keras": write_keras(graph)}, KerasRunner,
        {"fp32": 1e-5}, has_state=False,
    ),
    "litert": Target(
        "model.tflite", lambda graph: {"model.tflite": write_litert(graph)}, LitertRunner, _LITERT,
        has_loops=False, exact_runner=partial(LitertRunner, is_exact=True),
    ),
    "onnx": Target(
        "model.onnx", lambda graph: {"model.onnx": write_onnx(graph)}, OnnxRunner, _EXACT
    ),
    "saved-model": Target(
        "1", lambda graph: {f"1/{n}": data for n, data in write_saved_model(graph).items()},
        SavedModelRunner, _EXACT,
    ),
    "torch": Target("model.pt2", _torch, TorchRunner, {"fp32": 1e-5}),
}  # fmt: skip
"""Every target by name. A new target needs a file with a writer and a runner, a place here, and its
name in cli/export.py."""


@dataclass(frozen=True)
class Proof:
    """The outputs of the target's runtime compared with fastlstm's.

    Attributes:
        runtime: name and version.
        errors: `shapes` of the inputs and `error` of the outputs, per case. An error is the
            largest difference, relative to the largest value of that output or 1.
        limit: largest error that passes.
        figures: quality on data, speed (`ExportSource.figures`).
    """

    runtime: str
    errors: list[dict[str, Any]]
    limit: float
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def max_error(self) -> float:
        """The largest error of all cases; NaN where a result is NaN on one side only."""
        return float(np.max([case["error"] for case in self.errors]))

    @property
    def is_good(self) -> bool:
        """Whether no error is above the limit."""
        return self.max_error <= self.limit


@dataclass(frozen=True)
class ExportReport(InNotebook):
    """Result of an export, as export.json holds it.

    Attributes:
        source: run directory, or class of the module.
        kind: "text", "forecaster", "sequence" or "module".
        target: "onnx", "litert", …
        path: the exported directory.
        model: name of the model's file or folder in it.
        num_bytes: size of the model.
        weights: format of the weights.
        is_step: the model computes one step per call.
        files: name -> size and SHA-256.
        inputs: names, types and shapes; lengths that callers choose are letters.
        outputs: as `inputs`.
        metadata: a forecaster's columns, targets, …, a classifier's classes, as in the model's
            file; some runtimes cannot read them there.
        proof: comparison with fastlstm; None without a check.
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
    metadata: dict[str, Any]
    proof: Proof | None
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        values = dataclasses.asdict(self)
        if self.proof is not None:
            own = {"max_error": self.proof.max_error, "is_good": self.proof.is_good}
            values["proof"] = {**values["proof"], **own}
        return values

    def _rows(self) -> list[Row]:
        size = f"{short_bytes(self.num_bytes)}, {self.weights}"
        form = ", one step per call" if self.is_step else ""
        return [
            ("source", f"{self.source} ({self.kind})"),
            ("written", f"{self.path}/{self.model}, {size}"),
            ("inputs", _signature_text(self.inputs) + form),
            ("outputs", _signature_text(self.outputs)),
            *(
                [("checked", "no: --no-check")]
                if self.proof is None
                else _proof_rows(self, self.proof)
            ),
            *labelled("notes", self.notes),
        ]


_UNITS = {
    "forecaster": "in standard deviations of the column",
    "sequence": "in standard deviations of the answers, or in probability",
}


def _signature_text(values: list[Value]) -> str:
    return "; ".join(f"{v.name} ({', '.join(map(str, v.shape))}) {v.dtype}" for v in values)


def _proof_rows(report: ExportReport, proof: Proof) -> list[Row]:
    cases, figures = proof.errors, proof.figures
    first = next(iter(cases[0]["shapes"]))
    shapes = ", ".join(dict.fromkeys(str(tuple(case["shapes"][first])) for case in cases))
    rows = [
        ("checked in", proof.runtime),
        (
            "max error",
            f"{proof.max_error:.2g} (limit {proof.limit:g}) against fastlstm with the same"
            f" weights; {first} of shapes {shapes}",
        ),
    ]
    if (text := figures.get("text")) is not None:
        own, here, there = text["bits_per_char"].values()
        before = f"{own:.4f} bits/char before, " if abs(here - own) >= 5e-5 else ""
        same = f"{text['agreement']:.2%} of {counted(text['num_tokens'], 'token')}"
        bits = f"{before}{here:.4f} bits/char here, {there:.4f} there"
        rows.append(("on text", f"{bits}; the likeliest token is the same at {same}"))
    if (speeds := figures.get("tokens_per_s")) is not None:
        own = speeds.get("fastlstm")
        here = "" if own is None else f"{short_count(own)} here on one thread"
        rows.append(("one stream", joined(f"{short_count(speeds['target'])} tokens/s there", here)))
    for number, pair in figures.get("windows_per_s", {}).items():
        there, here = short_count(pair["target"]), short_count(pair["fastlstm"])
        text = f"{there} windows/s there, {here} here; one thread"
        rows.append((f"{number} at once", text))
    if (rounding := figures.get("rounding")) is not None:
        unit = _UNITS.get(report.kind, "of the largest value")
        text = (
            f"{report.weights} weights move outputs by {rounding['rms_error']:.2g} (RMS), by"
            f" {rounding['max_error']:.2g} at most, {unit}; random inputs"
        )
        rows.append(("rounding", text))
    return rows


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
    """Writes a trained model for another runtime and checks the file in that runtime.

    The directory `out` appears after the check, with the model, the files it needs (a text's
    tokenizer.json) and export.json, which holds this function's result.

    Args:
        model: a run directory, a checkpoint of a text model, or a torch module made of LSTM,
            Linear, Embedding, LayerNorm, Dropout and activations.
        example: arguments of a module's call: one, a tuple, or a dict by name.
        to: target, one of `TARGETS`: "keras", "litert", "onnx", "saved-model", "torch".
        out: directory to write; it must not exist yet.
        weights: "fp32", "fp16" or "int8"; default is the run's format, fp32 for an int4 run.
        step: a text model reads one token per call, without a time axis.
        length: steps of the longest sequence, for a sequence model or module in "litert"; shorter
            sequences are padded at the end. A module without `lengths` reads exactly so many.
        quantiles: levels of a forecaster; default 0.025, 0.1, 0.5, 0.9 and 0.975. A distribution
            has its parameters as outputs instead.
        check_text: text for the comparison; default is the run's validation part.
        check: compare the file in the target's runtime with fastlstm.

    Returns:
        The files and the measurements.

    Raises:
        ConfigError: an unknown target or format, or a model that the target cannot hold.
        MissingExtraError: the writer or the runtime is not installed.
        ExportError: the target's runtime gives other outputs; nothing is written.
        RunDirectoryError: no run, or `out` exists.
    """
    to = "litert" if to == "tflite" else to
    if not isinstance(to, str) or to not in TARGETS:
        raise ConfigError(
            f"`to={to!r}` is unknown{nearest_hint(to, TARGETS)}; expected one of"
            f" {', '.join(TARGETS)}"
        )
    path = _checked_out(out, TARGETS[to])
    if check_text is not None and not check:
        raise ConfigError("`check_text` is not read without a check; leave it out")
    if isinstance(model, nn.Module):
        if example is None:
            raise ConfigError("give an example of the module's arguments: export(module, example)")
        _refuse_options("module", check_text=check_text, quantiles=quantiles)
        name = type(model).__name__
        source: ExportSource = ModuleSource(model, example, _weight_format(weights, "fp32", to))
    elif not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"the model is {kind_of_value(model)}, expected a run directory or a torch module"
        )
    else:
        name = os.fspath(model)
        source = _source(model, weights, check_text, quantiles, to)
    _set_form(source, to, step, length)
    return _published(name, source, to, path, check)


def _published(name: str, source: ExportSource, to: str, path: Path, check: bool) -> ExportReport:
    """Writes and checks a directory beside `path`, then renames it."""
    target = TARGETS[to]
    with storage.storage_errors(path, "write the export"), staged_directory(path) as staged:
        graph = source.graph()
        files = target.write(graph)
        num_bytes = (
            sum(map(len, files.values())) if to == "saved-model" else len(files[target.model])
        )
        files |= source.files()
        for file, data in files.items():
            (staged / file).parent.mkdir(parents=True, exist_ok=True)
            storage.write_file(staged / file, data)
        proof = _proof(source, target, staged, files) if check else None
        inputs, outputs = _signature(source, graph)
        report = ExportReport(
            source=name, kind=source.kind, target=to, path=os.fspath(path),
            model=target.model, num_bytes=num_bytes,
            weights=source.weight_format, is_step=source.is_step,
            files={n: dataclasses.asdict(FileRecord.of(data)) for n, data in files.items()},
            inputs=inputs, outputs=outputs, proof=proof, notes=source.notes,
            metadata={
                name: json.loads(text) if text[:1] in ("[", "{") else text
                for name, text in graph.metadata.items()
                if name not in files
            },
        )  # fmt: skip
        storage.write_json(staged / REPORT_FILE, report.to_dict())
    return report


def _signature(source: ExportSource, graph: Graph) -> tuple[list[Value], list[Value]]:
    """Returns inputs and outputs of the file; a Keras file is batch-first and has no state."""
    if source.has_state:
        return graph.inputs, graph.outputs
    logits = Value("logits", "float32", ("B", "T", graph.outputs[0].shape[-1]))
    return [Value("tokens", "int32", ("B", "T"))], [logits]


def _set_form(source: ExportSource, to: str, step: bool, length: int | None) -> None:
    target = TARGETS[to]
    if to == "keras" and source.kind != "text":
        raise ConfigError(
            f"Keras files hold text models, and this is a {source.kind}; export it to onnx"
        )
    if length is not None and (source.kind not in ("sequence", "module") or target.has_loops):
        raise ConfigError(
            f"`length={length!r}` is for sequence models and modules that go to litert; leave it"
            " out"
        )
    if length is not None and not (is_whole(length) and 1 <= length <= _MOST_STEPS):
        raise ConfigError(
            f"`length={length!r:.60}` is no number of steps, expected 1 to {_MOST_STEPS}"
        )
    is_step = source.kind == "text" and (step or not target.has_loops)
    if step and not is_step:
        raise ConfigError(f"`step=True` is for text models; this is a {source.kind}")
    if is_step and not target.has_state:
        raise ConfigError(f"`step=True` needs the state as an input; {to} has none")
    source.is_step, source.has_state, source.length = is_step, target.has_state, length


def _checked_out(out: str | os.PathLike[str], target: Target) -> Path:
    if not isinstance(out, str | os.PathLike):
        raise ConfigError(f"`out` is {kind_of_value(out)}, expected the path of a directory")
    if not storage.is_utf8(out):
        raise ConfigError(f"`out` is {out}: the name is not UTF-8; give another")
    path = Path(out)
    if path.suffix and path.suffix == Path(target.model).suffix:
        raise ConfigError(
            f"`out={os.fspath(out)!r}` names a file; an export is a directory that holds"
            f" {target.model}: give `out={os.fspath(path.with_suffix(''))!r}`"
        )
    if os.path.lexists(path):
        raise RunDirectoryError(f"{path} exists; give another `out` or remove it")
    return path


def _source(
    run: str | os.PathLike[str],
    weights: str | None,
    check_text: Any,
    quantiles: Sequence[float] | None,
    to: str,
) -> ExportSource:
    require_run(run)
    kind = kind_of_run(run)
    _refuse_options(kind, check_text=check_text, quantiles=quantiles)
    if kind == "text":
        text = load_stored_model(run)
        return TextExport(text, _weight_format(weights, text.weight_format, to), check_text)
    if kind == "forecaster":
        stored = read_forecaster(Path(run))
        own = "fp32" if stored.compression is None else stored.compression.weights
        return ForecastExport(stored, _weight_format(weights, own, to), quantiles)
    return SequenceSource(read_sequence_model(Path(run)), _weight_format(weights, "fp32", to))


def _refuse_options(kind: str | None, **options: Any) -> None:
    owners = {"check_text": "text", "quantiles": "forecaster"}
    for name, value in options.items():
        if value is not None and owners[name] != kind:
            raise ConfigError(f"`{name}` has no meaning for a {kind}; leave it out")


def _weight_format(asked: str | None, own: str, to: str) -> str:
    """Returns the format to write; default is the run's format if the target holds it."""
    known = TARGETS[to].limits
    if asked is None:
        return own if own in known else "fp32"
    if not isinstance(asked, str) or asked not in known:
        raise ConfigError(
            f"`weights={asked!r}` cannot be held by {to}, which holds {', '.join(known)}"
        )
    return asked


def _proof(source: ExportSource, target: Target, directory: Path, files: dict[str, bytes]) -> Proof:
    """Checks the files on disk, then the outputs of the model in them."""
    for name, data in files.items():
        if storage.read_bytes(directory / name) != data:
            raise ExportError(f"{name} on disk is not what was written: nothing is exported")
    path, limits, exact = directory / target.model, target.limits, None
    if target.exact_runner is not None and source.weight_format == "int8":
        exact = compare(source, target.exact_runner(path), limits["fp32"])
        _refuse_wrong(exact)
    limit = limits[source.weight_format]
    lstms = [node for node in source.graph().nodes if node.kind == "lstm"]
    if any(node.attributes["options"].layer_norm for node in lstms):
        limit = max(limit, LAYER_NORM_LIMIT)
    proof = prove(source, target.runner(path), limit)
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


def prove(source: ExportSource, runner: Runner, limit: float) -> Proof:
    """Compares outputs (`compare`), then measures quality and speed."""
    proof = compare(source, runner, limit)
    if proof.is_good:
        proof.figures.update(source.figures(runner))
        if (own := source.unrounded()) is not None:
            proof.figures["rounding"] = _rounding(own, source)
    return proof


def compare(source: ExportSource, runner: Runner, limit: float) -> Proof:
    """Compares outputs for random inputs, of shapes that the writer did not use."""
    errors, compared = [], dict[str, bool]()
    for inputs in source.cases():
        expected, got = source.in_units(source.run(inputs)), source.in_units(runner.run(inputs))
        shapes = {name: list(array.shape) for name, array in inputs.items()}
        due = expected if source.has_state else {name: expected[name] for name in got}
        errors.append({"shapes": shapes, "error": largest_error(due, got)})
        for name, value in due.items():
            compared[name] = compared.get(name, False) or bool(np.isfinite(value).any())
    if not all(compared.values()):  # equal, but only NaN
        errors[-1]["error"] = float("nan")
    return Proof(runner.version, errors, limit)


def _rounding(own: ExportSource, source: ExportSource) -> dict[str, float]:
    """Returns how far rounded weights move the outputs: largest and root mean square."""
    moved = []
    for inputs in own.cases():
        before, after = (model.in_units(model.run(inputs)) for model in (own, source))
        for name, value in before.items():
            is_number = np.isfinite(value) & np.isfinite(after[name])
            moved.append(differences(value, after[name])[is_number])
    values = np.concatenate(moved).astype(np.float64)
    rms = float(np.sqrt(np.mean(values**2)))
    return {"max_error": float(values.max(initial=0.0)), "rms_error": rms}


@contextmanager
def staged_directory(path: Path) -> Iterator[Path]:
    """Yields a new directory, which gets the name `path` after the block.

    An error, SIGTERM, SIGHUP or Ctrl-C removes the directory and the parents made for it. In the
    main thread SIGTERM raises SystemExit(143) within the block. Raises OSError: a directory cannot
    be made or renamed.
    """
    made = [parent for parent in path.parents if not parent.exists()]
    with ended_like_ctrl_c():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with storage.staged(path, storage.make_dir) as staged:
                yield staged
        except BaseException:
            with suppress(OSError):
                for parent in made:
                    parent.rmdir()
            raise
