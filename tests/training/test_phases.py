"""Where the time of a run goes."""

from __future__ import annotations

import time

import pytest
import torch

from fastlstm.training import phases
from fastlstm.training.phases import PhaseTimes
from linear_task import LinearTask, trainer_of


def test_the_phases_add_up_to_the_time_and_a_slow_one_is_seen() -> None:
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


@pytest.mark.parametrize(("interval", "is_emitted"), [(0.0, True), (1e9, False)])
def test_events_come_at_intervals_and_change_no_weight(
    monkeypatch: pytest.MonkeyPatch, interval: float, is_emitted: bool
) -> None:
    weights = []
    for interval_s in (1e9, interval):
        monkeypatch.setattr(phases, "INTERVAL_S", interval_s)
        task, events = LinearTask(), list[dict[str, object]]()
        trainer = trainer_of(task)
        trainer._emit = events.append
        trainer.fit()
        weights.append(task.weight.detach().clone())
    found = [event for event in events if event["event"] == "phase"]
    assert bool(found) is is_emitted
    assert torch.equal(*weights)
