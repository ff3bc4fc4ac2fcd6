"""Alerts of `fastlstm watch`: faults planted in real runs, and false ones over recorded runs.

    python tests/campaigns/alerts.py faults ROUNDS [FAULT...]
    python tests/campaigns/alerts.py replay DIR...

A round trains one run per fault at once, each asleep for most of its time so that all of them
together use little of two cores, and plants all faults when each has trained for 50 s. `speed`,
`eta` and `input`, which others' load explains, are a round of their own. So is `hog`: a run that
does not sleep, and busy processes beside it. Clean runs: clean_runs.py.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastlstm.monitor.alerts import RunAlerts, chosen_rules
from fastlstm.monitor.event_tail import EventTail
from fastlstm.monitor.watcher import Watcher

TRAIN = """
import dataclasses, sys, time, torch, fastlstm
from pathlib import Path
fault, folder = sys.argv[1], Path(sys.argv[2])
class Plant(fastlstm.Callback):
    kept, sleep_s, is_on, steps = [], 0.0 if fault == "hog" else 0.24, False, 0
    def on_update(self, trainer):
        self.steps += 1
        if self.steps == 5:
            (folder / f"{fault}.began").touch()
        if not self.is_on and self.steps % (50 if fault == "hog" else 1) == 0:
            self.is_on = (folder / "go").exists()
            if self.is_on:
                (folder / f"{fault}.planted").touch()
                self.plant(trainer)
        time.sleep(self.sleep_s)
        if self.is_on and fault == "memory":
            self.kept.append(torch.ones(6_000_000))
        if self.is_on and fault == "nan":
            next(iter(trainer.model.parameters())).data.fill_(float("nan"))
        if self.is_on and fault == "spike":
            for parameter in trainer.model.parameters():
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    def plant(self, trainer):
        if fault == "hang":
            time.sleep(3600)
        if fault in ("speed", "eta"):
            self.sleep_s *= 1.6
        if fault == "overfitting":
            evaluate, count = trainer.task.evaluate, [0]
            def worse(*args, **options):
                count[0] += 1
                score = evaluate(*args, **options)
                return dataclasses.replace(score, loss=score.loss * (1.1 + 0.05 * count[0]))
            trainer.task.evaluate = worse
        if fault == "input":
            loader = trainer.task.loader
            class Slow:
                waited = 0.0
                def __getattr__(self, name): return getattr(loader, name)
                @property
                def wait_s(self): return loader.wait_s + self.waited
                def next(self):
                    time.sleep(0.3); self.waited += 0.3
                    return loader.next()
            trainer.task.loader = Slow()
options = dict(preset="tiny", rnn_size=32, embed_size=16, batch_size=4, seq_length=32, threads=1,
    precision="fp32", device="cpu", steps=100_000, eval_every=100_000, tensorboard=False)
if fault == "hog":
    options |= dict(rnn_size=256, batch_size=32)
if fault == "overfitting":
    options |= dict(eval_every=8)
