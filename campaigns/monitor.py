"""Measures `fastlstm monitor`: 1,000 runs, 50 live runs, an event to the page, the export.

    python campaigns/monitor.py [--runs 1000] [--lines 3600] [--live-s 60]

Its figures are in benchmarks/log.
"""

from __future__ import annotations

import argparse
import fcntl
import http.client
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from fastlstm.runs.events import event_line

START = {
    "event": "start", "task": "text", "unit": "tokens", "vocab": "char", "source": "book.txt",
    "batch_size": 32, "model": {"rnn_size": 256}, "resumed_from": None, "device": "cpu",
}  # fmt: skip


def step(at: int) -> str:
    loss = 1.2 + 2.0 / (1 + at / 100)
    event = {
        "event": "step", "step": at, "epoch": at / 500, "units": 4096 * at, "progress": at / 4000,
        "loss": loss, "bits_per_char": loss * 1.4427, "lr": 0.01, "grad_norm": random.random(),
        "units_per_s": 40000 + random.random(), "gflops": 200.0, "ceiling_share": 0.5,
        "input_wait_share": 0.001, "elapsed_s": at * 1.0, "eta_s": 4000.0 - at,
    }  # fmt: skip
    lines = event_line(event)
    if at % 100 == 0:
        lines += event_line({**event, "event": "eval", "split": "valid", "num_units": 9})
    if at % 10 == 0:
        spent = {"input_wait": 0.1, "forward_backward": 6.0, "optimizer": 3.0, "other": 0.9}
        lines += event_line({"event": "phase", "step": at, "seconds": spent})
        shares = {"own_cores": 1.9, "others_share": random.random() / 5, "steal_share": 0.0}
        lines += event_line(
            {"event": "machine", "step": at, "time": 1e9 + at, "cores": 2, **shares,
             "available_bytes": 10**10, "rss_bytes": 10**9, "elapsed_s": at * 1.0}
        )  # fmt: skip
    return lines


def write_runs(root: Path, runs: int, lines: int) -> None:
    events = "".join("".join(map(step, range(1, lines))).splitlines(keepends=True)[: lines - 2])
    for at in range(runs):
        run = root / f"group{at % 10}" / f"run{at}"
        run.mkdir(parents=True)
        start = {**START, "seed": at, "batch_size": 2 ** (at % 7)}
        end = {"event": "end", "reason": "budget used", "units": 1, "train_s": 1.0}
        text = event_line(start) + events + event_line(end)
        (run / "metrics.jsonl").write_text(text, "utf-8")


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def export(root: Path) -> None:
    out = root.parent / "page.html"
    command = [sys.executable, "-m", "fastlstm", "monitor", str(root), "--export", str(out)]
    for label in ("first", "again"):
        before, began = children_s(), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall, cpu = time.perf_counter() - began, children_s() - before
        print(f"{label}: {wall:.2f} s ({cpu:.2f} s of a core), {out.stat().st_size / 1e6:.2f} MB")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def add_lines(files: list[Path], stop: threading.Event) -> None:
    at = 10
    while not stop.wait(1.0):
        at += 1
        for path in files:
            with open(path, "a", encoding="utf-8") as file:
                file.write(step(at))


def live(root: Path, seconds: float, runs: int = 50) -> None:
    """A line a second in each run: the share of a core, then how long events take to the page."""
    files, locks = [], []
    for at in range(runs):
        run = root / f"run{at}"
        run.mkdir(parents=True)
        locks.append(open(run / ".lock", "w", encoding="utf-8"))  # noqa: SIM115
        fcntl.flock(locks[-1], fcntl.LOCK_EX)  # as a run that trains
        files.append(run / "metrics.jsonl")
        files[-1].write_text(event_line(START) + "".join(map(step, range(1, 10))), "utf-8")
    command = [sys.executable, "-m", "fastlstm", "monitor", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().split("127.0.0.1:")[1].split("/")[0])
        stop = threading.Event()
        writer = threading.Thread(target=add_lines, args=(files, stop))
        writer.start()
        for label, reader in (("no page open", None), ("a page open", port)):
            is_over = threading.Event()
            page = threading.Thread(target=follow, args=(reader, is_over))
            if reader is not None:
                page.start()
            time.sleep(3.0)
            began, used = time.perf_counter(), cpu_s(process.pid)
            time.sleep(seconds)
            share = (cpu_s(process.pid) - used) / (time.perf_counter() - began)
            print(f"{runs} live runs, {label}: {100 * share:.2f} % of a core")
            is_over.set()
            if reader is not None:
                page.join()
        stop.set()
        writer.join()
        delays = sorted(delay(port, path) for path in files[:20])
        print(f"event to body: median {delays[10]:.2f} s, highest {delays[-1]:.2f} s")
        process.terminate()


def follow(port: int | None, is_over: threading.Event) -> None:
    """Asks for the body once a second, as the page's script does."""
    assert port is not None
    while not is_over.wait(1.0):
        body(port)


def body(port: int) -> str:
    """Returns the newest body of the page."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/body")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def delay(port: int, path: Path) -> float:
    """Returns the seconds from a line in metrics.jsonl to the body that shows it."""
    word = f"warning-{random.random()}"
    time.sleep(random.random())
    with open(path, "a", encoding="utf-8") as file:
        file.write(event_line({"event": "message", "level": "warning", "text": word}))
    began = time.perf_counter()
    while word not in body(port):
        time.sleep(1.0)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=3600)
    parser.add_argument("--live-s", type=float, default=60.0, help="0 leaves it out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.environ["FASTLSTM_CACHE"] = f"{place}/cache"
        if options.live_s:
            live(Path(place) / "live", options.live_s)
        write_runs(Path(place) / "many", options.runs, options.lines)
        export(Path(place) / "many")


if __name__ == "__main__":
    main()
