"""The charts of a report."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from statistics import median
from typing import Any

from fastlstm.report.drawing import SMALL_INCHES, Band, Chart, DrawnCurve, Panel, draw
from fastlstm.report.events import Event, number, rank_seconds
from fastlstm.report.history import History, series
from fastlstm.report.markup import failure_text, name_text

_LEAST_SHARE = 1.0
"""Percent; a chart with all curves below it is left out."""
_CALIBRATION = "Calibration of the intervals"
_MAIN = 80
"""Percent of the interval of every forecast."""
_MAX_LABEL = 24


def draw_charts(history: History) -> list[Chart]:
    """Returns the charts that the history has points for; one that fails says why."""
    if not history.steps and not history.forecasts:
        return []
    unit, time = history.unit, ("elapsed_s", "time")
    amount, speed = ("units", unit), f"{unit.capitalize()} trained on per second."
    steps, norm = partial(_of_steps, history), "Global norm before clipping."
    makers: list[tuple[str, Callable[[str], Chart | None]]] = [
        *((_title(e), partial(_forecast, e, k)) for k, e in enumerate(history.forecasts)),
        (_CALIBRATION, partial(_calibration, history.calibration)),
        (f"Quality by {unit}", partial(_quality, history, *amount)),
        ("Quality by time", partial(_quality, history, *time)),
        ("Throughput", partial(steps, time, "units_per_s", f"{unit}/s", speed)),
        ("Share of the ceiling", partial(_ceiling, history)),
        ("Processes", partial(_processes, history)),
        ("Learning rate", partial(steps, amount, "lr", "learning rate", "Of each step.")),
        ("Gradient norm", partial(steps, amount, "grad_norm", "norm", norm)),
    ]
    charts = [_made(title, make) for title, make in makers]
    return [chart for chart in charts if chart is not None]


def _made(title: str, make: Callable[[str], Chart | None]) -> Chart | None:
    try:
        return make(title)
    except Exception as error:  # one broken chart must not cost the report
        return Chart(title, f"This chart could not be drawn: {failure_text(error)}", "")


def _quality(history: History, x_key: str, x_unit: str, title: str) -> Chart | None:
    panel = quality_panel(history, x_key, x_unit)
    caption = f"{history.measure.title}; lower is better."
    return None if panel is None else draw(panel, title, caption, name=f"quality-{x_unit}")


def quality_panel(history: History, x_key: str, x_unit: str) -> Panel | None:
    """Returns the loss of steps and validations; None with fewer than two points."""
    measure = history.measure
    steps = series(history.steps, x_key, measure.key)
    evals = series(history.validations, x_key, measure.key)
    if len(steps[0]) < 2 and not evals[0]:
        return None
    curves = [
        DrawnCurve(*steps, "training", "b"),
        DrawnCurve(*evals, "validation", "a", is_dotted=True),
    ]
    return Panel(curves, x_unit, measure.label, may_be_log=True, resumes=history.resumes(x_key))


def _of_steps(
    history: History, x: tuple[str, str], key: str, label: str, caption: str, title: str
) -> Chart | None:
    """Returns a chart of one value of the steps, None with fewer than two points."""
    points = series(history.steps, x[0], key)
    if len(points[0]) < 2:
        return None
    axes: Any = {"may_be_log": True} if key == "grad_norm" else {"bottom": 0.0}
    panel = Panel([DrawnCurve(*points, label, "a")], x[1], label, **axes)
    return draw(panel, title, caption, name=key)


def _processes(history: History, title: str) -> Chart | None:
    """Returns the time of a step on the slowest, the median and the fastest process."""
    points = [
        {"elapsed_s": event.get("elapsed_s"), "low": min(s), "mid": median(s), "high": max(s)}
        for event in history.steps
        if (s := rank_seconds(event))
    ]
    if len(points) < 2:
        return None
    looks = {"high": ("slowest", "a"), "mid": ("median", "muted"), "low": ("fastest", "b")}
    curves = [DrawnCurve(*series(points, "elapsed_s", key), *look) for key, look in looks.items()]
    last = next(s for event in reversed(history.steps) if (s := rank_seconds(event)))
    caption = (
        "Seconds of forward and backward; all processes wait for the slowest, at the end rank"
        f" {last.index(max(last))} of {len(last)}."
    )
    panel = Panel(curves, "time", "seconds a step", bottom=0.0)
    return draw(panel, title, caption, name="processes")


def _ceiling(history: History, title: str) -> Chart | None:
    """Returns share of the ceiling and input wait; input wait alone without a known ceiling."""
    looks = {"ceiling_share": ("share of ceiling", "a"), "input_wait_share": ("input wait", "b")}
    curves = []
    for key, look in looks.items():
        x, y = series(history.steps, "elapsed_s", key)
        if len(x) > 1:
            curves.append(DrawnCurve(x, [100 * value for value in y], *look))
    if not curves or max(y for curve in curves for y in curve.y) < _LEAST_SHARE:
        return None
    label, peak = "%", number(history.start, "ceiling_gflops")
    of = f" of {peak:,.0f} GFLOP/s" if peak else ""
    caption = f"Arithmetic done{of} measured; time spent waiting for input."
    if curves[0].label == "input wait":
        title, label = "Input wait", "% of time"
        caption = "Share of the time spent waiting for input."
    return draw(Panel(curves, "time", label, bottom=0.0), title, caption, name="ceiling")


def _title(event: Event) -> str:
    of = f" of {name_text(event['series'])}" if event.get("series") is not None else ""
    return f"Forecast of {name_text(event.get('target'))}{of}"


def _numbers(event: Event, key: str) -> list[float]:
    values = event.get(key)
    is_list = isinstance(values, list) and all(isinstance(v, int | float | None) for v in values)
    return [float("nan") if v is None else float(v) for v in values or ()] if is_list else []


def _forecast(event: Event, place: int, title: str) -> Chart | None:
    panel = forecast_panel(event)
    if panel is None:
        return None
    zone = f" Times in {name_text(event['time_zone'])}." if event.get("time_zone") else ""
    interval = "its 80 % interval"
    if all(band.is_empty for band in panel.bands):
        interval = "no interval: too few validation values"
    caption = f"A window of the test set, with {interval}.{zone}"
    return draw(panel, title, caption, name=f"forecast-{place}", size=SMALL_INCHES)


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
    known = [*past, *actual] if "actual" in event else past
    curves = [
        DrawnCurve(x[: len(known)], known, "actual", "muted"),
        DrawnCurve(ahead, center, "forecast", "a"),
    ]
    label = name_text(event.get("target"))
    label = label if len(label) <= _MAX_LABEL else label[:_MAX_LABEL] + "…"
    unit = "date" if times else "steps from the forecast origin"
    return Panel(curves, unit, label, fan, title, left=None)


def _times(event: Event, count: int) -> list[datetime]:
    written = event.get("times")
    if not isinstance(written, list) or len(written) != count:
        return []
    try:
        return [datetime.fromisoformat(time) for time in written]
    except (TypeError, ValueError):  # years beyond 9999
        return []


def _calibration(event: Event | None, title: str) -> Chart | None:
    levels, observed = (_numbers(event or {}, key) for key in ("levels", "observed"))
    if not levels or len(levels) != len(observed):
        return None
    nominal, covered = ([100 * value for value in values] for values in (levels, observed))
    curves = [
        DrawnCurve([0.0, 100.0], [0.0, 100.0], "ideal", "muted"),
        DrawnCurve(nominal, covered, "observed", "a", is_dotted=True),
    ]
    panel = Panel(curves, "nominal coverage, %", "observed coverage, %")
    caption = "Share of test values inside the interval of each level."
    return draw(panel, title, caption, name="calibration")
