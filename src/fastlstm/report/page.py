"""`write_report(run_dir)`: numbers, charts, samples and settings of a run as report.html.

It can be written at any time, also from a half-written metrics.jsonl. A section or chart that fails
says so in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fastlstm.errors import counted
from fastlstm.report.charts import draw_charts
from fastlstm.report.compression import compression_charts, compression_rows
from fastlstm.report.drawing import Chart
from fastlstm.report.events import SPLITS, Event, metrics_of, number, stored_json, text_of
from fastlstm.report.history import History, read_history
from fastlstm.report.html import document, figure, quiet, scores_table, table
from fastlstm.report.lines import (
    Row,
    ceiling_share,
    end_notes,
    figure_text,
    header_rows,
    is_unfinished,
    joined,
    score_form,
    skip_text,
    windows_text,
)
from fastlstm.report.markup import MAX_TEXT, clipped, failure_text, name_text, to_html
from fastlstm.report.terminal import Glyphs, clock, percent
from fastlstm.system.storage import write_file

_MAX_LISTED = 20
_FAN = (
    "Windows of the test set. A darker area is likelier; an 80 % interval should hold four of five"
    " actual values. The y axis has the unit of the table."
)
OPEN_SAMPLES = 2
"""Newest samples shown; the older ones are folded away."""


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` of a run directory and returns its path.

    metrics.jsonl and config.json may be missing. Raises StorageError.
    """
    path = Path(run_dir) / "report.html"
    history = read_history(Path(run_dir) / "metrics.jsonl")
    write_file(path, page(Path(run_dir), history))
    return path


def page(run_dir: Path, history: History) -> bytes:
    """Returns the HTML of a report."""
    name = run_dir.resolve().name
    compression = (history.end or {}).get("compression") or stored_json(
        run_dir / "compression.json"
    )
    sections: dict[str, Callable[[], str]] = {
        "Run": lambda: _head(name, history, bool(compression)),
        "Numbers": lambda: _numbers(history),
        "Test set": lambda: _test(history.test or {}),
        "Compression": lambda: _compression(compression),
        "Charts": lambda: _charts(history),
        "Samples": lambda: _samples(history),
        "Evaluations": lambda: _evaluations(history),
        "Setup": lambda: _rows(header_rows(history.start, Glyphs()) if history.start else []),
        "Settings": lambda: _settings(stored_json(run_dir / "config.json"), history),
        "Notes": lambda: _notes(history),
    }
    made = [_made(title, make) for title, make in sections.items()]
    body = "\n".join(section for section in made if section)
    footer = "<footer>Written by fastlstm from metrics.jsonl.</footer>"
    return document(f"{name} · fastlstm", f"{body}\n{footer}\n")


def _made(title: str, make: Callable[[], str]) -> str:
    """Returns a section below its heading; an empty one has none."""
    try:
        body = make()
    except Exception as error:  # one broken section must not cost the page
        body = quiet(f"This section could not be written: {failure_text(error)}")
    else:
        if title in ("Run", "Numbers") or body.startswith("<h2>"):  # with headings of their own
            return body
    return f"<h2>{title}</h2>\n{body}" if body else ""


def _head(name: str, history: History, is_compressed: bool) -> str:
    start = history.start
    parameters = number(start, "num_parameters")
    lead = [
        text_of(start, "source"),
        "" if parameters is None else counted(parameters, "parameter"),
        joined(text_of(start, "device"), text_of(start, "precision")),
    ]
    state = _state(history) if history.start or not is_compressed else ""
    kind = "compressed" if is_compressed else "training"
    return (
        f'<p class="eyebrow">fastlstm {kind} run</p>\n<h1>{to_html(name)}</h1>\n'
        f'<p class="lead">{to_html(clipped(joined(*lead, separator=" · "), MAX_TEXT))}</p>\n{state}'
    )


def _state(history: History) -> str:
    if history.end is not None:
        kind, word = ("warn", "") if is_unfinished(history.end) else ("good", "Finished: ")
        states = [(kind, word + text_of(history.end, "reason"))]
        states += [("warn", note) for note in end_notes(history.end, history.start)]
    elif not history.steps:
        states = [("warn", "No steps recorded yet")]
    else:
        done = number(history.steps[-1], "progress")
        share = f", {100 * done:.0f}% done" if done is not None else ""
        states = [("warn", f"No end recorded{share}")]
    return "\n".join(f'<p class="state {kind}">{to_html(text)}</p>' for kind, text in states)


