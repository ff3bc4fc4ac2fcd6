"""Publishes runs to the real W&B (offline), MLflow and Trackio, and compares every value.

    python tests/campaigns/publish.py [--wandb-reader PYTHON] [--train-python PYTHON]

Needs the extras wandb, mlflow and trackio. Each tracker is read by its own reader: MLflow's client,
Trackio's storage, W&B's `DataStore`. The last W&B that has a reader in Python is 0.21;
`--wandb-reader` is the interpreter of an environment that has it. `--train-python` trains the run
that is followed live.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from process import make_text, train_command

Rows = dict[int, dict[str, Any]]
TARGETS = ("wandb", "mlflow", "trackio")
ENDINGS = ("ends", "dies", "interrupted")
READER = """
import glob, json, sys, warnings
warnings.filterwarnings("ignore")
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore
for path in sorted(glob.glob(sys.argv[1] + "/wandb/offline-run-*/run-*.wandb")):
    store = DataStore()
    store.open_for_scan(path)
    run, config = None, {}
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind in ("run", "config"):
            update = record.run.config.update if kind == "run" else record.config.update
            names = [item.key or "/".join(item.nested_key) for item in update]
            values = [json.loads(item.value_json) for item in update]
            config.update(zip(names, values))
        if kind == "run":
            run = record.run.run_id, record.run.display_name
        if kind == "history":
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json)
                     for i in record.history.item}
            print(json.dumps({"run": run, "values": items, "config": config}))
