"""What every start of a run shares: the end after the report, bars, the time kept for the end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlstm.distributed.world import World
from fastlstm.report.history import read_history
from fastlstm.runs.manifest import metrics_mark
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.ceilings import Ceilings
from fastlstm.training import outputs
from fastlstm.training import session as run_session
from fastlstm.training.checkpoint import Checkpoint
from fastlstm.training.options import TrainingOptions
from fastlstm.training.precision import PrecisionChoice
from fastlstm.training.session import RunSession, Start


class Clock:
    """Stands for `time`: two clocks that are set by hand."""

    def __init__(self):
        self.wall_s = self.own_s = 100.0

    def perf_counter(self):
        return self.wall_s

    def thread_time(self):
        return self.own_s

    process_time = thread_time


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    for module in (outputs, run_session):
        monkeypatch.setattr(module, "time", found)
    return found


def session_in(path, events):
    run = RunDirectory(path / "run")
    run.create()
    return RunSession(run, [events.append])


@pytest.mark.parametrize(("budget_s", "is_said"), [(60.0, True), (100.0, False), (None, False)])
def test_a_set_up_of_more_than_a_tenth_of_a_budget_is_noted(clock, budget_s, is_said):
    session = RunSession(None, [])
    with session.part_of_setup("the plan"):
        clock.wall_s, clock.own_s = clock.wall_s + 7, clock.own_s + 6
    clock.wall_s += 2
    plan: Any = SimpleNamespace(stop_criterion=SimpleNamespace(budget_s=budget_s))
    text = "set-up took 9.0 s of the budget of 60 s: the plan 7.0 s, the rest 2.0 s"
    waited = "this process computed for 6.0 s of it and waited for the rest"
    assert session._notes_on_setup(plan) == ([f"{text}; {waited}"] if is_said else [])
    clock.own_s += 3
    assert session._notes_on_setup(plan) == ([text] if is_said else [])


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_cached_table_that_took_most_of_the_set_up_is_said_to_be_in_the_cache(clock, is_cached):
    session = RunSession(None, [])
    with session.part_of_setup("the table", is_cached=is_cached):
        clock.wall_s, clock.own_s = clock.wall_s + 7, clock.own_s + 7
    clock.wall_s, clock.own_s = clock.wall_s + 2, clock.own_s + 2
    plan: Any = SimpleNamespace(stop_criterion=SimpleNamespace(budget_s=9.0))
    (note,) = session._notes_on_setup(plan)
    text = "; the table is in the cache now, so the next start takes less"
    assert note.endswith(text) is is_cached


def test_the_end_is_shown_when_the_report_is_written(tmp_path, clock):
    events: list[dict[str, Any]] = []
    session = session_in(tmp_path, events)
    with session.files(None, tensorboard=True):
        session.emit({"event": "eval", "step": 5, "loss": 2.0})
        session.emit({"event": "end", "reason": "5 steps", "elapsed_s": 7.0, "spent_s": {"a": 1}})
        assert [event["event"] for event in events] == ["eval"]
        assert "5 steps" in session.run.metrics_path.read_text()
        clock.wall_s += 2.0
    end = events[-1]
    assert (end["event"], end["elapsed_s"], end["spent_s"]) == ("end", 9.0, {"a": 1, "report": 2.0})
    assert Path(end["report"]).read_text().startswith("<!doctype html>")
    assert Path(end["tensorboard"]).is_dir()
    assert end["still_improving"] is True


@pytest.mark.parametrize(
    ("first", "last", "is_so"), [(2.0, 1.9, False), (2.0, 1.2, True), (None, 1.4, True)]
)
def test_a_resumed_run_is_still_improving_beside_accepted_evaluations_before_it(
    tmp_path, first, last, is_so
):
    events: list[dict[str, Any]] = []
    session = session_in(tmp_path, events)
    best = {"loss": 1.0, "bits_per_char": 1.0, "is_accepted": False}
    if first is not None:
        best = {"loss": first, "bits_per_char": first}
    with session.files(None, tensorboard=False):
        session.emit({"event": "eval", "step": 10, **best})
        session.emit({"event": "eval", "step": 20, "loss": 1.5, "bits_per_char": 1.5})
    mark = metrics_mark(session.run.metrics_path)
    found = Checkpoint(session.run.path, 20, {}, {"metrics": mark}, {}, finite=True)
    again = RunSession(session.run, [events.append])
    with again.files(found, tensorboard=False):
        again.emit({"event": "eval", "step": 30, "loss": last, "bits_per_char": last})
        again.emit({"event": "end", "reason": "30 steps", "elapsed_s": 1.0})
    assert events[-1]["still_improving"] is is_so


@pytest.mark.parametrize(("wall_s", "factor"), [(1.0, 1.0), (2.0, 2.0), (50.0, 3.0), (0.5, 1.0)])
def test_a_busy_machine_gets_more_time_for_its_report(tmp_path, clock, monkeypatch, wall_s, factor):
    monkeypatch.setattr("fastlstm.training.session._SCHEDSTAT", tmp_path / "nothing")
    session = session_in(tmp_path, [])
    assert RunSession(None, []).report_s() == 0.0, "without a directory there is no report"
    with session.files(None, tensorboard=False):
        session.mark()
        clock.wall_s, clock.own_s = clock.wall_s + wall_s, clock.own_s + 1.0
        assert session.report_s() == pytest.approx(2.5 * factor)


def test_a_machine_is_not_busy_because_the_run_waits_for_its_threads(tmp_path, clock, monkeypatch):
    counters = tmp_path / "schedstat"
    monkeypatch.setattr("fastlstm.training.session._SCHEDSTAT", counters)
    counters.write_text("1000000000 500000000 7\n")
    session = session_in(tmp_path, [])
    with session.files(None, tensorboard=False):
        session.mark()
        clock.wall_s += 60.0
        for waited_s, factor in ((0.5, 1.0), (1.5, 2.0), (9.0, 3.0)):
            counters.write_text(f"2000000000 {round(waited_s * 1e9)} 9\n")
            assert session.report_s() == pytest.approx(2.5 * factor)


def test_long_work_shows_its_progress(tmp_path, clock):
    events: list[dict[str, Any]] = []
    show = session_in(tmp_path, events).watch("evaluating", "windows")
    for done in range(1, 11):
        clock.wall_s += 0.2
        show(done, 10)
    assert [event["done"] for event in events] == [3, 6, 9, 10]
    assert {(event["doing"], event["unit"], event["total"]) for event in events} == {
        ("evaluating", "windows", 10)
    }
    show(10, 10)  # a round that is over at once shows nothing
    assert len(events) == 4


@pytest.mark.parametrize(("threads", "is_noted"), [(3, True), (2, False)])
def test_more_threads_than_cores_are_noted(tmp_path, monkeypatch, threads, is_noted):
    monkeypatch.setattr(run_session.hardware, "cores", lambda: 2)
    monkeypatch.setattr(run_session.torch, "set_num_threads", lambda _: None)
    events: list[dict[str, Any]] = []
    session = session_in(tmp_path, events)
    session.set_threads(threads)
    noted = "3 threads share the 2 cores of this process, which is slower than one thread for each"
    assert [event["text"] for event in events] == ([noted] if is_noted else [])
    with session.files(None, tensorboard=False):  # what came before they were open is stored, too
        session.emit({"event": "start", "resumed_from": None})
    stored = read_history(session.run.metrics_path)
    assert [note["text"] for note in stored.notes] == ([noted] if is_noted else [])
    assert stored.start != {}


@pytest.mark.parametrize(("forced", "is_said"), [("scalar", True), ("avx2", False), ("", False)])
def test_a_ceiling_is_marked_as_not_limited_by_the_instruction_set(forced, is_said, monkeypatch):
    """It is measured by torch, which does not know FASTLSTM_ISA."""
    monkeypatch.setenv("FASTLSTM_ISA", forced)
    monkeypatch.setattr(run_session.hardware, "widest_isa", lambda: "avx2")
    found = Ceilings(120.0, "torch.mm", 20.0)
    monkeypatch.setattr(run_session, "measured_ceilings", lambda *_, **__: found)
    how = str(RunSession(None, []).ceiling("fp32")["ceiling_how"])
    assert how.startswith("torch.mm, 2048x512x2048 in fp32, ")
    assert how.endswith(", not limited by FASTLSTM_ISA") == is_said


@pytest.mark.parametrize(("size", "is_recalled"), [(1, True), (4, False)])
def test_the_ceiling_is_the_sum_of_all_processes(size, is_recalled, monkeypatch):
    found = Ceilings(120.0, "torch.mm", 20.0, is_recalled=is_recalled)
    monkeypatch.setattr(run_session, "measured_ceilings", lambda *_, **__: found)
    session = RunSession(None, [])
    session.world = World(0, size)
    ceiling = session.ceiling("fp32")
    assert ceiling["ceiling_gflops"] == 120.0 * size
    told = "1 thread, measured earlier" if is_recalled else "1 thread in each of 4 processes"
    assert str(ceiling["ceiling_how"]).endswith(told)
    assert session.notes == []


@pytest.mark.parametrize(
    ("options", "size", "rate"),
    [
        ({"sync_every": 25}, 4, 0.02),
        ({"sync_every": 25}, 1, 0.01),
        ({}, 4, 0.01),
        ({"sync_every": 25, "optimizer": "sgd"}, 4, 1.0),
        ({"sync_every": 25, "learning_rate": 0.3}, 4, 0.3),
    ],
)
def test_local_steps_have_a_higher_learning_rate_by_default(options, size, rate):
    session = RunSession(None, [])
    session.world = World(0, size)
    given = TrainingOptions(**{"optimizer": "muon", **options})
    chosen = session.with_rate(given, {"muon": 0.01, "sgd": 1.0})
    assert chosen.learning_rate == pytest.approx(rate)
    assert len(session.notes) == (rate == 0.02)


@pytest.mark.parametrize(
    ("why", "is_given", "is_resumed", "told"),
    [
        ("as asked", True, True, "as asked"),
        ("as asked", False, True, "as in the first start"),
        ("as asked", False, False, "the default"),
        ("2.0x faster here", False, True, "2.0x faster here"),
    ],
)
def test_the_reason_of_a_precision_is_asked_if_this_start_asks(why, is_given, is_resumed, told):
    checkpoint: Any = object() if is_resumed else None
    given = {"precision"} if is_given else set[str]()
    start = Start(TrainingOptions(), TrainingOptions(), torch.device("cpu"), checkpoint, given)
    assert start.why(PrecisionChoice("bf16", why)) == told
