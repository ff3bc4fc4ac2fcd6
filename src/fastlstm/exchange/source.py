"""`ExportSource`: a model to export and the network that checks the written file."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fastlstm.errors import MissingExtraError
from fastlstm.exchange.graph import Graph
from fastlstm.runs.weight_formats import as_floats, in_format

Arrays = Mapping[str, NDArray[Any]]
SHAPES = ((1, 1), (7, 3), (100, 64))
"""Steps and sequences, (T, B), of a comparison."""
Network = TypeVar("Network", bound=nn.Module)


class ExportSource:
    """A model to export.

    Attributes:
        kind: "text", "forecaster", "sequence" or "module".
        weight_format: "fp32", "fp16" or "int8".
        own_format: format of the weights before the export.
        is_step: a text model reads one token per call, without an axis of time.
        has_state: the state is an input and an output; otherwise every call starts from zero.
        length: steps of a sequence model's or module's input; None means any number.
    """

    kind = ""
    is_step, has_state = False, True
    length: int | None = None

    def __init__(self, weight_format: str, own_format: str = "fp32") -> None:
        self.weight_format, self.own_format, self.notes = weight_format, own_format, list[str]()
        if own_format not in ("fp32", weight_format):
            self.notes.append(f"weights are stored as {own_format}, written as {weight_format}")

    def graph(self) -> Graph:
        """Returns the model as a graph."""
        raise NotImplementedError

    def cases(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields random inputs of several shapes, by the names of the graph's inputs."""
        raise NotImplementedError

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Returns the outputs of fastlstm's own network for the graph's inputs."""
        raise NotImplementedError

    def in_units(self, outputs: Arrays) -> Arrays:
        """Returns the outputs scaled to about 1; errors are measured in these units."""
        return outputs

    def figures(self, runner: Any) -> dict[str, Any]:
        """Returns measurements beside the errors: quality on data, speed."""
        return {}

    def unrounded(self) -> ExportSource | None:
        """Returns the model with unrounded weights, or None if the file holds the same weights."""
        if self.weight_format in ("fp32", self.own_format):
            return None
        own = self.in_fp32()
        own.is_step, own.has_state, own.length = self.is_step, self.has_state, self.length
        return own

    def in_fp32(self) -> ExportSource:
        """Returns the model before `weight_format` rounded its weights."""
        raise NotImplementedError

    def files(self) -> dict[str, bytes]:
        """Returns files to write beside the model, such as the tokenizer."""
        return {}


def rounded_network(
    network: Network, weight_format: str, stored: Mapping[str, Any] | None = None
) -> tuple[Network, dict[str, Any]]:
    """Returns a copy of a network with rounded weights, and the weights in the file's format.

    Matrices that the run stores rounded (`stored`) are not rounded again.
    """
    copied = copy.deepcopy(network)
    named = {n: p for n, p in copied.named_parameters() if p.is_floating_point()}
    arrays = {name: parameter.detach().numpy() for name, parameter in named.items()}
    weights = in_format({**arrays, **(stored or {})}, weight_format)
    with torch.no_grad():
        for name, array in as_floats(weights).items():
            named[name].copy_(torch.from_numpy(array))
    return copied, weights


def needed(module: str, target: str) -> Any:
    """Imports a module that writes or runs the files of a target."""
    package, extra = module.partition(".")[0], {"saved-model": "tensorflow"}.get(target, target)
    try:
        import_module(package)
        return import_module(module)
    except ImportError:
        raise MissingExtraError(
            f"--to {target} needs {package}: pip install 'fastlstm[{extra}]'"
        ) from None


def largest_error(expected: Arrays, got: Arrays) -> float:
    """Returns the largest difference, relative to the largest value of the output or 1.

    NaN if an output is missing, has another shape, or is NaN on one side only.
    """
    if not expected or not expected.keys() <= got.keys():
        return float("nan")
    pairs = [(value, got[name]) for name, value in expected.items()]
    if any(value.shape != other.shape for value, other in pairs):
        return float("nan")
    return float(np.max([differences(*pair).max(initial=0.0) for pair in pairs]))


def differences(expected: NDArray[Any], got: NDArray[Any]) -> NDArray[Any]:
    """Returns the difference of each value, relative to the largest expected value or 1."""
    is_equal = (expected == got) | (np.isnan(expected) & np.isnan(got))
    finite = np.abs(expected[np.isfinite(expected)])
    scale = max(1.0, float(finite.max(initial=0.0)))
    with np.errstate(invalid="ignore"):
        differences: NDArray[Any] = np.where(is_equal, 0.0, np.abs(expected - got)) / scale
    return differences
