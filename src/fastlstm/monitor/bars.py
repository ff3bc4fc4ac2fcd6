"""Shares of a run's time as bars: its phases, and who used the machine when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.monitor.alert_rule import BUSY
from fastlstm.monitor.overlay import COLOURS
from fastlstm.report.markup import clipped, to_html
from fastlstm.report.terminal import clock, percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.monitor.machine_strip import Bin, MachineStrip

_MIN_SHARE = 0.005
_HEIGHT = 36


def phase_bar(phases: Mapping[str, float]) -> str:
    """Returns one bar of the seconds of each phase, largest first; empty where there are none."""
    total = sum(phases.values())
    if not total > 0.0:
        return ""
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    shown = [item for item in ordered if item[1] / total >= _MIN_SHARE][: len(COLOURS)]
    parts, key = [], []
    for (name, seconds), colour in zip(shown, COLOURS, strict=False):
        label = f"{clipped(name.replace('_', ' '), 40)} {percent(seconds / total)}"
        width = f"{100 * seconds / total:.2f}%"
        parts.append(f'<i style="width:{width};background:{colour}"></i>')
        key.append(f'<span><b style="background:{colour}"></b>{to_html(label)}</span>')
    return f'<div class="bar">{"".join(parts)}</div><p class="key">{"".join(key)}</p>'


def machine_bar(strip: MachineStrip) -> str:
    """Returns the cores used over a run's time; minutes in which others were busy are shaded."""
    bins = strip.bins
    if not bins:
        return ""
    end_s = bins[-1].begin_s + bins[-1].width_s
    busy = sum(part.width_s for part in bins if part.others > BUSY)
    own = "".join(_column(part, end_s, 0.0, part.own) for part in bins)
    others = "".join(_column(part, end_s, part.own, part.others) for part in bins if part.others)
    shade = "".join(_column(part, end_s, 0.0, 1.0) for part in bins if part.others > BUSY)
    told = f"others used more than a tenth of the machine in {percent(busy / end_s)} of the time"
    return (
        f'<svg class="strip" viewBox="0 0 600 {_HEIGHT}" preserveAspectRatio="none" role="img"'
        f' aria-label="cores used over time">'
        f'<path d="{shade}" class="shade"/><path d="{own}" class="own"/>'
        f'<path d="{others}" class="others"/></svg>'
        f'<p class="key"><span><b class="own"></b>this run</span><span><b class="others"></b>others'
        f"</span><span>0:00 to {clock(end_s)}; {to_html(told)}</span></p>"
    )


def _column(part: Bin, end_s: float, low: float, share: float) -> str:
    left, width = 600 * part.begin_s / end_s, 600 * part.width_s / end_s
    height = _HEIGHT * min(share, max(1.0 - low, 0.0))
    top = _HEIGHT * (1.0 - low) - height
    return f"M{left:.1f} {top:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"
