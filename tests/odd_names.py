"""Names that a column, a series or a file may have, and what a page must make of them."""

from __future__ import annotations

from typing import Any

NAMES = (
    '"><script>alert(1)</script>',
    "</title></style></svg><img src=x onerror=alert(2)>",
    "$\\frac{$",
    "$x_1$ and 5 $",
    "line\nbreak\r\t\x00\x1b[31m",
    "\u202eright to left\u200f",
    "x" * 10_000,
    "",
    " ",
    "_hidden",
    '#010203 url(#a) id="b" <!-- c',
    "]]>&amp;&#60;",
    "温度",
    "\ud800",
)


def forecast_event(target: str, series: str | None = None) -> dict[str, Any]:
    """A forecast as metrics.jsonl has it."""
    shown = {"past": [1.0, 2.0], "actual": [3.0, 2.0], "center": [2.5, 2.0]}
    ends = {"low": [2.0, 1.5], "high": [3.0, None]}
    return {"event": "forecast", "series": series, "target": target, **shown, **ends}
