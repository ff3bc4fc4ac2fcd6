"""SIGTERM at random moments of encoding, training, evaluation and saving.

Every time: exit code 75 (or 0 when it had just ended), and what lies in the run directory loads.

usage: python tests/campaigns/stop.py [--stops 50]
"""

from __future__ import annotations

import argparse
import collections
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from process import checkpoints, finish, make_text, start, temporaries, train_command

from fastlstm.errors import EXIT_OK, EXIT_STOPPED


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    codes: collections.Counter[int] = collections.Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        text = make_text(base / "text.txt", 40_000_000)
        small = make_text(base / "small.txt", 400_000)
        for number in range(options.stops):
            run = base / f"run-{number}"
            encoding = number % 4 == 0
            flags = ["--steps", "400", "--checkpoint-every", "5", "--eval-every", "10"]
            if encoding:
                flags += ["--cache-dir", str(base / f"cache-{number}")]
            process = start(train_command(text if encoding else small, run, *flags))
            time.sleep(rng.uniform(1.0, 4.0 if encoding else 12.0))
            running = process.poll() is None
            process.send_signal(signal.SIGTERM)
            asked = time.monotonic()
            output, _ = process.communicate(timeout=60)
            slowest = max(slowest, time.monotonic() - asked)
            codes[process.returncode] += 1
            if process.returncode not in (EXIT_STOPPED, EXIT_OK):
                raise SystemExit(f"stop {number}: exit {process.returncode}\n{output}")
            saved = checkpoints(run)
            if saved:
                finish([sys.executable, "-m", "fastlstm", "info", str(saved[-1])])
            if temporaries(run):
                raise SystemExit(f"stop {number}: left over {temporaries(run)}")
            last = output.strip().splitlines()[-1:] or ["(no output yet)"]
            saved_text = f"exit {process.returncode} running {running} saved {len(saved)}"
            print(f"stop {number}: {saved_text} | {last[0][:90]}", flush=True)
    print(f"{options.stops} stops, exit codes {dict(codes)}, slowest {slowest:.1f} s")


if __name__ == "__main__":
    main()
