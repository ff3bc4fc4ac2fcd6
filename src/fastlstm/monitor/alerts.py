"""Alerts of one run: a function of its events, the same wherever they are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fastlstm.errors import UsageError, nearest_hint
from fastlstm.monitor.alert_rule import CLEAR
from fastlstm.monitor.alert_rules import RULES
from fastlstm.report.events import Event, number


@dataclass(frozen=True)
class Alert:
    """One alert, or its end.

    Attributes:
        rule: its name.
        severity: "error" or "warning".
        text: what is wrong, with figures.
        advice: what to do.
        is_cleared: the trouble is over.
        elapsed_s: of the run.
    """

    rule: str
    severity: str
    text: str
    advice: str
    is_cleared: bool
    elapsed_s: float


class RunAlerts:
    """Evaluates the rules over the events of a run. Each alert comes once, and once its end.

    Args:
        values: thresholds by the names of rules; rules that are missing are not evaluated.
    """

    def __init__(self, values: Mapping[str, float | None] | None = None) -> None:
        chosen = dict.fromkeys(RULES) if values is None else values
        self._rules = {name: RULES[name](value) for name, value in chosen.items()}
        self._active: dict[str, Alert] = {}
        self._elapsed_s, self.is_started, self.is_ended = 0.0, False, False

    @property
    def active(self) -> list[Alert]:
        """The alerts that are not over."""
        return list(self._active.values())

    def update(self, event: Event) -> list[Alert]:
        """Returns what an event raises or clears."""
        kind = event.get("event")
        if kind == "start":
            self.is_started, self.is_ended = True, False
        self._elapsed_s = number(event, "elapsed_s") or self._elapsed_s
        if kind == "end":
            self.is_ended = True
            return [self._clear(name) for name in list(self._active)]
        if kind == "process" and (self.is_ended or not self.is_started):
            return []
        changes = []
        for name, rule in self._rules.items():
            found = rule.update(event)
            if found == CLEAR:
                changes += [self._clear(name)] if name in self._active else []
            elif found is not None and name not in self._active:
                alert = Alert(name, rule.severity, found, rule.advice, False, self._elapsed_s)
                self._active[name] = alert
                rule.is_active = True
                changes.append(alert)
        return changes

    def _clear(self, name: str) -> Alert:
        alert = self._active.pop(name)
        self._rules[name].is_active = False
        text = f"over: {alert.text}"
        return Alert(name, alert.severity, text, alert.advice, True, self._elapsed_s)


def chosen_rules(texts: Iterable[str]) -> dict[str, float | None]:
    """Returns the rules of `NAME` and `NAME=VALUE`; all where none is named, or by "all".

    Raises:
        UsageError: an unknown name, or a value that is no number above 0.
    """
    chosen: dict[str, float | None] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name == "all" and not equals:
            chosen = {**dict.fromkeys(RULES), **chosen}
            continue
        if name not in RULES:
            known = ", ".join([*RULES, "all"])
            raise UsageError(
                f"--rule {text!r}: there is no rule {name!r}{nearest_hint(name, RULES)};"
                f" rules: {known}"
            )
        chosen[name] = _value(text, value) if equals else None
    return chosen or dict.fromkeys(RULES)


def _value(text: str, value: str) -> float:
    try:
        number_ = float(value)
    except ValueError:
        number_ = math.nan
    if not (math.isfinite(number_) and number_ > 0.0):
        raise UsageError(f"--rule {text!r}: {value!r} is not a number above 0")
    return number_
