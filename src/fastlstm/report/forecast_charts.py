"""Charts of a forecaster: forecasts beside what came, and how often its intervals hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.report.drawing import Band, Chart, Curve, draw

if TYPE_CHECKING:
    from fastlstm.report.history import Event, History


def forecast_charts(history: History) -> list[Chart]:
    """Returns charts of the test part: forecasts, and the calibration of the intervals."""
    found = [_forecast(event, number) for number, event in enumerate(history.forecasts)]
    return [chart for chart in (*found, _calibration(history.calibration)) if chart is not None]


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
    target, who = event.get("target"), event.get("series")
    name = f"{target} of {who}" if who is not None else f"{target}"
    band = Band(steps, low, high)
    svg = draw(curves, name, "steps", str(target), name=f"forecast-{number}", left=None, band=band)
    return Chart(f"Forecast of {name}", "A window of the test part, with the 80 % interval.", svg)


def _calibration(event: Event | None) -> Chart | None:
    levels, observed = (_numbers(event or {}, key) for key in ("levels", "observed"))
    if not levels or len(levels) != len(observed):
        return None
    promised, held = ([100 * value for value in values] for values in (levels, observed))
    curves = [
        Curve([0.0, 100.0], [0.0, 100.0], "as promised", "muted"),
        Curve(promised, held, "observed", "a", is_dotted=True),
    ]
    title = "Calibration of the intervals"
    svg = draw(curves, title, "interval, %", "values within, %", name="calibration", bottom=0.0)
    return Chart(title, "Share of the test values within intervals of each level.", svg)
