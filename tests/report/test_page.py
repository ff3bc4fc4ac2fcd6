from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fastlstm.errors import StorageError
from fastlstm.report import charts
from fastlstm.report import page as page_module
from fastlstm.report.html import table
from fastlstm.report.page import write_report
from odd_names import NAMES, forecast_event
from recorded_run import add_event

VOID = {"meta", "br", "path", "use", "rect"}


class Outline(HTMLParser):
    """Collects elements, text and attributes, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.values: list[str] = []
        self.names: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value or "" for _, value in attrs]
        self.names += [name for name, _ in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(path: Path) -> Outline:
    found = Outline()
    found.feed(path.read_text(encoding="utf-8"))
    assert found.open == []
    return found


def test_the_report_has_everything(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = outline(path)
    for text in (
        "a <b>book", "Finished: budget 2m", "Best validation1.65", "of 412 GFLOP/s measured",
        "24,576 tokens/s2,457,600 tokens", "Share of the ceiling61%", "Quality by tokens",
        "Quality by time", "Throughput", "Learning rate", "Samples", "Evaluations", "a note",
        "layer 0: oneDNN", "rnn_size512", "layer_normon", "learning_rate0.0123",
        "step 5: non-finite",
    ):  # fmt: skip
        assert text in page.text, text
    assert page.tags.count("svg") == 6
    assert page.tags.count("tr") == 1 + 3


def test_nothing_is_loaded_and_nothing_runs(report: Path) -> None:
    source = report.read_text(encoding="utf-8")
    page = outline(report)
    assert re.findall(r"https?:|@import|url\((?!#)|\bsrc=", source) == []
    assert {"script", "link", "img", "iframe"} & set(page.tags) == set()
    assert "xmlns" not in source


def test_a_policy_forbids_scripts_loading_and_sending(report: Path) -> None:
    head = report.read_text(encoding="utf-8").partition("<style>")[0]
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', head)
    assert len(policy) == 1
    assert policy[0].startswith("default-src 'none'; style-src 'unsafe-inline';")
    assert policy[0].endswith("base-uri 'none'; form-action 'none'")
    assert "script" not in policy[0]


def test_names_of_columns_and_series_do_no_harm(run_dir: Path) -> None:
    events = [forecast_event(name, series=name) for name in NAMES]
    events += [{"event": "message", "text": name} for name in NAMES]
    start = {"event": "start", "task": "forecast", "source": NAMES[0], "series": 3}
    start |= {"unit": NAMES[0], "num_units": {"train": 3}, "kernels": list(NAMES)}
    scores = {name: {name: 1.0} for name in NAMES}
    test = {"event": "test", "scores": scores, "windows": 3}
    lines = [json.dumps(event) + "\n" for event in (start, test, *events)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    train = {"target": list(NAMES), "past": [f"c{n}" for n in range(1000)]}
    (run_dir / "config.json").write_text(json.dumps({"train": train}))
    path = write_report(run_dir)
    page = outline(path)
    source = path.read_text(encoding="utf-8")
    assert {"script", "img", "b"} & set(page.tags) == set()
    assert page.tags.count("svg") == len(NAMES)
    assert not any(name.startswith("on") for name in page.names)
    assert len(page.ids) == len(set(page.ids))
    assert not set("\0\x1b\u202e\ud800") & set(source)
    assert "x" * 3000 not in source
    assert "c18, c19 … (1,000 in all)" in page.text


def test_the_best_evaluation_is_marked_and_stays_in_sight(report: Path) -> None:
    source = report.read_text(encoding="utf-8")
    rows = re.findall(r"<tr class=\"best\">(.*?)</tr>", source)
    assert len(rows) == 1
    assert "best" in rows[0]
    assert re.search(r"tr\.best td \{[^}]*position: sticky; top: \d+px; bottom: 0;", source)


def test_errors_of_each_target(run_dir: Path) -> None:
    targets = [
        {"target": name, "num_values": 1200, "mse": 4.0, "mae": 1.5, "naive_mae": 3.5,
         "seasonal_naive_mae": 2.5,
         "by_step": [{"first": 1, "last": 1, "mae": 0.25}, {"first": 2, "last": 3, "mae": None}]}
        for name in ("load <b>", "wind")
    ]  # fmt: skip
    add_event(run_dir, event="test", scores={"forecaster": {"mse": 4.0}}, targets=targets)
    source = write_report(run_dir).read_text(encoding="utf-8")
    assert "<th>step 1</th><th>steps 2–3</th>" in source
    cells = "<td>1,200</td><td>4</td><td>1.5</td><td>3.5</td><td>2.5</td><td>0.25</td><td></td>"
    assert f"<td>load &lt;b&gt;</td>{cells}" in source
    assert f"<td>wind</td>{cells}" in source


def test_a_section_that_fails_says_so_and_the_others_are_there(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "_ceiling", lambda history, title: 1 / 0)
    add_event(run_dir, event="test", scores={"forecaster": 3})
    page = outline(write_report(run_dir))
    titles = ["Quality by time", "Throughput", "Share of the ceiling", "Learning rate"]
    assert sorted(titles, key=page.text.rindex) == titles
    assert "This chart could not be drawn: ZeroDivisionError" in page.text
    assert "Test set" in page.text
    assert "This section could not be written: TypeError" in page.text
    assert "Evaluations" in page.text


def test_axes_have_names_and_units(report: Path) -> None:
    source = report.read_text(encoding="utf-8")
    labels = set(re.findall(r"<text[^>]*>([^<]+)</text>", source))
    assert {"tokens", "seconds", "bits/char, log scale", "tokens/s", "%", "learning rate"} <= labels


@pytest.mark.parametrize("share", [None, 0.001, 0.1, 0.95])
def test_half_written_metrics_still_make_a_report(run_dir: Path, share: float | None) -> None:
    metrics = run_dir / "metrics.jsonl"
    data = metrics.read_bytes()
    metrics.unlink() if share is None else metrics.write_bytes(data[: int(share * len(data))])
    page = outline(write_report(run_dir))
    assert ("No end recorded" if (share or 0.0) > 0.01 else "No steps recorded yet") in page.text


def test_events_of_odd_types_make_a_report(run_dir: Path) -> None:
    kinds = ("start", "step", "eval", "sample", "skip", "message", "end")
    values = ("null", "[1]", '{"a":1}', "true", "1e999", "-1")
    odd = [
        f'{{"event":"{kind}","step":1,"tokens":2,"text":{value},"reason":{value},'
        f'"kernels":{value},"source":{value},"elapsed_s":{value},"bits_per_char":{value}}}\n'
        for kind in kinds
        for value in values
    ]
    (run_dir / "metrics.jsonl").write_text("".join(odd))
    (run_dir / "config.json").write_text("[]")
    outline(write_report(run_dir))


def test_without_matplotlib_the_rest_is_there(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = outline(write_report(run_dir))
    assert "This chart could not be drawn: ModuleNotFoundError" in page.text
    assert "svg" not in page.tags
    assert "Evaluations" in page.text


def test_a_report_that_cannot_be_written(run_dir: Path) -> None:
    (run_dir / "report.html").mkdir()
    with pytest.raises(StorageError):
        write_report(run_dir)


def test_the_warnings_of_the_end_and_notes_once(run_dir: Path) -> None:
    for _ in range(2):
        add_event(run_dir, event="message", level="info", text="said at every start")
    errors = {"measure": "mae", "forecaster": 2.0, "seasonal_naive": 1.5}
    end = {"still_improving": True, "best_step": 6, "step": 201, "test_error": errors}
    add_event(run_dir, event="end", reason="budget 2m", **end)
    text = outline(write_report(run_dir)).text
    assert "worse than the seasonal naive forecast on the test set: mae 2 vs 1.5" in text
    assert "a longer run would help" in text
    assert "step 6 of 201 is the best" in text
    assert text.count("said at every start") == 1


def test_names_in_sections_are_escaped(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of the configuration, a failure, and a time zone, which stands in a caption."""

    def fail(*_: object) -> str:
        raise ValueError("no <img src=x>")

    monkeypatch.setattr(page_module, "header_rows", fail)
    (run_dir / "config.json").write_text(json.dumps({"train": {"<img src=y>": 3}}))
    times = [f"2024-05-0{day}T12:00:00" for day in range(1, 5)]
    add_event(run_dir, **{**forecast_event("y"), "times": times, "time_zone": "<img src=z>"})
    page = outline(write_report(run_dir))
    assert "img" not in page.tags
    for place in "xyz":
        assert f"<img src={place}>" in page.text


