"""Charts of a forecaster: forecasts beside what came, and how often its intervals hold."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fastlstm.report.drawing import Band, Chart, Curve, draw
from fastlstm.report.markup import clipped, name_text

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
    before, steps = list(range(1 - len(past), 1)), list(range(1, len(center) + 1))
    curves = [
        Curve([*before, *steps], [*past, *actual], "what came", "muted"),
        Curve(steps, center, "forecast", "a"),
    ]
    title, label = _title(event), clipped(name_text(event.get("target")), _MAX_LABEL)
    band = Band(steps, low, high)
    svg = draw(curves, title, "steps", label, name=f"forecast-{number}", left=None, band=band)
    return Chart(title, "A window of the test part, with the 80 % interval.", svg)


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
    svg = draw(curves, title, "interval, %", "values within, %", name="calibration", bottom=0.0)
    return Chart(title, "Share of the test values within intervals of each level.", svg)
