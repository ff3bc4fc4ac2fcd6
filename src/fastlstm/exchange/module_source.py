"""A torch module to export: its graph and its own outputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fastlstm.errors import ConfigError
from fastlstm.exchange.graph import Graph, Value
from fastlstm.exchange.module_graph import arguments_of, module_graph
from fastlstm.exchange.rounded_network import rounded_network
from fastlstm.exchange.targets import Arrays, Form, Runner
from fastlstm.sequence.layer_stack import LayerStack

SHAPES = ({"T": 1, "B": 1}, {"T": 7, "B": 3}, {"T": 100, "B": 64})


class ModuleSource:
    """A module.

    Args:
        module: as `module_graph` takes it.
        example: arguments of a call, as `module_graph` takes them.
        weight_format: "fp32", "fp16" or "int8".
    """

    kind = "module"

    def __init__(self, module: nn.Module, example: Any, weight_format: str) -> None:
        self.weight_format, self.notes = weight_format, list[str]()
        self._given = copy.deepcopy(module).cpu().float().eval(), example
        self._module, self._weights = rounded_network(self._given[0], weight_format)
        self._graph = module_graph(self._module, example, self._weights)
        self._arguments = arguments_of(self._module, example)

    def graph(self, form: Form) -> Graph:
        return self._graph

    def stack(self) -> LayerStack:
        raise ConfigError("a torch module is not written as Keras layers; export it to onnx")

    def unrounded(self) -> ModuleSource | None:
        return ModuleSource(*self._given, "fp32") if self.weight_format != "fp32" else None

    def files(self) -> dict[str, bytes]:
        return {}

    def cases(self, form: Form) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields random inputs; whole numbers that no embedding reads are those of the example."""
        flat = _flat(self._arguments.values())
        for sizes in SHAPES:
            rng = np.random.default_rng(sizes["T"])
            inputs: dict[str, NDArray[Any]] = {}
            for value, example in zip(self._graph.inputs, flat, strict=True):
                shape = [sizes[n] if isinstance(n, str) else n for n in value.shape]
                if value.name == "lengths":
                    inputs[value.name] = rng.integers(0, sizes["T"] + 1, shape, dtype=np.int32)
                elif value.dtype == "int32":
                    known = self._tokens(value, example)
                    inputs[value.name] = rng.choice(known, shape).astype(np.int32)
                else:
                    inputs[value.name] = rng.normal(size=shape).astype(np.float32)
            yield inputs

    def _tokens(self, value: Value, example: Tensor) -> NDArray[Any]:
        """Returns whole numbers that an input may hold: all that its embeddings have rows for."""
        tables = [
            self._graph.weights[node.attributes["table"]].shape[0]
            for node in self._graph.nodes
            if node.kind == "gather" and node.inputs[0].name == value.name
        ]
        return np.arange(min(tables)) if tables else example.cpu().numpy().ravel()

    @torch.no_grad()
    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        tensors = (
            torch.from_numpy(a).long() if a.dtype == np.int32 else torch.from_numpy(a)
            for a in (inputs[value.name] for value in self._graph.inputs)
        )  # fmt: skip
        given = {
            name: tuple(next(tensors) for _ in value)
            if isinstance(value, tuple)
            else next(tensors)
            if isinstance(value, Tensor)
            else value
            for name, value in self._arguments.items()
        }
        result = self._module(**given)
        results = _flat(result.values() if isinstance(result, dict) else [result])
        names = [value.name for value in self._graph.outputs]
        return {name: value.numpy() for name, value in zip(names, results, strict=True)}

    def in_units(self, outputs: Arrays) -> Arrays:
        return outputs

    def figures(self, runner: Runner, form: Form) -> dict[str, Any]:
        """Returns nothing: the outputs are compared, no data is at hand."""
        return {}


def _flat(values: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors += _flat(value)
    return tensors
