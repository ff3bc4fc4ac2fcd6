"""Curves of several runs in one SVG, and a curve as small as a word."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fastlstm.report.drawing import tick_text
from fastlstm.report.markup import to_html

if TYPE_CHECKING:
    from collections.abc import Sequence

COLOURS = (
    *("#2e7cf6", "#e8710a", "#12a150", "#d6336c"),
    *("#8b5cf6", "#0e9aa7", "#b8860b", "#7a869a"),
)
"""Seen on white and on black."""
_WIDTH, _HEIGHT = 540, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 8, 10, 40
_NUM_TICKS = 5
_LOG_RATIO = 2.0


def overlay(
    curves: Sequence[Sequence[tuple[float, float]]], title: str, x_label: str, y_label: str
) -> str:
    """Returns the SVG of curves of (x, y), in the order of `COLOURS`; empty without two points."""
    points = [point for curve in curves for point in curve]
    if len(points) < 2:
        return ""
    right = max(x for x, _ in points) or 1.0
    low, high = min(y for _, y in points), max(y for _, y in points)
    is_log = 0 < low * _LOG_RATIO < high
    scale = math.log if is_log else float
    first, last = scale(low), scale(high if high > low else low + 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * x / right
        return across, _TOP + (_HEIGHT - _TOP - _BOTTOM) * (last - scale(y)) / (last - first)

    parts = []
    for share in range(_NUM_TICKS):
        inner = first + (last - first) * share / (_NUM_TICKS - 1)
        value = math.exp(inner) if is_log else inner
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (last - inner) / (last - first)
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="var(--grid)"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
        x = right * share / (_NUM_TICKS - 1)
        anchor = "end" if share == _NUM_TICKS - 1 else "middle"
        parts.append(
            f'<text x="{place(x, low)[0]:.1f}" y="{_HEIGHT - 22}" text-anchor="{anchor}">'
            f"{tick_text(float(f'{x:.3g}'))}</text>"
        )
    for curve, colour in zip(curves, COLOURS, strict=False):
        parts.append(_line([place(x, y) for x, y in curve], colour))
    unit = f"{y_label}, log scale" if is_log else y_label
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{to_html(title)}"'
        f' font-size="12" fill="var(--muted)">{"".join(parts)}'
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">{to_html(unit)}</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{to_html(x_label)}</text>'
        "</svg>"
    )


def sparkline(values: Sequence[float]) -> str:
    """Returns a curve of a few values without axes; empty with fewer than two."""
    values = values[:: max(1, len(values) // 32)]
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
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
