"""The charts of a report: which ones a run has points for."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from fastlstm.errors import MissingExtraError
from fastlstm.report.drawing import Chart, Curve, draw
from fastlstm.report.events import number, rank_seconds
from fastlstm.report.forecast_charts import forecast_charts
from fastlstm.report.history import History, series
from fastlstm.report.markup import failure_text

if TYPE_CHECKING:
    from collections.abc import Callable

_LEAST_SHARE = 1.0
"""Percent; a chart whose curves all stay below it is left out."""


def draw_charts(history: History) -> list[Chart]:
    """Returns the charts that the history has points for; one that fails says why.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if not history.steps and not history.forecasts:
        return []
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "charts need matplotlib; install it with: pip install matplotlib"
        ) from error
    x = ("units", history.unit)
    by_amount = f"Quality by {history.unit}"
    makers: list[tuple[str, Callable[[], Chart | None]]] = [
        *forecast_charts(history),
        (by_amount, partial(_quality, history, by_amount, *x)),
        ("Quality by time", partial(_quality, history, "Quality by time", "elapsed_s", "time")),
        ("Throughput", partial(_throughput, history)),
        ("Share of the ceiling", partial(_ceiling, history)),
        ("Processes", partial(_processes, history)),
        ("Learning rate", partial(_learning_rate, history, *x)),
        ("Gradient norm", partial(_gradient_norm, history, *x)),
    ]
    charts = [_made(title, make) for title, make in makers]
    return [chart for chart in charts if chart is not None]


def _made(title: str, make: Callable[[], Chart | None]) -> Chart | None:
    try:
        return make()
    except Exception as error:  # a chart is worth less than the run it is of
        return Chart(title, f"This chart could not be drawn: {failure_text(error)}", "")


def _quality(history: History, title: str, x_key: str, x_unit: str) -> Chart | None:
    measure = history.measure
    steps_x, steps_y = series(history.steps, x_key, measure.key)
    evals_x, evals_y = series(history.validations, x_key, measure.key)
    if len(steps_x) < 2 and not evals_x:
        return None
    curves = [
        Curve(steps_x, steps_y, "training", "b"),
        Curve(evals_x, evals_y, "validation", "a", is_dotted=True),
    ]
    name = f"quality-{x_unit}"
    svg = draw(curves, title, x_unit, measure.label, may_be_log=True, name=name)
    return Chart(title, f"{measure.title}; lower is better.", svg)


def _throughput(history: History) -> Chart | None:
    caption = f"{history.unit.capitalize()} trained on per second."
    axes = ("elapsed_s", "time", "units_per_s", f"{history.unit}/s")
    return _one_curve(history, "Throughput", caption, *axes, bottom=0.0)


def _learning_rate(history: History, x_key: str, x_unit: str) -> Chart | None:
    axes = (x_key, x_unit, "lr", "learning rate")
    return _one_curve(history, "Learning rate", "Of each step.", *axes, bottom=0.0)


def _gradient_norm(history: History, x_key: str, x_unit: str) -> Chart | None:
    axes = (x_key, x_unit, "grad_norm", "norm")
    caption = "Global norm before clipping."
    return _one_curve(history, "Gradient norm", caption, *axes, may_be_log=True)


def _one_curve(
    history: History,
    title: str,
    caption: str,
    x_key: str,
    x_unit: str,
    y_key: str,
    y_label: str,
    **axes: Any,
) -> Chart | None:
    """Returns a chart of one value of the steps, None with fewer than two points."""
    x, y = series(history.steps, x_key, y_key)
    if len(x) < 2:
        return None
    svg = draw([Curve(x, y, y_label, "a")], title, x_unit, y_label, name=y_key, **axes)
    return Chart(title, caption, svg)


def _processes(history: History) -> Chart | None:
    """Returns the passes of the slowest, the median and the fastest process of several."""
    points = [
        {"elapsed_s": event.get("elapsed_s"), "low": min(s), "mid": median(s), "high": max(s)}
        for event in history.steps
        if (s := rank_seconds(event))
    ]
    if len(points) < 2:
        return None
    curves = [
        Curve(*series(points, "elapsed_s", key), label, colour)
        for key, label, colour in (
            ("high", "slowest", "a"), ("mid", "median", "muted"), ("low", "fastest", "b"),
        )
    ]  # fmt: skip
    last = next(s for event in reversed(history.steps) if (s := rank_seconds(event)))
    svg = draw(curves, "Processes", "time", "seconds a step", bottom=0.0, name="processes")
    return Chart(
        "Processes",
        f"Seconds that the passes of a step take; all wait for the slowest, in the end rank"
        f" {last.index(max(last))} of {len(last)}.",
        svg,
    )


def _ceiling(history: History) -> Chart | None:
    """Without a known ceiling only the waiting for input is left to show."""
    curves = []
    for key, label, colour in (
        ("ceiling_share", "share of ceiling", "a"),
        ("input_wait_share", "input wait", "b"),
    ):
        x, y = series(history.steps, "elapsed_s", key)
        if len(x) > 1:
            curves.append(Curve(x, [100 * value for value in y], label, colour))
    if not curves or max(y for curve in curves for y in curve.y) < _LEAST_SHARE:
        return None
    title, label = "Share of the ceiling", "%"
    peak = number(history.start, "ceiling_gflops")
    of = f" of {peak:,.0f} GFLOP/s" if peak else ""
    caption = f"Arithmetic done{of} measured; time spent waiting for input."
    if curves[0].label == "input wait":
        title, label = "Input wait", "% of time"
        caption = "Share of the time spent waiting for input."
    svg = draw(curves, title, "time", label, bottom=0.0, name="ceiling")
    return Chart(title, caption, svg)
