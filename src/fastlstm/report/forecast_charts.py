"""Charts of a forecaster: forecasts beside actual values, and the calibration of its intervals."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from fastlstm.report.drawing import SMALL_INCHES, Band, Chart, Curve, Panel, draw, draw_panel
from fastlstm.report.markup import name_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastlstm.report.events import Event
    from fastlstm.report.history import History

_CALIBRATION = "Calibration of the intervals"
_MAIN = 80
"""Percent of the interval that every forecast has."""
_MAX_LABEL = 24
"""Characters of an axis label."""


def forecast_charts(history: History) -> list[tuple[str, Callable[[], Chart | None]]]:
    """Returns (title, function that draws) of each chart of the test set."""
    return [
        *(
            (_title(event), partial(_forecast, event, number))
            for number, event in enumerate(history.forecasts)
        ),
        (_CALIBRATION, partial(_calibration, history.calibration)),
    ]


def _title(event: Event) -> str:
    of = f" of {name_text(event['series'])}" if event.get("series") is not None else ""
    return f"Forecast of {name_text(event.get('target'))}{of}"


def _numbers(event: Event, key: str) -> list[float]:
    values = event.get(key)
    is_list = isinstance(values, list) and all(isinstance(v, int | float | None) for v in values)
    return [float("nan") if v is None else float(v) for v in values or ()] if is_list else []


def _forecast(event: Event, number: int) -> Chart | None:
    panel = forecast_panel(event)
    if panel is None:
        return None
    title = _title(event)
    svg = draw_panel(panel, title, name=f"forecast-{number}", size=SMALL_INCHES)
    zone = f" Times in {name_text(event['time_zone'])}." if event.get("time_zone") else ""
    interval = "its 80 % interval"
    if all(band.is_empty for band in panel.bands):
        interval = "no interval: too few validation values"
    return Chart(title, f"A window of the test set, with {interval}.{zone}", svg, is_small=True)


def forecast_panel(event: Event, title: str = "") -> Panel | None:
    """Returns the past, forecast, intervals and actual values, if any, of an event `forecast`."""
    past, center, low, high = (_numbers(event, key) for key in ("past", "center", "low", "high"))
    actual = _numbers(event, "actual") if "actual" in event else [float("nan")] * len(center)
    if not past or not center or len({len(v) for v in (actual, center, low, high)}) > 1:
        return None
    times = _times(event, len(past) + len(center))
    x: list[Any] = times or list(range(1 - len(past), len(center) + 1))
    ahead = x[len(past) :]
    fan = [Band(ahead, low, high, "80 % interval")]
    for band in event.get("bands") or ():
        ends = _numbers(band, "low"), _numbers(band, "high")
        if all(len(end) == len(center) for end in ends):
            at = 0 if band["level"] > _MAIN else len(fan)
            fan.insert(at, Band(ahead, *ends, f"{band['level']} %"))
    curves = [
        Curve(x, [*past, *actual], "actual", "muted")
        if "actual" in event
        else Curve(x[: len(past)], past, "actual", "muted"),
        Curve(ahead, center, "forecast", "a"),
    ]
    label = name_text(event.get("target"))
    label = label if len(label) <= _MAX_LABEL else label[:_MAX_LABEL] + "…"
    unit = "date" if times else "steps from the forecast origin"
    return Panel(curves, unit, label, fan, title, left=None)


def _times(event: Event, count: int) -> list[datetime]:
    """Returns the times of a forecast's rows; empty where a table has no times."""
    written = event.get("times")
    if not isinstance(written, list) or len(written) != count:
        return []
    try:
        return [datetime.fromisoformat(time) for time in written]
    except (TypeError, ValueError):  # years beyond 9999
        return []


def _calibration(event: Event | None) -> Chart | None:
    levels, observed = (_numbers(event or {}, key) for key in ("levels", "observed"))
    if not levels or len(levels) != len(observed):
        return None
    nominal, covered = ([100 * value for value in values] for values in (levels, observed))
    curves = [
        Curve([0.0, 100.0], [0.0, 100.0], "ideal", "muted"),
        Curve(nominal, covered, "observed", "a", is_dotted=True),
    ]
    title = _CALIBRATION
    svg = draw(curves, title, "nominal coverage, %", "observed coverage, %", name="calibration")
    return Chart(title, "Share of test values inside the interval of each level.", svg)
