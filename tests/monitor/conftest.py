from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recorded_run import START, STEP

Write = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> Write:
    """Returns a function that writes a run of 10 evaluations, each 100 steps and 10 s apart."""

    def write(name: str, *, best: float = 2.0, seconds: float = 10.0, is_ended: bool = True,
              **start: Any) -> Path:  # fmt: skip
        run = tmp_path / name
        run.mkdir(parents=True)
        events: list[dict[str, Any]] = [{**START, "resumed_from": None, **start}]
        for at in range(1, 11):
            same = {"step": 100 * at, "elapsed_s": seconds * at}
            figure = best + (10 - at) / 10
            left = (10 - at) * seconds
            one = {"units": 1000 * at, "bits_per_char": figure, "progress": at / 10, "eta_s": left}
            events.append({**STEP, **same, **one})
            events.append({"event": "eval", "split": "valid", **same, "bits_per_char": figure})
        if is_ended:
            end = {"units": 10_000, "train_s": 5 * seconds, "elapsed_s": 10 * seconds}
            events.append({"event": "end", "reason": "budget used", "step": 1000, **end})
        lines = [json.dumps(event) + "\n" for event in events]
        (run / "metrics.jsonl").write_text("".join(lines), "utf-8")
        return run

    return write
