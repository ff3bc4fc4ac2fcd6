from __future__ import annotations

import json
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fastlstm.errors import RunDirectoryError
from fastlstm.monitor import run_summary
from fastlstm.monitor.run_summary import (
    MAX_BINS,
    MAX_POINTS,
    Curve,
    MachineUse,
    RunIndex,
    RunSummary,
)
from fastlstm.report.events import Event
from fastlstm.runs.run_directory import RunDirectory, is_locked
from recorded_run import add_event


def read(run: Path) -> RunSummary:
    summary = RunSummary(run)
    summary.update()
    return summary


def test_a_finished_run(write_run: Any) -> None:
    run = read(write_run("a"))
    assert (run.state, run.best, run.seconds, run.rate) == ("finished", 2.0, 100.0, 200.0)
    assert run.slip == 0.0
    assert run.best_until(55.0, "seconds") == pytest.approx(2.5)
    assert run.best_until(3000.0, "chars") == pytest.approx(2.7)
    assert (run.reach("seconds"), run.reach("chars")) == (100.0, 10_000.0)
    assert not run.update()


def test_running_dead_and_stopped(write_run: Any) -> None:
    path = write_run("a", is_ended=False)
    run = read(path)
    assert run.state == "dead"
    with RunDirectory(path).lock():
        assert run.state == "running"
        assert is_locked(path / ".lock")
    assert run.state == "dead"
    add_event(path, event="end", reason="stopped by signal")
    run.update()
    assert run.state == "stopped"


def test_a_later_end_than_predicted_is_a_slip(write_run: Any) -> None:
    path = write_run("a", is_ended=False)
    run = read(path)
    add_event(path, event="step", step=1001, elapsed_s=110.0, eta_s=40.0)
    run.update()
    assert run.slip == pytest.approx(0.5)


def test_an_evaluation_before_the_first_line_of_progress_has_its_units(tmp_path: Path) -> None:
    add_event(tmp_path, event="eval", step=5, elapsed_s=1.0, bits_per_char=4.0)
    add_event(tmp_path, event="step", step=20, elapsed_s=2.0, bits_per_char=3.0, units=2000)
    add_event(tmp_path, event="eval", step=30, elapsed_s=3.0, bits_per_char=2.0)
    assert list(read(tmp_path).validation.units) == [500.0, 3000.0]


def test_the_steps_that_a_resumed_run_repeats_are_dropped(write_run: Any) -> None:
    path = write_run("a", is_ended=False)
    run = read(path)
    add_event(path, event="start", resumed_from=300)
    run.update()
    assert list(run.validation.steps) == [100, 200, 300]
    add_event(path, event="eval", split="valid", step=400, elapsed_s=41.0, bits_per_char=2.65)
    run.update()
    assert list(run.validation.steps) == [100, 200, 300, 400]
    assert run.best_until(40.0, "seconds") == pytest.approx(2.7)
    assert run.best_until(-1.0, "seconds") is None


def test_a_cut_file_is_summarised_again(write_run: Any) -> None:
    path = write_run("a")
    run = read(path)
    os.truncate(path / "metrics.jsonl", 3000)
    assert run.update()
    assert run.end is None
    assert len(run.validation) < 10


def long_run(run: Path, steps: int) -> None:
    """Adds steps, and an evaluation after each 50 of them, of which that at 1250 is the best."""
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        for step in range(1001, steps):
            event = {"event": "step", "step": step, "elapsed_s": step, "bits_per_char": 1.5}
            more = {"units": step * step, "progress": step / 100_000, "eta_s": 2 * step}
            file.write(json.dumps({**event, **more}) + "\n")
            if step % 50 == 0:
                bits = 0.5 if step == 1250 else 1.4
                event |= {"event": "eval", "bits_per_char": bits}
                file.write(json.dumps(event) + "\n")


