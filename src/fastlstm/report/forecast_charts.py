"""Charts of a forecaster: forecasts beside what came, and how often its intervals hold."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from fastlstm.report.drawing import Band, Chart, Curve, draw
from fastlstm.report.markup import name_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastlstm.report.history import Event, History

_CALIBRATION = "Calibration of the intervals"
_MAX_LABEL = 24
"""Characters beside an axis."""


def forecast_charts(history: History) -> list[tuple[str, Callable[[], Chart | None]]]:
    """Returns what draws the charts of the test part, by title: forecasts, and the calibration."""
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
    past, *ahead = (_numbers(event, key) for key in ("past", "actual", "center", "low", "high"))
    actual, center, low, high = ahead
    if not past or not center or len({len(values) for values in ahead}) > 1:
        return None
    times = _times(event, len(past) + len(center))
    x: list[Any] = times or list(range(1 - len(past), len(center) + 1))
    band = Band(x[len(past) :], low, high, "80 % interval")
    curves = [
        Curve(x, [*past, *actual], "what came", "muted"),
        Curve(x[len(past) :], center, "forecast", "a"),
    ]
    title, label = _title(event), name_text(event.get("target"))
    label = label if len(label) <= _MAX_LABEL else label[:_MAX_LABEL] + "…"
    unit = "date" if times else "steps from the start of the forecast"
    svg = draw(curves, title, unit, label, name=f"forecast-{number}", left=None, band=band)
    zone = f" Times are of {name_text(event['time_zone'])}." if event.get("time_zone") else ""
    interval = (
        "no interval: validation has too few values" if band.is_empty else "its 80 % interval"
    )
    return Chart(title, f"A window of the test part, with {interval}.{zone}", svg)


def _times(event: Event, count: int) -> list[datetime]:
    """Returns the times of a forecast's rows; none where rows are counted."""
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
    promised, held = ([100 * value for value in values] for values in (levels, observed))
    curves = [
        Curve([0.0, 100.0], [0.0, 100.0], "as promised", "muted"),
        Curve(promised, held, "observed", "a", is_dotted=True),
    ]
    title = _CALIBRATION
    svg = draw(curves, title, "interval, %", "values within, %", name="calibration")
    return Chart(title, "Share of the test values within intervals of each level.", svg)
