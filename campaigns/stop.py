"""SIGTERM at random moments of encoding, training, evaluation and saving.

Every time: exit code 75 (or 0 when it had just ended), and what lies in the run directory loads.

usage: python campaigns/stop.py [--stops 50] [--kind text]
"""

from __future__ import annotations

import argparse
import collections
import random
import signal
import tempfile
import time
from pathlib import Path

from process import (
    KINDS,
    checkpoints,
    make_source,
    make_text,
    start,
    temporaries,
    train_command,
)

from fastlstm.errors import EXIT_OK, EXIT_STOPPED
from fastlstm.training.checkpoint import load_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--kind", choices=KINDS, default="text")
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    codes: collections.Counter[int] = collections.Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        source = make_source(options.kind, base)
        long_text = make_text(base / "long.txt", 40_000_000)
        for number in range(options.stops):
            run = base / f"run-{number}"
            encoding = options.kind == "text" and number % 4 == 0
            flags = ["--steps", str(options.steps), "--checkpoint-every", "5"]
            if options.kind == "text":
                flags += ["--eval-every", "10"]
            if encoding:
                flags += ["--cache-dir", str(base / f"cache-{number}")]
            process = start(train_command(long_text if encoding else source, run, *flags))
            time.sleep(rng.uniform(1.0, 4.0 if encoding else 12.0))
            process.send_signal(signal.SIGTERM)
            asked = time.monotonic()
            output, _ = process.communicate(timeout=60)
            took_s = time.monotonic() - asked
            slowest = max(slowest, took_s)
            codes[process.returncode] += 1
            saved = checkpoints(run)
            expected = {EXIT_STOPPED, EXIT_OK}
            metrics = run / "metrics.jsonl"
            is_over = metrics.exists() and '"event":"end"' in metrics.read_text()
            if not run.exists() or (options.kind == "sequence" and is_over):
                expected.add(-signal.SIGTERM)  # Python was starting, or the script ending
            if process.returncode not in expected:
                raise SystemExit(f"stop {number}: exit {process.returncode}\n{output}")
            if saved:
                load_checkpoint(saved[-1])
            if temporaries(run):
                raise SystemExit(f"stop {number}: left over {temporaries(run)}")
            last = output.strip().splitlines()[-1:] or ["(no output yet)"]
            saved_text = f"exit {process.returncode} in {took_s:.1f} s saved {len(saved)}"
            print(f"stop {number}: {saved_text} | {last[0][:90]}", flush=True)
    print(f"{options.stops} stops, exit codes {dict(codes)}, slowest {slowest:.1f} s")


if __name__ == "__main__":
    main()