def test_settings_are_the_ones_of_the_run_and_the_time_of_an_event_is_none(run_dir: Path) -> None:
    start = {"event": "start", "time": 1_795_780_000.5, "seed": 7, "batch_size": 64}
    (run_dir / "metrics.jsonl").write_text(json.dumps(start))
    train = {"time": None, "seed": None, "batch_size": 32, "steps": 20_000, "grad_clip": 2.5e6}
    (run_dir / "config.json").write_text(json.dumps({"train": train}))
    source = write_report(run_dir).read_text(encoding="utf-8")
    shown = dict(re.findall(r"<dt>(\w+)</dt><dd>([^<]*)</dd>", source))
    known = {"seed": "7", "batch_size": "32", "steps": "20,000", "grad_clip": "2,500,000"}
    assert shown == known


def test_every_class_of_the_page_has_a_rule_and_every_rule_a_class() -> None:
    package = Path(page_module.__file__).parent
    code = (package / "page.py").read_text() + (package / "html.py").read_text()
    styles = (package / "report.css").read_text() + (package / "notebook.css").read_text()
    used = {name for names in re.findall(r'class="([a-z ]+)["{]', code) for name in names.split()}
    used |= set(re.findall(r"class=([a-z]+)", code)) | {"good", "warn"}  # the state of a run
    used |= {"rows", "vscode"}  # a kind of table, and the page around a notebook
    assert set(re.findall(r"\.([a-z]+)", styles)) == used
    colours = re.findall(r"--([a-z]+):", styles)
    assert set(re.findall(r"var\(--([a-z]+)\)", styles)) <= set(colours)
    assert all(colours.count(name) == 2 for name in colours), "a light and a dark one"


def test_tables_scroll_with_keys_and_have_no_empty_headings() -> None:
    written = table(["", "loss"], [["a", "1"]])
    assert '<div class="scroll " tabindex="0" role="group" aria-label="table">' in written
    assert "<tr><td></td><th>loss</th></tr>" in written
