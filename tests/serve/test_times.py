"""Seconds by phase: those of the engine's thread add up, texts count as often as there are."""

from __future__ import annotations

import asyncio
import time

import pytest

from fastlstm.serve import times
from fastlstm.serve.times import EngineTimes, HttpTimes, TimedLoop


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(times.time, "monotonic", lambda: self.now_s)


def test_the_phases_of_the_engine_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    engine = EngineTimes()
    clock.now_s += 1.0
    engine.enter("output")
    clock.now_s += 2.0
    engine.enter("model")
    clock.now_s += 4.0
    thread, texts = engine.read()
    assert thread == {"model": 4.0, "output": 2.0, "blocked": 0.0, "idle": 1.0}
    assert sum(texts.values()) == 0.0  # there was none


def test_texts_count_as_often_as_there_are_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    engine = EngineTimes()
    engine.enter("model")
    engine.count(3, 2)  # two are held up by their clients
    clock.now_s += 1.0
    engine.enter("output")
    clock.now_s += 0.5
    engine.count(0, 5)
    engine.enter("blocked")
    clock.now_s += 1.0
    engine.add_queue(7.0)
    assert engine.read()[1] == {"queue": 7.0, "model": 3.0, "output": 1.5, "client": 8.0}


def test_requests_count_while_they_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    http = HttpTimes()
    http.texts.change(2)
    clock.now_s += 1.0
    http.texts.change(-1)
    clock.now_s += 3.0
    assert http.texts.seconds == 5.0
    http.texts.change(-1)
    clock.now_s += 9.0
    assert http.texts.seconds == 5.0
    assert http.read() == dict.fromkeys(times.HTTP_PHASES, 0.0)  # of no measured loop


def test_an_event_loop_knows_how_long_it_waited() -> None:
    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, TimedLoop)

        async def work() -> None:
            await asyncio.sleep(0.2)
            end_s = time.monotonic() + 0.1
            while time.monotonic() < end_s:
                pass

        http = HttpTimes()
        http.idle = loop.selector
        runner.run(work())
        found = http.read()
    assert found["idle"] >= 0.2 * 0.9
    assert found["other"] >= 0.1 * 0.9


def test_a_send_that_is_not_over_yet_counts_and_only_since_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    http = HttpTimes()
    http.sends.change(1)
    clock.now_s += 30.0
    before_s = http.sends.seconds
    clock.now_s += 2.0
    http.sends.change(-1)
    clock.now_s += 1.0
    assert (before_s, http.sends.seconds - before_s) == (30.0, 2.0)
