"""Each rule on events with its trouble planted, and on the same without it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fastlstm.errors import UsageError
from fastlstm.monitor.alert_rules import RULES
from fastlstm.monitor.alerts import Alert, RunAlerts, chosen_rules
from fastlstm.report.events import Event

PLANTED_S = 150


def stream(rule: str | None, seconds: int = 400) -> list[Event]:
    """Returns a run of one `step` and one `process` event a second, an evaluation every 20 s."""
    rng, events = random.Random(0), list[Event]()
    events.append({"event": "start"})
    for now in range(1, seconds):
        plant = PLANTED[rule] if rule is not None and now > PLANTED_S else {}
        total = 1.3 * seconds if rule == "eta" and plant else seconds
        steps: Event = {
            "event": "step", "step": now, "loss": 2.0 + rng.gauss(0.0, 0.02) - now / 1000,
            "units_per_s": rng.gauss(1000.0, 20.0), "input_wait_share": 0.01,
            "elapsed_s": float(now), "eta_s": float(total - now),
        }  # fmt: skip
        process: Event = {
            "event": "process", "time": 1e9 + now, "is_locked": True, "silent_s": 0.5,
            "state": "R", "cpu_share": 1.9, "others_share": 0.02,
            "waiting_threads": 0.05, "seconds": 1.0,
            "anonymous_bytes": 5e8 + rng.gauss(0.0, 1e6), "available_bytes": 2e10,
            "disk_free_bytes": 5e10,
        }  # fmt: skip
        late = max(now - PLANTED_S, 0)
        events.append(_with(steps, plant.get("step", {}), late))
        events.append(_with(process, plant.get("process", {}), late))
        if now % 20 == 0:
            loss = 1.9 + (0.002 * late if plant.get("eval") else -now / 1000)
            events.append({"event": "eval", "step": now, "loss": loss, "elapsed_s": float(now)})
        events += plant.get("also", [])
    return events


def _with(
    event: Event, plant: dict[str, float | bool | Callable[[int], float]], late: int
) -> Event:
    return event | {k: v(late) if callable(v) else v for k, v in plant.items()}


PLANTED: dict[str, Event] = {
    "nan": {"also": [{"event": "skip", "step": 1, "what": "loss", "tensor": "layers.0"}]},
    "spike": {"step": {"loss": 3.0}},
    "input": {"step": {"input_wait_share": 0.5}},
    "eta": {"step": {}, "process": {"others_share": 0.9}},
    "speed": {"step": {"units_per_s": 700.0}},
    "cores": {"process": {"waiting_threads": 0.6, "others_share": 0.5}},
    "memory": {"process": {"anonymous_bytes": lambda late: 5e8 + 2e7 * late}},
    "disk": {"process": {"disk_free_bytes": 5e7}},
    "overfitting": {"eval": True},
    "dead": {"process": {"is_locked": False}},
    "hang": {"process": {"silent_s": lambda late: float(late), "cpu_share": 0.0}},
}


def alerts_of(events: list[Event], rule: str | None = None) -> list[Alert]:
    alerts = RunAlerts(None if rule is None else {rule: None})
    return [change for event in events for change in alerts.update(event)]


@pytest.mark.parametrize("rule", RULES)
def test_what_is_planted_raises_its_alert_once(rule: str) -> None:
    raised = alerts_of(stream(rule))
    assert [alert.rule for alert in raised if not alert.is_cleared] == [rule]
    assert raised[0].elapsed_s > PLANTED_S
    assert raised[0].advice
    assert any(letter.isdigit() for letter in raised[0].text) or rule == "dead"


def test_a_healthy_run_raises_none() -> None:
    assert alerts_of(stream(None, 4000)) == []


@pytest.mark.parametrize(
    "rule", ["nan", "spike", "input", "speed", "cores", "disk", "dead", "hang"]
)
def test_an_alert_is_over_when_its_trouble_is(rule: str) -> None:
    sick, healthy = stream(rule, 220), stream(None, 400)
    rest = [event for event in healthy if event.get("elapsed_s", event.get("time", 0)) % 1e9 >= 220]
    assert [alert.is_cleared for alert in alerts_of([*sick, *rest], rule)] == [False, True]


def test_a_busy_machine_explains_a_slow_run() -> None:
    events = [e | {"others_share": 0.4} if e["event"] == "process" else e for e in stream("speed")]
    assert alerts_of(events) == []


def test_others_are_named_where_they_slow_a_run_down() -> None:
    busy = [e | {"others_share": 0.6} if e["event"] == "process" else e for e in stream("eta")]
    (alert,) = alerts_of(busy)
    assert alert.rule == "eta"
    assert "others use 60 % of the machine" in alert.text
    assert "others slow the run down" in alert.advice
    quiet = [e | {"others_share": 0.02} if e["event"] == "process" else e for e in stream("eta")]
    (alert,) = alerts_of(quiet)
    assert "others use 2 % of the machine" in alert.text
    assert "fastlstm profile" in alert.advice
    (alert,) = alerts_of(stream("speed"))
    assert "others use 2 % of the machine" in alert.text


def test_a_run_that_waits_for_cores_is_told_how_many_threads_have_one() -> None:
    events = [{**e, "threads": 2} if e["event"] == "start" else e for e in stream("cores")]
    (alert,) = alerts_of(events, "cores")
    assert alert.text == "0.3 of 2 threads wait for a core; others use 20 % of the machine"
    assert alert.advice.endswith("continue with --resume --threads 1")
    machine = {"event": "machine", "time": 1.0, "seconds": 10.0, "waiting_threads": 0.6}
    (alert,) = alerts_of([{"event": "start", "threads": 1}, machine], "cores")  # no watcher
    assert "--threads" not in alert.advice


def test_waits_that_the_load_of_others_explains_are_no_stall() -> None:
    def events(wait: float) -> list[Event]:
        shares = {"step": {"input_wait_share": wait}, "process": {"others_share": 0.4}}
        return [e | shares.get(e["event"], {}) for e in stream(None)]

    assert alerts_of(events(0.5)) == []
    (alert,) = alerts_of(events(0.9))
    assert alert.rule == "input"
    assert "others use 40 % of the machine" in alert.text


def test_a_spike_is_found_while_the_loss_still_falls_fast() -> None:
    steps = [{"event": "step", "step": at, "loss": 3.0 * 0.97**at + 0.5} for at in range(60)]
    assert alerts_of([*steps], "spike") == []
    up = [{"event": "step", "step": 60 + at, "loss": 1.8} for at in range(3)]
    assert [alert.rule for alert in alerts_of([*steps, *up], "spike")] == ["spike"]


def test_memory_that_fills_in_minutes_is_told_within_ten_seconds() -> None:
    def memory(now: int, grown: float) -> Event:
        used = 5e8 + 1e8 * max(now - grown, 0.0)
        left = {"available_bytes": 2e10 - used, "anonymous_bytes": used}
        return {"event": "process", "time": 1e9 + now, "is_locked": True, **left}

    events = [{"event": "start"}, *(memory(now, 100) for now in range(110))]
    assert [alert.rule for alert in alerts_of(events, "memory")] == ["memory"]


def test_a_process_that_grows_in_its_first_seconds_is_no_leak() -> None:
    def memory(now: int) -> Event:
        used = 5e8 + 7.5e6 * min(now, 20)
        left = {"available_bytes": 2.3e10, "anonymous_bytes": used}
        return {"event": "process", "time": 1e9 + now, "is_locked": True, **left}

    assert alerts_of([{"event": "start"}, *map(memory, range(400))], "memory") == []


def test_noise_of_hundreds_of_evaluations_is_no_overfitting() -> None:
    rng, events = random.Random(1), list[Event]()
    for at in range(4000):
        events.append({"event": "step", "loss": 1.0 * (1.0 - at / 40_000)})
        if at % 5 == 0:
            events.append({"event": "eval", "loss": rng.gauss(1.0, 0.004)})
    assert alerts_of(events, "overfitting") == []


def test_a_run_that_gets_no_processor_time_for_seconds_is_not_hung() -> None:
    def silent(seconds: int) -> list[Event]:
        own = {"is_locked": True, "cpu_share": 0.0, "others_share": 0.9, "state": "S"}
        looks = [{"event": "process", "time": 1e9 + at, "silent_s": at, **own} for at in range(99)]
        return [{"event": "start"}, *looks[:seconds]]

    assert alerts_of(silent(25), "hang") == []
    assert [alert.rule for alert in alerts_of(silent(60), "hang")] == ["hang"]


def test_a_run_that_has_ended_is_not_dead() -> None:
    events = [*stream(None, 30), {"event": "end"}]
    gone = {"event": "process", "is_locked": False, "silent_s": 900.0}
    assert alerts_of([*events, gone, gone, gone]) == []


def test_values_of_the_wrong_kind_raise_nothing() -> None:
    kinds = ("start", "step", "eval", "skip", "machine", "process", "checkpoint", "end", 7, None)
    odd = (None, "x", [], {}, -1, 10**400, float("nan"), True)
    keys = {key for event in stream(None, 30) for key in event} - {"event"}
    for value in odd:
        alerts_of([{"event": kind, **dict.fromkeys(keys, value)} for kind in kinds] * 30)


def test_rules_are_chosen_by_name() -> None:
    assert chosen_rules([]) == dict.fromkeys(RULES)
    assert chosen_rules(["eta=0.5", "nan"]) == {"eta": 0.5, "nan": None}
    assert chosen_rules(["all", "eta=0.5"])["eta"] == 0.5
    with pytest.raises(UsageError, match=r"there is no rule 'spikes' .did you mean 'spike'"):
        chosen_rules(["spikes"])
    with pytest.raises(UsageError, match="'-1' is not a number above 0"):
        chosen_rules(["eta=-1"])
