"""What `fastlstm profile RUN` found, from RUN/profile.json: one card per verdict."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fastlstm.errors import FastLSTMError
from fastlstm.report.events import Event, number, text_of
from fastlstm.report.markup import clipped, to_html
from fastlstm.system.storage import MAX_JSON_BYTES, read_bytes

if TYPE_CHECKING:
    from pathlib import Path

PROFILE_FILE = "profile.json"
_MAX_CARDS = 6
_MAX_TEXT = 400
_MAX_COMMAND = 2000


def profile_cards(run: Path) -> str:
    """Returns the recommended verdicts of a run's profile as HTML; empty where there is none."""
    try:
        found = json.loads(read_bytes(run / PROFILE_FILE, MAX_JSON_BYTES))
    except (FastLSTMError, ValueError, RecursionError):
        return ""
    verdicts = found.get("verdicts") if isinstance(found, dict) else None
    if not isinstance(verdicts, list):
        return ""
    chosen = [v for v in verdicts if isinstance(v, dict) and v.get("is_recommended") is True]
    verified = _gain(found, "verified_gain")
    cards = [
        _card(verdict, verified if place == 0 else "")
        for place, verdict in enumerate(chosen[:_MAX_CARDS])
    ]
    if not cards and found.get("is_undecided") is True:
        return '<p class="quiet">undecided: a change may gain more than 5 %.</p>'
    if not cards:
        return '<p class="quiet">nothing above 5 %, this run is healthy.</p>'
    return f'<div class="verdicts">{"".join(cards)}</div>'


def _card(verdict: Event, verified: str) -> str:
    gain, low, high = (_gain(verdict, name) for name in ("gain", "low", "high"))
    within = f" ({low} to {high})" if low and high and low != high else ""
    lines = [
        f"<h4>{_text(verdict, 'cause')}: {gain}{within} speed</h4>",
        f"<p>{_text(verdict, 'effect')}. {_text(verdict, 'evidence')}</p>",
    ]
    if verified:
        lines.append(f"<p>verified by running it: {verified}</p>")
    if command := text_of(verdict, "command"):
        lines.append(f'<code class="command">{to_html(clipped(command, _MAX_COMMAND))}</code>')
    return f'<div class="verdict">{"".join(lines)}</div>'


def _gain(event: Event, name: str) -> str:
    value = number(event, name)
    return "" if value is None else f"{100 * value:+,.0f} %"


def _text(event: Event, name: str) -> str:
    return to_html(clipped(text_of(event, name), _MAX_TEXT))
