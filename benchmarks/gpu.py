"""Everything that needs an NVIDIA GPU, in one command: tests, cuDNN, steps, quality, limits.

usage: python benchmarks/gpu.py [--device cuda] [--text FILE] [--only WORD]
`make gpu` runs it. Without a GPU it says so and ends with 0. Each part has a time limit, under nine
minutes together; a part that fails does not end the others, and the command ends with 1 then.
Runs of `fastlstm train` are one JSON line each in benchmarks/results/<machine>/gpu.jsonl, the table
of torch's LSTM is in cudnn.jsonl. With --device cpu the runs are short ones on the CPU, to try the
script itself; nothing is stored.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, results_folder

FOLDER = Path(__file__).parent
TESTS_S, CUDNN_S, RUN_S = 90, 150, 75
ALL_S = 530
"""Where this is over, what is left is left out and named."""


def training_runs(device: str) -> dict[str, dict[str, Any]]:
    """Returns the options of each run: step times, quality in a minute, a memory limit."""
    if device == "cpu":
        tiny = {"preset": "tiny", "steps": 3}
        return {"step fp32": {**tiny, "precision": "fp32"}, "quality": tiny}
    timed = {"steps": 300, "log_every": 25, "eval_every": 100_000}
    steps: dict[str, dict[str, Any]] = {
        f"step {precision} {preset}": {"preset": preset, "precision": precision, **timed}
        for precision in ("fp32", "tf32", "bf16", "fp16")
        for preset in ("small", "medium")
    }
    lanes = {
        f"step {precision} small, 256 lanes": {
            "preset": "small", "precision": precision, "batch_size": 256, **timed,
        }
        for precision in ("tf32", "bf16", "fp16")
    }  # fmt: skip
    return {
        **steps,
        **lanes,
        "memory limit": {"memory_limit_gb": 1.0, "steps": 20, "batch_size": 512},
        "fp16 scaling": {"precision": "fp16", "steps": 400},
        "quality": {"budget": "60s"},
    }


def run_apart(words: list[str], limit_s: float) -> str:
    """Runs a command with a time limit; returns why it failed, or nothing."""
    try:
        status = subprocess.run(words, check=False, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        return f"did not end within {limit_s:.0f} s"
    return "" if status == 0 else f"ended with status {status}"


def train(
    name: str, options: dict[str, Any], device: str, text: str, out: Path, limit_s: float
) -> dict[str, Any]:
    """Runs `fastlstm train` as a process; returns what its events say, or why it failed."""
    flags = [
        part
        for key, value in options.items()
        for part in (f"--{key.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, "-m", "fastlstm", "train", text, "--out", str(out), "--json"]
    command += ["--device", device, "--no-tensorboard", *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"run": name, "options": options, "failed": f"did not end within {limit_s:.0f} s"}
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {kind: [e for e in events if e["event"] == kind] for kind in ("start", "step", "end")}
    row: dict[str, Any] = {"run": name, "options": options}
    row["skipped_steps"] = sum(event["event"] == "skip" for event in events)
    if done.returncode != 0 or not found["end"]:
        return {**row, "failed": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    end = found["end"][-1]
    keys = ("step", "units", "elapsed_s", "train_s", "best_bits_per_char", "peak_memory_bytes")
    row |= {key: end[key] for key in keys}
    row["tokens_per_s"] = settled_rate(found["step"]) or end["units"] / max(end["train_s"], 1e-9)
    row["start"] = {key: found["start"][-1].get(key) for key in ("kernels", "precision")}
    return row


def settled_rate(steps: list[dict[str, Any]]) -> float | None:
    """Returns the tokens a second after the first third, in which kernels are loaded."""
    settled = [event for event in steps if event["step"] >= steps[-1]["step"] / 3]
    if len(settled) < 2:
        return None
    first, last = settled[0], settled[-1]
    return float((last["units"] - first["units"]) / (last["elapsed_s"] - first["elapsed_s"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--text", default="python-docs", help="what the runs are trained on")
    parser.add_argument("--only", default="", help="the parts with this in their name")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no NVIDIA GPU that torch can use: nothing was tested or measured")
        return
    end_s, faults = time.monotonic() + ALL_S, list[str]()
    if options.device == "cuda":
        parts = {
            "tests": ([sys.executable, "-m", "pytest", "-q", "-m", "gpu"], TESTS_S),
            "torch's LSTM": ([sys.executable, str(FOLDER / "cudnn_steps.py")], CUDNN_S),
        }
        for name, (words, limit_s) in parts.items():
            if options.only not in name:
                continue
            print(f"{name}: {' '.join(words[1:])}", flush=True)
            if fault := run_apart(words, min(limit_s, end_s - time.monotonic())):
                faults.append(f"{name}: {fault}")
    for name, given in training_runs(options.device).items():
        if options.only not in name:
            continue
        limit_s = min(RUN_S, end_s - time.monotonic())
        if limit_s < 5:
            faults.append(f"{name}: left out, the {ALL_S} s are over")
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            row = train(name, given, options.device, options.text, out, limit_s)
        if "failed" in row:
            faults.append(f"{name}: {row['failed']}")
            print(f"{name}: FAILED: {row['failed']}", flush=True)
        else:
            memory_gb = row["peak_memory_bytes"] / 1e9
            print(
                f"{name}: {row['tokens_per_s']:,.0f} tokens/s, {row['best_bits_per_char']:.3f}"
                f" bits/char, {memory_gb:.2f} GB, {row['skipped_steps']} steps skipped",
                flush=True,
            )
        if options.device == "cuda":
            with (results_folder() / "gpu.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "machine": describe_machine()}) + "\n")
    print(f"{time.monotonic() - end_s + ALL_S:.0f} s")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
