"""Observers of a training run: a live line on a terminal, plain lines in a pipe, JSON lines.

Each is called with one event at a time. When the reader closes the pipe, output stops and the run
continues.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TextIO

from fastlstm.estimator import show_warning
from fastlstm.report import lines as words
from fastlstm.report.events import Event, number, text_of, unit_of
from fastlstm.report.terminal import (
    cell_width,
    clip,
    clock,
    columns,
    glyphs_for,
    is_terminal,
    notebook_display,
    percent,
    short_count,
    style_for,
    wrap,
)
from fastlstm.system.storage import finite

LABEL_WIDTH = 11
SHOWN_EVERY_S = 5.0
"""Interval of plain lines about the progress of reading or of an evaluation."""
MIN_BAR, MAX_BAR = 4, 30
_LOG = logging.getLogger("fastlstm")


class LineOutput:
    """Base of the observers: writes and flushes whole lines, survives a closed pipe."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.is_closed = stream, False
        self.glyphs = glyphs_for(stream)
        self.start: Event = {}

    def __call__(self, event: Event) -> None:
        if event.get("event") == "start":
            self.start = event
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            handler(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the output; a live line is removed."""

    def write(self, text: str) -> None:
        """Writes and flushes `text`; after a closed pipe or a full disk it does nothing."""
        if self.is_closed:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):
            self.is_closed = True


def default_output(
    *, use_json: bool, stream: TextIO | None = None, is_brief: bool = False
) -> LineOutput:
    """Returns JSON lines, a live line in a terminal or a notebook, or plain lines elsewhere.

    `stream` is standard output by default. `is_brief` shows the live line only.
    """
    display = notebook_display() if stream is None else None
    stream = sys.stdout if stream is None else stream
    if use_json:
        return JsonOutput(stream)
    if display is not None:
        return NotebookOutput(stream, display, is_brief)
    if is_terminal(stream):
        return LiveOutput(stream, is_brief)
    return LineOutput(stream) if is_brief else PlainOutput(stream)


@contextmanager
def fit_shown(verbose: bool | None) -> Iterator[Callable[[Event], None]]:
    """Yields the observer of a fit in Python.

    It shows the output of the command line (`verbose` is True), nothing (False), or a live line in
    a terminal or a notebook (None). Warnings become Python warnings. Other messages also go to the
    logger "fastlstm".
    """
    output = LineOutput(sys.stdout)
    if verbose is not False:
        output = default_output(use_json=False, is_brief=not verbose)

    def show(event: Event) -> None:
        if event["event"] == "message" and event["level"] == "warning":
            output.close()  # the warning begins a line
            show_warning(event)
            return
        if event["event"] == "message":
            _LOG.info(event["text"])
        output(event)

    with output:
        yield show


class JsonOutput(LineOutput):
    """One JSON object per line and nothing else; NaN and infinity become null."""

    def __call__(self, event: Event) -> None:
        self.write(json.dumps(finite(event), allow_nan=False, default=str) + "\n")


class PlainOutput(LineOutput):
    """Lines for a pipe or a log file: no control characters, flushed one by one."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._shown_s: dict[str, float] = {}

    def _note(self, text: str, is_warning: bool) -> None:
        self._print(("warning: " if is_warning else "") + text)

    def _section(self, title: str, colour: str, rows: list[words.Row]) -> None:
        """Shows rows below a title, which may be empty."""
        self._print(*([title] if title else []))
        label = ""
        for name, text in rows:
            label = name or label
            self._print(f"{label}: {text}")

    def _commands(self, commands: list[str]) -> None:
        self._print(*(f"next: {command}" for command in commands))

    def _print(self, *lines: str) -> None:
        for line in lines:
            self.write(line + "\n")

    def _under_way(self, kind: str, done: float | None, total: float | None, text: str) -> None:
        now, is_over = time.monotonic(), kind == "progress" and done == total
        if not is_over and now - self._shown_s.get(kind, -math.inf) >= SHOWN_EVERY_S:
            self._shown_s[kind] = now
            self._print(text)

    def _on_message(self, event: Event) -> None:
        self._note(text_of(event, "text"), event.get("level") == "warning")

    def _on_skip(self, event: Event) -> None:
        self._note(words.skip_text(event), True)

    def _on_test(self, event: Event) -> None:
        self._section("", "", words.test_rows(event))

    def _on_start(self, event: Event) -> None:
        self._section("fastlstm training", "cyan", words.header_rows(event, self.glyphs))

    def _on_end(self, event: Event) -> None:
        is_unfinished = words.is_unfinished(event)
        title = ("" if is_unfinished else "finished: ") + text_of(event, "reason")
        colour = "yellow" if is_unfinished else "green"
        self._section(title, colour, words.end_rows(event, self.start))
        for note in words.end_notes(event, self.start):
            self._note(note, True)
        self._commands(words.next_commands(event, self.start))

    def _on_prepare(self, event: Event) -> None:
        done, total = number(event, "done_bytes"), number(event, "total_bytes")
        if done or total:  # of a table in memory there is no size
            self._under_way("prepare", done, total, words.prepare_text(event))

    def _on_progress(self, event: Event) -> None:
        done, total = number(event, "done"), number(event, "total")
        self._under_way("progress", done, total, words.progress_text(event))

    def _on_step(self, event: Event) -> None:
        elapsed = number(event, "elapsed_s")
        parts = [f"step {number(event, 'step') or 0:,.0f}"]
        parts += [part.text for part in step_parts(event, unit_of(self.start))]
        parts += [f"elapsed {clock(elapsed)}"] if elapsed is not None else []
        self._print("  ".join(parts))

    def _on_eval(self, event: Event) -> None:
        best = "best so far" if event.get("is_best") else ""
        self._print("evaluation: " + words.joined(*words.eval_parts(event), best))

    def _on_outlook(self, event: Event) -> None:
        self._note(words.outlook_text(event), False)

    def _on_sample(self, event: Event) -> None:
        self._print(f"sample at step {number(event, 'step') or 0:,.0f}:")
        self._print(*(f"  | {line}" for line in words.sample_lines(event)))

    def _on_checkpoint(self, event: Event) -> None:
        self._print("checkpoint: " + words.checkpoint_text(event))


class LiveOutput(PlainOutput):
    """One line that is redrawn in place; evaluations, samples and notes scroll above it.

    `is_brief` shows the live line only, with the last validation figure; the end of the run stays.
    """

    def __init__(self, stream: TextIO, is_brief: bool = False) -> None:
        super().__init__(stream)
        self.style, self._is_brief = style_for(stream), is_brief
        self._live = ""
        self._valid: list[LinePart] = []

    def close(self) -> None:
        self._draw("")

    def _note(self, text: str, is_warning: bool) -> None:
        mark, colour = ("!", "yellow") if is_warning else (self.glyphs.dot, "dim")
        first, *rest = wrap(text, columns() - 4)
        head = "  " + self.style(mark, colour) + " " + first
        self._permanent([head, *("    " + part for part in rest)])

    def _section(self, title: str, colour: str, rows: list[words.Row]) -> None:
        self._draw("")
        width = max([LABEL_WIDTH, *(len(label) + 2 for label, _ in rows)])
        title = self.style(clip(title, columns() - 2), "bold", colour)
        lines = ["", f"  {title}", ""] if title else [""]
        for label, text in rows:
            for index, part in enumerate(wrap(text, columns() - width - 2)):
                lines.append(self._labelled("" if index else label, part, width))
        self._permanent(lines)

    def _commands(self, commands: list[str]) -> None:
        rows = words.labelled("next", commands)  # never wrapped: they are to be copied
        self._permanent([*(self._labelled(label, text) for label, text in rows), ""])

    def _labelled(self, label: str, text: str, width: int = LABEL_WIDTH) -> str:
        return "  " + self.style(label.ljust(width), "dim") + text

    def _draw(self, line: str) -> None:
        if line or self._live:
            self.write("\r\x1b[2K" + line)
        self._live = line

    def _permanent(self, lines: list[str]) -> None:
        if self._is_brief:
            return
        erase = "\r\x1b[2K" if self._live else ""
        self.write(erase + "".join(line + "\n" for line in lines) + self._live)

    def _under_way(self, kind: str, done: float | None, total: float | None, text: str) -> None:
        bar = self._bar(done / total, 20) + "  " if done is not None and total else ""
        is_over = kind == "progress" and done == total
        self._draw("" if is_over else bar + clip(text, columns() - 22))

    def _on_step(self, event: Event) -> None:
        parts = [*step_parts(event, unit_of(self.start)), *self._valid]
        self._draw(self.live_line(parts, share_of(event), columns()))

    def live_line(self, parts: list[LinePart], share: float | None, width: int) -> str:
        """Returns a line of at most `width` columns; the bar takes the rest of the numbers."""
        parts = list(parts)
        texts = [part.padded(is_long=True) for part in parts]
        if _room(texts, width) < MAX_BAR // 2:
            texts = [part.padded(is_long=False) for part in parts]
        while _room(texts, width) < MIN_BAR and len(parts) > 1:
            drop = max(range(len(parts)), key=lambda index: parts[index].rank)
            del parts[drop], texts[drop]
        room, shown = min(MAX_BAR, _room(texts, width)), []
        for text, part in zip(texts, parts, strict=True):
            before, value, after = text.partition(part.value)
            around = (self.style(text, "dim") for text in (before, after))
            shown.append(self.style(value, "bold").join(around))
        line = "  ".join(shown)
        return line if share is None or room < MIN_BAR else self._bar(share, room) + " " + line

    def _on_eval(self, event: Event) -> None:
        step, split, *figures = words.eval_parts(event)
        if self._is_brief and figures:
            self._valid = [LinePart(figures[0], f"{split} {{}}", "valid {}", 3)]
        elapsed = number(event, "elapsed_s")
        parts = [(step.ljust(12), "dim"), (split.ljust(10), "")]
        parts += [(text, "dim") for text in figures]
        parts[2:3] = [(text, "bold") for text, _ in parts[2:3]]
        parts += [(clock(elapsed), "dim")] if elapsed is not None else []
        mark = self.style(self.glyphs.best, "green", "bold") if event.get("is_best") else " "
        width, line = 4, f"  {mark} "
        for text, colour in parts:
            if width + len(text) <= columns():
                line += (self.style(text, colour) if colour else text) + "  "
                width += len(text) + 2
        self._permanent([line.rstrip()])

    def _on_sample(self, event: Event) -> None:
        lines = [line for text in words.sample_lines(event) for line in wrap(text, columns() - 6)]
        shown = lines[:6] + ([self.style("...", "dim")] if len(lines) > 6 else [])
        bar = self.style(self.glyphs.bar, "dim")
        self._permanent([f"    {bar} {line}" for line in shown])

    def _on_checkpoint(self, event: Event) -> None:
        """Checkpoints are too frequent to be shown on a terminal."""

    def _on_end(self, event: Event) -> None:
        super()._on_end(event)
        if self._is_brief:
            self._draw(clip(self._end_line(event), columns() - 1) + "\n")
            self._live = ""

    def _end_line(self, event: Event) -> str:
        best = dict(words.end_rows(event, self.start)).get("best", "")
        time = clock(number(event, "elapsed_s") or 0.0)
        return words.joined(text_of(event, "reason"), best, time)

    def _bar(self, share: float, width: int) -> str:
        filled = round(max(0.0, min(1.0, share)) * width)
        done, todo = self.glyphs.done * filled, self.glyphs.todo * (width - filled)
        return self.style(done, "cyan") + self.style(todo, "dim")


class NotebookOutput(LiveOutput):
    """The live line as a changing output of a notebook cell; the rest is printed below it. The end
    of the run stays in place of the live line.

    `display` is IPython's.
    """

    def __init__(self, stream: TextIO, display: Callable[..., Any], is_brief: bool = False) -> None:
        super().__init__(stream, is_brief)
        self._display = display
        self._shown: Any = None

    def _on_end(self, event: Event) -> None:
        PlainOutput._on_end(self, event)
        self._draw(self._end_line(event))
        self._live = ""  # stays when the output is closed

    def _draw(self, line: str) -> None:
        if line != self._live:
            data = {"text/plain": line}
            if self._shown is None:
                self._shown = self._display(data, raw=True, display_id=True)
            else:
                self._shown.update(data, raw=True)
        self._live = line

    def _permanent(self, lines: list[str]) -> None:
        if not self._is_brief:
            self._print(*lines)


@dataclass(frozen=True)
class LinePart:
    """A part of the step line: a value in a long or a short text.

    A narrow terminal drops the parts of highest rank first. The live line pads the value to `width`
    columns, so that nothing moves when numbers change.
    """

    value: str
    long: str
    short: str
    rank: int
    width: int = 0

    @property
    def text(self) -> str:
        return self.long.format(self.value)

    def padded(self, *, is_long: bool) -> str:
        return (self.long if is_long else self.short).format(self.value.rjust(self.width))


def share_of(event: Event) -> float | None:
    """Returns the share of a run that is done at a step; below 1 while its end still takes time."""
    done, elapsed, left = (number(event, key) for key in ("progress", "elapsed_s", "eta_s"))
    return min(done, elapsed / (elapsed + left)) if done and elapsed and left else done


def step_parts(event: Event, unit: str) -> list[LinePart]:
    """Returns the parts of a step: percent, loss, bits, speed, ceiling, input wait, ETA, ranks."""
    event = {**event, "progress": share_of(event)}
    table: tuple[tuple[str, Callable[[float], str], str, str, int, int], ...] = (
        ("progress", _whole_percent, "{}", "{}", 0, 4),
        ("loss", "{:.3f}".format, "loss {}", "loss {}", 3, 5),
        ("bits_per_char", "{:.3f}".format, "{} bits/char", "{} bpc", 1, 5),
        ("units_per_s", short_count, f"{{}} {unit}/s", f"{{}} {unit[:3]}/s", 2, 5),
        ("ceiling_share", percent, "{} of ceiling", "{} ceil", 4, 3),
        ("input_wait_share", percent, "input wait {}", "wait {}", 5, 4),
        ("eta_s", clock, "ETA {}", "ETA {}", 2, 0),
    )
    parts = [
        LinePart(form(value), long, short, rank, width)
        for key, form, long, short, rank, width in table
        if (value := number(event, key)) is not None
    ]
    if text := words.ranks_text(event):
        parts.append(LinePart(text, "ranks {}", "ranks {}", 6))
    return parts


def _whole_percent(share: float) -> str:
    return "100%" if share >= 1.0 else f"{min(99, round(100 * share))}%"


def _room(texts: list[str], width: int) -> int:
    return width - cell_width("  ".join(texts)) - 1
