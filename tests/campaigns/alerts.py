"""Alerts of `fastlstm watch`: faults planted in real runs, and false ones over recorded runs.

python tests/campaigns/alerts.py faults ROUNDS [FAULT...]
python tests/campaigns/alerts.py replay DIR...
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastlstm.monitor.alerts import RunAlerts, chosen_rules
from fastlstm.monitor.event_tail import EventTail
from fastlstm.monitor.watcher import Watcher

TRAIN = """
import sys, time, torch, fastlstm
fault, out, text = sys.argv[1:4]
class Plant(fastlstm.Callback):
    kept, began = [], None
    def on_update(self, trainer):
        self.began = self.began or time.monotonic()
        is_on = time.monotonic() - self.began > 30
        if is_on and not getattr(self, "told", False):
            self.told = True
            print("planted", flush=True)
        if not is_on:
            return
        if fault == "memory":
            self.kept.append(torch.ones(2_000_000))
        if fault == "hang":
            time.sleep(3600)
        if fault == "speed":
            end = time.perf_counter() + 0.03
            while time.perf_counter() < end: pass
        if fault == "nan":
            next(iter(trainer.model.parameters())).data.fill_(float("nan"))
        if fault == "spike":
            trainer.progress.lr_scale = 100.0
        if fault == "input" and self.kept == []:
            self.kept.append(0)
            loader, inner = trainer.task.loader, trainer.task.loader.next
            class Slow:
                waited = 0.0
                def __getattr__(self, name): return getattr(loader, name)
                @property
                def wait_s(self): return loader.wait_s + self.waited
                def next(self):
                    time.sleep(0.05); self.waited += 0.05
                    return inner()
            trainer.task.loader = Slow()
options = dict(preset="tiny", rnn_size=64, embed_size=16, batch_size=8, seq_length=32, threads=1,
    precision="fp32", device="cpu", steps=100000, eval_every=100000, tensorboard=False)
if fault == "overfitting":
    options |= dict(rnn_size=256, eval_every=20, dropout=0.0, learning_rate=0.01, weight_decay=0.0)
fastlstm.train([text], out=out, callbacks=[Plant()], **options)
"""
RULE = {"kill": "dead", "stop": "hang", "hog": "eta"}
FAULTS = ("kill", "stop", "hang", "nan", "spike", "input", "memory", "disk", "overfitting", "hog")
LIMIT_S = {"eta": 60.0, "input": 40.0}
"""Others have 10 s from the fault on. `input` is a rule about 30 s, which come before."""


def plant(fault: str, folder: Path) -> tuple[float | None, list[str]]:
    """Returns the seconds from a fault to its alert, and the alerts that came before it."""
    text = folder / "text.txt"
    words = [f"word{(i * i * 7919) % 977} " for i in range(400 if fault == "overfitting" else 9999)]
    text.write_text("".join(words))
    out = folder / "run"
    if fault == "disk":
        out.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "none", out], check=True)
    argv = [sys.executable, "-c", TRAIN, fault, str(out), str(text)]
    with open(folder / "err", "w") as errors:
        run = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors)
    assert run.stdout is not None
    hogs: list[subprocess.Popen[bytes]] = []
    rule, watcher = RULE.get(fault, fault), Watcher([out], chosen_rules([]))
    try:
        os.set_blocking(run.stdout.fileno(), False)
        since, before, began = None, [], time.monotonic()
        while time.monotonic() - began < 200.0:
            if since is None and b"planted" in (run.stdout.read() or b""):
                since = time.monotonic()
                hogs = act(fault, run, out)
            for _, alert in watcher.update() if out.is_dir() else []:
                if since is not None and alert.rule == rule and not alert.is_cleared:
                    return time.monotonic() - since, before
                if not alert.is_cleared and (since is None or alert.rule != rule):
                    before.append(alert.rule)
                    if fault == "overfitting" and alert.rule == rule:
                        return 0.0, before[:-1]  # its own definition says when it is there
            if since is not None and time.monotonic() - since > 90.0 and fault != "overfitting":
                return None, before
            time.sleep(0.5)
        return None, before
    finally:
        for process in (*hogs, run):
            process.kill()
            process.wait()
        if fault == "disk":
            subprocess.run(["umount", "-l", out], check=True)


def act(fault: str, run: subprocess.Popen[bytes], out: Path) -> list[subprocess.Popen[bytes]]:
    """Does what is planted from outside; returns what is to be ended."""
    if fault == "kill":
        run.kill()
        run.wait()
    if fault == "stop":
        run.send_signal(signal.SIGSTOP)
    if fault == "disk":
        (out / "other").write_bytes(bytes(230_000_000))
    if fault == "hog":
        code = "while True: pass"
        return [subprocess.Popen([sys.executable, "-c", code]) for _ in range(8)]
    return []


def faults(rounds: int, kinds: tuple[str, ...]) -> None:
    found: list[bool] = []
    for number in range(rounds):
        for fault in kinds:
            folder = Path(tempfile.mkdtemp(prefix="alerts-"))
            try:
                seconds, before = plant(fault, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            limit_s = LIMIT_S.get(RULE.get(fault, fault), 10.0)
            found.append(seconds is not None and seconds <= limit_s)
            result: dict[str, Any] = {"round": number, "fault": fault, "seconds": seconds}
            print(json.dumps(result | {"in_time": found[-1], "others": before}), flush=True)
    print(f"{sum(found)} of {len(found)} in time")


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
        faults(int(sys.argv[2]), tuple(sys.argv[3:]) or FAULTS)
