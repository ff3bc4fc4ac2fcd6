"""The charts of a report: which ones a run has points for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fastlstm.errors import MissingExtraError
from fastlstm.report.drawing import Chart, Curve, draw
from fastlstm.report.forecast_charts import forecast_charts
from fastlstm.report.history import History, number, series
from fastlstm.report.markup import failure_text

if TYPE_CHECKING:
    from collections.abc import Callable

_LEAST_SHARE = 1.0
"""Percent; curves that stay below it are a chart with nothing in it."""


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
    is_text = not history.is_forecast
    by_text = "tokens" if is_text else "step"
    by = f"Quality by {'text read' if is_text else 'steps'}"
    makers: list[tuple[str, Callable[[], Chart | None]]] = [
        *forecast_charts(history),
        (by, partial(_quality, history, by_text, by)),
        ("Quality by time", partial(_quality, history, "elapsed_s", "Quality by time")),
        ("Throughput", partial(_speed, history)),
        ("Share of the ceiling", partial(_ceiling, history)),
        ("Learning rate", partial(_learning_rate, history, by_text)),
        ("Gradient norm", partial(_gradient, history, by_text)),
    ]
    charts = [_made(title, make) for title, make in makers]
    return [chart for chart in charts if chart is not None]


def _made(title: str, make: Callable[[], Chart | None]) -> Chart | None:
    try:
        return make()
    except Exception as error:  # a chart is worth less than the run it is of
        return Chart(title, f"This chart could not be drawn: {failure_text(error)}", "")


def _quality(history: History, x_key: str, title: str) -> Chart | None:
    steps_x, steps_y = series(history.steps, x_key, history.measure)
    evals = [{**event, "tokens": history.tokens_at(event["step"])} for event in history.validations]
    evals_x, evals_y = series(evals, x_key, history.measure)
    if len(steps_x) < 2 and not evals_x:
        return None
    curves = [
        Curve(steps_x, steps_y, "training", "b"),
        Curve(evals_x, evals_y, "validation", "a", is_dotted=True),
    ]
    unit = {"tokens": "tokens", "step": "steps"}.get(x_key, "time")
    what = "loss" if history.is_forecast else "bits/char"
    caption = "Loss" if history.is_forecast else "Bits per character"
    svg = draw(curves, title, unit, what, may_be_log=True, name=f"quality-{unit}")
    return Chart(title, f"{caption}; lower is better.", svg)


def _speed(history: History) -> Chart | None:
    unit = history.unit
    x, y = series(history.steps, "elapsed_s", f"{unit}_per_s")
    if len(x) < 2:
        return None
    curves = [Curve(x, y, f"{unit}/s", "a")]
    svg = draw(curves, "Throughput", "time", f"{unit}/s", bottom=0.0, name="speed")
    return Chart("Throughput", f"{unit.capitalize()} trained on per second.", svg)


def _ceiling(history: History) -> Chart | None:
    """Without a share of the ceiling, as of forecasters, what is left is the waiting for input."""
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
    if curves[0].label == "input wait":
        svg = draw(curves, "Input wait", "time", "% of time", bottom=0.0, name="ceiling")
        return Chart("Input wait", "Share of the time spent waiting for input.", svg)
    peak = number(history.start, "ceiling_gflops")
    of = f" of {peak:,.0f} GFLOP/s" if peak else ""
    svg = draw(curves, "Share of the ceiling", "time", "%", bottom=0.0, name="ceiling")
    return Chart(
        "Share of the ceiling", f"Arithmetic done{of} measured; time spent waiting for input.", svg
    )


def _learning_rate(history: History, x_key: str) -> Chart | None:
    x, y = series(history.steps, x_key, "lr")
    if len(x) < 2:
        return None
    curves = [Curve(x, y, "learning rate", "a")]
    unit = "steps" if x_key == "step" else x_key
    svg = draw(curves, "Learning rate", unit, "learning rate", bottom=0.0, name="rate")
    return Chart("Learning rate", "Of each step.", svg)


def _gradient(history: History, x_key: str) -> Chart | None:
    x, y = series(history.steps, x_key, "grad_norm")
    if len(x) < 2:
        return None
    curves = [Curve(x, y, "gradient norm", "a")]
    unit = "steps" if x_key == "step" else x_key
    svg = draw(curves, "Gradient norm", unit, "norm", may_be_log=True, name="gradient")
    return Chart("Gradient norm", "Global norm before clipping.", svg)
