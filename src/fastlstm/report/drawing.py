"""Draws charts with matplotlib, as SVG whose colours are CSS variables: the page is light or dark.

matplotlib takes half a second to import, so it is imported at the first chart, with the Agg canvas:
no display is needed.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from fastlstm.errors import ConfigError
from fastlstm.report.html import LIGHT
from fastlstm.report.markup import visible
from fastlstm.report.terminal import tick_texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE_INCHES = (5.4, 2.9)
SMALL_INCHES = (3.6, 2.3)
"""Size of a panel among several, or of a chart beside two others."""
_ALPHAS = {1: (0.18,), 2: (0.12, 0.22), 3: (0.16, 0.26, 0.4)}
"""Opacity of bands, widest first, by the number of bands."""
LOG_RATIO = 2.0
"""Ratio of highest to lowest value above which an axis is logarithmic."""
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
    """A drawn chart: heading, a sentence below it, and the SVG, empty if drawing failed.

    Small charts are three in a row.
    """

    title: str
    caption: str
    svg: str
    is_small: bool = False


@dataclass(frozen=True)
class DrawnCurve:
    """Points joined by a line; `colour` is ink, muted, a or b; `x` may be times."""

    x: Sequence[Any]
    y: Sequence[float]
    label: str
    colour: str
    is_dotted: bool = False


@dataclass(frozen=True)
class Band:
    """An area between two curves; `x` may be times."""

    x: Sequence[Any]
    low: Sequence[float]
    high: Sequence[float]
    label: str

    @property
    def is_empty(self) -> bool:
        ends = zip(self.low, self.high, strict=True)
        return not any(math.isfinite(low) and math.isfinite(high) for low, high in ends)


@dataclass(frozen=True)
class Panel:
    """Curves over one pair of axes, in front of bands (widest first).

    Attributes:
        x_unit: label below; "time" is in seconds, shown in seconds, minutes or hours; "date" has
            `datetime` values.
        bottom: lower end of the y axis.
        left, right: ends of the x axis; None takes the ends of the curves.
        may_be_log: use a logarithmic y axis if all values are positive and the highest is more than
            twice the lowest.
        resumes: x of vertical lines, where the run was resumed.
    """

    curves: Sequence[DrawnCurve]
    x_unit: str
    y_label: str
    bands: Sequence[Band] = ()
    title: str = ""
    bottom: float | None = None
    left: float | None = 0.0
    right: float | None = None
    may_be_log: bool = False
    resumes: Sequence[float] = ()


def draw(
    panel: Panel, title: str, caption: str, *, name: str, size: tuple[float, float] | None = None
) -> Chart:
    """Returns the chart of a panel in the colours of a page.

    `name` makes the ids of the SVG unique in a page; `size` is of a small chart, in inches.
    """
    svg = embed(render([panel], size or _SIZE_INCHES), name, title)
    return Chart(title, caption, svg, is_small=size is not None)


def render(panels: Sequence[Panel], size: tuple[float, float]) -> bytes:
    """Returns panels below each other as a transparent SVG in light colours."""
    from matplotlib.figure import Figure

    add_panels(figure := Figure(), panels, size)
    return written(figure, "svg", transparent=True)


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the reader's browser has its own fonts
        yield


def form_of(path: str | Path) -> str:
    """Returns svg or png, the suffix of a file. Raises ConfigError for another suffix."""
    if (suffix := Path(path).suffix.lower()) not in (".svg", ".png"):
        raise ConfigError(f"the picture is '{path}', expected a file name ending in .svg or .png")
    return suffix[1:]


def written(figure: Figure, form: str, **options: Any) -> bytes:
    """Returns a figure as a file."""
    about: dict[str, Any] = {"metadata": {"Date": None}} if form == "svg" else {"dpi": 200}
    buffer = io.BytesIO()
    with _settings():
        figure.savefig(buffer, format=form, **about, **options)
    return buffer.getvalue()


def add_panels(
    figure: Figure,
    panels: Sequence[Panel],
    size: tuple[float, float],
    columns: int = 1,
    palette: Mapping[str, str] = LIGHT,
) -> None:
    """Draws at least one panel of `size` inches into an empty figure, row by row, with one legend;
    `columns` panels are beside each other."""
    rows = math.ceil(len(panels) / columns)
    figure.set_size_inches(size[0] * columns, size[1] * rows + (0.3 if len(panels) > 1 else 0.0))
    figure.set_layout_engine("constrained")
    figure.set_facecolor(palette["paper"])
    with _settings():
        grid = [figure.add_subplot(rows, columns, n + 1) for n in range(len(panels))]
        for axes, panel in zip(grid, panels, strict=True):
            _draw_panel(axes, panel, palette)
        handles, labels = grid[0].get_legend_handles_labels()
        if len(panels) > 1 or panels[0].title:
            place: Any = {"loc": "outside upper left", "ncols": 5, "frameon": False, "fontsize": 9}
            figure.legend(handles, labels, labelcolor=palette["ink"], **place)
        elif len(panels[0].curves) > 1:
            _add_legend(grid[0], palette)


def _draw_panel(axes: Any, panel: Panel, palette: Mapping[str, str]) -> None:
    bands = [band for band in panel.bands if not band.is_empty]
    for band, alpha in zip(bands, _ALPHAS.get(len(bands), ()), strict=True):
        _add_band(axes, band, palette["a"], alpha)
    panel = replace(panel, curves=[curve for curve in panel.curves if len(curve.x)])
    if panel.x_unit == "time":
        panel = _in_time(panel)
    curves = panel.curves
    for curve in curves:
        _add_curve(axes, curve, palette[curve.colour])
    for place, at in enumerate(panel.resumes):
        style: Any = {"linestyle": ":", "linewidth": 1.0, "color": palette["muted"]}
        axes.axvline(at, label="_" if place else "resumed", **style)
    _label_x(axes, panel.x_unit, palette)
    _label_y(axes, panel, palette)
    _style_axes(axes, palette)
    axes.set_xlim(left=panel.left, right=panel.right)
    if panel.bottom is not None:
        highest = max((y for curve in curves for y in curve.y), default=1.0)
        axes.set_ylim(panel.bottom, 1.12 * highest or 1.0)
    if panel.title:
        axes.set_title(visible(panel.title), loc="left", fontsize=10, color=palette["ink"])


def _add_band(axes: Any, band: Band, colour: str, alpha: float) -> None:
    style: Any = {"color": colour, "alpha": alpha, "linewidth": 0, "label": band.label}
    if len(band.x) > 1:
        axes.fill_between(band.x, band.low, band.high, **style)
    else:  # an area without width is invisible
        axes.vlines(band.x, band.low, band.high, **{**style, "linewidth": 9})


def _add_curve(axes: Any, curve: DrawnCurve, colour: str) -> None:
    """Points without neighbours get a mark, because they are no line."""
    width = 1.9 if curve.colour == "a" else 1.2
    has_gaps = any(math.isnan(y) for y in curve.y)
    marked = curve.is_dotted or has_gaps or len(curve.x) == 1
    mark = {"marker": "o", "markersize": 3.2 if curve.is_dotted else 2.2} if marked else {}
    axes.plot(curve.x, curve.y, color=colour, linewidth=width, label=curve.label, **mark)


def _add_legend(axes: Any, palette: Mapping[str, str]) -> None:
    """Adds a legend above the plot, where no curve can cross it."""
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 5, "borderaxespad": 0}
    if len(axes.get_legend_handles_labels()[0]) > 3:
        place |= {"ncols": 3, "columnspacing": 1.0, "handlelength": 1.0, "handletextpad": 0.5}
        place |= {"labelspacing": 0.2}
    axes.legend(frameon=False, labelcolor=palette["ink"], fontsize=9, **place)


def _label_x(axes: Any, unit: str, palette: Mapping[str, str]) -> None:
    from matplotlib.ticker import MaxNLocator

    if unit == "date":
        import matplotlib.dates

        dates: Any = matplotlib.dates
        locator = dates.AutoDateLocator(minticks=3, maxticks=8)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
        axes.xaxis.get_offset_text().set_color(palette["muted"])
        return
    axes.set_xlabel(unit, color=palette["muted"])
    steps: list[float] = [1, 2, 3, 5, 6, 10] if unit == "minutes" else [1, 2, 2.5, 5, 10]
    is_count = unit not in ("seconds", "minutes", "hours")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=steps, integer=is_count))
    axes.xaxis.set_major_formatter(_tick_formatter())


def _label_y(axes: Any, panel: Panel, palette: Mapping[str, str]) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    label = visible(panel.y_label)
    values = [y for curve in panel.curves for y in curve.y if math.isfinite(y)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if panel.may_be_log and 0 < low * LOG_RATIO < high:
        axes.set_yscale("log")
        decades = math.log10(high / low)
        fine = (1, 1.5, 2, 3, 4, 6, 8) if decades < 1 else (1, 2, 5) if decades < 3 else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=fine, numticks=9))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="y", which="minor", length=0)
        label = f"{label}, log scale"
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(_tick_formatter())
    axes.set_ylabel(label, color=palette["muted"])


def _tick_formatter() -> Any:
    from matplotlib.ticker import FuncFormatter

    formatter: Any = FuncFormatter(_tick_text)
    formatter.format_ticks = tick_texts
    return formatter


def _tick_text(value: float, _: int | None) -> str:  # a lambda could not be pickled
    return tick_texts([value])[0]


def _in_time(panel: Panel) -> Panel:
    """Returns a panel over seconds in seconds, minutes or hours."""
    longest = max((x for curve in panel.curves for x in curve.x), default=0.0)
    size, unit = (3600, "hours") if longest > 3 * 3600 else (60, "minutes")
    if longest <= 180:
        size, unit = 1, "seconds"
    curves = [replace(curve, x=[x / size for x in curve.x]) for curve in panel.curves]
    return replace(panel, curves=curves, x_unit=unit, resumes=[x / size for x in panel.resumes])


def _style_axes(axes: Any, palette: Mapping[str, str]) -> None:
    axes.patch.set_visible(False)  # the paper is the figure's
    axes.tick_params(colors=palette["muted"], length=0, labelsize=9, pad=5)
    axes.grid(axis="y", color=palette["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(palette["grid"])
    axes.spines["left"].set_visible(False)


def embed(svg: bytes, name: str, title: str) -> str:
    """Returns a standalone SVG in light colours for use in a page, in the page's colours.

    Only attributes are rewritten, never text.
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
    for variable, colour in LIGHT.items():
        value = value.replace(colour, f"var(--{variable})")
    return re.sub(r"font: ([\d.]+)px [^;]+", r"font-size: \1px", value)
