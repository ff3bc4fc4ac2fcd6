from __future__ import annotations

import io
import json
import re
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fastlstm.report import progress
from fastlstm.report.events import number
from fastlstm.report.progress import (
    JsonOutput,
    LiveOutput,
    PlainOutput,
    default_output,
    fit_shown,
    step_parts,
)
from fastlstm.report.terminal import cell_width

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
COLOUR = re.compile(r"\x1b\[[\d;]*m")


def step_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    return next(event for event in events if event["event"] == "step")


def line_of(event: dict[str, Any], columns: int) -> str:
    parts, share = step_parts(event, "tokens"), number(event, "progress")
    output = LiveOutput(io.StringIO())
    output._bar = lambda share, width: "#" * width  # type: ignore[method-assign]
    return output.live_line(parts, share, columns)


def shown_rows(text: str) -> list[str]:
    """What a terminal shows: every line as left by its last redraw."""
    return [line.split("\r\x1b[2K")[-1] for line in COLOUR.sub("", text).split("\n")]


def plain(*events: dict[str, Any]) -> str:
    stream = io.StringIO()
    output = PlainOutput(stream)
    for event in events:
        output(event)
    return stream.getvalue()


def live(terminal: Any, *events: dict[str, Any]) -> str:
    """What a terminal gets, without colours."""
    output = LiveOutput(terminal)
    for event in events:
        output(event)
    return COLOUR.sub("", terminal.getvalue())


