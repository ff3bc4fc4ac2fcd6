"""False alerts over clean runs: real runs recorded on a quiet machine, and long ones made of them.

    python tests/campaigns/clean_runs.py record FILE SECONDS TRAIN_ARGUMENT...
    python tests/campaigns/clean_runs.py replay HOURS FILE...

`record` trains with `fastlstm train` and keeps the run's events with the `process` events of a look
once a second. `replay` first evaluates the recordings as they are, then makes runs of 10 minutes to
8 hours: the first minute of a recording, then blocks of 20 s drawn from those in which others used
at most a tenth of the machine. A block keeps its events, their order and their times, the
recorded noise of speed, waits, time left and loss around their medians, and all of memory, disk and
processor. Two things are made up: the level of the loss, a falling curve, and the noise of
evaluations around it, 0.3 %.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fastlstm.monitor.alerts import RunAlerts
from fastlstm.monitor.event_tail import EventTail
from fastlstm.monitor.machine_strip import others_share
from fastlstm.monitor.run_process import RunProcess
from fastlstm.report.events import Event

BLOCK_S = 20.0
WARM_UP_S = 60.0
QUIET = 0.1


def record(out: Path, seconds: float, arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place, open(out, "w", encoding="utf-8") as file:
        run = Path(place) / "run"
        command = [sys.executable, "-m", "fastlstm", "train", *arguments, "--out", str(run)]
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        tail, process = EventTail(run / "metrics.jsonl"), RunProcess(run)
        began = None
        try:
            while training.poll() is None and (began is None or time.time() < began + seconds):
                events = tail.read()
                began = time.time() if began is None and events else began
                if began is not None:
                    for event in [*events, process.look()]:
                        at = round(time.time() - began, 2)
                        file.write(json.dumps({"at": at, **event}) + "\n")
                time.sleep(1.0)
        finally:
            training.kill()
            training.wait()


class Recording:
    """A recorded run: its first minute, and the quiet blocks after it."""

    def __init__(self, path: Path) -> None:
        self.events = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        last_s = self.events[-1]["at"]
        start = next(e for e in self.events if e["event"] == "start")
        self.has_budget = start["end"].startswith("budget")
        steps = [e for e in self.events if e["event"] == "step" and e["at"] > WARM_UP_S / 2]
        self.num_steps = round(steps[-1]["step"] / steps[-1]["progress"])
        self.rate = median(e["units_per_s"] for e in steps)
        self.step_s = median(self.seconds_per_step(e) for e in steps)
        self.start = [e for e in self.events if e["at"] < WARM_UP_S]
        self.blocks = list[list[Event]]()
        for begin in range(int(WARM_UP_S), int(last_s - BLOCK_S) + 1, 5):
            block = [e for e in self.events if begin <= e["at"] < begin + BLOCK_S]
            shares = [share for e in block if (share := others_share(e)) is not None]
            if shares and fmean(shares) <= QUIET:
                self.blocks.append(block)

    def seconds_per_step(self, step: Event) -> float:
        """Returns the pace that the run predicted its end with; by a budget the end is no
        prediction, and the pace of the last steps stands for it."""
        if self.has_budget:
            return 1.0 / float(step["units_per_s"])
        return float(step["eta_s"]) / (self.num_steps - step["step"])

    def made(self, seconds: float, rng: random.Random) -> Iterator[Event]:
        """Yields the events of a long clean run."""
        now, end_loss = 0.0, rng.uniform(0.5, 1.5)
        parts = [self.start]
        while now < seconds:
            block = parts.pop() if parts else rng.choice(self.blocks)
            losses = [e["loss"] for e in block if e["event"] == "step"]
            middle, first_s = median(losses or [1.0]), block[0]["at"]
            is_start = block is self.start
            for event in block:
                at = event["at"] if is_start else now + event["at"] - first_s
                level = end_loss + 3.0 * math.exp(-at / (0.15 * seconds))
                made = dict(event)
                if "elapsed_s" in event:
                    made["elapsed_s"] = at
                if "time" in event:
                    made["time"] = 1e9 + at
                if event["event"] == "step":
                    made["loss"] = level * (event["loss"] / middle if not is_start else 1.0)
                    pace = self.seconds_per_step(event) / self.step_s
                    made["eta_s"] = max(seconds - at, 0.0) * pace
                if event["event"] == "eval":
                    made["loss"] = 1.05 * level * rng.gauss(1.0, 0.003)
                yield made
            now = WARM_UP_S if is_start else now + BLOCK_S


def alerts_of(events: Iterator[Event], told: str) -> Counter[str]:
    alerts, counts = RunAlerts(), Counter[str]()
    for event in events:
        for alert in alerts.update(event):
            if not alert.is_cleared:
                counts[alert.rule] += 1
                print(f"{told}: {alert.rule} at {alert.elapsed_s:.0f} s: {alert.text}")
    return counts


def replay(hours: float, paths: list[Path]) -> None:
    recordings = [Recording(path) for path in paths]
    for path, one in zip(paths, recordings, strict=True):
        shares = [share for e in one.events if (share := others_share(e)) is not None]
        steps = [e["units_per_s"] / one.rate for e in one.events if e["event"] == "step"]
        low, high = sorted(steps)[len(steps) // 20], sorted(steps)[-len(steps) // 20]
        print(
            f"{path.name}: {one.events[-1]['at']:.0f} s, {len(one.blocks)} quiet blocks, others"
            f" {100 * fmean(shares):.0f} % of the machine, speed 5 to 95 %: {low:.2f} to {high:.2f}"
        )
        counts = alerts_of(iter(one.events), path.name)
        print(f"{path.name} as it is: alerts {dict(counts)}")
    rng, total_s, num_runs, counts = random.Random(0), 0.0, 0, Counter[str]()
    usable = [one for one in recordings if len(one.blocks) > 3]
    while total_s < 3600 * hours:
        one, seconds = rng.choice(usable), 600.0 * 48.0 ** rng.random()
        counts += alerts_of(one.made(seconds, rng), f"run {num_runs} of {seconds:.0f} s")
        total_s, num_runs = total_s + seconds, num_runs + 1
    told: dict[str, Any] = {"runs": num_runs, "hours": round(total_s / 3600, 1)}
    print(json.dumps(told | {"alerts": dict(counts)}))


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    else:
        replay(float(sys.argv[2]), [Path(word) for word in sys.argv[3:]])
