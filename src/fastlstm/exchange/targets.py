"""The targets of `fastlstm export`: what writes a file of each, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from fastlstm.exchange.graph import Graph
from fastlstm.exchange.onnx_format import OnnxRunner, write_onnx
from fastlstm.exchange.torch_format import TorchRunner, write_torch

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
        file_name: of the model in the directory that is written.
        write: returns the file of a graph.
        runner: loads a file.
        has_loops: can run any number of steps in one call; else texts are written as one step.
        limits: by format of the weights, the largest error of an output, in units of the largest
            value of that output or of 1, whichever is larger.
    """

    name: str
    file_name: str
    write: Callable[[Graph], bytes]
    runner: Callable[[Path], Runner]
    has_loops: bool
    limits: Mapping[str, float]


TARGETS = {
    target.name: target
    for target in (
        Target(
            "onnx", "model.onnx", write_onnx, OnnxRunner, True,
            {"fp32": 1e-5, "fp16": 1e-5, "int8": 1e-5},
        ),
        Target("torch", "model.pt2", write_torch, TorchRunner, True, {"fp32": 1e-5}),
    )
}  # fmt: skip
"""Every target by name. A new one is a file with a writer and a runner, and its place here."""
