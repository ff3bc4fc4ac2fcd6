"""`import_module` on damaged model files: one clear error each, bounded memory, nothing executed.

Four files, made here by Keras (on torch) and torch, are damaged in four ways each: cut, bytes
overwritten, parts zeroed, parts repeated. A file that is still read must give a module. Printed are
the errors by kind and the largest memory of this process and of the processes that read files.
SavedModels, which only TensorFlow makes, are damaged too where a directory of saved_model_import.py
is given: one of their files each time, which is now and then left out or made a link.

usage: python tests/campaigns/import_damage.py [FILES PER FORMAT, default 200] [SAVED MODELS]
"""

from __future__ import annotations

import collections
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
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
    paths = [folder / name for name in ("m.keras", "m.h5", "m.pt", "m.safetensors")]
    for path in paths[:2]:
        model.save(path)
    torch.save(network.state_dict(), paths[2])
    safetensors.torch.save_file(network.state_dict(), paths[3])
    return paths


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


def damage(files: dict[Path, bytes], rng: random.Random, k: int) -> None:
    """Writes a model's files, one of them damaged."""
    chosen = rng.choice(sorted(files))
    for path, data in files.items():
        path.unlink(missing_ok=True)
        if path != chosen:
            path.write_bytes(data)
        elif len(files) == 1 or k % 10 > 1:
            path.write_bytes(damaged(data, rng, k))
        elif k % 10 == 1:
            path.symlink_to("/etc/passwd")


def saved_models(folder: Path, given: list[str]) -> list[Path]:
    """Copies SavedModels of both versions of Keras."""
    names = [f"Keras {k}, both ways, concat" for k in (2, 3)] if given else []
    return [shutil.copytree(Path(given[0], name), folder / name) for name in names]


def main() -> None:
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    rng, failed = random.Random(0), 0
    with tempfile.TemporaryDirectory() as folder:
        for path in [*make_files(Path(folder)), *saved_models(Path(folder), sys.argv[2:])]:
            name = path.suffix or path.name
            parts = [part for part in path.rglob("*") if part.is_file()] or [path]
            files = {part: part.read_bytes() for part in parts if part.name != "fingerprint.pb"}
            kinds = collections.Counter[str]()
            started, slowest = time.perf_counter(), 0.0
            for k in range(num):
                damage(files, rng, k)
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