def _numbers(history: History) -> str:
    cells, measure, unit = [], history.measure, history.unit
    if (best := history.best) is not None:
        best_text = figure_text(best, measure.key)
        cells.append(_number("Best validation", best_text, measure.label, _at(best)))
    test = (history.end or {}).get("test")
    if isinstance(test, dict) and (test_text := figure_text(test, measure.key)):
        cells.append(_number("Test", test_text, measure.label, "the best model, on unseen text"))
    if (rate := history.rate) is not None:
        total = number(history.end or history.steps[-1], "units") if history.steps else None
        trained = f"{total:,.0f} {unit}" if total is not None else ""
        cells.append(_number("Speed", f"{rate:,.0f}", f"{unit}/s", trained))
    if (elapsed := history.elapsed_s) is not None:
        cells.append(_number("Time", clock(elapsed), "", "including evaluations and saving"))
    if (share := ceiling_share(history.start, history.rate)) is not None:
        peak = number(history.start, "ceiling_gflops")
        of = f"of {peak:,.0f} GFLOP/s measured" if peak is not None else ""
        cells.append(_number("Share of the ceiling", percent(share), "", of))
    return f'<div class="numbers">{"".join(cells)}</div>' if cells else ""


def _test(test: Event) -> str:
    scores = test.get("scores")
    if not isinstance(scores, dict) or not scores:
        return ""
    remark = (
        f"{windows_text(test)} of the test set, all targets together, in units of the table."
        " Lower errors are better; rel_mae 0.8 is an error 20 % below the naive forecast's. A"
        " coverage should be close to its level: 0.8 for coverage_80."
    )
    return f"{quiet(remark)}{scores_table(scores, test)}{_targets(test)}{_series(test)}"


def _scores(event: Event, names: Sequence[str]) -> list[str]:
    return [figure_text(event, name, score_form(name)) for name in names]


def _targets(test: Event) -> str:
    """Returns the errors of each target, also by the number of steps ahead."""
    targets = test.get("targets")
    if not isinstance(targets, list) or not targets:
        return ""
    figures = ("num_values", "mse", "mae", "naive_mae", "seasonal_naive_mae")
    rows = [
        [name_text(event["target"]), *_scores(event, figures)]
        + [figure_text(part, "mae", ".4g") for part in event["by_step"]]
        for event in targets
    ]
    heads = ["target", "num_values", "mse", "mae", "naive mae", "seasonal naive mae"]
    for first, last in ((part["first"], part["last"]) for part in targets[0]["by_step"]):
        heads.append(f"step {first}" if first == last else f"steps {first}–{last}")
    remark = "Each target in its own unit; the columns on the right are the MAE by steps ahead."
    return f"<h3>By target</h3>\n{quiet(remark)}{table(heads, rows)}"


def _series(test: Event) -> str:
    """Returns the series with the largest errors beside the seasonal naive forecast's."""
    series = test.get("series")
    if not isinstance(series, dict) or not series.get("worst"):
        return ""
    figures = ("num_values", "mae", "seasonal_naive_mae")
    rows = [
        [
            *map(name_text, (row["series"], row["target"])),
            *_scores(row, figures),
            figure_text(row, "ratio", ".2f"),
        ]
        for row in series["worst"]
    ]
    heads = ["series", "target", "num_values", "mae", "seasonal naive mae", "mae / naive"]
    remark = (
        f"The seasonal naive forecast is better for {series['num_worse']:,} of"
        f" {series['num_compared']:,} series (mae / naive above 1; 0.8 is an error 20 % below)."
        f" The {len(rows)} series with the largest ratio:"
    )
    return f"<h3>By series</h3>\n{quiet(remark)}{table(heads, rows)}"


def _compression(report: Any) -> str:
    if not isinstance(report, dict) or not report:
        return ""
    charts = f'<div class="charts">{_figures(compression_charts(report))}</div>'
    return _rows(compression_rows(report)) + charts


