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
from fastlstm.report.history import History
from fastlstm.report.page import write_report
from odd_names import NAMES, forecast_event

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
        "a <b>book",
        "Finished: budget 2m",
        "Best validation1.65",
        "24,576 tokens/s2,457,600 tokens",
        "Share of the ceiling61%",
        "of 412 GFLOP/s measured",
        "Quality by tokens",
        "Quality by time",
        "Throughput",
        "Learning rate",
        "Samples",
        "Evaluations",
        "layer 0: oneDNN",
        "rnn_size512",
        "layer_normon",
        "learning_rate0.0123",
        "a note",
        "step 5: non-finite",
    ):
        assert text in page.text, text
    assert page.tags.count("svg") == 6
    assert page.tags.count("tr") == 1 + 3


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs(report: Path) -> None:
    source = report.read_text(encoding="utf-8")
    page = outline(report)
    assert re.findall(r"https?:|@import|url\((?!#)|\bsrc=", source) == []
    assert {"script", "link", "img", "iframe"} & set(page.tags) == set()
    assert "xmlns" not in source


def test_text_of_the_run_is_escaped(report: Path) -> None:
    source = report.read_text(encoding="utf-8")
    assert "<script" not in source
    assert "<b>" not in source
    assert "\x1b" not in source
    assert source.count("&lt;script&gt;") >= 6


def test_a_policy_forbids_scripts_and_loading(report: Path) -> None:
    head = report.read_text(encoding="utf-8").partition("<style>")[0]
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', head)
    assert len(policy) == 1
    assert policy[0].startswith("default-src 'none'; style-src 'unsafe-inline';")
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
        {"target": name, "num_values": 1200, "mse": 4.0, "mae": 1.5, "seasonal_naive_mae": 2.5,
         "by_step": [{"first": 1, "last": 1, "mae": 0.25}, {"first": 2, "last": 3, "mae": None}]}
        for name in ("load <b>", "wind")
    ]  # fmt: skip
    test = {"event": "test", "scores": {"forecaster": {"mse": 4.0}}, "targets": targets}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(test) + "\n")
    source = write_report(run_dir).read_text(encoding="utf-8")
    assert "<th>step 1</th><th>steps 2–3</th>" in source
    cells = "<td>1,200</td><td>4</td><td>1.5</td><td>2.5</td><td>0.25</td><td></td>"
    assert f"<td>load &lt;b&gt;</td>{cells}" in source
    assert f"<td>wind</td>{cells}" in source


def test_the_time_of_an_event_is_no_setting(run_dir: Path) -> None:
    """`time` names a column; a run that leaves it open does not show when it began instead."""
    metrics = run_dir / "metrics.jsonl"
    start, *others = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(
        json.dumps({**json.loads(start), "time": 1.79578e9}) + "\n" + "".join(others)
    )
    (run_dir / "config.json").write_text(json.dumps({"train": {"time": None, "series": "shop"}}))
    source = write_report(run_dir).read_text(encoding="utf-8")
    assert "<dt>series</dt><dd>shop</dd>" in source
    assert "<dt>time</dt>" not in source
    assert "1.79578e+09" not in source


def test_a_section_that_fails_says_so_and_the_others_are_there(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "_ceiling", lambda history, title: 1 / 0)
    events = [{"event": "test", "scores": {"forecaster": 3}}]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    page = outline(write_report(run_dir))
    assert "This chart could not be drawn: ZeroDivisionError" in page.text
    assert "Test set" in page.text
    assert "This section could not be written: TypeError" in page.text
    assert "Evaluations" in page.text


def test_ids_are_unique_and_references_resolve(report: Path) -> None:
    source = report.read_text(encoding="utf-8")
    page = outline(report)
    assert len(page.ids) == len(set(page.ids))
    used = re.findall(r"url\(#([^)]+)\)", source) + re.findall(r'href="#([^"]+)"', source)
    assert used
    assert set(used) <= set(page.ids)


