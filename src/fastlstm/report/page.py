"""`write_report(run_dir)`: numbers, charts, samples and settings of a run as report.html.

One file, no script, nothing loaded from elsewhere, and a policy that forbids both. It can be
written at any moment of a run, also from a half-written metrics.jsonl. Everything that comes from
the run goes through `markup.to_html`. A section or chart that fails says so in its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fastlstm.errors import FastLSTMError, MissingExtraError, counted
from fastlstm.report.charts import draw_charts
from fastlstm.report.drawing import Chart
from fastlstm.report.history import Event, History, number, read_history
from fastlstm.report.lines import ceiling_share, count_of, end_notes, score_form
from fastlstm.report.markup import MAX_TEXT, clipped, failure_text, name_text, to_html
from fastlstm.report.style import CSS
from fastlstm.system.storage import MAX_JSON_BYTES, read_bytes, write_file

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Styles stand in the page and in its charts; nothing else is needed."""
_MAX_LISTED = 20
"""Names shown of a list."""
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
    sections: list[tuple[str, Callable[[], str]]] = [
        ("Run", lambda: _head(name, history)),
        ("Numbers", lambda: _numbers(history)),
        ("On the test part", lambda: _test(history)),
        ("Charts", lambda: _charts(history)),
        ("Samples", lambda: _samples(history)),
        ("Evaluations", lambda: _evaluations(history)),
        ("Kernels", lambda: _kernels(history)),
        ("Settings", lambda: _settings(_config(run_dir), history)),
        ("Notes", lambda: _notes(history)),
    ]
    made = [_made(title, make) for title, make in sections]
    body = "\n".join(section for section in made if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{to_html(name)} · fastlstm</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n<footer>Written by fastlstm from metrics.jsonl.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def _made(title: str, make: Callable[[], str]) -> str:
    try:
        return make()
    except Exception as error:  # a section is worth less than the page, and than the run it is of
        text = to_html(f"This section could not be written: {failure_text(error)}")
        return f'<h2>{title}</h2>\n<p class="quiet">{text}</p>'


def _head(name: str, history: History) -> str:
    start = history.start
    parts = [_source_text(start)]
    if (parameters := number(start, "num_parameters")) is not None:
        parts.append(counted(parameters, "parameter"))
    if start.get("device"):
        parts.append(f"{start['device']}, {start.get('precision', '')}".rstrip(", "))
    lead = " · ".join(part for part in parts if part)
    return (
        f'<p class="eyebrow">fastlstm training run</p>\n<h1>{to_html(name)}</h1>\n'
        f'<p class="lead">{to_html(clipped(lead, MAX_TEXT))}</p>\n{_state(history)}'
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
        said = [f'<p class="state {kind}">{to_html(word + reason)}</p>']
        said += [f'<p class="state warn">{to_html(note)}</p>' for note in end_notes(history.end)]
        return "\n".join(said)
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
    test = (history.end or {}).get("test")
    if isinstance(test, dict) and (bits := number(test, "bits_per_char")) is not None:
        note = count_of(test, "num_units", "token") + " of a text of its own"
        cells.append(_number("Test", f"{bits:.4f}", "bits/char", note))
    if (rate := history.rate) is not None:
        total = number(history.end or history.steps[-1], history.unit) if history.steps else None
        note = f"{total:,.0f} {history.unit}" if total is not None else ""
        cells.append(_number("Speed", f"{rate:,.0f}", f"{history.unit}/s", note))
    if (elapsed := history.elapsed_s) is not None:
        value, unit = _duration(elapsed)
        cells.append(_number("Time", value, unit, "evaluations and saves included"))
    if (share := ceiling_share(history.start, history.rate)) is not None:
        peak = number(history.start, "ceiling_gflops")
        note = f"of {peak:,.0f} GFLOP/s measured" if peak is not None else ""
        cells.append(_number("Share of the ceiling", f"{100 * share:.0f}%", "", note))
    return f'<div class="numbers">{"".join(cells)}</div>' if cells else ""


def _test(history: History) -> str:
    """The forecaster's errors beside those of naive forecasts."""
    test = history.test or {}
    scores = test.get("scores")
    if not isinstance(scores, dict) or not scores:
        return ""
    names = list(dict.fromkeys(key for found in scores.values() for key in found))
    rows = [
        [name_text(who).replace("_", " ")]
        + [_figure_text(found, name, score_form(name)) for name in names]
        for who, found in scores.items()
    ]
    best = list(scores).index("forecaster") if "forecaster" in scores else None
    windows, of_windows = (number(test, key) or 0 for key in ("windows", "of_windows"))
    share = f"{windows:,.0f} of " if of_windows > windows else ""
    note = (
        f"{share}{counted(max(windows, of_windows), 'window')} of the test part, all targets"
        " together, in units of the table. Lower is better; a coverage should be near its level."
    )
    heads = ["", *(name_text(name) for name in names)]
    table = _table(heads, rows, best)
    return f"<h2>On the test part</h2>\n{_note(note)}\n{table}{_targets(test)}"


def _targets(test: Event) -> str:
    """The errors of each target, and how they grow with the step ahead."""
    targets = test.get("targets")
    if not isinstance(targets, list) or not targets:
        return ""
    figures = ("num_values", "mse", "mae", "seasonal_naive_mae")
    rows = [
        [name_text(event["target"])]
        + [_figure_text(event, name, score_form(name)) for name in figures]
        + [_figure_text(part, "mae", ".4g") for part in event["by_step"]]
        for event in targets
    ]
    heads = ["target", "num_values", "mse", "mae", "seasonal naive mae"]
    heads += [_steps_text(part) for part in targets[0]["by_step"]]
    note = _note("Each target in its own unit; on the right the mae by how many steps ahead.")
    return f"\n<h3>By target</h3>\n{note}\n{_table(heads, rows)}"


def _steps_text(part: Event) -> str:
    first, last = part["first"], part["last"]
    return f"step {first}" if first == last else f"steps {first}–{last}"


def _note(text: str) -> str:
    return f'<p class="quiet">{to_html(text)}</p>'


def _table(heads: list[str], rows: list[list[str]], best: int | None = None) -> str:
    """Returns a table that scrolls where it is long; the best row stays in sight."""

    def line(cells: list[str], tag: str) -> str:
        return "".join(f"<{tag}>{to_html(cell)}</{tag}>" for cell in cells)

    kinds = [' class="best"' if index == best else "" for index in range(len(rows))]
    body = "".join(
        f"<tr{kind}>{line(row, 'td')}</tr>" for kind, row in zip(kinds, rows, strict=True)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{line(heads, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _number(label: str, value: str, unit: str, note: str) -> str:
    return (
        f'<div class="number"><p class="label">{to_html(label)}</p>'
        f'<p class="value">{to_html(value)} <span class="unit">{to_html(unit)}</span></p>'
        f'<p class="note">{to_html(note)}</p></div>'
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
        return f'<h2>Charts</h2>\n<p class="quiet">{to_html(error)}</p>'
    if not charts:
        return ""
    return f'<h2>Charts</h2>\n<div class="charts">{"".join(map(_figure, charts))}</div>'


def _figure(chart: Chart) -> str:
    caption = f"<h3>{to_html(chart.title)}</h3><p>{to_html(chart.caption)}</p>"
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
    text = to_html(event["text"], keep="\r\n\t")
    return f'<div class="sample"><h3>{to_html(at)}</h3><pre>{text}</pre></div>\n'


def _evaluations(history: History) -> str:
    if not history.evals:
        return ""
    shown = [column for column in _COLUMNS if any(column.key in e for e in history.evals)]
    best = history.best
    place = next((n for n, event in enumerate(history.evals) if event is best), None)
    heads = ["step", "split", *(column.title for column in shown), "time", ""]
    rows = [_evaluation(event, event is best, shown) for event in history.evals]
    return f"<h2>Evaluations</h2>\n{_table(heads, rows, place)}"


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


def _evaluation(event: Event, is_best: bool, shown: list[_Column]) -> list[str]:
    elapsed = number(event, "elapsed_s")
    split = str(event.get("split", "valid"))
    return [
        f"{event['step']:,.0f}",
        {"valid": "validation"}.get(split, split),
        *(_figure_text(event, column.key, column.form) for column in shown),
        " ".join(_duration(elapsed)) if elapsed is not None else "",
        "best" if is_best else "",
    ]


def _figure_text(event: Event, key: str, form: str = ".4f") -> str:
    value = number(event, key)
    return "" if value is None else format(value, form)


def _kernels(history: History) -> str:
    lines = history.start.get("kernels")
    if not isinstance(lines, list) or not lines:
        return ""
    why = history.start.get("precision_why")
    note = f"precision {history.start.get('precision', '')}: {why}\n" if why else ""
    text = to_html(note + "\n".join(str(line) for line in lines), keep="\n")
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
        f"<div><dt>{to_html(name)}</dt><dd>{to_html(clipped(_setting(value), MAX_TEXT))}</dd></div>"
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
        more = f" … ({len(value):,} in all)" if len(value) > _MAX_LISTED else ""
        return ", ".join(map(name_text, value[:_MAX_LISTED])) + more
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
        rows.append(
            f"<li{' class=warn' if is_warning else ''}>{to_html(clipped(text, MAX_TEXT))}</li>"
        )
    once = dict.fromkeys(rows)  # a resumed run says the same again
    return f"<h2>Notes</h2>\n<ul>{''.join(once)}</ul>" if once else ""
