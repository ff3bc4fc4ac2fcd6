"""Load of a run's machine over time: by the run itself and by others."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from statistics import fmean
from typing import TYPE_CHECKING

from fastlstm.report.events import number
from fastlstm.report.terminal import clock, percent

if TYPE_CHECKING:
    from fastlstm.report.events import Event

MAX_BINS = 120
_LEAST_S, _MOST_S = 10.0, 1e9
"""Width of the narrowest bin, and the longest valid time."""
_OTHERS = ("others_share", "steal_share", "throttled_share")
"""Shares of the machine that a run cannot use."""
_BUSY = 0.1
_WIDTH, _HEIGHT = 600, 36


class MachineUse:
    """The shares of all cores used by a run and by others, from its `machine` events."""

    def __init__(self) -> None:
        self._seconds, self._own, self._others = array("d"), array("d"), array("d")

    @property
    def mean_others(self) -> float | None:
        """The mean share used by others; None if unknown."""
        return fmean(self._others) if self._others else None

    def add(self, event: Event) -> None:
        """Adds a `machine` event."""
        at, others = number(event, "elapsed_s"), [number(event, name) for name in _OTHERS]
        if at is None or others[0] is None or not 0.0 <= at < _MOST_S:
            return
        cores = max(number(event, "cores") or 1.0, 1.0)
        own = (number(event, "own_cores") or 0.0) / cores
        self._seconds.append(max(at, self._seconds[-1]) if self._seconds else at)
        self._own.append(min(max(own, 0.0), 1.0))
        self._others.append(min(max(sum(share or 0.0 for share in others), 0.0), 1.0))

    def cut_after(self, seconds: float) -> None:
        """Drops the events after a time; a resumed run repeats them."""
        kept = bisect_right(self._seconds, seconds)
        for column in (self._seconds, self._own, self._others):
            del column[kept:]

    def bins(self) -> list[tuple[float, float, float]]:
        """Returns start, own mean share and others' of at most 120 equal parts of the time."""
        width = max(self._seconds[-1] / (MAX_BINS - 1), _LEAST_S) if self._seconds else 1.0
        found: dict[int, list[int]] = {}
        for place, at in enumerate(self._seconds):
            found.setdefault(int(at / width), []).append(place)
        return [
            (part * width, fmean(self._own[p] for p in at), fmean(self._others[p] for p in at))
            for part, at in found.items()
        ]

    def drawing(self) -> str:
        """Returns the used cores over time as SVG, shaded where others used a tenth or more."""
        bins = self.bins()
        if not bins:
            return ""
        width = max(self._seconds[-1] / (MAX_BINS - 1), _LEAST_S)
        end_s = bins[-1][0] + width
        paths = {"shade": "", "own": "", "others": ""}
        for begin, own, others in bins:
            left, across = _WIDTH * begin / end_s, _WIDTH * width / end_s
            paths["shade"] += _column(left, across, 0.0, 1.0) if others > _BUSY else ""
            paths["own"] += _column(left, across, 0.0, own)
            paths["others"] += _column(left, across, own, others)
        drawn = "".join(f'<path d="{path}" class="{name}"/>' for name, path in paths.items())
        busy = percent(sum(others > _BUSY for *_, others in bins) * width / end_s)
        return (
            f'<svg class="strip" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none"'
            f' role="img" aria-label="cores used over time">{drawn}</svg>'
            '<p class="key"><span><b class="own"></b>this run</span><span><b class="others"></b>'
            f"others</span><span>0:00 to {clock(end_s)}; others used more than a tenth of the"
            f" machine for {busy} of the time</span></p>"
        )


def _column(left: float, width: float, low: float, share: float) -> str:
    height = _HEIGHT * min(share, max(1.0 - low, 0.0))
    top = _HEIGHT * (1.0 - low) - height
    return f"M{left:.1f} {top:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"
