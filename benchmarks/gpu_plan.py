"""Whole runs on a GPU with every choice left open: what was chosen, when steps began, the result.

usage: python benchmarks/gpu_plan.py [--budget 60s] [--profile] [--options "--dropout 0.3"] FILE...
Each file is a run of its own process, as a user starts it: a text, or a table (.csv, 96 steps
ahead). `--profile` adds what the time before the first step was spent in. One JSON line a run in
benchmarks/results/<machine>/gpu_plan.jsonl.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_SHOWN = 40
_NO_GPU = "no NVIDIA GPU that torch can use: nothing was measured"


def run(path: str, budget: str, options: list[str]) -> dict[str, Any]:
    """Trains and returns what the events of the run tell."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "fastlstm", "train", path, "--out", str(out)]
        command += ["--budget", budget, *options]
        if path.endswith(".csv"):
            command += ["--horizon", "96"]
        began = time.perf_counter()
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        if done.returncode:
            return {"file": path, "code": done.returncode, "error": done.stderr[-2000:]}
        events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    start, end, steps = by_kind["start"][0], by_kind["end"][-1], by_kind.get("step", [])
    names = ("batch_size", "optimizer", "precision", "seq_length", "dropout", "machine", "kernels")
    model_names = ("rnn_size", "hidden_size", "num_layers", "embed_size")
    rates = sorted(step["units_per_s"] for step in steps)
    return {
        "file": path, "budget": budget, "options": options, "wall_s": round(seconds, 2),
        **{name: start[name] for name in names if name in start},
        **{name: start["model"][name] for name in model_names if name in start["model"]},
        "setup_s": end["spent_s"].get("setup"), "spent_s": end["spent_s"],
        "units_per_s": rates[len(rates) // 2] if rates else None,
        "step": end["step"], "epochs": steps[-1]["epoch"] if steps else None,
        "best_step": end["best_step"], "best_loss": end["best_loss"],
        "best_bits_per_char": end.get("best_bits_per_char"),
        "said": [event["text"] for event in by_kind.get("message", [])],
    }  # fmt: skip


def profile_setup(path: str, budget: str, options: list[str]) -> None:
    """Prints what a run does until its first step, by time within each function's calls."""
    began = time.perf_counter()
    import torch

    print(f"import torch: {time.perf_counter() - began:.2f} s")
    if not torch.cuda.is_available():
        print(_NO_GPU)
        return
    began = time.perf_counter()
    torch.zeros(1, device="cuda")
    print(f"CUDA context: {time.perf_counter() - began:.2f} s")
    from fastlstm.cli.main import main
    from fastlstm.errors import FastLSTMError
    from fastlstm.training.trainer import Trainer

    class Begun(FastLSTMError):
        pass

    def stop(*_: object) -> None:
        raise Begun("set-up is over")

    Trainer._train = stop  # type: ignore[method-assign]
    argv = ["train", path, "--budget", budget, *options]
    argv += ["--horizon", "96"] if path.endswith(".csv") else []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            profiler, began = cProfile.Profile(), time.perf_counter()
            profiler.runcall(main, [*argv, "--out", f"{folder}/{name}"])
            print(f"{name} set-up: {time.perf_counter() - began:.2f} s")
            pstats.Stats(profiler).sort_stats("cumulative").print_stats(_SHOWN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--options", default="", help="further options of train, as one string")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    options = shlex.split(arguments.options)
    if arguments.profile:
        profile_setup(arguments.files[0], arguments.budget, options)
        return
    import torch
    from machine import results_folder

    if not torch.cuda.is_available():
        print(_NO_GPU)
        return
    for path in arguments.files:
        row = run(path, arguments.budget, options)
        print(json.dumps(row, indent=1), flush=True)
        if "error" in row:
            sys.exit(f"{path}: train ended with status {row['code']}, which is not stored")
        with (results_folder() / "gpu_plan.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