def test_a_long_run_read_at_once_is_as_one_read_line_by_line(
    write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run("a", is_ended=False)
    (path / "metrics.jsonl").write_text("", "utf-8")
    long_run(path, 4000)
    add_event(path, event="skip", what="loss is NaN")
    decoded, decode = list[bytes](), run_summary.decode_event
    monkeypatch.setattr(run_summary, "decode_event", lambda x: decoded.append(x) or decode(x))
    run = read(path)
    assert len(decoded) < 1400  # of which 1000 until the end is predicted
    monkeypatch.setattr(run_summary, "_STEP", (b"none",))
    slow = read(path)
    assert len(decoded) > 3300
    shown = ("best", "last", "first_end_s", "num_warnings", "seconds", "slip", "rate")
    assert {n: getattr(run, n) for n in shown} == {n: getattr(slow, n) for n in shown}
    assert run.validation.columns == slow.validation.columns
    assert run.best_until(1300.0, "seconds") == 0.5
    assert run.first_end_s == 6000.0
    assert run.training.steps[-1] == 3999
    assert MAX_POINTS <= len(run.training) <= 2 * MAX_POINTS


def test_values_of_other_kinds_are_ignored(tmp_path: Path) -> None:
    values: tuple[Any, ...] = ("1", None, [], {}, True, 10**400)
    for value in values:
        figures = dict.fromkeys(("elapsed_s", "bits_per_char", "eta_s"), value)
        add_event(tmp_path, event="step", step=value, **figures)
        add_event(tmp_path, event="eval", split="valid", step=1, **figures)
        about = dict.fromkeys(("vocab", "source", "resumed_from"), value)
        add_event(tmp_path, event="start", task="text", **about)
        add_event(tmp_path, event="end", reason=value, units=value, train_s=value, best_loss=value)
    run = read(tmp_path)
    figures = (run.best, run.rate, run.slip, run.units_per_char, run.reach("chars"))
    assert (figures, run.seconds, run.state) == ((None,) * 5, 0.0, "finished")


def test_runs_are_found_at_any_depth(write_run: Any, tmp_path: Path) -> None:
    for name in ("a", "deep/er/b", "a/checkpoint-5", ".hidden"):
        write_run(name)
    index = RunIndex([tmp_path, tmp_path / "a"])
    index.update()
    assert [path.name for path in index.runs] == ["a", "b"]
    with pytest.raises(RunDirectoryError, match="no such directory"):
        RunIndex([tmp_path / "none"])


def test_runs_appear_and_go(write_run: Any, tmp_path: Path) -> None:
    write_run("a")
    index = RunIndex([tmp_path])
    assert index.update()
    assert not index.update()
    kept = index.runs[tmp_path / "a"]
    (write_run("b") / "metrics.jsonl").rename(tmp_path / "a" / "old")
    write_run("c")
    index._searched_at -= 60.0
    assert index.update()
    assert [path.name for path in index.runs] == ["a", "c"]
    assert index.runs[tmp_path / "a"] is kept


def curve_of(values: list[float]) -> Curve:
    curve = Curve()
    for at, value in enumerate(values):
        curve.add(at, 2.0 * at, 3.0 * at, value)
    return curve


@pytest.mark.parametrize("count", [1, 2, 240, 241, 1000, 5003])
def test_a_curve_is_short_and_keeps_newest_and_lowest(count: int) -> None:
    rng = random.Random(count)
    values = [rng.random() for _ in range(count)]
    curve = curve_of(values)
    assert len(curve) <= 2 * MAX_POINTS
    assert len(curve) >= min(count, MAX_POINTS)
    assert curve.steps[-1] == count - 1
    assert min(curve.values) == min(values)
    assert list(curve.steps) == sorted(set(curve.steps))


def test_points_are_as_dense_at_the_beginning_as_at_the_end() -> None:
    curve = curve_of([1.0] * 5000)
    gaps = [after - before for before, after in pairwise(curve.steps)]
    assert max(gaps) <= 2 * 5000 / MAX_POINTS


def machine_event(at: float, others: float = 0.0, own: float = 1.0) -> Event:
    shares = {"others_share": others, "steal_share": 0.0}
    return {"event": "machine", "elapsed_s": at, "cores": 2, "own_cores": own, **shares}


def test_a_long_run_has_few_bins_with_the_means() -> None:
    use = MachineUse()
    for at in range(0, 40_000, 10):
        use.add(machine_event(at, others=0.5 if 20_000 <= at < 30_000 else 0.0))
    bins = use.bins()
    assert MAX_BINS / 2 <= len(bins) <= MAX_BINS
    assert sum(others > 0.25 for *_, others in bins) == pytest.approx(len(bins) / 4, abs=1)
    assert all(own == 0.5 for _, own, _ in bins)
    assert use.mean_others == pytest.approx(0.125)
    use.cut_after(15_000)
    assert use.mean_others == 0.0
    assert use.bins()[-1][0] == pytest.approx(15_000)


def test_values_that_cannot_be_are_left_out() -> None:
    use = MachineUse()
    for value in (None, "x", [], -1.0, 1e300, float("inf"), True):
        use.add(machine_event(value))  # type: ignore[arg-type]
        use.add({"event": "machine", "elapsed_s": 5.0, "others_share": value, "cores": value})
    assert all(0.0 <= own <= 1.0 and 0.0 <= others <= 1.0 for _, own, others in use.bins())
    assert use.drawing()
    use.cut_after(0.0)
    assert use.bins() == []
    assert use.drawing() == ""
