"""The paths that docs/architecture.md gives to readers: what is on the stack, and no more."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet as pq

import fastlstm
from fastlstm.forecast.data import dataset
from fastlstm.nn.lstm import LSTM
from fastlstm.ops import native_call
from fastlstm.text.data import lanes
from series_frames import long_table

SRC = Path(fastlstm.__file__).resolve().parent
ENTRY = ["text/train.py", "training/session.py"]
STEP = ["training/trainer.py", "training/stepper.py", "text/task.py", "text/model.py", "nn/lstm.py"]
CALL = ["ops/lstm.py", "ops/backends/native.py", "ops/autograd.py", "ops/native_call.py"]
TABLE_STEP = [
    *("forecast/forecaster.py", "forecast/train.py", "training/session.py", "training/trainer.py"),
    *("training/stepper.py", "forecast/task.py", "forecast/model/network.py", "nn/lstm.py"),
]
ROW_TO_FORECAST = [
    *("forecast/forecaster.py", "forecast/forecast_table.py", "forecast/data/preparation.py"),
    *("forecast/data/dataset.py", "forecast/data/ingest.py", "forecast/data/arrange.py"),
    *("forecast/files.py", "forecast/model/network.py", "nn/lstm.py"),
]


def files_on_stack() -> list[str]:
    """Returns the files of the package that lead here, each once, outermost first."""
    frames = (Path(frame.filename).resolve() for frame in traceback.extract_stack())
    names = [str(path.relative_to(SRC)) for path in frames if path.is_relative_to(SRC)]
    return list(dict.fromkeys(names))


def train(folder: Path) -> None:
    rng = np.random.default_rng(0)
    (folder / "text.txt").write_text("".join(rng.choice(list("abc \n"), 3000)))
    fastlstm.train(
        folder / "text.txt", out=folder / "run", steps=1, rnn_size=16, embed_size=8,
        batch_size=2, seq_length=8, precision="fp32", device="cpu", tensorboard=False, observers=(),
    )  # fmt: skip


def test_from_a_step_to_the_native_call(tmp_path, monkeypatch):
    forward, stacks = native_call.forward, []

    def seen(*args: Any, **kwargs: Any) -> Any:
        stacks.append([*files_on_stack(), "ops/native_call.py"])
        return forward(*args, **kwargs)

    monkeypatch.setattr(native_call, "forward", seen)
    train(tmp_path)
    steps = [stack for stack in stacks if "training/stepper.py" in stack]
    assert steps
    for stack in steps:
        assert stack == [*ENTRY, *STEP, *CALL]


def test_from_a_batch_to_its_lanes(tmp_path, monkeypatch):
    reset, threads = lanes.TextLoader._reset, []

    def seen(*args: Any, **kwargs: Any) -> Any:
        threads.append(files_on_stack())
        return reset(*args, **kwargs)

    monkeypatch.setattr(lanes.TextLoader, "_reset", seen)
    train(tmp_path)
    assert threads[0] == ["system/prefetch.py", "text/data/lanes.py"]


def test_from_a_row_of_a_table_to_its_forecast(tmp_path, monkeypatch):
    """A step of training takes the first path, `predict` the second: nine files at most."""
    stacks: list[list[str]] = []

    def watch(kind: type, name: str) -> None:
        function = getattr(kind, name)
        own = str(Path(inspect.getsourcefile(function) or "").resolve().relative_to(SRC))

        def seen(*args: Any, **kwargs: Any) -> Any:
            stacks.append([*files_on_stack(), own])
            return function(*args, **kwargs)

        monkeypatch.setattr(kind, name, seen)

    for place in ((dataset.TableIngest, "run"), (dataset.Arrangement, "run"), (LSTM, "forward")):
        watch(*place)
    first, second = tmp_path / "first.parquet", tmp_path / "second.parquet"
    pq.write_table(long_table(60), first)
    pq.write_table(long_table(61), second)
    model = fastlstm.Forecaster(
        horizon=4, input_size=8, patch=4, hidden_size=8, steps=1, observers=(), device="cpu",
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    model.fit(first)
    steps = [stack for stack in stacks if "training/stepper.py" in stack]
    assert steps
    for stack in steps:
        assert stack == TABLE_STEP
    stacks.clear()
    model.predict(second)
    assert list(dict.fromkeys(file for stack in stacks for file in stack)) == ROW_TO_FORECAST
    assert max(len(TABLE_STEP), len(ROW_TO_FORECAST)) <= 9


@pytest.mark.parametrize(
    "name", sorted({*ENTRY, *STEP, *CALL, *TABLE_STEP, *ROW_TO_FORECAST, "text/data/lanes.py"})
)
def test_the_documentation_names_the_files(name, repository):
    assert f"`{name}" in (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
