"""Where the time of a run goes."""

import time
from typing import Any

import pytest

from fastlstm.errors import Stopped
from fastlstm.training import events as run_events
from fastlstm.training.events import PhaseTimes
from linear_task import LinearTask, trainer_of


def test_the_phases_add_up_to_the_time_and_a_slow_one_is_seen():
    trainer = trainer_of(LinearTask())
    times = PhaseTimes(trainer)
    started = time.perf_counter()
    trainer.step(trainer.task.loader.next())
    trainer.progress.add("saving", 0.25)
    time.sleep(0.3)
    found = times.take()
    assert time.perf_counter() - started >= sum(found.values()) >= 0.3
    assert found["checkpoint"] == 0.25
    assert min(found["forward_backward"], found["optimizer"]) > 0.0
    assert times.take()["checkpoint"] == 0.0


def test_the_phases_of_a_run_reach_to_its_end():
    task, events = LinearTask(), list[dict[str, Any]]()
    slow = task.evaluate_blocks

    def evaluate(*args):
        time.sleep(0.1)
        return slow(*args)

    task.evaluate_blocks = evaluate  # type: ignore[method-assign]
    trainer = trainer_of(task, events, eval_every=1000)  # a short run, evaluated at its end only
    trainer.fit()
    found = [event["seconds"] for event in events if event["event"] == "phase"]
    assert sum(seconds["evaluation"] for seconds in found) >= 0.1
    spent = trainer.progress.spent
    assert sum(seconds["evaluation"] for seconds in found) == pytest.approx(spent["evaluations"])
    assert sum(seconds["checkpoint"] for seconds in found) == pytest.approx(spent["saving"])


def test_the_phases_of_a_stopped_run_reach_to_the_stop():
    events, trainer = list[dict[str, Any]](), None
    trainer = trainer_of(
        LinearTask(), events, stop=lambda: trainer.progress.step >= 3, run_path="run"
    )
    with pytest.raises(Stopped):
        trainer.fit()
    (phase,) = (event for event in events if event["event"] == "phase")
    assert phase["step"] == 3
    assert phase["seconds"]["forward_backward"] > 0.0


@pytest.mark.parametrize("interval_s", [0.0, 1e9])
def test_events_come_at_intervals(monkeypatch, interval_s):
    monkeypatch.setattr(run_events, "INTERVAL_S", interval_s)
    events = list[dict[str, object]]()
    trainer = trainer_of(LinearTask(), events)
    trainer.fit()
    found = [event for event in events if event["event"] == "phase"]
    assert len(found) == (1 if interval_s else trainer.progress.step + 1)
