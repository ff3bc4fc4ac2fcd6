"""Fan-outs that lose a node, a job, or themselves; the models must be those of a serial run.

    python tests/campaigns/ray_fanout.py FOLDER [SEED]

12 groups are trained one after the other, then on a `ray.cluster_utils.Cluster` of three nodes on
this machine, one of which is removed while it trains, and with `--jobs 2`, where a job and then
the fan-out itself are killed and the command is started again. Last, a text is trained by
`fastlstm.ray.train` in two workers, one of which is lost with its node, beside one process alone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

_GROUPS = 12
_ROWS = 2_000
_OPTIONS = (
    "--by store --horizon 8 --input-size 48 --patch 4 --hidden-size 32 --steps 1500"
    " --checkpoint-every 50 --no-tensorboard --device cpu"
)
_FILES = ("model.safetensors", "scaler.json", "schema.json")


def main() -> None:
    folder, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]) if sys.argv[2:] else 0)
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "table.parquet"
    if not table.exists():
        write_table(table)
    began = time.monotonic()
    if not (folder / "serial" / "fanout.json").exists():
        assert command(table, folder / "serial", "--jobs", "1").wait() == 0
    serial = models(folder / "serial")
    shown("serial", serial, serial, began)
    began = time.monotonic()
    lost = on_ray(table, folder / "ray", rng)
    shown("ray", models(folder / "ray"), serial, began, **lost)
    began = time.monotonic()
    killed = with_kills(table, folder / "killed", rng)
    shown("kills", models(folder / "killed"), serial, began, **killed)
    began = time.monotonic()
    alone, together = trained_text(folder)
    shown("ray.train", together, alone, began)


def write_table(path: Path) -> None:
    """Writes hourly rows of the groups, mixed."""
    rng, hours = np.random.default_rng(0), np.arange(_ROWS)
    times = np.datetime64("2024-01-01T00", "s") + 3600 * hours
    tables = [
        pa.table({
            "store": [f"store {number}"] * _ROWS, "ds": times,
            "y": np.sin(hours / (3 + number)) + 0.1 * rng.standard_normal(_ROWS),
        })
        for number in range(_GROUPS)
    ]  # fmt: skip
    pq.write_table(pa.concat_tables(tables).sort_by("ds"), path)


def command(table: Path, out: Path, *words: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "fastlstm", "fanout", str(table), "--out", str(out)]
    return subprocess.Popen([*argv, *_OPTIONS.split(), *words], stdout=subprocess.DEVNULL)


def on_ray(table: Path, out: Path, rng: random.Random) -> dict[str, Any]:
    """Trains on a cluster, removes a node that trains, and returns what happened."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    try:
        fanout = command(table, out, "--ray", cluster.address)
        wait_for(lambda: done(out) >= 3 and len(saved(out)) >= 2, fanout)
        time.sleep(rng.uniform(0.0, 2.0))
        at, before = done(out), len(saved(out))
        cluster.remove_node(rng.choice(nodes), allow_graceful=False)
        code = fanout.wait(timeout=900)
        resumed = sum(num_events(run, "start") > 1 for run in runs(out))
    finally:
        cluster.shutdown()
    assert code == 0, code
    return {"done_at_loss": at, "training_at_loss": before, "started_twice": resumed}


def with_kills(table: Path, out: Path, rng: random.Random) -> dict[str, Any]:
    """Kills a job, then the fan-out, starts again; returns what happened."""
    fanout = command(table, out, "--jobs", "2")
    wait_for(lambda: done(out) >= 2 and len(saved(out)) == 2, fanout)
    time.sleep(rng.uniform(0.0, 2.0))
    os.kill(rng.choice(children(fanout.pid)), signal.SIGKILL)
    wait_for(lambda: done(out) >= 5 and len(saved(out)) == 3, fanout)  # one of them was killed
    time.sleep(rng.uniform(0.0, 2.0))
    jobs = children(fanout.pid)
    fanout.kill()
    fanout.wait()
    time.sleep(0.5)
    orphans = sum(is_alive(job) for job in jobs)
    at = done(out)
    again = command(table, out, "--jobs", "2")
    assert again.wait(timeout=900) == 0
    resumed = sum(num_events(run, "start") > 1 for run in runs(out))
    return {"done_at_kill": at, "jobs_at_kill": len(jobs), "orphans": orphans, "resumed": resumed}


def trained_text(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains a text alone, and in two workers, one lost with its node; returns the weights."""
    import ray
    from ray.cluster_utils import Cluster

    import fastlstm
    import fastlstm.ray

    text = folder / "text.txt"
    rng = random.Random(0)
    text.write_text(
        " ".join(rng.choice(("the", "cat", "sat", "on", "a", "mat")) for _ in range(60_000))
    )
    options: dict[str, Any] = {
        "rnn_size": 24, "embed_size": 12, "seq_length": 16, "batch_size": 16, "precision": "fp32",
        "steps": 1500, "eval_every": 1000, "tensorboard": False, "device": "cpu", "threads": 1,
        "checkpoint_every": 100, "shards": 2,
    }  # fmt: skip
    alone, together = folder / "alone", folder / "together"
    fastlstm.train(text, out=alone, **options)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)

    def lose() -> None:
        while num_events(together, "checkpoint") < 2:
            time.sleep(0.2)
        cluster.remove_node(nodes[0], allow_graceful=False)

    threading.Thread(target=lose, daemon=True).start()
    fastlstm.ray.train(text, out=together, num_workers=2, **options)
    assert num_events(together, "start") == 2
    ray.shutdown()
    cluster.shutdown()
    return tuple({"text": (out / _FILES[0]).read_bytes()} for out in (alone, together))


def num_events(run: Path, kind: str) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(f'"event":"{kind}"'.encode())
    except OSError:
        return 0


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def runs(out: Path) -> list[Path]:
    return [path.parent for path in sorted(out.glob("*/metrics.jsonl"))]


def states(out: Path) -> list[str]:
    try:
        return [group["state"] for group in json.loads((out / "fanout.json").read_text())["groups"]]
    except (OSError, ValueError):
        return []


def done(out: Path) -> int:
    return states(out).count("done")


def saved(out: Path) -> list[Path]:
    """Returns the runs that have a checkpoint behind the first step and no end."""
    return [
        run for run in runs(out)
        if num_events(run, "checkpoint") > 1 and not num_events(run, "end")
    ]  # fmt: skip


def is_alive(pid: int) -> bool:
    """Returns whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def models(out: Path) -> dict[str, list[bytes]]:
    groups = json.loads((out / "fanout.json").read_text())["groups"]
    return {
        group["name"]: [(out / group["directory"] / name).read_bytes() for name in _FILES]
        for group in groups
    }


def shown(
    what: str, found: dict[str, Any], serial: dict[str, Any], began: float, **more: Any
) -> None:
    equal = sum(found[name] == serial[name] for name in serial)
    seconds = round(time.monotonic() - began, 1)
    print(
        json.dumps({"run": what, "equal": equal, "of": len(serial), "seconds": seconds, **more}),
        flush=True,
    )


def wait_for(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 600
    while not is_so():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the fan-out ended with {process.poll()}, or nothing happened")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
