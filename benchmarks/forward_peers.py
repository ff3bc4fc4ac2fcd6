"""The forward pass alone, dense input: fastlstm against torch and ONNX Runtime.

usage: python benchmarks/forward_peers.py [--rounds 5] [--steps 5] [--only SUBSTRING]
       [--peer-python PATH]     an interpreter with onnx and onnxruntime
       [--shape E,H,L,B,T]      this one instead of the five token models'
       [--results DIR]          default benchmarks/results/<machine>
All candidates have the same weights, the same x (T, B, E) and as many threads as torch; one whose
output is not torch's is not measured. Stores one JSON line per shape in forward_peers.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from alternation import Worker, alternate
from forward_worker import CANDIDATES
from machine import describe_machine, results_folder
from rates import ceilings, show, torch_has_bf16
from shapes import TOKEN_MODELS, Shape
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--peer-python")
    parser.add_argument("--shape")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    path = (options.results or results_folder()) / "forward_peers.jsonl"
    own = [Shape(*map(int, options.shape.split(",")))] if options.shape else TOKEN_MODELS
    for shape in own:
        if options.only not in str(shape):
            continue
        result = measure(shape, options.rounds, options.steps, options.peer_python)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(shape)
        show(result["median_s"], result["flop"], result["ceiling_gflops"])


def write_layer(shape: Shape, path: Path) -> None:
    """Stores weights, input and torch's output for the workers."""
    torch.manual_seed(0)
    layer = nn.LSTM(shape.E, shape.H, shape.L)
    x = torch.randn(shape.T, shape.B, shape.E)
    with torch.no_grad():
        y = layer(x)[0]
    weights = {name: w.numpy() for name, w in layer.state_dict().items()}
    np.savez(path, x=x.numpy(), y=y.numpy(), **weights)


def measure(shape: Shape, rounds: int, steps: int, peer_python: str | None) -> dict[str, Any]:
    ceiling = ceilings(shape)
    threads = str(torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        layer = Path(folder) / "layer.npz"
        write_layer(shape, layer)
        workers = []
        for name in CANDIDATES:
            if name == "torch bf16" and not torch_has_bf16():
                continue
            python = peer_python if name.startswith("onnx") else sys.executable
            if python is not None:
                command = [python, "forward_worker.py", name, str(layer), threads]
                workers.append(Worker(name, command))
        seconds = alternate(workers, rounds, steps)
    inputs = [shape.E] + [shape.H] * (shape.L - 1)
    return {
        "shape": shape._asdict(),
        "machine": describe_machine(),
        "ceiling_gflops": ceiling,
        "flop": float(sum(8 * shape.T * shape.B * shape.H * (shape.H + i) for i in inputs)),
        "median_s": {name: statistics.median(found) for name, found in seconds.items()},
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
