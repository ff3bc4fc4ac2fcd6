"""One run in some detail: how it will end, its alerts, its time, its machine, its profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.monitor.bars import machine_bar, phase_bar
from fastlstm.monitor.profile_cards import profile_cards
from fastlstm.report.events import number, text_of
from fastlstm.report.markup import clipped, to_html
from fastlstm.report.terminal import clock, percent, short_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.monitor.alerts import Alert
    from fastlstm.monitor.run_summary import RunSummary
    from fastlstm.report.events import Event

_MAX_GPUS = 16


def run_card(run: RunSummary, name: str, state: str, alerts: Sequence[Alert]) -> str:
    """Returns the HTML of a run; empty where there is nothing but its line in the table."""
    parts = [
        outlook_line(run),
        "".join(_alert(run, alert) for alert in alerts),
        _titled("Time by phase", phase_bar(run.phases)),
        _titled("Cores in use over time", machine_bar(run.machine)),
        gpu_lines(run.machine_event),
        _titled("Profile", profile_cards(run.path)),
    ]
    if not any(parts):
        return ""
    title = f'<h3>{to_html(name)} <span class="{state}">{state}</span></h3>'
    return f'<div class="card">{title}{"".join(parts)}</div>\n'


def _titled(title: str, html: str) -> str:
    return f'<p class="what">{title}</p>{html}' if html else ""


def outlook_line(run: RunSummary) -> str:
    """Returns what a running text model is expected to end at; empty where that is not known."""
    bits, error = number(run.outlook, "bits_per_char"), number(run.outlook, "error")
    if bits is None or run.end is not None:
        return ""
    told = f"predicted final validation: {bits:.3f}"
    told += "" if error is None else f" ± {error:.3f}"
    told += f" {run.measure.label}"
    more = number(run.outlook, "hour_more_bits_per_char")
    told += "" if more is None else f"; with one hour more {more:.3f}"
    return f'<p class="outlook">{to_html(told)}</p>'


def _alert(run: RunSummary, alert: Alert) -> str:
    since = f"since {clock(alert.elapsed_s)}"
    ago = run.seconds - alert.elapsed_s
    since += f", for {clock(ago)}" if ago > 0.0 else ""
    text = to_html(clipped(alert.text, 300))
    return (
        f'<p class="alert {alert.severity}"><b>{alert.rule}</b> {text} <span>({since})</span><br>'
        f"{to_html(alert.advice)}</p>"
    )


def gpu_lines(event: Event) -> str:
    """Returns what a `machine` event says of GPUs, and which of them the run may use."""
    gpus = event.get("gpus")
    if not isinstance(gpus, list) or not gpus:
        return ""
    lines = [_gpu(gpu) for gpu in gpus[:_MAX_GPUS] if isinstance(gpu, dict)]
    visible = event.get("cuda_visible_devices")
    allowed = "not set" if visible is None else clipped(text_of(event, "cuda_visible_devices"), 80)
    lines.append(f"CUDA_VISIBLE_DEVICES: {allowed}")
    items = "".join(f"<li>{to_html(line)}</li>" for line in lines)
    return f'<p class="what">GPUs</p><ul class="gpus">{items}</ul>'


def _gpu(gpu: Event) -> str:
    used, total, others = (number(gpu, f"{name}_bytes") for name in ("used", "total", "others"))
    busy, power, clock = (number(gpu, n) for n in ("busy_share", "power_w", "clock_mhz"))
    parts = [
        "" if used is None or total is None else f"{short_bytes(used)} of {short_bytes(total)}",
        f"others hold {short_bytes(others)}" if others else "",
        "" if busy is None else f"{percent(busy)} busy",
        "" if power is None else f"{power:.0f} W",
        "" if clock is None else f"{clock:.0f} MHz",
        "slowed down by heat or power" if gpu.get("is_held_back") is True else "",
    ]
    index = number(gpu, "index")
    name = "GPU" if index is None else f"GPU {index:.0f}"
    return f"{name}: {', '.join(filter(None, parts)) or 'tells nothing'}"
