"""Drawing one chart: matplotlib makes an SVG whose colours are CSS variables of the page.

The page is then light or dark as its reader prefers. matplotlib takes half a second to import, so
it is imported when a chart is drawn, with the Agg canvas: no display is needed or opened.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from fastlstm.report.markup import visible

# Stand-ins that matplotlib can parse; each becomes var(--name) in the SVG.
_COLOURS = {"ink": "#010203", "muted": "#010205", "grid": "#010207", "a": "#010209", "b": "#01020b"}
_SIZE_INCHES = (6.2, 3.1)
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
    """Points joined by a line; colours are ink, muted, a and b."""

    x: Sequence[float]
    y: Sequence[float]
    label: str
    colour: str
    is_dotted: bool = False


@dataclass(frozen=True)
class Band:
    """An area between two curves."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def draw(
    curves: Sequence[Curve],
    title: str,
    x_unit: str,
    y_label: str,
    *,
    name: str,
    top: float | None = None,
    bottom: float | None = None,
    left: float | None = 0.0,
    band: Band | None = None,
) -> str:
    """Returns the SVG of curves over tokens, steps or time.

    Args:
        curves: what to draw.
        title: for readers of screens.
        x_unit: label below; time is shown in seconds, minutes or hours.
        y_label: label at the left.
        name: makes the ids of the SVG unique in a page.
        top: upper end of the values shown.
        bottom: lower end.
        left: where the x axis begins; None leaves it to the curves.
        band: an area behind them.
    """
    with _settings():
        svg = _draw(curves, x_unit, y_label, (bottom, top), left, band)
    return _embed(svg, name, title)


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the reader's browser has its own fonts
        yield


def _draw(
    curves: Sequence[Curve],
    x_unit: str,
    y_label: str,
    limits: tuple[float | None, float | None],
    left: float | None,
    band: Band | None,
) -> bytes:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    bottom, top = limits
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasSVG(figure)
    axes: Any = figure.add_subplot()
    if band is not None:
        colour = _COLOURS["a"]
        axes.fill_between(band.x, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
    for curve in curves:
        width = 1.9 if curve.colour == "a" else 1.2
        mark = {"marker": "o", "markersize": 3.2} if curve.is_dotted else {}
        colour = _COLOURS[curve.colour]
        axes.plot(curve.x, curve.y, color=colour, linewidth=width, label=curve.label, **mark)
    divisor, x_label = _time_scale(curves) if x_unit == "time" else (1.0, x_unit)
    _style_axes(axes, visible(x_label), visible(y_label), divisor)
    axes.set_xlim(left=left)
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
    return buffer.getvalue()


def _time_scale(curves: Sequence[Curve]) -> tuple[float, str]:
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
        found = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update({key: _rewritten(key, found[key], name) for key in found})
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
