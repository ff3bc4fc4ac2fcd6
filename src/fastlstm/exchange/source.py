"""What is exported: a graph to write, and the network that the written file is checked against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from numpy.typing import NDArray

from fastlstm.exchange.graph import Graph
from fastlstm.exchange.targets import Arrays, Form, Runner
from fastlstm.sequence.layer_stack import LayerStack


class Source(Protocol):
    """A model to export.

    Attributes:
        kind: "text", "forecaster", "sequence" or "module".
        weight_format: of its weights in the written file.
        notes: for the user.
    """

    kind: str
    weight_format: str
    notes: list[str]

    def graph(self, form: Form) -> Graph:
        """Returns the graph."""

    def stack(self) -> LayerStack:
        """Returns the model as a sequence of layers.

        Raises:
            ConfigError: it is none.
        """

    def cases(self, form: Form) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields random inputs of several shapes, in the order and names of the graph's inputs."""

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Returns the outputs of fastlstm's own network for the graph's inputs."""

    def in_units(self, outputs: Arrays) -> Arrays:
        """Returns outputs in units of about 1, in which errors are counted."""

    def figures(self, runner: Runner, form: Form) -> dict[str, Any]:
        """Returns what is measured beside the errors: quality on data, speed."""

    def unrounded(self) -> Source | None:
        """Returns the model with its own weights; None where those of the file are the same."""

    def files(self) -> dict[str, bytes]:
        """Returns files to be written beside the model, such as the tokenizer."""
