"""The inputs of a torch module's graph: names, types, and axes whose length callers choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.exchange.graph import DType, GraphBuilder, Size, Value


def add_inputs(
    g: GraphBuilder,
    calls: fx.Graph,
    modules: Mapping[str, nn.Module],
    example: Mapping[str, Any],
) -> dict[fx.Node, Any]:
    """Adds an input for every tensor among the arguments; returns them by placeholder.

    Args:
        g: the graph.
        calls: as recorded.
        modules: by name.
        example: arguments by name: tensors, or tuples of tensors.
    """
    lstms = [
        (node, modules[str(node.target)])
        for node in calls.nodes
        if node.op == "call_module" and isinstance(modules[str(node.target)], nn.LSTM)
    ]
    batch_first = any(lstm.batch_first for _, lstm in lstms)
    steps = ("B", "T") if batch_first else ("T", "B")
    states = {part for node, _ in lstms for part in _states(node)}
    is_bare = "" in {str(node.target) for node, _ in lstms}
    inputs: dict[fx.Node, Any] = {}
    for node in calls.nodes:
        if node.op != "placeholder":
            continue
        value, name = example[str(node.target)], str(node.target)
        if isinstance(value, Tensor):
            name = "x" if is_bare and name == "input" else name
            inputs[node] = _input(g, name, value, steps, node in states)
        else:
            is_state = node in states and len(value) == 2
            names = ("h0", "c0") if is_state else [f"{name}_{k}" for k in range(len(value))]
            inputs[node] = tuple(
                _input(g, n, v, steps, is_state) for n, v in zip(names, value, strict=True)
            )
    return inputs


def _states(node: fx.Node) -> list[Any]:
    """Returns the recorded values that are the state of an LSTM's call, or parts of it."""
    hx = node.args[1] if len(node.args) > 1 else node.kwargs.get("hx")
    return list(hx) if isinstance(hx, tuple | list) else [hx]


def _input(
    g: GraphBuilder, name: str, example: Tensor, steps: tuple[str, str], is_state: bool
) -> Value:
    is_number = example.is_floating_point()
    dtype: DType = "float32" if is_number else "int32"
    sizes: list[Size] = list(example.shape)
    if is_state and len(sizes) == 3:
        sizes[1] = "B"
    elif len(sizes) == (3 if is_number else 2):
        sizes[:2] = steps
    elif sizes:
        sizes[0] = "B"
    return g.input(name, sizes, dtype)