def _number(label: str, value: str, unit: str, note: str) -> str:
    return (
        f'<div class="number"><p class="label">{to_html(label)}</p>'
        f'<p class="value">{to_html(value)} <span class="unit">{to_html(unit)}</span></p>'
        f'<p class="note">{to_html(note)}</p></div>'
    )


def _at(event: Event) -> str:
    return f"at step {event['step']:,.0f}"


def _charts(history: History) -> str:
    charts = draw_charts(history)
    if not charts:
        return ""
    small = _figures(chart for chart in charts if chart.is_small)
    large = _figures(chart for chart in charts if not chart.is_small)
    examples = f'<h2>Forecasts</h2>\n{quiet(_FAN)}<div class="charts small">{small}</div>\n'
    return f'{examples if small else ""}<h2>Charts</h2>\n<div class="charts">{large}</div>'


def _figures(charts: Iterable[Chart]) -> str:
    return "".join(figure(chart.title, chart.caption, chart.svg) for chart in charts)


def _samples(history: History) -> str:
    shown = []
    for event in reversed(history.samples):
        if event.get("text"):
            at = _at(event) if number(event, "step") is not None else "sample"
            text = to_html(event["text"], keep="\r\n\t")
            shown.append(f'<div class="sample"><h3>{to_html(at)}</h3><pre>{text}</pre></div>\n')
    if not shown:
        return ""
    newest, older = "".join(shown[:OPEN_SAMPLES]), shown[OPEN_SAMPLES:]
    title = counted(len(older), "earlier sample")
    fold = f"<details><summary>{title}</summary>{''.join(older)}</details>" if older else ""
    return newest + fold


def _evaluations(history: History) -> str:
    if not history.evals:
        return ""
    shown = metrics_of(history.evals)
    best = history.best
    place = next((n for n, event in enumerate(history.evals) if event is best), None)
    forms = {key: ".4g" if key == "perplexity" else ".4f" for key in shown}
    rows = []
    for event in history.evals:
        split, elapsed = str(event.get("split", "valid")), number(event, "elapsed_s")
        figures = [figure_text(event, key, form) for key, form in forms.items()]
        time = "" if elapsed is None else clock(elapsed)
        mark = "best" if event is best else ""
        rows.append([f"{event['step']:,.0f}", SPLITS.get(split, split), *figures, time, mark])
    return table(["step", "split", *shown.values(), "time", ""], rows, place)


def _rows(rows: list[Row]) -> str:
    lines = "".join(to_html(clipped(f"{label:<12}{text}", MAX_TEXT)) + "\n" for label, text in rows)
    return f"<pre>{lines}</pre>" if rows else ""


_CHOSEN = ("vocab", "batch_size", "seq_length", "optimizer", "learning_rate", "dropout", "seed")


def _settings(config: Any, history: History) -> str:
    """Returns the configuration; a value that it leaves open is the one chosen at the start."""
    train = config.get("train") if isinstance(config, dict) else None
    values = train if train and isinstance(train, dict) else dict.fromkeys(_CHOSEN)
    start = {**history.start, "time": None}  # of the event; the option names a column
    rows = "".join(
        f"<div><dt>{to_html(name)}</dt><dd>{to_html(clipped(_setting(value), MAX_TEXT))}</dd></div>"
        for name, own in values.items()
        if (value := start.get(name) if own in (None, []) else own) not in (None, [])
    )
    return f"<dl>{rows}</dl>" if rows else ""


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    if isinstance(value, list):
        more = f" … ({len(value):,} in all)" if len(value) > _MAX_LISTED else ""
        return ", ".join(map(name_text, value[:_MAX_LISTED])) + more
    return f"{value:,.10g}" if isinstance(value, float) else str(value)


def _notes(history: History) -> str:
    rows = []
    for event in history.notes:
        is_skip = event.get("event") == "skip"
        kind = " class=warn" if is_skip or event.get("level") == "warning" else ""
        text = skip_text(event) if is_skip else str(event.get("text") or "")
        rows.append(f"<li{kind}>{to_html(clipped(text, MAX_TEXT))}</li>")
    once = dict.fromkeys(rows)  # a resumed run repeats its notes
    return f"<ul>{''.join(once)}</ul>" if once else ""
