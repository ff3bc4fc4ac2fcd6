"""The charts of a report: matplotlib draws SVG whose colours are CSS variables of the page.

The page is then light or dark as its reader prefers. matplotlib takes half a second to import, so
it is imported when a chart is drawn, with the Agg canvas: no display is needed or opened.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastlstm.errors import MissingExtraError
from fastlstm.report.history import History, number, series

if TYPE_CHECKING:
    from collections.abc import Sequence

# Stand-ins that matplotlib can parse; each becomes var(--name) in the SVG.
_COLOURS = {"ink": "#010203", "muted": "#010205", "grid": "#010207", "a": "#010209", "b": "#01020b"}
_SIZE_INCHES = (6.2, 3.1)


@dataclass(frozen=True)
class Chart:
    """A drawn chart: heading, one sentence under it, and the SVG."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class _Curve:
    x: Sequence[float]
    y: Sequence[float]
    label: str
    colour: str
    is_dotted: bool = False


def draw_charts(history: History) -> list[Chart]:
    """Returns the charts that the history has points for.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if not history.steps:
        return []
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError(
            "charts need matplotlib; install it with: pip install matplotlib"
        ) from error
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "fastlstm",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.unicode_minus": False,
    }
    with matplotlib.rc_context(settings):
        charts = [
            _quality(history, "tokens", "Quality by text read"),
            _quality(history, "elapsed_s", "Quality by time"),
            _speed(history),
            _ceiling(history),
            _learning_rate(history),
            _gradient(history),
        ]
    return [chart for chart in charts if chart is not None]


def _quality(history: History, x_key: str, title: str) -> Chart | None:
    steps_x, steps_y = series(history.steps, x_key, "bits_per_char")
    evals = [{**event, "tokens": history.tokens_at(event["step"])} for event in history.validations]
    evals_x, evals_y = series(evals, x_key, "bits_per_char")
    if len(steps_x) < 2 and not evals_x:
        return None
    curves = [
        _Curve(steps_x, steps_y, "training", "b"),
        _Curve(evals_x, evals_y, "validation", "a", is_dotted=True),
    ]
    unit = "tokens" if x_key == "tokens" else "time"
    top = _top(steps_x, [*steps_y], evals_y)
    return Chart(
        title,
        "Bits per character; lower is better.",
        _draw(curves, title, f"{unit}", "bits/char", top=top, name=f"quality-{unit}"),
    )


def _top(x: Sequence[float], steps: list[float], evals: Sequence[float]) -> float | None:
    """Cuts off the plunge of the first steps, which would press the rest flat."""
    everything = [*steps, *evals]
    if len(x) < 10 or not everything:
        return None
    start = x[0] + 0.04 * (x[-1] - x[0])
    later = [y for at, y in zip(x, steps, strict=True) if at >= start]
    low, high = min(everything), max([*later, *evals])
    return low + 1.08 * (high - low) if high > low else None


def _speed(history: History) -> Chart | None:
    x, y = series(history.steps, "elapsed_s", "tokens_per_s")
    if len(x) < 2:
        return None
    curves = [_Curve(x, y, "tokens/s", "a")]
    svg = _draw(curves, "Throughput", "time", "tokens/s", bottom=0.0, name="speed")
    return Chart("Throughput", "Tokens trained on per second.", svg)


def _ceiling(history: History) -> Chart | None:
    curves = []
    for key, label, colour in (
        ("ceiling_share", "share of ceiling", "a"),
        ("input_wait_share", "input wait", "b"),
    ):
        x, y = series(history.steps, "elapsed_s", key)
        if len(x) > 1:
            curves.append(_Curve(x, [100 * value for value in y], label, colour))
    if not curves:
        return None
    peak = number(history.start, "ceiling_gflops")
    of = f" of {peak:,.0f} GFLOP/s" if peak else ""
    svg = _draw(curves, "Share of the ceiling", "time", "%", bottom=0.0, name="ceiling")
    return Chart(
        "Share of the ceiling", f"Arithmetic done{of} measured; time spent waiting for text.", svg
    )


def _learning_rate(history: History) -> Chart | None:
    x, y = series(history.steps, "tokens", "lr")
    if len(x) < 2:
        return None
    curves = [_Curve(x, y, "learning rate", "a")]
    svg = _draw(curves, "Learning rate", "tokens", "learning rate", bottom=0.0, name="rate")
    return Chart("Learning rate", "Warm-up, plateau, cooldown.", svg)


def _gradient(history: History) -> Chart | None:
    x, y = series(history.steps, "tokens", "grad_norm")
    if len(x) < 2:
        return None
    top = _top(x, y, [])
    curves = [_Curve(x, y, "gradient norm", "a")]
    svg = _draw(curves, "Gradient norm", "tokens", "norm", bottom=0.0, top=top, name="gradient")
    return Chart("Gradient norm", "Global norm before clipping.", svg)


def _draw(
    curves: Sequence[_Curve],
    title: str,
    x_unit: str,
    y_label: str,
    *,
    name: str,
    top: float | None = None,
    bottom: float | None = None,
) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasSVG(figure)
    axes: Any = figure.add_subplot()
    for curve in curves:
        width = 1.9 if curve.colour == "a" else 1.2
        mark = {"marker": "o", "markersize": 3.2} if curve.is_dotted else {}
        colour = _COLOURS[curve.colour]
        axes.plot(curve.x, curve.y, color=colour, linewidth=width, label=curve.label, **mark)
    divisor, x_label = _time_scale(curves) if x_unit == "time" else (1.0, "tokens")
    _style_axes(axes, x_label, y_label, divisor)
    axes.set_xlim(left=0)
    if bottom is not None:
        highest = max((y for curve in curves for y in curve.y), default=1.0)
        axes.set_ylim(bottom, 1.12 * highest or 1.0)
    if top is not None:
        axes.set_ylim(top=top)
    if len(curves) > 1:
        # Above the plot: no curve can run through it.
        axes.legend(
            frameon=False,
            labelcolor=_COLOURS["ink"],
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=len(curves),
            borderaxespad=0,
            fontsize=9,
        )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _embed(buffer.getvalue().decode("utf-8"), name, title)


def _time_scale(curves: Sequence[_Curve]) -> tuple[float, str]:
    longest = max((x for curve in curves for x in curve.x), default=0.0)
    if longest > 3 * 3600:
        return 3600.0, "hours"
    return (60.0, "minutes") if longest > 180 else (1.0, "seconds")


def _style_axes(axes: Any, x_label: str, y_label: str, divisor: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(x_label, color=_COLOURS["muted"])
    axes.set_ylabel(y_label, color=_COLOURS["muted"])
    axes.tick_params(colors=_COLOURS["muted"], length=0, labelsize=9, pad=5)
    axes.grid(axis="y", color=_COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_COLOURS["grid"])
    axes.spines["left"].set_visible(False)
    steps: list[float] = [1, 2, 3, 5, 6, 10] if divisor == 60.0 else [1, 2, 2.5, 5, 10]
    axes.xaxis.set_major_locator(_scaled_locator(MaxNLocator, divisor, steps))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tick_text(x / divisor)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: tick_text(y)))


def _scaled_locator(base: Any, divisor: float, steps: list[float]) -> Any:
    """Ticks at round numbers of the shown unit while the data stay in seconds."""

    class Locator(base):  # type: ignore[misc]
        def tick_values(self, vmin: float, vmax: float) -> Any:
            return super().tick_values(vmin / divisor, vmax / divisor) * divisor

    return Locator(nbins=6, steps=steps)


def tick_text(value: float) -> str:
    """Returns an axis label: 1.5, 20k, 3M; no zeros at the end."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _embed(svg: str, name: str, title: str) -> str:
    """Makes a standalone SVG fit to stand in a page beside others, in the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    svg = re.sub(r'xlink:href="#', f'href="#{name}-', svg)
    for variable, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]+"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]+"', r"\1", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
