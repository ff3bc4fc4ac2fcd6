"""Alerts of a run: each rule by planted trouble, and the command that gets them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastlstm
from fastlstm.training import alerts
from fastlstm.training.alerts import Rule, not_finite, slip
from fastlstm.training.graphed_step import _SEEING
from fastlstm.training.loggers import LOGGERS
from linear_task import LinearTask, of_kind, trainer_of

Events = list[dict[str, Any]]
RULES: dict[str, Callable[[], Rule]] = {"nan": not_finite, "slip": slip}
PLANTED_S, NUM_S = 200, 400
NAME = "a'; touch planted; $(touch planted)\x1b[2J\0"


def stream(plant="", until=NUM_S):
    """Returns a step a second; trouble from 200 s on."""
    rng, events = random.Random(1), Events()
    for at in range(NUM_S):
        found = plant if PLANTED_S <= at < until else ""
        loss = 2.0 - at / NUM_S + rng.gauss(0.0, 0.01)
        total = 600.0 if found == "slip" else 400.0
        step = {"step": at, "elapsed_s": float(at), "eta_s": total - at + rng.gauss(0.0, 5.0)}
        if found == "nan" and at % 10 == 0:
            events.append({"event": "skip", "step": at, "what": "non-finite", "tensor": "loss"})
        events.append({"event": "step", **step, "loss": loss})
    return events


def found_by(rule, events):
    update = RULES[rule]()
    return [text for event in events if (text := update(event)) is not None]


@pytest.mark.parametrize("rule", RULES)
def test_a_healthy_run_raises_nothing(rule):
    assert set(found_by(rule, stream())) <= {""}


@pytest.mark.parametrize("rule", RULES)
def test_planted_trouble_is_found_and_over(rule):
    for other in RULES:
        texts = found_by(other, stream(rule, 300))
        assert any(texts) == (other == rule)
    texts = found_by(rule, stream(rule, 300))
    first = next(text for text in texts if text)
    assert any(letter.isdigit() for letter in first)
    assert texts[-1] == ""


def test_values_of_the_wrong_kind_raise_nothing():
    kinds = ("start", "step", "eval", "machine", "end", 7, None)
    keys = ("step", "loss", "elapsed_s", "eta_s")
    for value in (None, "x", [], {}, -1, 10**400, float("nan"), True):
        events = [{"event": kind, **dict.fromkeys(keys, value)} for kind in kinds] * 30
        assert not any(found_by("slip", events))


class Emitting(fastlstm.Callback):
    """Emits events at the begin of a run; `then` is called after each."""

    def __init__(self, events, then=lambda: None):
        self.events, self.then = events, then

    def on_begin(self, trainer):
        for event in self.events:
            trainer.emit(event)
            self.then()


SKIP = {"event": "skip", "step": 7, "what": "non-finite", "tensor": NAME}


def told(command, events, then=lambda: None):
    """Returns the warnings of a short run that emits events."""
    found = Events()
    given = [fastlstm.Alerts(command), Emitting(events, then)]
    assert trainer_of(LinearTask(), found, callbacks=given, run_path=NAME).fit().steps == 10
    return [event for event in of_kind(found, "message") if event["level"] == "warning"]


def test_an_alert_is_told_once_until_it_is_over():
    good = [{"event": "step", "step": at, "loss": 1.0} for at in range(30)]
    (warning,) = told(None, [SKIP, SKIP])
    assert warning["text"].startswith("alert (nan): step 7: non-finite in a'; touch")
    assert "; lower the learning rate" in warning["text"]
    again = [event["text"] for event in told(None, [SKIP, SKIP, *good, SKIP])]
    assert sum(text.startswith("alert (nan)") for text in again) == 2


def test_the_command_gets_the_alert_and_no_text_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_API_KEY", "hush-hush-0123456789")
    event = {**SKIP, "action": "hush-hush-0123456789"}
    names = ("RULE", "STEP", "RUN", "ADVICE", "TEXT")
    shown = " ".join(f'"$FASTLSTM_ALERT_{name}"' for name in names)
    told(f"printf '%s\\n' {shown} > told", [event])
    lines = (tmp_path / "told").read_text().splitlines()
    assert lines[:3] == ["nan", "7", NAME.replace("\0", "")]
    assert lines[3].startswith("lower the learning rate")
    assert lines[4].startswith("step 7: non-finite in a'; touch planted")
    assert lines[4].endswith("***")
    assert os.listdir() == ["told"]


def test_a_command_that_fails_is_told():
    assert told("exit 7", [SKIP])[-1]["text"] == (
        "the command of an alert ended with exit status 7"
    )


def test_a_command_that_takes_too_long_is_ended_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(alerts, "_COMMAND_S", 0.3)
    monkeypatch.chdir(tmp_path)
    told("sh -c 'echo $$ > pid.new; mv pid.new pid; sleep 9; touch lived' & wait", [SKIP])
    assert not Path("lived").exists()
    state = Path("/proc", Path("pid").read_text().strip(), "stat")
    for _ in range(200):  # it was killed; the kernel ends it when it gets a core
        try:
            if state.read_text().split()[2] in "ZX":
                return
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail("the command goes on")


def test_a_stall_runs_the_command_while_it_lasts(tmp_path, monkeypatch):
    monkeypatch.setattr(alerts, "_STALL_S", 0.02)
    monkeypatch.setattr(alerts, "_STALL_TIMES", 2.0)
    monkeypatch.setattr(alerts, "_LOOK_S", 0.01)
    monkeypatch.chdir(tmp_path)
    ends = time.monotonic() + 60

    def stall():
        while not Path("told").exists() and time.monotonic() < ends:
            time.sleep(0.01)

    step = {"event": "step", "step": 1, "loss": 1.0}
    told('printf "%s" "$FASTLSTM_ALERT_TEXT" > told.new; mv told.new told', [step], stall)
    assert Path("told").read_text().startswith("no event for ")


def test_alerts_leave_the_steps_alone():
    """A hook inside of a step would keep a GPU from running it as one graph."""
    for kind in (fastlstm.Alerts, *LOGGERS.values()):
        assert not [h for h in _SEEING if getattr(kind, h) != getattr(fastlstm.Callback, h)]
