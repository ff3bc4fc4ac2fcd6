"""The pictures of docs/gallery.md, from short runs on made data: `python docs/gallery.py`.

They are parts of a page, drawn by the package's own functions, in build/gallery; `make docs` puts
them into the site.
"""

from __future__ import annotations

import shutil
import tempfile
from html import escape
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

import fastlstm
from fastlstm.cli.main import main
from fastlstm.report.charts import draw_charts
from fastlstm.report.history import read_history
from fastlstm.report.html import figure
from fastlstm.report.picture import Picture

OUT = Path(__file__).resolve().parents[1] / "build" / "gallery"
_NEW = OUT.with_name("gallery.new")
_PLACES = ("harbour", "hill", "market", "station")
_TEXT_CHARTS = ("Quality by time", "Throughput")


def load_table() -> pa.Table:
    """Returns 90 days of hourly load at four places: waves of a day and a week, and noise."""
    random, hours = np.random.default_rng(0), np.arange(90 * 24)
    day, week = hours * 2 * np.pi / 24, hours * 2 * np.pi / 168
    loads = [
        100
        * k
        * (1 + 0.3 * np.sin(day + k) + 0.15 * np.sin(week) + random.normal(0, 0.06, hours.size))
        for k, _ in enumerate(_PLACES, 1)
    ]
    times = np.datetime64("2026-01-01T00", "s") + hours.astype("timedelta64[h]")
    return pa.table(
        {
            "ds": np.tile(times, len(_PLACES)),
            "unique_id": np.repeat(_PLACES, hours.size),
            "load": np.concatenate(loads),
        }
    )


def _write(name: str, body: str) -> None:
    html = f'<div class="drawing" data-search-exclude>\n{body}</div>\n'
    (_NEW / f"{name}.html").write_text(html, encoding="utf-8")


def _charts(name: str, run: Path, titles: tuple[str, ...]) -> None:
    charts = [c for c in draw_charts(read_history(run / "metrics.jsonl")) if c.title in titles]
    assert len(charts) == len(titles), [chart.title for chart in charts]
    _write(name, "".join(figure(chart.title, chart.caption, chart.svg) for chart in charts))


def _panels(name: str, title: str, caption: str, picture: Picture) -> None:
    _write(name, figure(title, caption, picture._repr_html_()))


def _text(runs: Path) -> None:
    run = fastlstm.train(
        "python-docs", out=runs / "text", preset="tiny", steps=200, eval_every=20, observers=()
    )
    _charts("text", run.path, _TEXT_CHARTS)
    texts = [
        fastlstm.LM.load(run).generate("The ", max_tokens=160, temperature=temperature, seed=1)
        for temperature in (0.3, 1.0)
    ]
    _write("written", "".join(f"<pre><code>The {escape(text)}</code></pre>\n" for text in texts))


def _forecasts(runs: Path) -> None:
    model = fastlstm.Forecaster(horizon=48, hidden_size=64, steps=200, verbose=False)
    model.fit(load_table(), out=runs / "load")
    ahead = model.forecasts(quantiles=(0.1, 0.5, 0.9)).plot()
    _panels("forecast", "Load of the next two days", "With intervals of 50, 80 and 95 %.", ahead)
    past = model.plot_backtest(series=["hill"], max_panels=4)
    _panels("backtest", "Windows of the test part", "Forecasts beside the actual values.", past)
    _charts("calibration", runs / "load", ("Calibration of the intervals",))


def _kernels() -> None:
    lstm = fastlstm.LSTM(64, 128, num_layers=2, bidirectional=True)
    model = torch.nn.ModuleDict({"encoder": lstm, "tagger": torch.nn.GRU(256, 64)})
    _write("kernels", f"<pre><code>{escape(str(fastlstm.explain(model)))}</code></pre>\n")


def _pages(runs: Path) -> None:
    for name in ("text", "load"):
        shutil.copy(runs / name / "report.html", _NEW / f"{name}-page.html")
    assert main(["monitor", str(runs), "--export", str(_NEW / "runs-page.html")]) == 0
    titles = {
        "text": "the report of the text",
        "load": "the report of the load",
        "runs": "the page of both runs",
    }
    links = [
        f'<li><a href="gallery/{name}-page.html">{title}</a></li>' for name, title in titles.items()
    ]
    _write("pages", f"<ul>\n{chr(10).join(links)}\n</ul>\n")


def make() -> None:
    """Writes all pictures, and the pages of the runs that they show, under `OUT` once all are."""
    shutil.rmtree(_NEW, ignore_errors=True)
    _NEW.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        _text(runs)
        _forecasts(runs)
        _pages(runs)
    _kernels()
    shutil.rmtree(OUT, ignore_errors=True)
    _NEW.rename(OUT)


if __name__ == "__main__":
    make()
