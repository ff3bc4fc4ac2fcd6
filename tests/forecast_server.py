"""Small forecasters to serve, requests to them, and a model whose passes can be held up."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from fastlstm import Forecaster
from fastlstm.forecast.window_forecaster import WindowForecaster
from series_frames import long_table

L, h = 24, 6
PAST = "/v2/models/waves/infer"
QUICK: dict[str, Any] = {
    "horizon": h, "input_size": L, "patch": 6, "hidden_size": 16, "steps": 5, "dropout": 0.0,
    "learning_rate": 0.01, "split": "60/20/20", "eval_every": 1, "calendar": "none",
}  # fmt: skip


def waves(num_rows: int = 120, num_series: int = 3) -> pa.Table:
    """Daily waves of several heights around several levels, and a second column."""
    rng = np.random.default_rng(0)
    hours = np.tile(np.arange(num_rows), num_series)
    which = np.repeat(np.arange(num_series), num_rows)
    y = 10 * which + np.sin(hours * (2 * np.pi / 24)) + 0.05 * rng.normal(size=len(hours))
    return long_table(num_rows, num_series, y=y.astype(np.float32))


def everything(num_rows: int = 120) -> pa.Table:
    """Three series with columns of every role, numbers and names, and values that are missing."""
    rng = np.random.default_rng(1)
    table, total = waves(num_rows), 3 * num_rows
    y = table["y"].to_numpy().copy()
    y[rng.random(total) < 0.2] = np.nan
    columns = {
        "sky": np.array(["sun", "rain", "fog"])[rng.integers(0, 3, total)],
        "price": rng.normal(size=total).astype(np.float32) + 7,
        "kind": np.array(["work", "rest"])[np.arange(total) % 24 // 12],
        "size": np.repeat(np.array([4.0, 5.0, 9.0], dtype=np.float32), num_rows),
        "place": np.repeat(["n", "s", "n"], num_rows),
    }
    table = table.set_column(2, "y", pa.array(y))
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    return table


def fit_plain() -> Forecaster:
    """Fits `waves`: the target y, temp known up to now."""
    return Forecaster(**QUICK).fit(waves())


def fit_everything() -> Forecaster:
    """Fits `everything`."""
    roles: dict[str, Any] = {
        "past": ["temp", "sky"],
        "future": ["price", "kind"],
        "static": ["size", "place"],
        "categorical": ["kind", "place", "sky"],
    }
    return Forecaster(**QUICK, **roles).fit(everything())


def save(model: Forecaster, folder: Path) -> Path:
    path = folder / "waves"
    model.save(path)
    return path


def tensor(name: str, values: Any, datatype: str = "FP32", *, nested: bool = False) -> Any:
    """A tensor as JSON; NaN becomes null."""
    array = np.asarray(values, dtype=object if datatype == "BYTES" else np.float32)
    listed = [None if v != v else v for v in array.ravel().tolist()]
    data = np.array(listed, dtype=object).reshape(array.shape).tolist() if nested else listed
    return {"name": name, "shape": list(array.shape), "datatype": datatype, "data": data}


def past_of(table: pa.Table, series: int, end: int, columns: tuple[str, ...]) -> Any:
    """The L rows before row `end` of a series, shape (L, columns)."""
    num_rows = len(table) // 3
    rows = slice(series * num_rows + end - L, series * num_rows + end)
    return np.stack([table[name].to_numpy(zero_copy_only=False)[rows] for name in columns], -1)


def body(values: Any, **parameters: Any) -> dict[str, Any]:
    """A request for windows, shape (B, rows, columns)."""
    return {"inputs": [tensor("past", values)], "parameters": parameters}


def output(answer: httpx.Response, name: str = "forecast") -> Any:
    """An output of an answer as an array."""
    assert answer.status_code == 200, answer.text
    found = next(one for one in answer.json()["outputs"] if one["name"] == name)
    assert found["datatype"] == "FP32"
    return np.array(found["data"], dtype=np.float32).reshape(found["shape"])


def refusal(answer: httpx.Response, status: int = 400) -> str:
    """The error of an answer."""
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"])


def submitted(server: Any) -> int:
    """Windows of requests that were read: they wait, or are computed."""
    scheduler = server.scheduler
    return sum(map(len, scheduler._waiting)) + int(scheduler.num_active)


class HeldModel:
    """A forecaster whose passes wait while `holds` is set, and fail once when `fails` is."""

    def __init__(self, model: WindowForecaster) -> None:
        self._model = model
        self.holds, self.fails = threading.Event(), threading.Event()
        self.sizes: list[int] = []
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run(self, past: Any, *more: Any) -> Any:
        self.sizes.append(len(past))
        self.threads.add(threading.current_thread().name)
        while self.holds.is_set():
            time.sleep(0.001)
        if self.fails.is_set():
            self.fails.clear()
            raise RuntimeError("planted")
        return self._model.run(past, *more)


def rows(first: int, last: int) -> Any:
    """Rows of the first series of `waves`, shape (1, n, 2)."""
    columns = [waves()[name].to_numpy()[first:last] for name in ("y", "temp")]
    return np.stack(columns, -1)[None]


def at(server: Any, last: int) -> Any:
    """The forecast from the window of `rows` that ends before a row."""
    return output(server.client.post(PAST, json=body(rows(last - L, last))))
