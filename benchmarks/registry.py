"""Every benchmark: what it measures, its command, where its result lies.

usage: python benchmarks/registry.py                   the list
       python benchmarks/registry.py run [--only NAME] [--with KEY=VALUE ...]
A command with a {word} needs `--with word=...`; without it the benchmark is left out and named.
Stored files lie in benchmarks/results/<machine>.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent


class Benchmark(NamedTuple):
    """One benchmark; a command's first word is a file of this folder, or fastlstm."""

    name: str
    measures: str
    command: str
    stored: str


BENCHMARKS = (
    Benchmark(
        "ceiling", "what this machine reaches: products and copies", "fastlstm doctor --measure", ""
    ),
    Benchmark(
        "training_step",
        "whole training steps beside torch and Keras, share of the ceiling",
        "training_step.py --peer-python {peer_python}",
        "training_step.jsonl",
    ),
    Benchmark(
        "forward_peers",
        "forward pass alone beside torch and ONNX Runtime",
        "forward_peers.py --peer-python {peer_python}",
        "forward_peers.jsonl",
    ),
    Benchmark(
        "grid", "the drop-in layer against nn.LSTM, sizes 32 to 1024", "grid.py", "grid.jsonl"
    ),
    Benchmark(
        "small_models",
        "small models as people build them, one thread, beside nn.LSTM",
        "small_models.py",
        "small_models.jsonl",
    ),
    Benchmark(
        "model_layers",
        "the LSTM layers of published models, beside nn.LSTM",
        "model_layers.py",
        "model_layers.jsonl",
    ),
    Benchmark(
        "growth",
        "time and memory as H, B, T, threads, layers grow",
        "growth.py",
        "growth.jsonl",
    ),
    Benchmark("lengths", "unequal lengths against PackedSequence", "lengths.py", "lengths.jsonl"),
    Benchmark(
        "variants",
        "what layer norm, zoneout, recurrent dropout and lengths add",
        "variants.py",
        "variants.jsonl",
    ),
    Benchmark(
        "decode",
        "writing text beside ONNX Runtime, torch and Keras",
        "decode.py --peer-python {peer_python}",
        "decode.jsonl",
    ),
    Benchmark(
        "serving",
        "what of the engine's rate reaches the server's clients",
        "serving.py",
        "serving.jsonl",
    ),
    Benchmark(
        "oversubscription",
        "training beside two busy processes",
        "oversubscription.py",
        "oversubscription.jsonl",
    ),
    Benchmark(
        "windows",
        "windows per second beside tf.data, Keras, torch and NumPy",
        "windows.py --peer-python {peer_python}",
        "windows.jsonl",
    ),
    Benchmark("prepare", "a table of 10^8 rows into the cache", "prepare.py", "prepare.jsonl"),
    Benchmark(
        "forecast",
        "accuracy of the forecaster over horizons and seeds",
        "forecast.py {table}",
        "forecast.jsonl",
    ),
    Benchmark(
        "forecast_peer",
        "errors of forecasts beside ridge, naive forecasts and neuralforecast's models",
        "forecast_peer.py {tables} --peer-python {forecast_python}",
        "forecast_peer.jsonl",
    ),
    Benchmark("cudnn_steps", "torch's LSTM on a GPU", "cudnn_steps.py", "cudnn.jsonl"),
    Benchmark(
        "quality",
        "quality against time on a real text",
        "quality.py {experiment} {text}",
        "quality.jsonl",
    ),
    Benchmark(
        "keras_peer",
        "a model trained by Keras, same evaluator",
        "keras_peer.py {keras_model} {text} --epoch-log {keras_log}",
        "keras.jsonl",
    ),
)
"""In the order in which they run: the ceiling first."""


def run(benchmark: Benchmark, values: dict[str, str]) -> str:
    """Runs one benchmark; returns why it did not run to its end, or nothing."""
    missing = [word for word in re.findall(r"{(\w+)}", benchmark.command) if word not in values]
    if missing:
        return f"left out, it needs {' '.join(f'--with {word}=…' for word in missing)}"
    first, *words = (word.format(**values) for word in shlex.split(benchmark.command))
    program = ["-m", first] if first == "fastlstm" else [str(FOLDER / first)]
    status = subprocess.run([sys.executable, *program, *words], check=False).returncode
    return "" if status == 0 else f"ended with status {status}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=["list", "run"], default="list")
    parser.add_argument("--only", choices=[benchmark.name for benchmark in BENCHMARKS])
    parser.add_argument("--with", dest="values", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    values = dict(value.split("=", 1) for value in options.values if "=" in value)
    chosen = [b for b in BENCHMARKS if options.only in (None, b.name)]
    faults = []
    for benchmark in chosen:
        print(f"{benchmark.name}: {benchmark.measures}")
        print(f"  {benchmark.command}  ->  {benchmark.stored or 'printed'}", flush=True)
        fault = run(benchmark, values) if options.action == "run" else ""
        if fault:
            faults.append(f"{benchmark.name}: {fault}")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