fastlstm.train([str(folder / "text.txt")], out=str(folder / fault), callbacks=[Plant()], **options)
"""
RULE = {"kill": "dead", "stop": "hang", "hog": "eta"}
GROUPS = (
    ("kill", "stop", "hang", "nan", "spike", "memory", "disk", "overfitting", "none"),
    ("speed", "eta", "input"),
)
"""`none` is a run without a fault."""
WARM_UP_S = 50.0
AFTER_S = 65.0
LIMIT_S = {"eta": 60.0, "input": 40.0}
"""Others have 10 s from the fault on. `input` is a rule about 30 s, which come before."""


class Round:
    """Runs of one round, each with the fault of its name, and the watcher that looks at them."""

    def __init__(self, folder: Path, kinds: Sequence[str]) -> None:
        words = [f"word{(i * i * 7919) % 977} " for i in range(9999)]
        (folder / "text.txt").write_text("".join(words))
        self.folder, self.kinds = folder, kinds
        if "disk" in kinds:
            (folder / "disk").mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", "size=300m", "none", folder / "disk"]
            subprocess.run(mount, check=True)
        self.runs: dict[str, subprocess.Popen[bytes]] = {}
        for kind in kinds:
            with open(folder / f"{kind}.err", "w") as errors:
                command = [sys.executable, "-c", TRAIN, kind, str(folder)]
                self.runs[kind] = subprocess.Popen(command, stdout=errors, stderr=errors)
        self.hogs: list[subprocess.Popen[bytes]] = []
        self.watcher = Watcher([folder], chosen_rules([]))
        self.raised: list[tuple[float, str, str, str]] = []

    def watch(self, is_over: Callable[[], bool]) -> None:
        """Looks at the runs once a second, as `fastlstm watch` does."""
        while not is_over():
            for path, alert in self.watcher.update():
                if not alert.is_cleared:
                    self.raised.append((time.time(), path.name, alert.rule, alert.text))
            time.sleep(1.0)

    def has_begun(self) -> bool:
        """Whether every run trains."""
        return all((self.folder / f"{kind}.began").exists() for kind in self.kinds)

    def plant(self) -> dict[str, float]:
        """Plants all faults; returns when each was."""
        (self.folder / "go").touch()
        at = dict.fromkeys(self.kinds, time.time())
        if "kill" in self.kinds:
            self.runs["kill"].kill()
            self.runs["kill"].wait()
        if "stop" in self.kinds:
            self.runs["stop"].send_signal(signal.SIGSTOP)
        if "disk" in self.kinds:
            (self.folder / "disk" / "other").write_bytes(bytes(230_000_000))
        if "hog" in self.kinds:
            hog = [sys.executable, "-c", "while True: pass"]
            self.hogs = [subprocess.Popen(hog) for _ in range(6)]
        return at

    def close(self) -> None:
        """Ends all processes."""
        for process in (*self.hogs, *self.runs.values()):
            process.kill()
            process.wait()
        if "disk" in self.kinds:
            subprocess.run(["umount", "-l", self.folder / "disk"], check=True)


def one_round(number: int, kinds: Sequence[str]) -> tuple[list[bool], float]:
    """Returns whether each fault was found in time, and the seconds of clean training before."""
    folder = Path(tempfile.mkdtemp(prefix="alerts-"))
    this = Round(folder, kinds)
    try:
        began = time.monotonic()
        this.watch(lambda: this.has_begun() or time.monotonic() - began > 300)
        begun = [kind for kind in kinds if (folder / f"{kind}.began").exists()]
        warm = time.monotonic()
        this.watch(lambda: time.monotonic() - warm > WARM_UP_S)
        at = this.plant()
        this.watch(lambda: time.time() > max(at.values()) + AFTER_S)
    finally:
        this.close()
    found = []
    for kind in begun:
        rule, planted = RULE.get(kind, kind), folder / f"{kind}.planted"
        since = at[kind] if not planted.exists() else planted.stat().st_mtime
        own = [entry for entry in this.raised if entry[1] == kind]
        hits = [when - since for when, _, name, _ in own if name == rule and when >= since]
        result: dict[str, Any] = {"round": number, "fault": kind}
        if kind != "none":
            found.append(bool(hits) and hits[0] <= LIMIT_S.get(rule, 10.0))
            result |= {"seconds": round(hits[0], 1) if hits else None, "in_time": found[-1]}
            result["text"] = next((t for w, _, n, t in own if n == rule and w >= since), None)
        result["before"] = [entry[2:] for entry in own if entry[0] < since]
        result["also"] = [n for w, _, n, _ in own if w >= since and n != rule]
        print(json.dumps(result), flush=True)
    for kind in set(kinds) - set(begun):
        print(f"{kind} did not begin:", (folder / f"{kind}.err").read_text()[-2000:])
    shutil.rmtree(folder, ignore_errors=True)
    return found, WARM_UP_S * len(begun)


def faults(rounds: int, groups: Sequence[Sequence[str]]) -> None:
    found, clean_s = list[bool](), 0.0
    for number in range(rounds):
        for kinds in groups:
            in_time, seconds = one_round(number, kinds)
            found, clean_s = found + in_time, clean_s + seconds
    print(f"{sum(found)} of {len(found)} in time; {clean_s / 3600:.2f} hours before the faults")


def replay(tops: list[str]) -> None:
    """Counts alerts over recorded runs, and the hours of them."""
    hours, counts, num_runs = 0.0, Counter[str](), 0
    for path in {path for top in tops for path in Path(top).rglob("metrics.jsonl")}:
        alerts, tail, num_steps, last_s = RunAlerts(), EventTail(path), 0, 0.0
        update: Callable[[Any], Any] = alerts.update
        while events := tail.read():
            for event in events:
                num_steps += event.get("event") == "step"
                last_s = max(last_s, float(event.get("elapsed_s") or 0.0))
                for alert in update(event):
                    if not alert.is_cleared:
                        counts[alert.rule] += 1
                        print(f"{path}: {alert.rule} at {alert.elapsed_s:.0f} s: {alert.text}")
        if num_steps > 15:
            hours, num_runs = hours + last_s / 3600.0, num_runs + 1
    print(f"{num_runs} runs, {hours:.1f} hours, alerts: {dict(counts)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["replay"]:
        replay(sys.argv[2:])
    else:
        faults(int(sys.argv[2]), [sys.argv[3:]] if sys.argv[3:] else GROUPS)
