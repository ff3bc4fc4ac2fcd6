"""`write_report(run_dir)`: numbers, charts, samples and settings of a run as report.html.

One file, no script, nothing loaded from elsewhere. It can be written at any moment of a run, also
from a half-written metrics.jsonl. Everything that comes from the run is HTML-escaped.
"""

from __future__ import annotations

import json
import unicodedata
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from fastlstm.errors import FastLSTMError, MissingExtraError
from fastlstm.report.charts import draw_charts
from fastlstm.report.drawing import Chart
from fastlstm.report.history import Event, History, number, read_history
from fastlstm.report.lines import score_form
from fastlstm.report.style import CSS
from fastlstm.storage import MAX_JSON_BYTES, read_bytes, write_file

OPEN_SAMPLES = 2
"""Newest samples shown at once; older ones are behind a fold."""


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` of a run directory.

    Args:
        run_dir: directory with `metrics.jsonl` and `config.json`; either may be missing.

    Returns:
        The path of the report.

    Raises:
        StorageError: the file cannot be written.
    """
    path = Path(run_dir) / "report.html"
    history = read_history(Path(run_dir) / "metrics.jsonl")
    write_file(path, page(Path(run_dir), history).encode("utf-8", "replace"))
    return path


def page(run_dir: Path, history: History) -> str:
    """Returns the HTML of a report."""
    name = run_dir.resolve().name
    sections = [
        _head(name, history),
        _numbers(history),
        _test(history),
        _charts(history),
        _samples(history),
        _evaluations(history),
        _kernels(history),
        _settings(_config(run_dir), history),
        _notes(history),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(name)} · fastlstm</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n<footer>Written by fastlstm from metrics.jsonl.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def _text(value: object, keep: str = "") -> str:
    """Escapes for HTML and drops control characters, of which `keep` may stay."""
    clean = "".join(
        char
        for char in str(value)
        if char in keep or unicodedata.category(char) not in ("Cc", "Cs")
    )
    return escape(clean)


def _head(name: str, history: History) -> str:
    start = history.start
    parts = [_source_text(start)]
    if (parameters := number(start, "num_parameters")) is not None:
        parts.append(f"{parameters:,.0f} parameters")
    if start.get("device"):
        parts.append(f"{start['device']}, {start.get('precision', '')}".rstrip(", "))
    lead = " · ".join(part for part in parts if part)
    return (
        f'<p class="eyebrow">fastlstm training run</p>\n<h1>{_text(name)}</h1>\n'
        f'<p class="lead">{_text(lead)}</p>\n{_state(history)}'
    )


def _source_text(start: Event) -> str:
    source = start.get("source")
    if isinstance(source, list | tuple):
        return ", ".join(str(part) for part in source)
    return str(source) if source else ""


def _state(history: History) -> str:
    if history.end is not None:
        reason = str(history.end.get("reason", ""))
        kind, word = ("warn", "") if "stopped" in reason else ("good", "Finished: ")
        return f'<p class="state {kind}">{_text(word + reason)}</p>'
    if not history.steps:
        return '<p class="state warn">No steps recorded yet</p>'
    done = number(history.steps[-1], "progress")
    share = f", {100 * done:.0f}% done" if done is not None else ""
    return f'<p class="state warn">No end recorded{share}</p>'


def _numbers(history: History) -> str:
    cells = []
    if (best := history.best) is not None:
        unit = "loss" if history.is_forecast else "bits/char"
        cells.append(_number("Best validation", f"{best[history.measure]:.4f}", unit, _at(best)))
    if (rate := history.rate) is not None:
        total = number(history.end or history.steps[-1], history.unit) if history.steps else None
        note = f"{total:,.0f} {history.unit}" if total is not None else ""
        cells.append(_number("Speed", f"{rate:,.0f}", f"{history.unit}/s", note))
    if (elapsed := history.elapsed_s) is not None:
        value, unit = _duration(elapsed)
        cells.append(_number("Time", value, unit, "evaluations and saves included"))
    if (share := history.mean("ceiling_share")) is not None:
        peak = number(history.start, "ceiling_gflops")
        note = f"of {peak:,.0f} GFLOP/s measured" if peak is not None else ""
        cells.append(_number("Share of the ceiling", f"{100 * share:.0f}%", "", note))
    return f'<div class="numbers">{"".join(cells)}</div>' if cells else ""


def _test(history: History) -> str:
    """The forecaster's errors beside those of naive forecasts."""
    scores = (history.test or {}).get("scores")
    if not isinstance(scores, dict) or not scores:
        return ""
    names = list(dict.fromkeys(key for found in scores.values() for key in found))
    head = "".join(f"<th>{_text(name)}</th>" for name in ("", *names))
    rows = "".join(
        f"<tr{' class=best' if who == 'forecaster' else ''}><td>{_text(who.replace('_', ' '))}</td>"
        + "".join(f"<td>{_figure_text(found, name, score_form(name))}</td>" for name in names)
        + "</tr>"
        for who, found in scores.items()
    )
    assert history.test is not None
    windows, of_windows = (number(history.test, k) or 0 for k in ("windows", "of_windows"))
    share = f" of {of_windows:,.0f}" if of_windows > windows else ""
    note = (
        f"{windows:,.0f}{share} windows of the test part, in units of the table. All figures are of"
        " the same num_values targets."
    )
    return (
        f'<h2>On the test part</h2>\n<p class="quiet">{_text(note)}</p>\n'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _number(label: str, value: str, unit: str, note: str) -> str:
    return (
        f'<div class="number"><p class="label">{_text(label)}</p><p class="value">{_text(value)} '
        f'<span class="unit">{_text(unit)}</span></p><p class="note">{_text(note)}</p></div>'
    )


def _at(event: Event) -> str:
    return f"at step {event['step']:,.0f}"


def _duration(seconds: float) -> tuple[str, str]:
    if seconds < 100:
        return f"{seconds:.1f}", "s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}", "min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}", "h"


def _charts(history: History) -> str:
    try:
        charts = draw_charts(history)
    except MissingExtraError as error:
        return f'<h2>Charts</h2>\n<p class="quiet">{_text(error)}</p>'
    if not charts:
        return ""
    return f'<h2>Course of the run</h2>\n<div class="charts">{"".join(map(_figure, charts))}</div>'


def _figure(chart: Chart) -> str:
    caption = f"<h3>{_text(chart.title)}</h3><p>{_text(chart.caption)}</p>"
    return f"<figure><figcaption>{caption}</figcaption>{chart.svg}</figure>\n"


def _samples(history: History) -> str:
    shown = [_sample(event) for event in reversed(history.samples) if event.get("text")]
    if not shown:
        return ""
    older = "".join(shown[OPEN_SAMPLES:])
    count = len(shown) - OPEN_SAMPLES
    fold = f"<details><summary>{count} earlier</summary>{older}</details>" if older else ""
    return f"<h2>What it wrote</h2>\n{''.join(shown[:OPEN_SAMPLES])}{fold}"


def _sample(event: Event) -> str:
    at = _at(event) if number(event, "step") is not None else "sample"
    text = _text(event["text"], keep="\n\t")
    return f'<div class="sample"><h3>{_text(at)}</h3><pre>{text}</pre></div>\n'


def _evaluations(history: History) -> str:
    if not history.evals:
        return ""
    shown = [column for column in _COLUMNS if any(column.key in e for e in history.evals)]
    columns = ("step", "split", *(column.title for column in shown), "time", "")
    head = "".join(f"<th>{column}</th>" for column in columns)
    best = history.best
    rows = "".join(_evaluation(event, event is best, shown) for event in history.evals)
    return (
        f'<h2>Evaluations</h2>\n<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


class _Column(NamedTuple):
    key: str
    title: str
    form: str = ".4f"


_COLUMNS = (
    _Column("bits_per_char", "bits/char"),
    _Column("bits_per_byte", "bits/byte"),
    _Column("perplexity", "perplexity", ".4g"),
    _Column("loss", "loss"),
)


def _evaluation(event: Event, is_best: bool, shown: list[_Column]) -> str:
    elapsed = number(event, "elapsed_s")
    split = str(event.get("split", "valid"))
    cells = [
        f"{event['step']:,.0f}",
        {"valid": "validation"}.get(split, split),
        *(_figure_text(event, column.key, column.form) for column in shown),
        " ".join(_duration(elapsed)) if elapsed is not None else "",
    ]
    row = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
    kind, mark = (' class="best"', "best") if is_best else ("", "")
    return f'<tr{kind}>{row}<td class="mark">{mark}</td></tr>'


def _figure_text(event: Event, key: str, form: str = ".4f") -> str:
    value = number(event, key)
    return "" if value is None else format(value, form)


def _kernels(history: History) -> str:
    lines = history.start.get("kernels")
    if not isinstance(lines, list) or not lines:
        return ""
    why = history.start.get("precision_why")
    note = f"precision {history.start.get('precision', '')}: {why}\n" if why else ""
    text = _text(note + "\n".join(str(line) for line in lines), keep="\n")
    return f"<h2>Kernels</h2>\n<pre>{text}</pre>"


def _config(run_dir: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(read_bytes(run_dir / "config.json", MAX_JSON_BYTES))
    except (FastLSTMError, ValueError, RecursionError):
        return {}
    train = loaded.get("train") if isinstance(loaded, dict) else None
    return train if isinstance(train, dict) else {}


def _settings(config: dict[str, Any], history: History) -> str:
    start = history.start
    if not config:
        names = (
            "vocab",
            "batch_size",
            "seq_length",
            "optimizer",
            "learning_rate",
            "dropout",
            "seed",
        )
        config = {name: start[name] for name in names if start.get(name) is not None}
    resolved = {name: start.get(name) for name, value in config.items() if value in (None, [])}
    facts = {
        name: start[name]
        for name in (
            *("vocab_size", "train_tokens", "valid_tokens", "test_tokens"),
            *("rows", "series", "frequency", "train_windows", "valid_windows", "end"),
        )
        if start.get(name) is not None
    }
    merged = {**config, **resolved, **facts}
    rows = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(_setting(value))}</dd></div>"
        for name, value in merged.items()
        if value not in (None, [])
    )
    return f"<h2>Settings</h2>\n<dl>{rows}</dl>" if rows else ""


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _notes(history: History) -> str:
    rows = []
    for event in history.notes:
        if event.get("event") == "skip":
            parts = [str(event.get(key) or "") for key in ("what", "tensor", "action")]
            step = number(event, "step") or 0
            text, is_warning = f"step {step:,.0f}: " + " · ".join(p for p in parts if p), True
        else:
            text, is_warning = str(event.get("text") or ""), event.get("level") == "warning"
        rows.append(f"<li{' class=warn' if is_warning else ''}>{_text(text)}</li>")
    return f"<h2>Notes</h2>\n<ul>{''.join(rows)}</ul>" if rows else ""