"""


class Campaign:
    def __init__(self, folder: Path, wandb_reader: str) -> None:
        self.folder, self._wandb_reader = folder, wandb_reader
        self.failures = 0
        self.config: dict[str, Any] = {}
        os.environ["TRACKIO_DIR"] = str(folder / "trackio")
        os.environ["FASTLSTM_CACHE"] = str(folder / "cache")
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "MLFLOW_TRACKING_URI"):
            os.environ.pop(name, None)

    def check(self, label: str, is_right: bool, detail: object = "") -> None:
        self.failures += not is_right
        print(
            f"{'ok  ' if is_right else 'FAIL'} {label} {detail if not is_right else ''}", flush=True
        )

    def command(self, run: Path, to: str, *flags: str) -> list[str]:
        return [sys.executable, "-m", "fastlstm", "publish", str(run), "--to", to, "--json", *flags]

    def publish(self, run: Path, to: str, *flags: str) -> dict[str, Any]:
        done = subprocess.run(
            self.command(run, to, *flags),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"exit {done.returncode}: {done.stderr}")
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def compare(self, label: str, to: str, name: str, wanted: Rows) -> None:
        runs = getattr(self, f"_{to}")(name)
        found = runs[0] if len(runs) == 1 else {}
        wrong = [s for s in wanted.keys() | found.keys() if wanted.get(s) != found.get(s)]
        count = sum(len(row) for row in wanted.values())
        text = f"{label}: {to}, {len(wanted)} steps, {count} values"
        detail = [(s, wanted.get(s), found.get(s)) for s in sorted(wrong)[:2]]
        self.check(text, len(runs) == 1 and not wrong, (len(runs), len(wrong), detail))

    def _wandb(self, name: str) -> list[Rows]:
        done = subprocess.run(
            [self._wandb_reader, "-c", READER, str(self.folder)], capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"no reader of W&B's files, see --wandb-reader: {done.stderr[-300:]}")
        runs: dict[str, Rows] = {}
        for line in map(json.loads, done.stdout.splitlines()):
            identity, shown = line["run"]
            values = line["values"]
            step = values.pop("_step")
            del values["_runtime"]
            if shown == name:
                self.config = line["config"]
                rows = runs.setdefault(identity, {})
                if step <= max(rows, default=-1):
                    raise SystemExit(f"W&B: step {step} comes after {max(rows)}")
                rows[step] = values
        return list(runs.values())

    def _mlflow(self, name: str) -> list[Rows]:
        import mlflow

        client = mlflow.MlflowClient(f"sqlite:///{self.folder}/mlflow.db")
        runs = []
        for run in client.search_runs(["1"], filter_string=f"attributes.run_name = '{name}'"):
            rows: Rows = {}
            stored = Path(run.info.artifact_uri, "config.json").read_text("utf-8")
            self.config = json.loads(stored)
            if run.data.params["start.task"] != "text":
                raise SystemExit(f"MLflow: the params are {run.data.params}")
            for key in run.data.metrics:
                for metric in client.get_metric_history(run.info.run_id, key):
                    row = rows.setdefault(metric.step, {})
                    if key in row:
                        raise SystemExit(f"MLflow: {key} twice at step {metric.step}")
                    row[key], row["_timestamp"] = metric.value, metric.timestamp / 1000
            for file in client.list_artifacts(run.info.run_id, "samples"):
                step = int(Path(file.path).stem)
                text = Path(run.info.artifact_uri, file.path).read_bytes().decode("utf-8")
                rows.setdefault(step, {})["sample"] = text
            runs.append(rows)
        return runs

    def _trackio(self, name: str) -> list[Rows]:
        from datetime import datetime

        from trackio import SQLiteStorage

        runs = []
        for record in SQLiteStorage.get_run_records("fastlstm"):
            if record["name"] != name:
                continue
            rows: Rows = {}
            self.config = SQLiteStorage.get_run_config("fastlstm", name, run_id=record["id"])
            for line in SQLiteStorage.get_logs("fastlstm", name, run_id=record["id"]):
                when = datetime.fromisoformat(line.pop("timestamp")).timestamp()
                step = line.pop("step")
                if step in rows:
                    raise SystemExit(f"Trackio: step {step} twice")
                rows[step] = {**line, "_timestamp": when}
            runs.append(rows)
        return runs


class Writer:
    """Writes a made-up run, and keeps what a tracker should have of it."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.rows, self._rng = path, Rows(), random.Random(seed)
        path.mkdir(parents=True)
        config = {"format": "fastlstm-run", "model": {"rnn_size": 8}, "data": {"about": "x" * 9000}}
        (path / "config.json").write_text(json.dumps(config))
        self._file = open(path / "metrics.jsonl", "ab")  # noqa: SIM115
        self._offset = 1.7e9 + seed
        begun = {"task": "text", "unit": "tokens", "num_units": {"train": 9}, "seed": seed}
        self._line({"event": "start", "time": self._offset, **begun, "resumed_from": None})
        self.config = {"model": config["model"], "data": config["data"], "start": begun}
        self._line({"event": "machine", "elapsed_s": 0.0, "time": self._offset})

    def _line(self, event: dict[str, Any]) -> None:
        self._file.write((json.dumps(event) + "\n").encode())
        self._file.flush()

    def step(self, at: int) -> None:
        rng, when = self._rng, round(at * 0.25, 3)
        values = {
            "loss": rng.random() * 10 ** rng.randint(-300, 300), "lr": 0.1 + 0.2,
            "units": at * 2**33, "elapsed_s": when,
        }  # fmt: skip
        row = {f"train/{key}": float(value) for key, value in values.items()}
        bad = rng.choice((None, float("nan"), float("inf"), -float("inf"), True, "2", [1]))
        self._line({"event": "step", "step": at, **values, "grad_norm": bad})
        if at % 5 == 0:
            self._line(
                {"event": "eval", "step": at, "split": "valid", "loss": at / 7, "is_best": True}
            )
            row["valid/loss"] = at / 7
        if at % 20 == 0:
            text = f'He said "{at}",\n\u00e9\u4e2d \ud83d\ude00 and went.'
            text = text.encode("utf-16", "surrogatepass").decode("utf-16")
            self._line({"event": "sample", "step": at, "text": text})
            row["sample"] = text
        if at % 13 == 0:
            self._file.write(b'{"event": "step", "step": 3, "lo\n\xff\xfe\n[]\n')
        self.rows[at] = {**row, "_timestamp": round(self._offset + when, 3)}

    def resume(self, at: int) -> None:
        self._offset += 3600.0
        self._line({"event": "start", "time": self._offset, "seed": 0, "resumed_from": at})
        self._line({"event": "machine", "elapsed_s": 0.0, "time": self._offset})
        self.rows = {step: row for step, row in self.rows.items() if step <= at}

    def end(self) -> None:
        self._line({"event": "end", "step": max(self.rows)})

    @contextmanager
    def locked(self) -> Iterator[None]:
        with open(self.path / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def afterwards(campaign: Campaign) -> None:
    for at, to in enumerate(TARGETS):
        name = f"after-{to}"
        run = Writer(campaign.folder / "runs" / name, at)
        for step in range(1, 301):
            run.step(step)
        run.resume(250)
        for step in range(252, 400, 2):
            run.step(step)
        with open(run.path / "metrics.jsonl", "ab") as file:
            file.write(b'{"event": "step", "st')
        report = campaign.publish(run.path, to)
        campaign.compare("afterwards", to, name, run.rows)
        found = {key: campaign.config.get(key) for key in run.config}
        campaign.check(f"configuration: {to}", found == run.config, (found, run.config))
        campaign.check(f"rows counted: {to}", report["rows"] == len(run.rows), report)
        again = campaign.publish(run.path, to)
        campaign.compare("again", to, name, run.rows)
        campaign.check(f"nothing new: {to}", again["rows"] == 0, again)
        with open(run.path / "metrics.jsonl", "ab") as file:
            file.write(b"\n")
        for step in range(400, 450):
            run.step(step)
        run.end()
        campaign.publish(run.path, to)
        campaign.compare("with more", to, name, run.rows)
        twin = Writer(campaign.folder / "others" / name, 100 + at)
        twin.step(1)
        campaign.publish(twin.path, to)
        campaign.check(f"same name, other run: {to}", len(getattr(campaign, f"_{to}")(name)) == 2)


def live(campaign: Campaign, ending: str) -> None:
    """A run is written while it is followed; it ends, dies, or Ctrl-C comes to the whole group."""
    for at, to in enumerate(TARGETS):
        name = f"{ending}-{to}"
        run = Writer(campaign.folder / "runs" / name, 10 + 10 * ENDINGS.index(ending) + at)
        with run.locked():
            process = subprocess.Popen(
                campaign.command(run.path, to, "--live"), cwd=campaign.folder, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            for step in range(1, 101):
                run.step(step)
                time.sleep(0.15)
            if ending == "ends":
                run.end()
            if ending == "interrupted":
                os.killpg(process.pid, signal.SIGINT)
                process.wait(60)
        out, err = process.communicate(timeout=120)
        code = {"ends": 0, "dies": 1, "interrupted": 130}[ending]
        campaign.check(
            f"live, {ending}: {to} exit {code}",
            process.returncode == code and "Traceback" not in err, (process.returncode, err),
        )  # fmt: skip
        report = json.loads(out)
        if ending == "interrupted":
            sent = {s: row for s, row in run.rows.items() if s <= (report["last_step"] or 0)}
            campaign.check(f"most is sent: {to}", len(sent) >= 50, len(sent))
            campaign.compare("what was sent by Ctrl-C", to, name, sent)
            run.end()
            campaign.publish(run.path, to)
        campaign.compare(f"live, {ending}", to, name, run.rows)


def trained(campaign: Campaign, train_python: str) -> None:
    """A real training, followed by all three at once from its first second."""
    text, run = (
        make_text(campaign.folder / "text.txt", 120_000),
        campaign.folder / "runs" / "trained",
    )
    command = [
        train_python, *train_command(text, run, "--steps", "2000", "--log-every", "10")[1:],
        "--eval-every", "200",
    ]  # fmt: skip
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (run / "metrics.jsonl").exists():
        time.sleep(0.1)
    followers = [
        subprocess.Popen(
            campaign.command(run, to, "--live"), cwd=campaign.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for to in TARGETS
    ]  # fmt: skip
    training.wait(600)
    for to, follower in zip(TARGETS, followers, strict=True):
        out, err = follower.communicate(timeout=120)
        campaign.check(f"training followed: {to}", follower.returncode == 0, err)
        wanted: Rows = {}
        for event in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            kind = event.pop("event")
            if kind in ("step", "eval"):
                group = "train" if kind == "step" else event.pop("split")
                numbers = {
                    k: v for k, v in event.items() if type(v) in (int, float) and k != "step"
                }
                wanted.setdefault(event["step"], {}).update(
                    {f"{group}/{k}": float(v) for k, v in numbers.items()}
                )
        (found,) = getattr(campaign, f"_{to}")("trained")
        times = [row.pop("_timestamp") for _, row in sorted(found.items())]
        count = sum(map(len, wanted.values()))
        campaign.check(f"every value of a training: {to}, {count} values", wanted == found)
        is_ordered = times == sorted(times) and time.time() - 600 < times[0] <= time.time()
        campaign.check(f"times of a training: {to}", is_ordered, times[:3])
        print(f"     {json.loads(out)['where']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wandb-reader", default=sys.executable)
    parser.add_argument("--train-python", default=sys.executable)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), options.wandb_reader)
        afterwards(campaign)
        for ending in ENDINGS:
            live(campaign, ending)
        trained(campaign, options.train_python)
    print(f"{campaign.failures} failures")
    sys.exit(campaign.failures > 0)


if __name__ == "__main__":
    main()