def test_charts_take_their_colours_from_the_page(report: Path) -> None:
    source = report.read_text(encoding="utf-8")
    charts = "".join(re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL))
    assert "var(--a)" in charts
    assert "prefers-color-scheme: dark" in source
    visible = {
        colour
        for colour in re.findall(r"(?:fill|stroke): ?(#\w+)", charts)
        if colour not in ("#ffffff",)
    }
    assert visible == set()


def test_axes_have_names_and_units(report: Path) -> None:
    source = report.read_text(encoding="utf-8")
    labels = set(re.findall(r"<text[^>]*>([^<]+)</text>", source))
    assert {"tokens", "seconds", "bits/char, log scale", "tokens/s", "%", "learning rate"} <= labels


@pytest.mark.parametrize("share", [0.001, 0.1, 0.95])
def test_half_written_metrics_still_make_a_report(run_dir: Path, share: float) -> None:
    metrics = run_dir / "metrics.jsonl"
    data = metrics.read_bytes()
    metrics.write_bytes(data[: int(share * len(data))])
    page = outline(write_report(run_dir))
    assert "No steps recorded yet" in page.text or "No end recorded" in page.text


def test_an_empty_run_makes_a_report(tmp_path: Path) -> None:
    page = outline(write_report(tmp_path))
    assert "No steps recorded yet" in page.text


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
    assert "charts need matplotlib; install it with: pip install matplotlib" in page.text
    assert "svg" not in page.tags
    assert "Evaluations" in page.text


def test_a_report_that_cannot_be_written(run_dir: Path) -> None:
    (run_dir / "report.html").mkdir()
    with pytest.raises(StorageError):
        write_report(run_dir)


def test_the_warnings_of_the_end_and_notes_once(run_dir: Path) -> None:
    end = {"event": "end", "reason": "budget 2m", "still_improving": True}
    end["test_error"] = {"measure": "mae", "forecaster": 2.0, "seasonal_naive": 1.5}
    note = {"event": "message", "level": "info", "text": "said at every start"}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in (note, note, end))
    text = outline(write_report(run_dir)).text
    assert "worse than the seasonal naive forecast on the test set: mae 2 vs 1.5" in text
    assert "a longer run would help" in text
    assert text.count("said at every start") == 1


def test_what_a_section_names_is_escaped(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of the configuration, a failure, and a time zone, which stands in a caption."""

    def fail(history: History) -> str:
        raise ValueError("no <img src=x>")

    monkeypatch.setattr(page_module, "_setup", fail)
    (run_dir / "config.json").write_text(json.dumps({"train": {"<img src=y>": 3}}))
    times = [f"2024-05-0{day}T12:00:00" for day in range(1, 5)]
    event = {**forecast_event("y"), "times": times, "time_zone": "<img src=z>"}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    page = outline(write_report(run_dir))
    assert "img" not in page.tags
    for place in "xyz":
        assert f"<img src={place}>" in page.text


def test_the_policy_leaves_no_place_to_send_to(report: Path) -> None:
    head = report.read_text(encoding="utf-8").partition("<style>")[0]
    assert "base-uri 'none'" in head
    assert "form-action 'none'" in head


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(99.94, "99.9 s"), (100, "1:40 min"), (3599.4, "59:59 min"), (3599.6, "1:00 h"),
     (7530.0, "2:05 h")],
)  # fmt: skip
def test_the_time_of_a_run(seconds: float, shown: str) -> None:
    assert " ".join(page_module._duration(seconds)) == shown


def test_every_class_of_the_page_has_a_rule_and_every_rule_a_class() -> None:
    package = Path(page_module.__file__).parent
    code = (package / "page.py").read_text()
    styles = (package / "report.css").read_text()
    used = {name for names in re.findall(r'class="([a-z ]+)["{]', code) for name in names.split()}
    used |= set(re.findall(r"class=([a-z]+)", code)) | {"good", "warn"}  # the state of a run
    assert set(re.findall(r"\.([a-z]+)", styles)) == used
    colours = re.findall(r"--([a-z]+):", styles)
    assert set(re.findall(r"var\(--([a-z]+)\)", styles)) <= set(colours)
    assert all(colours.count(name) == 2 for name in colours), "a light and a dark one"
