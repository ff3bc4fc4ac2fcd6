"""One candidate of the forward benchmark in a process of its own.

usage: python forward_worker.py CANDIDATE LAYER.npz THREADS     then one number of steps per line on
stdin; answers each with a JSON list of seconds per step. Prints "ready" first, and only when its
output is that of LAYER.npz: x (T, B, I), torch's weights by name, y (T, B, H) by torch in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from alternation import required, serve

if TYPE_CHECKING:
    import onnx

Arrays = dict[str, np.ndarray]
Step = Callable[[], Any]

LIMITS = {"fp32": 5e-6, "bf16": 1.5e-2}
"""Largest relative RMS distance of y to torch's in float32."""


def module_step(arrays: Arrays, threads: int, is_ours: bool, is_bf16: bool) -> Step:
    """Returns the forward pass of torch's nn.LSTM or of ours."""
    import torch
    from torch import nn

    from fastlstm.nn.lstm import LSTM

    torch.set_num_threads(threads)
    weights = {name: torch.from_numpy(a) for name, a in arrays.items() if name not in "xy"}
    H, I = weights["weight_hh_l0"].shape[1], weights["weight_ih_l0"].shape[1]  # noqa: E741
    layer = (LSTM if is_ours else nn.LSTM)(I, H, len(weights) // 4).eval()
    layer.load_state_dict(weights)
    x = torch.from_numpy(arrays["x"])

    def step() -> np.ndarray:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            y = layer(x)[0]
        return y.float().numpy()

    return step


def onnx_model(arrays: Arrays) -> onnx.ModelProto:
    """Returns a stack of LSTM operators; ONNX' gate order is i, o, f, c, torch's i, f, g, o."""
    from onnx import TensorProto, helper, numpy_helper

    H = arrays["weight_hh_l0"].shape[1]
    nodes, constants = [], [numpy_helper.from_array(np.array([1], np.int64), "direction")]
    source = "x"
    for layer in range(sum(name.startswith("weight_hh") for name in arrays)):
        parts = {}
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            i, f, g, o = np.split(arrays[f"{name}_l{layer}"], 4)
            parts[name] = np.concatenate([i, o, f, g])
        values = {
            f"W{layer}": parts["weight_ih"][None],
            f"R{layer}": parts["weight_hh"][None],
            f"B{layer}": np.concatenate([parts["bias_ih"], parts["bias_hh"]])[None],
        }
        constants += [numpy_helper.from_array(value, name) for name, value in values.items()]
        found, target = f"found{layer}", f"y{layer}"  # (T, 1, B, H), then (T, B, H)
        nodes.append(helper.make_node("LSTM", [source, *values], [found], hidden_size=H))
        nodes.append(helper.make_node("Squeeze", [found, "direction"], [target]))
        source = target
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, arrays["x"].shape)
    y = helper.make_tensor_value_info(source, TensorProto.FLOAT, arrays["y"].shape)
    graph = helper.make_graph(nodes, "lstm", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def onnxruntime_step(arrays: Arrays, threads: int) -> Step:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    model = onnx_model(arrays).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": arrays["x"]})[0]


CANDIDATES: dict[str, Callable[[Arrays, int], Step]] = {
    "fastlstm fp32": lambda arrays, threads: module_step(arrays, threads, True, False),
    "fastlstm bf16": lambda arrays, threads: module_step(arrays, threads, True, True),
    "torch fp32": lambda arrays, threads: module_step(arrays, threads, False, False),
    "torch bf16": lambda arrays, threads: module_step(arrays, threads, False, True),
    "onnxruntime fp32": onnxruntime_step,
}


def main() -> None:
    name, path, threads = sys.argv[1:]
    with np.load(path) as file:
        arrays = dict(file)
    with required(name):
        step = CANDIDATES[name](arrays, int(threads))
    want, limit = arrays["y"].astype(np.float64), LIMITS[name.rsplit(maxsplit=1)[1]]
    distance = np.linalg.norm(step() - want) / np.linalg.norm(want)
    if not distance <= limit:
        sys.exit(f"{name} is {distance:.1e} from torch's output, allowed {limit}; not measured")
    step()
    serve(step)


if __name__ == "__main__":
    main()
