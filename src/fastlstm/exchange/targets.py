"""The targets of `fastlstm export`: what writes a file of each, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from fastlstm.exchange.graph import Graph
from fastlstm.exchange.litert_format import LitertRunner, write_litert
from fastlstm.exchange.onnx_format import OnnxRunner, write_onnx
from fastlstm.exchange.saved_model_format import SavedModelRunner, write_saved_model
from fastlstm.exchange.torch_format import TorchRunner, state_dict_file, write_torch

Arrays = Mapping[str, NDArray[Any]]


class Runner(Protocol):
    """A written model in its target's own runtime.

    Attributes:
        version: name and version of the runtime.
    """

    version: str

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Returns the outputs by name."""


@dataclass(frozen=True)
class Target:
    """A kind of file.

    Attributes:
        name: value of ``--to``.
        model: name of the model's file, or folder, in the directory that is written.
        write: returns the files of a graph by name.
        runner: loads the model.
        has_loops: can run any number of steps in one call; else texts are written as one step.
        limits: by format of the weights, the largest error of an output, in units of the largest
            value of that output or of 1, whichever is larger.
    """

    name: str
    model: str
    write: Callable[[Graph], dict[str, bytes]]
    runner: Callable[[Path], Runner]
    has_loops: bool
    limits: Mapping[str, float]


def _onnx(graph: Graph) -> dict[str, bytes]:
    return {"model.onnx": write_onnx(graph)}


def _litert(graph: Graph) -> dict[str, bytes]:
    return {"model.tflite": write_litert(graph)}


def _torch(graph: Graph) -> dict[str, bytes]:
    return {"model.pt2": write_torch(graph), "model.safetensors": state_dict_file(graph)}


def _saved_model(graph: Graph) -> dict[str, bytes]:
    return {f"1/{name}": data for name, data in write_saved_model(graph).items()}


_LITERT = {"fp32": 1e-4, "fp16": 1e-4, "int8": 0.1}
"""Of int8 the activations are rounded too, by LiteRT's kernels."""
_EXACT = {"fp32": 1e-5, "fp16": 1e-5, "int8": 1e-5}
TARGETS = {
    target.name: target
    for target in (
        Target("litert", "model.tflite", _litert, LitertRunner, False, _LITERT),
        Target("onnx", "model.onnx", _onnx, OnnxRunner, True, _EXACT),
        Target("saved-model", "1", _saved_model, SavedModelRunner, True, _EXACT),
        Target("torch", "model.pt2", _torch, TorchRunner, True, {"fp32": 1e-5}),
    )
}
"""Every target by name. A new one is a file with a writer and a runner, and its place here."""
