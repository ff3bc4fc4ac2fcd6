"""Everything that needs an NVIDIA GPU, in one command and nine minutes, in order of value.

usage: python benchmarks/gpu.py [--text FILE] [--only WORD]
`make gpu` runs it. Without a GPU it says so and ends with 0. Each part is a process with a time
limit and stores its figures as it goes (benchmarks/results/<machine>/gpu_*.jsonl); one that fails
does not end the others. A table of the goals ends the output; the status is 1 where a part failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from machine import results_folder

FOLDER = Path(__file__).parent
ALL_S = 530
"""Where this is over, what is left is left out and named."""


def parts(text: str) -> dict[str, tuple[list[str], float]]:
    """Returns the commands with their time limits, by name."""

    def script(name: str, *options: str) -> list[str]:
        return [sys.executable, str(FOLDER / f"{name}.py"), *options]

    return {
        "tests": ([sys.executable, "-m", "pytest", "-q", "-m", "gpu"], 110),
        "kernels": (script("gpu_kernels"), 130),
        "steps": (script("gpu_steps", "--turns", "1", "--steps", "120"), 130),
        "generation": (script("gpu_generation", "--rounds", "3"), 50),
        "plan": (script("gpu_plan", "--budget", "60s", text), 80),
    }


def run_apart(words: list[str], limit_s: float) -> str:
    """Runs a command with a time limit; returns why it failed, or nothing."""
    try:
        status = subprocess.run(words, check=False, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        return f"did not end within {limit_s:.0f} s"
    return "" if status == 0 else f"ended with status {status}"


def goals(folder: Path) -> Iterator[tuple[str, str, float, float]]:
    """Yields name, unit, goal and newest stored figure; a goal is a least value but of times."""

    def rows(name: str, key: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
        path = folder / f"{name}.jsonl"
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        return list({key(row): row for row in map(json.loads, lines)}.values())

    for row in rows("gpu_steps", lambda r: (r["H"], r["layers"], r["B"])):
        shape = f"{row['H']} units, {row['layers']} layers, {row['B']} x {row['T']}"
        yield f"step, {shape}", "of torch's best in a graph", 1.8, row["ours bf16 muon"]["over"]
    for row in rows("gpu_kernels", lambda r: (r["H"], r["B"], "over" in r)):
        if "over" in row:
            name = f"layer, H={row['H']} B={row['B']}"
            yield name, "over cuDNN in a graph", 2.2, row["over"]["cuDNN bf16"]
            yield name, "over cuDNN fp16", 3.0, row["over"]["cuDNN fp16 eager"]
        for option, ratio in row.get("over_plain", {}).items():
            yield option, "times the plain cell, at most", 1.5, ratio
    for row in rows("gpu_plan", lambda r: r["file"]):
        yield f"set-up, {row['file']}", "s, at most", 3.0, row["setup_s"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--text", default="python-docs", help="what the last part is trained on")
    parser.add_argument("--only", default="", help="the parts with this in their name")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no NVIDIA GPU that torch can use: nothing was tested or measured")
        return
    end_s, faults = time.monotonic() + ALL_S, list[str]()
    for name, (words, limit_s) in parts(options.text).items():
        limit_s = min(limit_s, end_s - time.monotonic())
        if options.only not in name:
            continue
        if limit_s < 10:
            faults.append(f"{name}: left out, the {ALL_S} s are over")
            continue
        print(f"{name}: {' '.join(words[1:])}", flush=True)
        if fault := run_apart(words, limit_s):
            faults.append(f"{name}: {fault}")
    print(f"{torch.cuda.get_device_name()}: goals and the newest figures")
    for name, unit, goal, figure in goals(results_folder()):
        is_met = figure <= goal if "at most" in unit else figure >= goal
        print(f"{'met   ' if is_met else 'MISSED'} {name}: {figure:.2f} {unit} (goal {goal:g})")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
