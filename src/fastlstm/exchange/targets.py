"""The targets of `fastlstm export`: what writes a file of each, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from numpy.typing import NDArray

from fastlstm.exchange.graph import Graph, Value
from fastlstm.exchange.keras_format import KerasRunner, write_keras
from fastlstm.exchange.litert_format import LitertRunner, write_litert
from fastlstm.exchange.onnx_format import OnnxRunner, write_onnx
from fastlstm.exchange.saved_model_format import SavedModelRunner, write_saved_model
from fastlstm.exchange.text_graph import TEXT_GRAPH
from fastlstm.exchange.torch_format import TorchRunner, state_dict_file, write_torch
from fastlstm.sequence.layer_stack import Dense

if TYPE_CHECKING:
    from fastlstm.exchange.source import Source

Arrays = Mapping[str, NDArray[Any]]


class Runner(Protocol):
    """A written model in its target's own runtime.

    Attributes:
        version: name and version of the runtime.
    """

    version: str

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Returns the outputs by name."""


class Form(NamedTuple):
    """How a model is written.

    Attributes:
        is_step: of a text, one token per call, without an axis of time.
        has_state: the state is an input and an output; else every call starts from zero.
        length: steps of the sequences that a sequence model takes; None is any number.
    """

    is_step: bool = False
    has_state: bool = True
    length: int | None = None


class Written(NamedTuple):
    """A model as files: their content by name, and what goes into and comes out of the model."""

    files: dict[str, bytes]
    inputs: list[Value]
    outputs: list[Value]


@dataclass(frozen=True)
class Target:
    """A kind of file.

    Attributes:
        name: value of ``--to``.
        model: name of the model's file, or folder, in the directory that is written.
        write: returns the files of a model.
        runner: loads the model.
        exact_runner: loads the same weights into the same runtime without the rounding of its int8
            products, to which the limit of fp32 applies; None where it rounds nothing.
        limits: by format of the weights, the largest error of an output, in units of the largest
            value of that output or of 1, whichever is larger.
        has_loops: can run any number of steps in one call; else texts are written as one step.
        has_state: the state of a text model is an input and an output.
    """

    name: str
    model: str
    write: Callable[[Source, Form], Written]
    runner: Callable[[Path], Runner]
    limits: Mapping[str, float]
    has_loops: bool = True
    has_state: bool = True
    exact_runner: Callable[[Path], Runner] | None = None


def _of_graph(write: Callable[[Graph], dict[str, bytes]]) -> Callable[[Source, Form], Written]:
    def written(source: Source, form: Form) -> Written:
        graph = source.graph(form)
        return Written(write(graph), graph.inputs, graph.outputs)

    return written


def _litert(graph: Graph) -> dict[str, bytes]:
    return {"model.tflite": write_litert(graph)}


def _onnx(graph: Graph) -> dict[str, bytes]:
    return {"model.onnx": write_onnx(graph)}


def _saved_model(graph: Graph) -> dict[str, bytes]:
    return {f"1/{name}": data for name, data in write_saved_model(graph).items()}


def _torch(graph: Graph) -> dict[str, bytes]:
    files = {"model.pt2": write_torch(graph)}
    if graph.name == TEXT_GRAPH:  # other models have names of their own
        files["model.safetensors"] = state_dict_file(graph)
    return files


def _keras(source: Source, form: Form) -> Written:
    stack = source.stack()
    last = stack.layers[-1]
    assert isinstance(last, Dense)
    inputs = [Value("tokens", "int32", ("B", "T"))]
    outputs = [Value("logits", "float32", ("B", "T", len(last.bias)))]
    return Written({"model.keras": write_keras(stack)}, inputs, outputs)


_EXACT = {"fp32": 1e-5, "fp16": 1e-5, "int8": 1e-5}
_LITERT = {"fp32": 1e-4, "fp16": 1e-4, "int8": 0.1}
"""Of int8 the activations are rounded too, by LiteRT's kernels."""
TARGETS = {
    target.name: target
    for target in (
        Target("keras", "model.keras", _keras, KerasRunner, {"fp32": 1e-5}, has_state=False),
        Target(
            "litert",
            "model.tflite",
            _of_graph(_litert),
            LitertRunner,
            _LITERT,
            has_loops=False,
            exact_runner=partial(LitertRunner, is_exact=True),
        ),
        Target("onnx", "model.onnx", _of_graph(_onnx), OnnxRunner, _EXACT),
        Target("saved-model", "1", _of_graph(_saved_model), SavedModelRunner, _EXACT),
        Target("torch", "model.pt2", _of_graph(_torch), TorchRunner, {"fp32": 1e-5}),
    )
}
"""Every target by name. A new one is a file with a writer and a runner, and its place here."""
