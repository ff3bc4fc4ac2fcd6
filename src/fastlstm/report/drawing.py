"""Drawing one chart: matplotlib makes an SVG whose colours are CSS variables of the page.

The page is then light or dark as its reader prefers. matplotlib takes half a second to import, so
it is imported when a chart is drawn, with the Agg canvas: no display is needed or opened.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from xml.etree import ElementTree

from fastlstm.report.markup import visible

# Stand-ins that matplotlib can parse; each becomes var(--name) in the SVG.
_COLOURS = {"ink": "#010203", "muted": "#010205", "grid": "#010207", "a": "#010209", "b": "#01020b"}
_SIZE_INCHES = (5.4, 2.9)
_LOG_RATIO = 2.0
"""A curve whose ends are further apart than this is shown on a logarithmic axis."""
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fastlstm",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": False,
    "text.usetex": False,
    "text.parse_math": False,  # a column may be called $x$
}


@dataclass(frozen=True)
class Chart:
    """A drawn chart: heading, one sentence under it, and the SVG; empty where drawing failed."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Curve:
    """Points joined by a line; colours are ink, muted, a and b; x may be times."""

    x: Sequence[Any]
    y: Sequence[float]
    label: str
    colour: str
    is_dotted: bool = False


@dataclass(frozen=True)
class Band:
    """An area between two curves; x may be times."""

    x: Sequence[Any]
    low: Sequence[float]
    high: Sequence[float]
    label: str

    @property
    def is_empty(self) -> bool:
        """Whether it has no point with two ends."""
        ends = zip(self.low, self.high, strict=True)
        return not any(math.isfinite(low) and math.isfinite(high) for low, high in ends)


def draw(
    curves: Sequence[Curve],
    title: str,
    x_unit: str,
    y_label: str,
    *,
    name: str,
    bottom: float | None = None,
    left: float | None = 0.0,
    right: float | None = None,
    may_be_log: bool = False,
    band: Band | None = None,
) -> str:
    """Returns the SVG of curves over tokens, steps or time; every point of them is inside.

    Args:
        curves: what to draw.
        title: for readers of screens.
        x_unit: label below; "time" is of seconds, shown in seconds, minutes or hours; "date" is of
            `datetime`, shown as such.
        y_label: label at the left.
        name: makes the ids of the SVG unique in a page.
        bottom: lower end of the values shown.
        left: where the x axis begins; None leaves it to the curves.
        right: where it ends; None leaves it to the curves.
        may_be_log: take a logarithmic axis, and say so, where all values are positive and the
            highest is more than twice the lowest.
        band: an area behind them.
    """
    limits = {"bottom": bottom, "left": left, "right": right}
    return _embed(_svg(curves, x_unit, visible(y_label), limits, may_be_log, band), name, title)


def _svg(
    curves: Sequence[Curve], x_unit: str, y_label: str, limits: Mapping[str, float | None],
    may_be_log: bool, band: Band | None,
) -> bytes:  # fmt: skip
    """Returns what matplotlib makes of the arguments of `draw`."""
    with _settings():
        figure, axes = _new_figure()
        if band is not None and not band.is_empty:
            _add_band(axes, band)
        has_legend = len(curves) > 1
        curves = [curve for curve in curves if len(curve.x)]
        if x_unit == "time":
            curves, x_unit = _in_time(curves)
        for curve in curves:
            _add_curve(axes, curve)
        _label_x(axes, x_unit)
        _label_y(axes, curves, y_label, may_be_log)
        _style_axes(axes)
        axes.set_xlim(left=limits["left"], right=limits["right"])
        if limits["bottom"] is not None:
            highest = max((y for curve in curves for y in curve.y), default=1.0)
            axes.set_ylim(limits["bottom"], 1.12 * highest or 1.0)
        if has_legend:
            _add_legend(axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the reader's browser has its own fonts
        yield


def _new_figure() -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def _add_band(axes: Any, band: Band) -> None:
    style = {"color": _COLOURS["a"], "alpha": 0.18, "linewidth": 0, "label": band.label}
    if len(band.x) > 1:
        axes.fill_between(band.x, band.low, band.high, **style)
    else:  # an area of no width would not be seen
        axes.vlines(band.x, band.low, band.high, **{**style, "linewidth": 9})


def _add_curve(axes: Any, curve: Curve) -> None:
    """A point without neighbours is no line: it gets a mark."""
    width = 1.9 if curve.colour == "a" else 1.2
    has_gaps = any(math.isnan(y) for y in curve.y)
    marked = curve.is_dotted or has_gaps or len(curve.x) == 1
    mark = {"marker": "o", "markersize": 3.2 if curve.is_dotted else 2.2} if marked else {}
    colour = _COLOURS[curve.colour]
    axes.plot(curve.x, curve.y, color=colour, linewidth=width, label=curve.label, **mark)


def _add_legend(axes: Any) -> None:
    """Stands above the plot: no curve can run through it."""
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3, "borderaxespad": 0}
    axes.legend(frameon=False, labelcolor=_COLOURS["ink"], fontsize=9, **place)


