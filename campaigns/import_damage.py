"""`import_module` on damaged model files: one clear error each, bounded memory, nothing executed.

Five files, made here by Keras (on torch) and torch, are damaged in four ways each: cut, bytes
overwritten, parts zeroed, parts repeated; every second one of ONNX in what it says: sizes, names,
types, where arrays are. A file that is still read must give a module. Printed are the errors by
kind and the largest memory of this process and of the processes that read files.

usage: python campaigns/import_damage.py [--files 200] [--only SUFFIX]
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import onnx
import safetensors.torch
import torch

import fastlstm


def make_files(folder: Path) -> list[Path]:
    """Writes one model per format."""
    model = keras.Sequential(
        [
            keras.Input((20,), dtype="int32"),
            keras.layers.Embedding(50, 16),
            keras.layers.Bidirectional(keras.layers.LSTM(32, return_sequences=True)),
            keras.layers.LSTM(32, return_sequences=True),
            keras.layers.Dense(50, activation="softmax"),
        ]
    )
    network = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(50, 16),
            "lstm": torch.nn.LSTM(16, 32, 2),
            "out": torch.nn.Linear(32, 50),
        }
    )
    paths = [folder / f"m{end}" for end in (".keras", ".h5", ".pt", ".safetensors", ".onnx")]
    for path in paths[:2]:
        model.save(path)
    stack = torch.nn.Sequential(network["embedding"], network["lstm"], First(), network["out"])
    torch.onnx.export(
        stack, (torch.zeros(4, 3, dtype=torch.int64),), paths[4], input_names=["x"],
        dynamic_axes={"x": {0: "T", 1: "B"}}, dynamo=False,
    )  # fmt: skip
    torch.save(network.state_dict(), paths[2])
    safetensors.torch.save_file(network.state_dict(), paths[3])
    return paths


class First(torch.nn.Module):
    """The output of an LSTM, without its state."""

    def forward(self, x):
        return x[0]


def misleading(data: bytes, rng: random.Random) -> bytes:
    """Returns an ONNX file that says something wrong."""
    model = onnx.load_model_from_string(data)
    graph = model.graph
    array, node = rng.choice(graph.initializer), rng.choice(graph.node)
    other = rng.choice(graph.node)
    axis = rng.randrange(len(array.dims) or 1)
    kind = rng.randrange(12)
    if kind < 4 and array.dims:
        sizes = (-1, 0, array.dims[axis] + 1, rng.choice((1 << 31, 1 << 40, 1 << 62)))
        array.dims[axis] = sizes[kind]
    elif kind == 4 and node.input:  # a cycle, or a value of another shape
        node.input[rng.randrange(len(node.input))] = other.output[0]
    elif kind == 5:
        node.output[0] = other.output[0]
    elif kind == 6:
        array.name = rng.choice(graph.initializer).name
    elif kind == 7:
        node.op_type = rng.choice(("Loop", "Einsum", "", "Tile", other.op_type))
    elif kind == 8:
        array.data_type = rng.randrange(30)
    elif kind == 9:
        array.data_location = onnx.TensorProto.EXTERNAL
        array.external_data.add(
            key="location", value=rng.choice(("/etc/passwd", "../../etc/passwd", "m.pt", "\n/"))
        )
    elif kind == 10:
        array.raw_data = array.raw_data[: rng.randrange(len(array.raw_data) + 1)]
    else:
        size = rng.choice((0, -5, 1 << 40, 1 << 62))
        for item in (*graph.input, *graph.output):
            item.type.tensor_type.shape.dim[0].dim_value = size
        for item in node.attribute:
            item.i = size
    return model.SerializeToString()


def damaged(data: bytes, rng: random.Random, k: int) -> bytes:
    """Returns the file with one kind of damage."""
    at = rng.randrange(len(data))
    size = min(rng.choice((1, 4, 64, 1000)), len(data) - at)
    if k % 4 == 0:
        return data[:at]
    if k % 4 == 1:  # the first bytes of a file and its ends hold what describes it
        at = rng.choice((at, rng.randrange(min(4000, len(data))), len(data) - 1 - at % 600))
        return data[:at] + rng.randbytes(size) + data[at + size :]
    if k % 4 == 2:
        return data[:at] + bytes(size) + data[at + size :]
    return data[:at] + data[at : at + size] + data[at:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=200, help="per format")
    parser.add_argument("--only", metavar="SUFFIX")
    options = parser.parse_args()
    rng, failed = random.Random(0), 0
    with tempfile.TemporaryDirectory() as folder:
        for path in make_files(Path(folder)):
            name = path.suffix
            if options.only not in (None, path.suffix):
                continue
            data = path.read_bytes()
            kinds = collections.Counter[str]()
            started, slowest = time.perf_counter(), 0.0
            for k in range(options.files):
                if path.suffix == ".onnx" and k % 2:
                    path.write_bytes(misleading(data, rng))
                else:
                    path.write_bytes(damaged(data, rng, k // 2 if path.suffix == ".onnx" else k))
                began = time.perf_counter()
                try:
                    fastlstm.import_module(path)
                    kinds["read"] += 1
                except fastlstm.UsageError as error:
                    kinds[type(error).__name__] += 1
                    if "\n" in str(error):
                        failed += 1
                        print(f"{name} {k}: more than one line: {error}")
                except BaseException as error:
                    failed += 1
                    print(f"{name} {k}: {type(error).__name__}: {error}", flush=True)
                slowest = max(slowest, time.perf_counter() - began)
            seconds = time.perf_counter() - started
            print(f"{name}: {dict(kinds)} in {seconds:.0f} s, slowest {slowest:.1f} s", flush=True)
    for name, who in (("this", resource.RUSAGE_SELF), ("reading", resource.RUSAGE_CHILDREN)):
        print(f"{name} process: {resource.getrusage(who).ru_maxrss / 1024:.0f} MB at most")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