@pytest.mark.parametrize("columns", [80, 60, 120, 200])
def test_nothing_is_wider_than_the_terminal(
    events: list[Any], terminal: Any, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = live(terminal, *events)
    drawn = re.split(r"\r\x1b\[2K|\n", text)
    assert [line for line in drawn if cell_width(line) > columns - 1] == []
    for told in ("LSTM layers of 512 units", "finished: budget 2m", "8.65M tokens/s in training"):
        assert told in text
    assert columns < 80 or "fastlstm generate 'runs/a book' --length 500" in text


SHORT = (
    "47%", "loss 1.234", "1.781 bpc", " 182k tok/s", "61% ceil", "wait 0.1%", "ETA 4:12", "####",
)  # fmt: skip
LONG = ("1.781 bits/char", "182k tokens/s", "61% of ceiling", "input wait")


@pytest.mark.parametrize(
    ("columns", "parts", "absent"),
    [(39, SHORT[2:3], "wait"), (79, SHORT, "of"), (140, LONG, "bpc")],
)
def test_live_line_shows_what_fits(
    events: list[Any], columns: int, parts: tuple[str, ...], absent: str
) -> None:
    line = line_of(step_of(events), columns)
    assert cell_width(line) <= columns
    assert [part for part in parts if part not in line] == []
    assert absent not in line


def test_live_line_does_not_jump_when_numbers_change(events: list[Any]) -> None:
    def width(**changes: Any) -> int:
        event = {**step_of(events), **changes}
        return line_of(event, 79).count("#")

    assert width() == width(input_wait_share=0.12, units_per_s=1_230_000.0, progress=0.05)


def test_no_step_is_100_percent_while_the_end_takes_time(events: list[Any]) -> None:
    step = {**step_of(events), "progress": 1.0, "elapsed_s": 52.0}
    shown = {left: line_of({**step, "eta_s": left}, 79).split()[1] for left in (8.0, 0.1, 0.0)}
    assert shown == {8.0: "87%", 0.1: "99%", 0.0: "100%"}
    early = {**step, "progress": 0.01, "eta_s": 8.0}
    assert line_of(early, 79).split()[1] == "1%", "set-up is no training"


def test_what_runs_after_the_last_step_is_told(terminal: Any) -> None:
    event = {"event": "progress", "doing": "finishing", "unit": "", "done": 0, "total": None}
    assert plain(event) == "finishing\n"
    LiveOutput(terminal)(event)
    assert shown_rows(terminal.getvalue()) == ["finishing"]


def test_live_line_without_a_known_ceiling(events: list[Any]) -> None:
    event = {**step_of(events), "ceiling_share": None, "loss": float("nan")}
    line = line_of(event, 79)
    assert "ceil" not in line
    assert "loss" not in line


def test_permanent_lines_scroll_above_the_live_line(events: list[Any], terminal: Any) -> None:
    output = LiveOutput(terminal)
    output(step_of(events))
    output(next(event for event in events if event["event"] == "eval"))
    rows = shown_rows(terminal.getvalue())
    assert rows[0].startswith("  ★ step 123,456,789  validation  1.7123 bits/char  1.1869 nats")
    assert rows[1].endswith("ETA 4:12")
    output.close()
    assert shown_rows(terminal.getvalue())[1] == ""


def test_the_share_of_the_ceiling_matches_the_speed(events: list[Any]) -> None:
    start = {**events[1], "flop_per_unit": 1_000_000, "ceiling_gflops": 100.0}
    assert start["event"] == "start"
    step = step_of(events)
    steps = [{**step, "step": at, "ceiling_share": share} for at, share in ((9, 0.9), (10, 0.001))]
    shown = plain(start, *steps, {**events[-1], "units": 10_000, "train_s": 1.0})
    assert "10.0k tokens/s in training steps, 10% of the ceiling" in shown


def test_warnings_about_the_model_come_at_the_end(events: list[Any], terminal: Any) -> None:
    errors = {"measure": "mae", "forecaster": 2.0, "naive": 3.0, "seasonal_naive": 1.5}
    end = {**events[-1], "still_improving": True, "test_error": errors}
    notes = [line for line in plain(end).splitlines() if line.startswith("warning: ")]
    assert notes == [
        "warning: worse than the seasonal naive forecast on the test set: mae 2 vs 1.5; do not"
        " rely on this model",
        "warning: the validation loss was still falling at the end; a longer run would help",
    ]
    LiveOutput(terminal)(end)
    assert "worse than the seasonal naive forecast" in terminal.getvalue()


def test_one_is_no_plural(events: list[Any]) -> None:
    names = ("rows", "tbptt", "num_parameters", "threads", "batch_size", "seq_length")
    sizes = ("input_size", "horizon", "patch", "num_layers", "hidden_size")
    one = {**dict.fromkeys(names, 1), "num_units": {"train": 1}, "unit": "windows"}
    one["model"] = dict.fromkeys(sizes, 1)
    start = plain({"event": "start", "task": "forecast", **one})
    test = plain({"event": "test", "scores": {"naive": {"mae": 1}}, "windows": 1})
    end = plain({"event": "end", "reason": "1 step", "step": 1, "units": 1})
    for text in (start, test, end):
        assert re.findall(r"\b1 \w+s\b", text) == []
    assert "1 row\n" in start
    assert "1 token" in end
    assert "test: 1 window, errors in units" in test


def test_progress_has_a_bar(terminal: Any) -> None:
    about = {"doing": "evaluating the test set", "unit": "windows", "done": 512, "total": 2048}
    event = {"event": "progress", **about}
    text = "evaluating the test set: 512 of 2,048 windows, 25%"
    assert plain(event) == text + "\n"
    output = LiveOutput(terminal)
    output(event)
    assert shown_rows(terminal.getvalue()) == ["━━━━━───────────────  " + text]
    output({**event, "done": 2048})
    assert shown_rows(terminal.getvalue()) == [""]
    assert plain({**event, "done": 2048}) == ""


def test_a_stopped_run_says_how_to_continue(events: list[Any], terminal: Any) -> None:
    end = {**events[-1], "reason": "stopped by SIGTERM"}
    text = plain(end)
    assert text.startswith("stopped by SIGTERM\n")
    assert "next: the same command with --resume" in text
    LiveOutput(terminal)(end)
    assert COLOUR.sub("", terminal.getvalue()).count("stopped") == 1


def test_samples_reach_the_terminal_without_their_control_characters(
    events: list[Any], terminal: Any
) -> None:
    text = live(terminal, next(event for event in events if event["event"] == "sample"))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "│" in text
    assert "    the end" in text


@pytest.mark.parametrize(("no_color", "is_coloured"), [("1", False), ("", True)])
def test_a_terminal_has_colours_without_no_color(
    events: Any, terminal: Any, monkeypatch: pytest.MonkeyPatch, no_color: str, is_coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    live(terminal, *events)
    assert (COLOUR.search(terminal.getvalue()) is not None) is is_coloured


def test_plain_lines_have_no_control_characters_and_are_flushed_one_by_one(
    events: list[Any],
) -> None:
    class Counting(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    stream = Counting()
    output = PlainOutput(stream)
    for event in events:
        output(event)
    text = stream.getvalue()
    assert CONTROL.search(text) is None
    assert text.endswith("\n")
    assert stream.flushed == text.count("\n")


def test_plain_step_line(events: list[Any]) -> None:
    assert plain(step_of(events)) == (
        "step 123,456,789  47%  loss 1.234  1.781 bits/char  182k tokens/s  61% of ceiling"
        "  input wait 0.1%  ETA 4:12  elapsed 3:48\n"
    )


def test_plain_header_repeats_the_label_of_every_line(events: list[Any]) -> None:
    lines = plain(events[1]).splitlines()
    assert "model: variational dropout 0.1, output norm" in lines
    assert sum(line.startswith("kernels: layer ") for line in lines) == 2


def test_json_gives_one_strict_object_per_event(events: list[Any]) -> None:
    stream = io.StringIO()
    output = JsonOutput(stream)
    for event in events:
        output({**event, "loss": float("nan"), "path": [float("inf"), "\x1b\n"]})
    lines = stream.getvalue().split("\n")
    assert lines.pop() == ""
    loaded = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert [event["event"] for event in loaded] == [event["event"] for event in events]
    assert loaded[0]["loss"] is None
    assert loaded[0]["path"] == [None, "\x1b\n"]
    assert stream.getvalue().isascii()


def test_a_reader_that_left_does_not_stop_the_run(events: list[Any]) -> None:
    class Closed(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            Closed.writes += 1
            raise BrokenPipeError

    output = JsonOutput(Closed())
    for event in events:
        output(event)
    assert Closed.writes == 1


def test_ascii_terminal_gets_ascii(events: list[Any], terminal: Any) -> None:
    terminal.encoding = "ascii"
    live(terminal, step_of(events), next(e for e in events if e["event"] == "eval"))
    assert terminal.getvalue().isascii()


def test_unknown_and_bare_events_are_harmless(events: list[Any], terminal: Any) -> None:
    for output in (LiveOutput(terminal), PlainOutput(io.StringIO())):
        output({"event": "something new"})
        for event in events:
            output({"event": event["event"]})


@pytest.mark.parametrize(
    ("term", "use_json", "kind"),
    [("xterm", False, LiveOutput), ("xterm", True, JsonOutput), ("dumb", False, PlainOutput),
     (None, False, PlainOutput)],
)  # fmt: skip
def test_the_stream_decides_the_kind_of_output(
    terminal: Any, monkeypatch: pytest.MonkeyPatch, term: str | None, use_json: bool, kind: type
) -> None:
    monkeypatch.setenv("TERM", term or "xterm")
    stream = io.StringIO() if term is None else terminal
    assert type(default_output(use_json=use_json, stream=stream)) is kind


def test_a_long_label_does_not_run_into_its_figures(terminal: Any) -> None:
    scores = {"forecaster": {"mse": 1.5}, "seasonal_naive": {"mse": 2.5}}
    test = {"event": "test", "windows": 9, "of_windows": 9, "scores": scores}
    lines = live(terminal, test).splitlines()
    assert "  forecaster      mse 1.5" in lines
    assert "  seasonal naive  mse 2.5" in lines


def test_figures_beside_a_long_label_are_wrapped(terminal: Any) -> None:
    figures = {f"coverage_{n}": 0.123456 for n in range(9)}
    scores = {"seasonal_naive_of_the_same_day": figures}
    test = {"event": "test", "windows": 9, "of_windows": 9, "scores": scores}
    lines = live(terminal, test).splitlines()
    assert max(map(cell_width, lines)) <= 79
    assert sum(line.count("0.1235") for line in lines) == 9


def test_a_table_in_memory_has_no_size_to_tell() -> None:
    stream = io.StringIO()
    PlainOutput(stream)({"event": "prepare", "done_bytes": 0, "total_bytes": None})
    assert stream.getvalue() == ""


def test_a_log_gets_few_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    stream = io.StringIO()
    output = PlainOutput(stream)
    output({"event": "prepare", "done_bytes": 1, "total_bytes": 9})
    for done in range(20):
        now_s[0] += 0.5
        about = {"doing": "evaluating", "unit": "windows", "done": done, "total": 20}
        output({"event": "progress", **about})
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines if "evaluating" in line] == ["0", "10"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ([0.2311, 0.2291], "  ranks 231/229 ms"),
        ([0.2, 0.21, 0.31, 0.2, 0.2], "  ranks 200-310 ms, slowest 2"),
        ([0.2], ""),
        (["x", 0.2], ""),
    ],
)
def test_the_seconds_of_several_processes_are_shown(
    events: list[Any], seconds: list[Any], text: str
) -> None:
    line = plain({**step_of(events), "rank_s": seconds})
    assert ("ranks" in line) == bool(text)
    assert text in line


FIT: list[dict[str, Any]] = [
    {"event": "start", "task": "forecast", "unit": "windows"},
    {"event": "step", "step": 7, "progress": 0.5, "loss": 0.3},
    {"event": "message", "level": "info", "text": "720 rows"},
    {"event": "eval", "step": 7, "split": "valid", "loss": 0.2, "is_best": True},
    {"event": "end", "reason": "7 steps", "step": 7, "run": None, "best_step": 7,
     "best_loss": 0.2, "elapsed_s": 9.0},
]  # fmt: skip


def fit_with(verbose: bool | None, stream: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stdout", stream)
    with fit_shown(verbose) as show:
        for event in FIT:
            show(event)
    return str(stream.getvalue())


def test_a_fit_shows_a_live_line_in_a_terminal_and_leaves_its_end(
    terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = fit_with(None, terminal, monkeypatch)
    assert "50%" in shown
    assert shown_rows(shown) == ["7 steps, 0.2000 validation loss at step 7, 0:09", ""]


def test_the_live_line_of_a_fit_has_the_last_validation_figure(terminal: Any) -> None:
    output = LiveOutput(terminal, is_brief=True)
    for event in (FIT[0], FIT[3], FIT[1]):
        output(event)
    (line,) = shown_rows(terminal.getvalue())
    assert line.endswith("loss 0.300  validation 0.2000 loss")


@pytest.mark.parametrize(("verbose", "is_seen"), [(None, False), (False, False), (True, True)])
def test_a_fit_shows_nothing_in_a_pipe_unless_verbose(
    verbose: bool | None, is_seen: bool, terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = fit_with(verbose, io.StringIO(), monkeypatch)
    assert ("evaluation: " in shown) == is_seen
    assert ("finished: 7 steps" in shown) == is_seen
    assert "next:" not in shown  # there is no run directory
    if verbose is False:
        assert fit_with(False, terminal, monkeypatch) == ""


@pytest.mark.parametrize("verbose", [None, True])
def test_a_fit_in_a_notebook_changes_one_display(
    verbose: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Any:
        calls.append(("display", data["text/plain"]))
        update = lambda data, raw: calls.append(("update", data["text/plain"]))  # noqa: E731
        return SimpleNamespace(update=update)

    ipython, of_display = ModuleType("IPython"), ModuleType("IPython.display")
    vars(ipython)["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    vars(of_display)["display"] = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", of_display)
    shown = fit_with(verbose, io.StringIO(), monkeypatch)
    assert [kind for kind, _ in calls] == ["display", "update", "update"]
    assert "50%" in calls[0][1]
    assert calls[1][1] == ""
    assert "7 steps" in calls[2][1]
    assert "\x1b" not in shown + calls[0][1]
    assert ("validation" in shown) == (verbose is True)


def test_a_warning_of_a_fit_is_pythons_and_begins_a_line(
    terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    seen: list[str] = []
    monkeypatch.setattr(
        warnings, "warn", lambda text, **_: seen.append(shown_rows(terminal.getvalue())[-1] + text)
    )
    with fit_shown(None) as show:
        show(FIT[1])
        show({"event": "message", "level": "warning", "text": "two threads"})
        assert seen == ["two threads"]
        assert "two threads" not in terminal.getvalue()