def _label_x(axes: Any, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if unit == "date":
        import matplotlib.dates

        dates: Any = matplotlib.dates
        locator = dates.AutoDateLocator(minticks=3, maxticks=8)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
        axes.xaxis.get_offset_text().set_color(_COLOURS["muted"])
        return
    axes.set_xlabel(unit, color=_COLOURS["muted"])
    steps: list[float] = [1, 2, 3, 5, 6, 10] if unit == "minutes" else [1, 2, 2.5, 5, 10]
    is_count = unit not in ("seconds", "minutes", "hours")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=steps, integer=is_count))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tick_text(x)))


def _label_y(axes: Any, curves: Sequence[Curve], label: str, may_be_log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    values = [y for curve in curves for y in curve.y if math.isfinite(y)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if may_be_log and 0 < low * _LOG_RATIO < high:
        axes.set_yscale("log")
        decades = math.log10(high / low)
        fine = (1, 1.5, 2, 3, 4, 6, 8) if decades < 1 else (1, 2, 5) if decades < 3 else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=fine, numticks=9))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="y", which="minor", length=0)
        label = f"{label}, log scale"
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: tick_text(y)))
    axes.set_ylabel(label, color=_COLOURS["muted"])


def _in_time(curves: Sequence[Curve]) -> tuple[list[Curve], str]:
    """Returns curves over seconds in seconds, minutes or hours, and which of these it is."""
    longest = max((x for curve in curves for x in curve.x), default=0.0)
    size, unit = (3600, "hours") if longest > 3 * 3600 else (60, "minutes")
    if longest <= 180:
        size, unit = 1, "seconds"
    return [replace(curve, x=[x / size for x in curve.x]) for curve in curves], unit


def _style_axes(axes: Any) -> None:
    axes.tick_params(colors=_COLOURS["muted"], length=0, labelsize=9, pad=5)
    axes.grid(axis="y", color=_COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_COLOURS["grid"])
    axes.spines["left"].set_visible(False)


def tick_text(value: float) -> str:
    """Returns an axis label: 1.5, 20k, 3M; no zeros at the end."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _embed(svg: bytes, name: str, title: str) -> str:
    """Makes a standalone SVG fit to stand in a page beside others, in the page's colours.

    Only attributes are rewritten: text may say whatever it likes.
    """
    root = ElementTree.fromstring(svg)
    for parent in root.iter():
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        values = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({k: _rewritten(k, value, name) for k, value in values.items()})
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib.update({"role": "img", "aria-label": visible(title)})
    return ElementTree.tostring(root, encoding="unicode")


def _rewritten(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return value.replace("#", f"#{name}-", 1)
    value = value.replace("url(#", f"url(#{name}-")
    for variable, colour in _COLOURS.items():
        value = value.replace(colour, f"var(--{variable})")
    return re.sub(r"font: ([\d.]+)px [^;]+", r"font-size: \1px", value)
