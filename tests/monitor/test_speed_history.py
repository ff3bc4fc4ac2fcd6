from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastlstm.monitor.run_summary import RunSummary
from fastlstm.monitor.speed_history import speed_history


def run_of(write_run: Any, name: str, days: float, **start: Any) -> RunSummary:
    path: Path = write_run(name, machine="<b>cpu</b>", **start)
    event = {"event": "machine", "time": 1.7e9 + 86400 * days, "elapsed_s": 1.0}
    with open(path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")
    run = RunSummary(path)
    run.update()
    return run


def test_runs_that_are_alike_are_one_line(write_run: Any) -> None:
    runs = [run_of(write_run, f"a{at}", 2.0 * at) for at in range(3)]
    assert speed_history(runs[:2]) == ""
    assert speed_history([*runs[:2], run_of(write_run, "b", 1.0, batch_size=7)]) == ""
    html = speed_history([*runs, run_of(write_run, "c", 1.0, batch_size=7)])
    assert html.count("<polyline") == 1
    assert html.count("<circle") == 3
    assert "3 runs, &lt;b&gt;cpu" in html


def test_dates_that_cannot_be_are_harmless(write_run: Any) -> None:
    days = (1e300, -1e300, 0.0)
    speed_history([run_of(write_run, f"a{at}", day) for at, day in enumerate(days)])
