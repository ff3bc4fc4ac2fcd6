"""What every kind of run emits: which events come in which order, and the keys of each."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import fastlstm
from fastlstm.errors import Stopped
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.train import train_forecaster
from golden import material
from golden.kinds import TABLE, TEXT

FILE = Path(__file__).with_name("courses.json")
_IGNORED = ["plan", "day", "shop", "size"]


class Stop:
    """A stop flag that is set when an event of a step comes."""

    name = "SIGTERM"

    def __init__(self, at):
        self._at, self._is_set = at, False

    def __call__(self):
        return self._is_set

    def observe(self, event):
        self._is_set |= event["event"] == "step" and event["step"] == self._at


@contextmanager
def fast_clock():
    """Makes every look at the clock find it 2 s later: what comes once a second comes each time."""
    clock = itertools.count(0.0, 2.0)
    with mock.patch("time.perf_counter", clock.__next__):
        yield


@contextmanager
def bad_gradients(first, last):
    """Makes the gradients of some backward passes NaN; their losses are right."""
    backward, numbers = torch.Tensor.backward, itertools.count(1)

    def broken(loss, *args, **kwargs):
        is_bad = first <= next(numbers) <= last
        backward(loss * float("nan") if is_bad else loss, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "backward", broken):
        yield


def text(folder, **fields):
    """Trains a text model and says what it does not say otherwise: a sample, a checkpoint."""
    source = folder / "text.txt"
    if not source.exists():
        source.write_text(material.text(700), encoding="utf-8")
    stop, resume = fields.pop("stop", None), fields.pop("resume", False)
    observers = [stop.observe] if stop is not None else ()
    config = {**TEXT, "sample_every": 2, "checkpoint_every": 8, "ema": 0.9, **fields}
    fastlstm.train(
        source, out=folder / "run", observers=observers, stop=stop, resume=resume, **config
    )


def text_resumed(folder):
    with pytest.raises(Stopped):
        text(folder, stop=Stop(9))
    text(folder, resume=True)


def text_rolled_back(folder):
    with bad_gradients(10, 14):
        text(folder)


def table(folder, resume=False, stop=None, **fields):
    """Trains a forecaster in a run directory."""
    config = ForecastConfig(**{**TABLE, "checkpoint_every": 8, "ignore": _IGNORED, **fields})
    train_forecaster(
        material.table(), config, out=folder / "run", resume=resume, stop=stop,
        observers=[stop.observe] if stop is not None else (),
    )  # fmt: skip


def table_resumed(folder):
    with pytest.raises(Stopped):
        table(folder, stop=Stop(9))
    table(folder, resume=True)


def table_with_bad_gradients(folder):
    with bad_gradients(10, 12):
        table(folder)


def sequences(folder):
    """Trains a regressor; it has no run directory, so that its observer writes the events."""
    X = material.sequences(44, even=False)
    with (folder / "events.jsonl").open("w") as file:
        fastlstm.SequenceRegressor(
            hidden_size=6, epochs=4, observers=[lambda e: file.write(json.dumps(e) + "\n")]
        ).fit(X, [float(len(part)) for part in X])


COURSES: dict[str, Callable[[Path], None]] = {
    "text": text,
    "text, stopped and resumed": text_resumed,
    "text, rolled back": text_rolled_back,
    "table": table,
    "table, streams": lambda folder: table(folder, tbptt=8, batch_size=2),
    "table, stopped and resumed": table_resumed,
    "table, bad gradients": table_with_bad_gradients,
    "sequences": sequences,
}


def course_of(kind, folder):
    """Runs a kind and returns the order of its stored events, and the keys of each."""
    # Of its own: what was measured in an earlier run is said, and a fast clock measures nonsense.
    own = mock.patch.dict(os.environ, FASTLSTM_CACHE=str(folder / "cache"))
    with own, fast_clock():
        COURSES[kind](folder)
    path = folder / "run" / "metrics.jsonl"
    path = path if path.exists() else folder / "events.jsonl"
    stored = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # Whether there is something to mention (a busy machine, a slow disk) differs from run to run.
    events = [event for event in stored if event.get("level") != "info"]
    keys: dict[str, set[str]] = {}
    for event in events:
        keys.setdefault(event["event"], set()).update(_keys(event))
    order = [f"{event['event']} {event.get('step', '')}".strip() for event in events]
    return {"order": order, **{name: sorted(found) for name, found in sorted(keys.items())}}


def _keys(value, prefix=""):
    """Yields the paths of all keys, such as ``final.loss`` or ``targets[].mae``."""
    if isinstance(value, list):
        for part in value:
            yield from _keys(part, f"{prefix}[]")
    elif isinstance(value, dict):
        for name, part in value.items():
            yield f"{prefix}.{name}".lstrip(".")
            yield from _keys(part, f"{prefix}.{name}".lstrip("."))
