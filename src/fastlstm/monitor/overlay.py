"""Curves of several runs in one SVG, and sparklines.

A live page is made once a second: a chart takes 2 ms here and 97 ms with matplotlib.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fastlstm.report.drawing import LOG_RATIO
from fastlstm.report.markup import to_html
from fastlstm.report.terminal import tick_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

COLOURS = (
    *("#2e7cf6", "#e8710a", "#12a150", "#d6336c"),
    *("#8b5cf6", "#0e9aa7", "#b8860b", "#7a869a"),
)
"""Visible on white and on black."""
_WIDTH, _HEIGHT = 540, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 8, 10, 40


def overlay(
    curves: Sequence[Sequence[tuple[float, float]]], title: str, x_label: str, y_label: str
) -> str:
    """Returns the SVG of curves of (x, y), in the order of `COLOURS`; empty without two points."""
    if sum(map(len, curves)) < 2:
        return ""
    all_x, all_y = zip(*(point for curve in curves for point in curve), strict=True)
    right, low, high = max(all_x) or 1.0, min(all_y), max(all_y)
    is_log = 0 < low * LOG_RATIO < high
    scale = math.log if is_log else float
    first, last = scale(low), scale(high if high > low else low + max(1.0, abs(low)))
    width, height, span = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM, last - first

    parts = []
    marks = _log_ticks(low, high) if is_log else _ticks(low, high)
    for y, text in zip(marks, tick_texts(marks), strict=True):
        up = _TOP + height * (last - scale(y)) / span
        parts.append(
            f'<path d="M{_LEFT} {up:.1f}H{_WIDTH - _RIGHT}" stroke="var(--grid)"/>'
            f'<text x="{_LEFT - 8}" y="{up + 4:.1f}" text-anchor="end">{text}</text>'
        )
    marks = _ticks(0.0, right)
    for x, text in zip(marks, tick_texts(marks), strict=True):
        across = _LEFT + width * x / right
        anchor = "end" if across > _WIDTH - 30 else "middle"
        parts.append(
            f'<text x="{across:.1f}" y="{_HEIGHT - 22}" text-anchor="{anchor}">{text}</text>'
        )
    for curve, colour in zip(curves, COLOURS, strict=False):
        points = [
            (_LEFT + width * x / right, _TOP + height * (last - scale(y)) / span) for x, y in curve
        ]
        parts.append(_line(points, colour))
    unit = f"{y_label}, log scale" if is_log else y_label
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{to_html(title)}"'
        f' font-size="12" fill="var(--muted)">{"".join(parts)}'
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{to_html(unit)}</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{to_html(x_label)}</text>'
        "</svg>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Returns 1 to 6 round values from `low` to `high`."""
    span = high - low
    if not 1e-290 < span < math.inf:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next((power * s for s in (1, 2, 2.5, 5) if span / (power * s) <= 5), 10 * power)
    first = math.ceil(low / step)
    return [step * at for at in range(first, math.floor(high / step) + 1)] or [low]


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns some values from `low` to `high` in equal ratios."""
    ratio = high / low
    return [float(f"{low * ratio ** (at / 4):.3g}") for at in range(5)]


def sparkline(values: Sequence[float]) -> str:
    """Returns a curve of a few values without axes; empty with fewer than two."""
    values = values[:: max(1, -(-len(values) // 32))]
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = high - low or 1.0
    step = 90 / (len(values) - 1)
    points = [(2 + step * at, 2 + 16 * (high - y) / span) for at, y in enumerate(values)]
    return f'<svg viewBox="0 0 94 20">{_line(points, "var(--a)")}</svg>'


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    if len(points) == 1:
        ((x, y),) = points
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
    path = " ".join(map("%.1f,%.1f".__mod__, points))  # fastest: a page has thousands of points
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
