"""A run that is timed, recorded, watched or profiled ends with the bits of one that is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet as pq

import fastlstm
from fastlstm import Forecaster, SequenceClassifier
from fastlstm.cli.main import main
from fastlstm.monitor import run_summary
from fastlstm.monitor.run_summary import RunIndex
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system import ceilings
from fastlstm.training import events as run_events
from fastlstm.training.checkpoint import find_checkpoint
from fastlstm.tuning import profile
from series_frames import long_table

Train = Callable[..., Any]
SHARED: dict[str, Any] = {"device": "cpu", "precision": "fp32", "threads": 1, "steps": 8}
TEXT: dict[str, Any] = {
    **SHARED, "rnn_size": 16, "embed_size": 8, "batch_size": 4, "seq_length": 16, "eval_every": 5,
}  # fmt: skip
TABLE: dict[str, Any] = {
    **SHARED, "horizon": 4, "target": "y", "time": "ds", "series": "unique_id", "input_size": 16,
    "patch": 4, "hidden_size": 8, "batch_size": 8, "evaluations": 3,
}  # fmt: skip
SEQUENCES: dict[str, Any] = {
    **SHARED, "hidden_size": 6, "embed_size": 4, "batch_size": 8, "held_out": 0.2, "dropout": 0.2,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "muon": TEXT,
    "adamw": {**TEXT, "optimizer": "adamw"},
    "bf16": {**TEXT, "precision": "bf16"},
    "zoneout": {**TEXT, "zoneout": 0.1, "sample_every": 0},
    "dropout": {**TEXT, "dropout": 0.3, "weight_drop": 0.2, "weight_decay": 0.1},
    "norms": {**TEXT, "layer_norm": True, "output_norm": True, "num_layers": 2, "sample_every": 0},
    "accumulation": {**TEXT, "accumulate": 2, "dropout": 0.2},
    "two threads": {**TEXT, "threads": 2, "rnn_size": 64, "batch_size": 16},
    "average": {**TEXT, "ema": 0.9, "order": "windows"},
    "table": {**TABLE, "bidirectional": True},
    "long series": {**TABLE, "tbptt": 8, "batch_size": 2},
    "sequences": {**SEQUENCES, "bidirectional": True},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A directory with a text and a table."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "book.txt").write_text("the quick brown fox jumps over the lazy dog; why?\n" * 80)
    pq.write_table(long_table(80, temp=None), folder / "table.parquet")
    return folder


@pytest.fixture(autouse=True)
def _instant_ceilings(monkeypatch):
    """What the machine reaches takes a second to measure."""
    found = ceilings.Ceilings(1e6, "torch.mm", 1e6)
    monkeypatch.setattr(ceilings, "_measure", lambda *_: found)


def train(kind, source, out, look):
    """Trains a run of `RUNS`; `look` has its observers, callbacks and options of output."""
    options = {"tensorboard": False, "log_every": 1000, **look, **RUNS[kind]}
    if "rnn_size" in options:
        options = {"sample_every": 0, **options}
        cache = str(source / "cache")
        fastlstm.train(source / "book.txt", out=out, cache_dir=cache, **options)
    elif "horizon" in options:
        options.pop("sample_every", None)
        Forecaster(**options, cache_dir=str(source / "cache")).fit(
            str(source / "table.parquet"), out=out
        )
    else:
        options.pop("sample_every", None)
        rng = np.random.default_rng(0)
        X = [rng.normal(size=(n, 2)) for n in rng.integers(3, 9, 50)]
        SequenceClassifier(**options).fit(X, [int(x[0, 0] > 0) for x in X], out=out)


def state_after(kind, source, out, **look):
    """Returns weights, optimizer, averages, carried state and random numbers after a run."""
    numbers = dict[str, torch.Tensor]()

    def keep(event):
        if event["event"] == "end":
            numbers["random numbers at the end"] = torch.get_rng_state()

    before = random_numbers()
    train(kind, source, out, {**look, "observers": [*look.get("observers", ()), keep]})
    assert random_numbers() == before
    found, damage = find_checkpoint(RunDirectory(out))
    assert not damage
    assert found.step == SHARED["steps"]
    return numbers | {f"{s} {n}": t for s, group in found.tensors.items() for n, t in group.items()}


def random_numbers():
    """Returns the states of the process's generators: torch's, Python's, numpy's."""
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


def files_of(run):
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def differing(left, right):
    """Returns the names of tensors whose bits differ."""
    assert left.keys() == right.keys()
    return [
        name
        for name, tensor in left.items()
        if tensor.dtype != right[name].dtype
        or tensor.contiguous().numpy(force=True).tobytes()
        != right[name].contiguous().numpy(force=True).tobytes()
    ]


class Looking(fastlstm.Callback):
    """Uses every hook, and looks at weights and gradients without changing them."""

    norm = 0.0

    def on_gradients(self, trainer):
        self.norm = float(sum(p.grad.norm() for p in trainer.model.parameters()))

    def on_update(self, trainer):
        self.weights = {name: w.clone() for name, w in trainer.model.state_dict().items()}

    def on_evaluate(self, trainer, metrics):
        return {"norm": self.norm, "largest": max(w.abs().max() for w in self.weights.values())}

    def on_event(self, trainer, event):
        self.rate = trainer.optimizers.learning_rate

    def state_dict(self):
        return {"norm": self.norm}


class Recording(fastlstm.Callback):
    """Records the operations of the first steps, as `profile --ops --trace` does."""

    def on_begin(self, trainer):
        self.profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, with_flops=True
        )
        self.profiler.start()

    def on_update(self, trainer):
        if trainer.progress.step == 2:
            self.profiler.stop()
            assert self.profiler.events()


class Watching:
    """Observer that reads the run at every event, as monitor does."""

    def __init__(self, out):
        self.out, self.index = out, RunIndex([out.parent])

    def __call__(self, event):
        self.index.update()

    def check(self):
        assert self.index.runs[self.out].validation


def looks_at(out, patch, *names):
    """Returns the observers, callbacks and options of output of some ways to look at a run."""
    found: dict[str, Any] = {"observers": [], "callbacks": []}
    if "events" in names:  # every one that can come at a step comes at every step
        patch.setattr(run_events, "INTERVAL_S", 0.0)
        patch.setattr(run_events, "CORE_WAIT", math.inf)  # else it warns on a busy machine
        found |= {"log_every": 1, "sample_every": 1, "tensorboard": True}
    if "recording" in names:
        found["callbacks"] += [Recording()]
    if "callback" in names:
        found["callbacks"] += [Looking(), fastlstm.Alerts()]
    if "watching" in names:
        patch.setattr(run_summary, "_SEARCH_EVERY_S", 0.0)  # short runs end sooner
        found["observers"] += [Watching(out)]
    return found


LOOKS = ("events", "recording", "callback", "watching")


@pytest.fixture(scope="module")
def bare(source, tmp_path_factory):
    """Returns a function for the state after a run that nobody looks at, trained once."""
    folder, known = tmp_path_factory.mktemp("bare"), dict[str, dict[str, torch.Tensor]]()

    def state(kind):
        if kind not in known:
            known[kind] = state_after(kind, source, folder / kind)
        return known[kind]

    return state


@pytest.mark.parametrize(
    ("kind", "looks"), [*((kind, LOOKS) for kind in RUNS), *(("dropout", (n,)) for n in LOOKS)],
    ids=str,
)  # fmt: skip
def test_a_look_at_a_run_changes_no_bit(kind, looks, source, tmp_path, bare, monkeypatch):
    expected, out = bare(kind), tmp_path / "run"
    given = looks_at(out, monkeypatch, *looks)
    found = state_after(kind, source, out, **given)
    for watching in given["observers"]:
        watching.check()
    assert not differing({n: t for n, t in found.items() if "callback-" not in n}, expected)


@pytest.mark.parametrize("kind", ["dropout", "two threads", "table"])
def test_a_profile_changes_neither_the_run_nor_the_next(kind, source, tmp_path, bare, monkeypatch):
    monkeypatch.setattr(profile, "TURN_S", 0.001)
    expected, run = bare(kind), tmp_path / "run"
    train(kind, source, run, {"observers": []})
    before = files_of(run)
    numbers = random_numbers()
    words = ["--measure", "1s", "--ops", "--trace", str(tmp_path / "trace.json")]
    assert main(["profile", str(run), *words]) == 0
    assert random_numbers() == numbers
    after = files_of(run)
    assert after.pop("profile.json")
    assert after == before
    assert not differing(state_after(kind, source, tmp_path / "next"), expected)
