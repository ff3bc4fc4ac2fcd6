"""The wording of what processes and stages of a run are."""

from __future__ import annotations

from fastlstm.errors import counted
from fastlstm.report.events import Event, number, rank_seconds, text_of
from fastlstm.report.markup import visible

_LISTED_RANKS = 4
"""Whose seconds are listed one by one."""


def processes_text(start: Event) -> str:
    """Returns ``2 on 1 machine (gloo), 1 thread each``; empty for one."""
    about = start.get("processes")
    if not isinstance(about, dict) or (num := number(about, "num")) is None:
        return ""
    machines, threads = number(about, "machines"), number(about, "threads")
    every = number(about, "sync_every") or 1
    stages = start.get("stages")
    parts = [f"{num:,.0f}"]
    if num > 1:
        where = "" if machines is None else f" on {counted(machines, 'machine')}"
        parts = [f"{num:,.0f}{where}" + (f" ({text_of(about, 'backend')})")]
        parts += [] if threads is None else [f"{counted(threads, 'thread')} each"]
    if isinstance(stages, list):
        parts.append("layers " + " / ".join(map(visible, stages)))
    elif num > 1 and every > 1:
        parts.append(f"weights averaged every {every:,.0f} steps")
    if num > 1 and about.get("wire") == "bf16":
        parts.append("sent in bf16")
    return ", ".join(parts)


def ranks_text(event: Event) -> str:
    """Returns how long the passes of a step take on each rank, of many on the fastest and slowest;
    empty where there is one process."""
    seconds = rank_seconds(event)
    if len(seconds) <= _LISTED_RANKS:
        return "/".join(f"{1e3 * s:.0f}" for s in seconds) + (" ms" if seconds else "")
    low, high = min(seconds), max(seconds)
    return f"{1e3 * low:.0f}-{1e3 * high:.0f} ms, slowest {seconds.index(high)}"
