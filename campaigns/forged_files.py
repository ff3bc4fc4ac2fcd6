"""Runs whose files were changed by somebody who can seal them again: used, or refused in words.

usage: python campaigns/forged_files.py [--count 300] [--seed 0]

A value of a JSON file, or a tensor, is replaced by one that makes no sense (huge, negative, of
another type, missing, nested deep), sizes and SHA-256 are written anew, and the run is used as the
commands would: shown, loaded and written or forecast with, resumed. Whatever is raised must be one
of the package's own errors, within seconds and within 1 GiB more than before.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import random
import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from process import make_text

from fastlstm import LM, Forecaster, train
from fastlstm.cli import info
from fastlstm.errors import FastLSTMError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.train import train_forecaster
from fastlstm.runs.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.tensors import decode_tensors, encode_tensors

MAX_SECONDS = 60.0
MAX_BYTES = 1 << 30
SENSELESS: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 10**6, 10**9, 2**63, 10**30, 10**400, -(10**12), 0.5, 1e-300, 1e300),
    *("", "1", "../../etc/passwd", "x" * 10_000, "\x1b[31m<script>", "\ud800", "NaN"),
    *([], {}, [[]], [1, "a", None], {"a": 1}, [0] * 1000),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    found: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for use, run, again in (text_run(Path(folder)), forecaster_run(Path(folder))):
            for number in range(options.count):
                forged = Path(folder) / "forged"
                shutil.copytree(run, forged)
                target = forged
                if number % 3 == 0:
                    target = RunDirectory(forged).checkpoints()[0]
                what = forge(target, rng)
                result = outcome(again if number % 3 == 0 else use, forged)
                found[result.split(":")[0]] += 1
                if result.startswith("BAD"):
                    print(f"{what}\n  {result}", flush=True)
                shutil.rmtree(forged)
    print(dict(found))
    raise SystemExit(any(kind.startswith("BAD") for kind in found))


Use = Callable[[Path], object]


def text_run(folder: Path) -> tuple[Use, Path, Use]:
    """Returns what uses a run of a text, the run, and what resumes it."""
    text = make_text(folder / "text.txt", 20_000)
    sizes: dict[str, Any] = {"preset": "tiny", "rnn_size": 16, "embed_size": 8, "vocab": "bpe"}
    sizes |= {"vocab_size": 300, "batch_size": 4, "seq_length": 16, "tensorboard": False}
    run = folder / "text"
    train(text, out=run, steps=4, checkpoint_every=2, observers=(), **sizes)

    def use(path: Path) -> None:
        show(path)
        model = LM.load(path)
        model.generate("a", length=20)
        model.evaluate(text)

    def again(path: Path) -> None:
        show(path)
        train(text, out=path, resume=True, steps=6, observers=())

    return use, run, again


def forecaster_run(folder: Path) -> tuple[Use, Path, Use]:
    """Returns what uses a run of a forecaster, the run, and what resumes it."""
    rng = np.random.default_rng(0)
    columns = {
        "unique_id": np.repeat(["a", "b"], 100),
        "ds": np.tile(np.datetime64("2024-01-01T00", "s") + 3600 * np.arange(100), 2),
        "y": rng.normal(size=200).astype(np.float32),
        "sky": np.array(["sun", "rain"])[rng.integers(0, 2, 200)],
        "price": rng.normal(size=200),
        "size": np.repeat([1.5, 2.5], 100),
    }
    path = folder / "table.parquet"
    pq.write_table(pa.table(columns), path)
    roles: dict[str, Any] = {"past": "sky", "static": "size", "categorical": "sky"}
    sizes: dict[str, Any] = {"input_size": 12, "patch": 3, "hidden_size": 8, "batch_size": 8}
    config = ForecastConfig(horizon=6, steps=4, tensorboard=False, **roles, **sizes)
    run = folder / "forecaster"
    train_forecaster(path, config, out=run)

    def use(given: Path) -> None:
        show(given)
        model = Forecaster.load(given)
        model.predict(path)
        model.predict_quantiles(path, (0.1, 0.9))
        model.backtest(frame=path)

    def again(given: Path) -> None:
        show(given)
        longer = ForecastConfig(horizon=6, steps=6)
        train_forecaster(path, longer, out=given, resume=True, given=("steps",))

    return use, run, again


def show(path: Path) -> None:
    with redirect_stdout(io.StringIO()):
        info.run([str(path)])


def forge(directory: Path, rng: random.Random) -> str:
    """Changes a file of a directory and its manifest; returns what was changed."""
    manifest = read_manifest(directory)
    name = rng.choice([name for name in manifest.files if name != MANIFEST])
    path = directory / name
    data = path.read_bytes()
    if name.endswith(".json"):
        value = json.loads(data)
        what = mutate(value, rng)
        data = json.dumps(value).encode()
        if rng.random() < 0.05:
            what, data = "nested", b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    else:
        tensors = decode_tensors(data, path)
        what = spoil(tensors, rng)
        data = encode_tensors(tensors)
    path.write_bytes(data)
    records = {**manifest.files, name: FileRecord.of(data)}
    (directory / MANIFEST).write_bytes(Manifest(records, True, manifest.extra).to_bytes())
    return f"{directory.name}/{name}: {what}"


def mutate(value: Any, rng: random.Random) -> str:
    """Replaces, drops or adds one value somewhere in JSON; returns where and what."""
    at = ""
    while True:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return f"{at} nothing"
        key = rng.choice(keys)
        at += f".{key}"
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.85:
            value = inner
            continue
        if rng.random() < 0.15:
            del value[key]
            return f"{at} dropped"
        value[key] = rng.choice(SENSELESS)
        return f"{at} = {value[key]!r:.60}"


def spoil(tensors: dict[str, torch.Tensor], rng: random.Random) -> str:
    """Changes one tensor; returns which and how."""
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    kinds: dict[str, Callable[[], torch.Tensor | None]] = {
        "NaN": lambda: torch.full_like(tensor.double(), float("nan")).to(torch.float32),
        "flat": lambda: tensor.flatten()[:1].clone(),
        "empty": lambda: tensor.new_zeros(0),
        "int64": lambda: tensor.to(torch.int64),
        "float64": lambda: tensor.double(),
        "longer": lambda: torch.cat([tensor.reshape(-1), tensor.reshape(-1)]),
        "random": lambda: torch.randint_like(tensor.float(), 256).to(tensor.dtype),
        "gone": lambda: None,
    }
    kind = rng.choice(sorted(kinds))
    changed = kinds[kind]()
    if changed is None:
        del tensors[name]
    else:
        tensors[name] = changed
    return f"{name} {kind}"


def outcome(use: Use, path: Path) -> str:
    """Uses a run; returns "used", "refused: …" or "BAD …"."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    try:
        use(path)
        result = "used"
    except FastLSTMError as error:
        result = f"refused: {error}"
        if len(result) > 2000:
            result = f"BAD message of {len(result)} characters"
    except Exception:
        result = f"BAD {traceback.format_exc(limit=-3)}"
    taken_s = time.monotonic() - began
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if taken_s > MAX_SECONDS or grown > MAX_BYTES:
        return f"BAD after {taken_s:.0f} s and {grown >> 20} MiB more: {result}"
    return result


if __name__ == "__main__":
    main()
