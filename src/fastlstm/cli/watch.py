"""`fastlstm watch DIR…`: alerts of runs while they train."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.options import json_option
from fastlstm.cli.output import print_json, say
from fastlstm.cli.parser import parse
from fastlstm.errors import EXIT_OK, UsageError
from fastlstm.report.markup import visible

if TYPE_CHECKING:
    from fastlstm.monitor.alert_delivery import AlertDelivery
    from fastlstm.monitor.alerts import Alert
    from fastlstm.monitor.watcher import Watcher

EXIT_ALERT = 3
_EVERY_S, _LOOKS_ONCE = 1.0, 3
_DELIVERY_S, _INTERRUPTED_S = 60.0, 3.0
"""How long alerts may take to be delivered at the end, and after Ctrl-C or SIGTERM."""

COMMAND = Command(
    verb="watch",
    summary="Follow runs while they train, and say when something is wrong with one.",
    positionals=(Positional("DIR", "a run directory, or a directory of them", is_many=True),),
    options=(
        Option(
            "rule", str, (), "only this rule, or with another threshold; all: every rule",
            is_repeatable=True, value="NAME[=VALUE]",
        ),
        Option("exec", str, None, "run a command for each alert (see docs/watch.md)",
               value="CMD"),
        Option("webhook", str, None, "post each alert to this address as JSON",
               value="URL"),
        Option("once", bool, False, "look once and end", is_switch=True),
        json_option("one JSON object per alert"),
    ),
    examples=(
        "fastlstm watch runs",
        "fastlstm watch runs --exec 'mail -s \"$FASTLSTM_ALERT_TEXT\" me'",
        "fastlstm watch runs/book --once --rule dead --rule eta=0.5",
    ),
    other="Exit status: 0 no alert is active at the end, 3 one is.",
)  # fmt: skip


def run(argv: list[str]) -> int:
    """Prints alerts until every run that was given has ended, or until Ctrl-C."""
    parsed = parse(COMMAND, argv)
    paths = [Path(text) for text in parsed.positionals]
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"{path} is not a directory, expected a run or a directory of runs")

    from fastlstm.monitor.alert_delivery import AlertDelivery
    from fastlstm.monitor.alerts import chosen_rules
    from fastlstm.monitor.watcher import Watcher
    from fastlstm.training.signals import ended_like_ctrl_c

    watcher = Watcher(paths, chosen_rules(parsed["rule"]))
    delivery, wait_s = AlertDelivery(parsed["exec"], parsed["webhook"], say), _DELIVERY_S
    try:
        with ended_like_ctrl_c():
            _follow(watcher, delivery, paths, parsed["once"], parsed["json"])
    except (KeyboardInterrupt, SystemExit):
        wait_s = _INTERRUPTED_S
        raise
    finally:
        delivery.close(wait_s)
    return EXIT_ALERT if watcher.active else EXIT_OK


def _follow(
    watcher: Watcher, delivery: AlertDelivery, paths: list[Path], is_once: bool, use_json: bool
) -> None:
    """Tells and delivers alerts until all runs have ended; `is_once`: after three looks."""
    looks = 0
    while True:
        changes = watcher.update()
        if looks == 0:  # what was over before is of no interest
            changes = watcher.active
            if not watcher.runs:
                say("no run has written a metrics.jsonl there in the last 24 hours")
        looks += 1
        if not is_once or looks == _LOOKS_ONCE:
            for path, alert in watcher.active if is_once else changes:
                _tell(path, alert, use_json)
                delivery.send(as_dict(path, alert))
        if watcher.is_over or (is_once and looks == _LOOKS_ONCE):
            for path in paths:
                if not path.is_dir():
                    say(f"{path} was removed")
            return
        time.sleep(_EVERY_S)


def as_dict(path: Path, alert: Alert) -> dict[str, object]:
    """Returns an alert as an `alert` event."""
    return {
        "event": "alert",
        "run": str(path),
        "rule": alert.rule,
        "severity": alert.severity,
        "text": alert.text,
        "advice": alert.advice,
        "is_cleared": alert.is_cleared,
        "elapsed_s": alert.elapsed_s,
        "time": round(time.time(), 1),
    }


def _tell(path: Path, alert: Alert, use_json: bool) -> None:
    if use_json:
        print_json(as_dict(path, alert))
        return
    level = "over" if alert.is_cleared else alert.severity
    text = alert.text.removeprefix("over: ")
    advice = "" if alert.is_cleared else f"; {alert.advice}"
    line = f"{time.strftime('%H:%M:%S')}  {path}  {level} ({alert.rule}): {text}{advice}"
    sys.stdout.write(visible(line) + "\n")
    sys.stdout.flush()
