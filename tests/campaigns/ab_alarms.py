"""False alarms and misses of `fastlstm ab`: on this machine, and simulated from recorded pairs.

usage: python tests/campaigns/ab_alarms.py record FOLDER [--seconds 240] [--text FILE]
       python tests/campaigns/ab_alarms.py simulate FOLDER [--runs 400]
       python tests/campaigns/ab_alarms.py run [--times 4] [--max-time 30s]
       python tests/campaigns/ab_alarms.py bound

`record` measures the same command on both sides, alone and beside two processes that burn CPU in
bursts: whole commands, and training steps. `simulate` makes measurements of them: a stretch of
pairs from a random place on, the sides of each group exchanged by chance, B slowed by 0 and 5 %.
`run` has the command itself compare loops of the same work, and of 5 % more. `bound` simulates what
error of a look gives 5 % over all looks.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from process import make_text

from fastlstm.tuning.ab import Pair, TrainingSteps, WholeCommands
from fastlstm.tuning.command import parse_command
from fastlstm.tuning.paired_times import LOOKS, Verdict, estimate, verdict
from fastlstm.tuning.process import stop_all

LOOP = f"{sys.executable} -S -c 'for i in range({{}}): pass'"
WORK = 4_000_000
BURSTS = """
import random, time
rng = random.Random()
while True:
    end = time.perf_counter() + rng.uniform(0.05, 2.0)
    while time.perf_counter() < end:
        pass
    time.sleep(rng.uniform(0.05, 2.0))
"""
DETECT = 0.03


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that burn CPU in bursts of random length, with random pauses."""
    running = [subprocess.Popen([sys.executable, "-c", BURSTS]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def record(folder: Path, seconds: float, text: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = text or make_text(folder / "text.txt", 1_000_000)
    train = f"{sys.executable} -m fastlstm train {text} --preset tiny"
    for kind, command in (("whole", LOOP.format(WORK)), ("steps", train)):
        both = (parse_command("A", command), parse_command("B", command))
        for beside in (0, 2):
            make = WholeCommands if kind == "whole" else TrainingSteps
            end = time.perf_counter() + (seconds if kind == "steps" else seconds / 2)
            pairs = list[Pair]()
            with neighbours(beside), contextlib.closing(make(both, 300).blocks(
                random.Random(0), end)) as blocks:  # fmt: skip
                for block in blocks:
                    pairs += block
            stop_all()
            name = f"{kind}-{'beside' if beside else 'alone'}"
            rows = [[pair.a, pair.b, pair.group] for pair in pairs]
            (folder / f"{name}.json").write_text(json.dumps(rows))
            print(f"{name}: {len(rows)} pairs", flush=True)


def simulate(folder: Path, runs: int) -> None:
    rng = np.random.default_rng(0)
    for path in sorted(folder.glob("*.json")):
        rows = np.array(json.loads(path.read_text()))
        spread = np.median(np.abs(np.log(rows[:, 1] / rows[:, 0]))) * 1.4826
        for ratio in (1.0, 1.05):
            shown, pairs = collections.Counter[Verdict](), list[int]()
            for _ in range(runs):
                outcome, used = one(rows, ratio, rng)
                shown[outcome] += 1
                pairs.append(used)
            found = ", ".join(
                f"{outcome} {100 * shown[outcome] / runs:.1f} %" for outcome in Verdict
            )
            print(
                f"{path.stem}: {len(rows)} pairs recorded, deviation {spread:.3f}; B x {ratio}: "
                f"{found}; pairs: median {np.median(pairs):.0f}", flush=True,
            )  # fmt: skip


def one(rows: np.ndarray, ratio: float, rng: np.random.Generator) -> tuple[Verdict, int]:
    """One simulated measurement: its verdict and how many pairs it took."""
    groups = rows[:, 2].astype(int)
    order = np.roll(np.unique(groups), -int(rng.integers(groups.max() + 1)))
    taken = list[np.ndarray]()
    for number in range(LOOKS[-1]):  # round and round: a stretch of the recording, in its order
        block = rows[groups == order[number % len(order)]].copy()
        if rng.random() < 0.5:
            block[:, :2] = block[:, 1::-1]
        block[:, 1] *= ratio
        block[:, 2] = number
        taken.append(block)
        if sum(map(len, taken)) >= LOOKS[-1]:
            break
    made = np.concatenate(taken)[: LOOKS[-1]]
    for count in LOOKS:
        part = made[:count]
        shows = verdict(estimate(part[:, 0], part[:, 1], part[:, 2].astype(int)), DETECT)
        if shows is not Verdict.UNDECIDED:
            return shows, count
    return Verdict.UNDECIDED, LOOKS[-1]


def run(times: int, max_time: str) -> None:
    same, more = LOOP.format(WORK), LOOP.format(int(1.05 * WORK))
    for beside in (0, 2):
        for b in (same, more):
            for _ in range(times):
                command = [sys.executable, "-m", "fastlstm", "ab", "--a", same, "--b", b]
                with neighbours(beside):
                    done = subprocess.run(
                        [*command, "--max-time", max_time, "--json"],
                        capture_output=True, text=True, check=False,
                    )  # fmt: skip
                facts = json.loads(done.stdout)
                found = {
                    name: round(facts["found"][name] or 0, 3) for name in ("low", "ratio", "high")
                }
                print(
                    f"{beside} neighbours, {'same' if b == same else '+5 %'}: {done.returncode},"
                    f" {facts['verdict']}, {found}, {len(facts['pairs'])} pairs,"
                    f" {facts['seconds']:.0f} s, others {facts['others'] or 0:.2f}", flush=True,
                )  # fmt: skip


def bound(runs: int = 2_000_000) -> None:
    rng, total, before, highest = np.random.default_rng(0), np.zeros(runs), 0, np.zeros(runs)
    for look in LOOKS:
        total += rng.standard_normal(runs) * np.sqrt(look - before)
        highest, before = np.maximum(highest, np.abs(total) / np.sqrt(look)), look
    limit = float(np.quantile(highest, 0.95))
    own = np.abs(rng.standard_normal(runs)) > limit
    print(f"z = {limit:.3f}, error of one look {own.mean():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("record", "simulate", "run", "bound"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("ab-pairs"))
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--max-time", default="30s")
    given = parser.parse_args()
    if given.what == "record":
        record(given.folder, given.seconds, given.text)
    elif given.what == "simulate":
        simulate(given.folder, given.runs)
    elif given.what == "run":
        run(given.times, given.max_time)
    else:
        bound()


if __name__ == "__main__":
    main()
