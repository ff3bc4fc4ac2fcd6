"""Time to the best validation loss beside neuralforecast's LSTM, on one split, one budget, one run.

usage: python benchmarks/forecast_peer.py TABLE --peer-python PATH [--horizon 96] [--input 336]
       [--train-rows 8640] [--seconds 120] [--results DIR]
PATH is an interpreter with neuralforecast. Both read the same z-scored columns and the same past,
train on the mean absolute error for as long, each alone, and are evaluated on every test window.
The peer's settings are its defaults. Stores one JSON line in forecast_peer.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import describe_machine, results_folder

from fastlstm import Forecaster


def own(path: str, horizon: int, input_size: int, train_rows: int, seconds: int) -> dict[str, Any]:
    """Trains ours; returns the curve of its evaluations and its errors on the test windows."""
    events: list[dict[str, Any]] = []
    third = train_rows // 3
    model = Forecaster(
        horizon=horizon, input_size=input_size, split=(train_rows, third, third),
        budget=f"{seconds}s", observers=[events.append],
    ).fit(path)  # fmt: skip
    curve = [(e["elapsed_s"], e["step"], e["loss"]) for e in events if e["event"] == "eval"]
    scores = model.backtest(scaled=True)["forecaster"]
    return {"curve": curve, "mse": scores["mse"], "mae": scores["mae"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("table")
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--horizon", type=int, default=96)
    parser.add_argument("--input", type=int, default=336)
    parser.add_argument("--train-rows", type=int, default=8640)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    sizes = (options.horizon, options.input, options.train_rows, options.seconds)
    worker = str(Path(__file__).parent / "forecast_peer_worker.py")
    command = [options.peer_python, worker, options.table, *map(str, sizes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{options.peer_python} did not run neuralforecast's LSTM; nothing was measured")
    lines = done.stdout.splitlines()
    peer = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    ours = own(options.table, *sizes)
    best_s, best_step, best = min(peer["curve"], key=lambda point: point[2])
    reached = next((at for at, _, loss in ours["curve"] if loss <= best), None)
    result = {
        "machine": describe_machine(),
        "table": Path(options.table).name,
        "horizon": options.horizon, "input_size": options.input, "seconds": options.seconds,
        "peer": peer, "fastlstm": ours, "peer_best": best, "peer_best_s": best_s,
        "reached_s": reached,
    }  # fmt: skip
    print(f"  neuralforecast: best {best:.4f} after {best_s:.1f} s (step {best_step}),"
          f" test mse {peer['mse']:.4f}, mae {peer['mae']:.4f}")  # fmt: skip
    when = "not reached" if reached is None else f"reached after {reached:.1f} s"
    ratio = "" if reached is None else f", {best_s / reached:.1f}x sooner"
    print(f"  fastlstm: that loss {when}{ratio}; best {min(c[2] for c in ours['curve']):.4f},"
          f" test mse {ours['mse']:.4f}, mae {ours['mae']:.4f}")  # fmt: skip
    path = (options.results or results_folder()) / "forecast_peer.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
