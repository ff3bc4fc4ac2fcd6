"""What one process and two train alike: run by the tests in one, under torchrun in several."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastlstm
from distributed_run import train_command
from fastlstm.cli.main import main
from fastlstm.distributed import joining
from fastlstm.distributed.joining import joined
from fastlstm.errors import FastLSTMError, LostProcessError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.window_loader import ChunkLoader, WindowLoader
from fastlstm.forecast.train import train_forecaster
from fastlstm.text.data.lanes import TextLoader
from fastlstm.training.options import TrainingOptions
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.trainer import Trainer
from linear_task import LinearTask, RowLoader

OWN: dict[str, Any] = {"threads": 1, "device": "cpu", "seed": 3, "eval_every": 1000}
TEXT = {"rnn_size": 16, "embed_size": 8, "seq_length": 16, "batch_size": 8, "precision": "fp32"}
TEXTS: dict[str, dict[str, Any]] = {
    "muon": {"accumulate": 2, "lane_reset": 0.1, "num_layers": 2, "ema": 0.9},
    "adamw": {"order": "windows", "layer_norm": True},
    "pipeline": {"num_layers": 3, "pipeline": 3, "ema": 0.9, "residual": True},
}
INPUT = {"horizon": 4, "input_size": 24, "patch": 4, "hidden_size": 8, "dropout": 0.0}
TABLES: dict[str, dict[str, Any]] = {
    "windows": {"batch_size": 20, "steps": 40, "precision": "fp32"},
    "chunks": {"tbptt": 24, "batch_size": 6, "steps": 40, "optimizer": "muon", "precision": "fp32"},
}
Results = dict[str, list[torch.Tensor]]


def trained(place, text, size):
    """Returns weights and losses by job."""
    results: Results = {}

    def language_model(name, more):
        out = place / f"{name}-{size}"
        options = {**TEXT, **OWN, "steps": 30, "tensorboard": False, "sample_every": 0, **more}
        run = fastlstm.train(text, out=out, observers=(), **options)
        weights = fastlstm.LM.load(run).model.parameters() if rank() == 0 else ()
        results[name] = [torch.tensor(run.bits_per_char), *(p.detach() for p in weights)]

    for name, more in TEXTS.items():
        optimizer = "adamw" if name == "pipeline" else name
        language_model(name, {**more, "optimizer": optimizer})
    dropped = {"optimizer": "adamw", "dropout": 0.2, "zoneout": (0.1, 0.1), "steps": 12}
    language_model("dropped", dropped)
    language_model("dropped again", dropped)
    language_model("wire", {"optimizer": "adamw", "wire": "bf16"})
    language_model("local", {"optimizer": "adamw", "sync_every": 5, "ema": 0.9})
    rng = np.random.default_rng(0)
    table = rng.normal(size=(400, 2)).cumsum(0).astype("float32")
    table[rng.random(table.shape) < 0.1] = np.nan
    for name, more in TABLES.items():
        model = fastlstm.Forecaster(**INPUT, **OWN, **more).fit(table)
        results[name] = [torch.tensor(model.fitted_.best_loss), model.stored_.calibration.residuals]
        results[name] += [p.detach() for p in model.stored_.network.parameters()]
    table = rng.normal(size=(34, 1)).cumsum(0).astype("float32")  # 13 windows: the last batch has 1
    sizes = {"horizon": 2, "input_size": 4, "patch": 2, "hidden_size": 4, "batch_size": 12}
    own = {**OWN, "steps": 9, "precision": "fp32", "split": "24,5,5", "dropout": 0.0}
    network = fastlstm.Forecaster(**sizes, **own).fit(table).stored_.network
    results["one row"] = [p.detach() for p in network.parameters()]
    X = [rng.normal(size=(int(n), 3)).astype("float32") for n in rng.integers(2, 20, size=101)]
    y = np.array([x[:, 0].sum() for x in X])
    regressor = fastlstm.SequenceRegressor(hidden_size=8, batch_size=16, steps=30, **OWN).fit(X, y)
    results["sequences"] = [torch.from_numpy(regressor.predict(X[:20]))]
    return results


class Steps(fastlstm.Callback):
    """Counts the steps of a run."""

    def __init__(self):
        self.taken = 0

    def on_update(self, trainer):
        self.taken = trainer.progress.step + 1


def moved(place, text, name, end, last):
    """Trains a text and a table to step `end` of `last`; returns the rows that were read."""
    rows = list[torch.Tensor]()
    kinds: list[tuple[Any, Callable[[Any], Any]]] = [
        (TextLoader, lambda b: b.x.T),
        (WindowLoader, lambda b: b.values),
    ]
    before = [kind.next for kind, _ in kinds]
    for (kind, rows_of), read in zip(kinds, before, strict=True):

        def noted(self, read=read, rows_of=rows_of):
            batch = read(self)
            rows.append(torch.as_tensor(rows_of(batch)).clone())
            return batch

        kind.next = noted
    own = {**OWN, "steps": last, "precision": "fp32", "optimizer": "adamw"}
    table = np.random.default_rng(0).normal(size=(400, 2)).cumsum(0)
    config = ForecastConfig(**INPUT, batch_size=20, **own)
    own |= {**TEXT, "lane_reset": 0.1, "tensorboard": False, "sample_every": 0}
    for kind_of_run in ("text", "table"):
        steps = Steps()
        more: dict[str, Any] = {
            "callbacks": [steps],
            "stop": lambda steps=steps: steps.taken >= end < last,
            "resume": True,
            "observers": (),
            "out": place / f"{name}-{kind_of_run}",
        }
        try:
            if kind_of_run == "text":
                fastlstm.train(text, **own, **more)
            else:
                train_forecaster(table, config, **more)
        except FastLSTMError:
            if end == last:
                raise
    for (kind, _), read in zip(kinds, before, strict=True):
        kind.next = read
    return rows


def stopped(place):
    """Returns how a run ends that is stopped while one rank waits for a batch."""
    flags, before = list[int](), ChunkLoader.next

    def next_batch(self):
        flags.extend([1] * (self.state_dict()["index"] == 3 and rank() == 0))
        return before(self)

    ChunkLoader.next = next_batch  # type: ignore[method-assign]
    own = {**OWN, "steps": 90, "precision": "fp32", "tbptt": 24}
    config = ForecastConfig(**INPUT, batch_size=2, **own)
    table = np.random.default_rng(0).normal(size=(400, 2)).cumsum(0)
    try:
        train_forecaster(table, config, out=place / "stopped", stop=lambda: bool(flags))
    except FastLSTMError as error:
        return type(error).__name__
    finally:
        ChunkLoader.next = before  # type: ignore[method-assign]
    return ""


class OwnRows(RowLoader):
    """The rows of a rank of two; batches that are NaN once."""

    def __init__(self, nan_at):
        super().__init__()
        self._nan_at = nan_at

    def next(self):
        rows = super().next()[4 * rank() : 4 * rank() + 4]
        if self.at - 1 not in self._nan_at:
            return rows
        self._nan_at.remove(self.at - 1)
        return rows * float("nan")


class OwnTask(LinearTask):
    num_lanes, row_axis = 2, {"level": 0}

    def size(self, batch):
        return 8


def linear(nan_at, **options):
    """Returns how a small run goes in which batches of rank 1 are NaN."""
    own: dict[str, Any] = {"steps": 24, "optimizer": "adamw", "batch_size": 8, "precision": "fp32"}
    own |= {"learning_rate": 0.05, "device": "cpu", "checkpoint_every": 4, **options}
    chosen, events = TrainingOptions(**own), list[dict[str, Any]]()
    with joined(chosen) as world:
        task = OwnTask(dropout=0.0)
        task.loader = OwnRows(nan_at if rank() == 1 else set())
        ending = StopCriterion.of(chosen, 5)
        plan = TrainingPlan(chosen, ending, torch.device("cpu"), 4, world=world)
        result = Trainer(task, plan, events.append).fit()
    return {
        "steps": result.steps,
        "weights": [p.detach().clone() for p in task.model.parameters()],
        "actions": [event["action"] for event in events if event["event"] == "skip"],
    }


def refused(text):
    """Returns the errors of runs for which the ranks have other texts or options."""
    small = {**TEXT, "steps": 5, "threads": 1, "observers": (), "tensorboard": rank() == 0}
    other = text.with_name(f"other-{rank()}.txt")
    other.write_text(text.read_text() + "more" * rank())
    rate = {"steps": 5, "threads": 1, "learning_rate": 0.01 * (1 + rank())}
    found = dict[str, str]()
    for name, fit in {
        "text": lambda: fastlstm.train(other, out=text.with_name("refused"), **small),
        "rate": lambda: fastlstm.train(text, out=text.with_name("refused"), **{**small, **rate}),
        "table": lambda: fastlstm.Forecaster(horizon=2, **rate).fit(np.ones((99, 1))),
    }.items():
        try:
            fit()
        except FastLSTMError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


KILLED = "--rnn-size 64 --num-layers 2 --log-every 1 --steps 100 --dropout 0.2 --ema 0.9"
KILLED += " --eval-every 30 --checkpoint-every 15 --optimizer adamw"


def hang(place):
    """Stops rank 0 while rank 1 waits for it, which writes the error down and ends both."""
    joining.DEADLINE = timedelta(seconds=2)
    try:
        with joining.joined() as world:
            if world.is_leader:
                os.kill(os.getpid(), signal.SIGSTOP)
                os._exit(0)
            leader = int(world.names[0].split()[-1])
            world.decided(0.0)
    except LostProcessError as error:
        (place / "hung").write_text(str(error))
        os.kill(leader, signal.SIGCONT)


def rank():
    return int(os.environ.get("RANK", "0"))


def run():
    place, text, end, last = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:5])
    found = {
        "trained": trained(place, text, 2),
        "moved": moved(place, text, "moved", end, last),
        "stopped": stopped(place),
        "skipped": linear({5, 9}),
        "went back": linear({9, 10, 11, 12, 13}, sync_every=4),
        "ended early": linear(set(), patience=1, learning_rate=1e-12),
        "refused": refused(text),
    }
    for name in ("unbroken", "killed"):
        words = train_command(text, *KILLED.split(), "--resume", "--out", place / name)
        assert main(words[3:]) == 0
    torch.save(found, place / f"{rank()}.pt")
    hang(place)
    # Gloo's threads can outlive the interpreter and abort the process (pytorch#190489).
    os._exit(0)


if __name__ == "__main__":
    run()
