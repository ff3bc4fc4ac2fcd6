"""Observers of a training run: a live line on a terminal, plain lines in a pipe, JSON lines.

Each takes one event dict at a time. A reader that went away (a closed pipe) silences the output and
lets the run go on: what it learned is worth more than what it would have printed.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from fastlstm.report import lines as words
from fastlstm.report.terminal import (
    Style,
    cell_width,
    clip,
    clock,
    columns,
    glyphs_for,
    is_terminal,
    percent,
    short_bytes,
    short_count,
    style_for,
    wrap,
)
from fastlstm.system.storage import finite

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from fastlstm.report.lines import Event

LABEL_WIDTH = 11
PREPARE_EVERY_S = 5.0
MIN_BAR, MAX_BAR = 4, 30


class Output:
    """Base of the observers: writes whole lines, flushes them, survives a closed pipe."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.is_closed = False
        self._start: Event = {}

    def __call__(self, event: Event) -> None:
        """Shows one event; unknown kinds are ignored."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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


def observer_for(stream: TextIO, *, use_json: bool) -> Output:
    """Returns JSON lines, a live line on a terminal, or plain lines elsewhere."""
    if use_json:
        return JsonOutput(stream)
    return LiveOutput(stream) if is_terminal(stream) else PlainOutput(stream)


class JsonOutput(Output):
    """One JSON object per line and nothing else; NaN and infinity become null."""

    def __call__(self, event: Event) -> None:
        self.write(json.dumps(finite(event), allow_nan=False, default=str) + "\n")


class PlainOutput(Output):
    """Lines for a pipe or a log file: no control characters, flushed one by one."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.glyphs = glyphs_for(stream)
        self._prepare_shown_s = self._progress_shown_s = -math.inf

    def __call__(self, event: Event) -> None:
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            for line in handler(event):
                self.write(line + "\n")

    def _on_prepare(self, event: Event) -> list[str]:
        now = time.monotonic()
        if now - self._prepare_shown_s < PREPARE_EVERY_S:
            return []
        self._prepare_shown_s = now
        return [f"reading: {prepare_text(event)}"]

    def _on_progress(self, event: Event) -> list[str]:
        now = time.monotonic()
        if now - self._progress_shown_s < PREPARE_EVERY_S or event.get("done") == event.get(
            "total"
        ):
            return []
        self._progress_shown_s = now
        return [progress_text(event)]

    def _on_message(self, event: Event) -> list[str]:
        level = words.text_of(event, "level")
        return [("warning: " if level == "warning" else "") + words.text_of(event, "text")]

    def _on_start(self, event: Event) -> list[str]:
        self._start = event
        rows = words.header_rows(event, self.glyphs)
        lines, label = [], ""
        for name, text in rows:
            label = name or label
            lines.append(f"{label}: {text}")
        return lines

    def _on_step(self, event: Event) -> list[str]:
        step = words.number(event, "step") or 0
        elapsed = words.number(event, "elapsed_s")
        parts = [part.text for part in step_parts(event)]
        parts.append(f"elapsed {clock(elapsed)}" if elapsed is not None else "")
        return [words.joined([f"step {step:,.0f}", *parts], "  ")]

    def _on_eval(self, event: Event) -> list[str]:
        best = "best so far" if event.get("is_best") else ""
        return ["evaluation: " + words.joined([*words.eval_parts(event), best])]

    def _on_sample(self, event: Event) -> list[str]:
        step = words.number(event, "step") or 0
        return [f"sample at step {step:,.0f}:", *(f"  | {s}" for s in words.sample_lines(event))]

    def _on_test(self, event: Event) -> list[str]:
        return [f"{label}: {text}" for label, text in words.test_rows(event)]

    def _on_checkpoint(self, event: Event) -> list[str]:
        return ["checkpoint: " + words.checkpoint_text(event)]

    def _on_skip(self, event: Event) -> list[str]:
        return ["warning: " + words.skip_text(event)]

    def _on_end(self, event: Event) -> list[str]:
        reason = words.text_of(event, "reason")
        lines = [reason if words.is_unfinished(event) else "finished: " + reason]
        label = ""
        for name, text in words.end_rows(event, self._start):
            label = name or label
            lines.append(f"{label}: {text}")
        lines += [f"warning: {note}" for note in words.end_notes(event)]
        return lines + [f"next: {command}" for command in words.next_commands(event)]


class LiveOutput(Output):
    """One line that is redrawn in place; evaluations, samples and notes scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.style = style_for(stream)
        self.glyphs = glyphs_for(stream)
        self._live = ""

    def __call__(self, event: Event) -> None:
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            handler(event)

    def close(self) -> None:
        self._draw("")

    def _draw(self, line: str) -> None:
        if line or self._live:
            self.write("\r\x1b[2K" + line)
        self._live = line

    def _permanent(self, lines: list[str]) -> None:
        erase = "\r\x1b[2K" if self._live else ""
        self.write(erase + "".join(line + "\n" for line in lines) + self._live)

    def _rows(self, rows: list[tuple[str, str]]) -> list[str]:
        lines = []
        width = max([LABEL_WIDTH, *(len(label) + 2 for label, _ in rows)])
        for label, text in rows:
            head = label
            for part in wrap(text, columns() - width - 2):
                lines.append("  " + self.style(head.ljust(width), "dim") + part)
                head = ""
        return lines

    def _note(self, mark: str, text: str, *colours: str) -> list[str]:
        parts = wrap(text, columns() - 4)
        first = "  " + self.style(mark, *colours) + " " + parts[0]
        return [first, *("    " + part for part in parts[1:])]

    def _on_prepare(self, event: Event) -> None:
        done, total = words.number(event, "done_bytes"), words.number(event, "total_bytes")
        self._draw_share(done, total, f"reading  {prepare_text(event)}")

    def _on_progress(self, event: Event) -> None:
        done, total = words.number(event, "done"), words.number(event, "total")
        if done == total:
            self._draw("")
        else:
            self._draw_share(done, total, progress_text(event))

    def _draw_share(self, done: float | None, total: float | None, text: str) -> None:
        share = done / total if done is not None and total else None
        bar = self._bar(share, 20) + "  " if share is not None else ""
        self._draw(bar + clip(text, columns() - 22))

    def _on_message(self, event: Event) -> None:
        is_warning = event.get("level") == "warning"
        mark, colour = ("!", "yellow") if is_warning else (self.glyphs.dot, "dim")
        self._permanent(self._note(mark, words.text_of(event, "text"), colour))

    def _on_start(self, event: Event) -> None:
        self._draw("")
        title = "  " + self.style("fastlstm", "bold", "cyan") + self.style(" training", "bold")
        self._start = event
        rows = words.header_rows(event, self.glyphs)
        self._permanent(["", title, "", *self._rows(rows), ""])

    def _on_step(self, event: Event) -> None:
        self._draw(live_line(event, columns(), self.style, self._bar))

    def _on_eval(self, event: Event) -> None:
        step, split, bits, loss, perplexity = words.eval_parts(event)
        is_best = bool(event.get("is_best"))
        elapsed = words.number(event, "elapsed_s")
        parts = [
            (step.ljust(12), "dim"),
            (split.ljust(10), ""),
            (bits, "bold"),
            (loss, ""),
            (perplexity, "dim"),
            (clock(elapsed) if elapsed is not None else "", "dim"),
        ]
        mark = self.style(self.glyphs.best, "green", "bold") if is_best else " "
        width, line = 4, f"  {mark} "
        for text, colour in parts:
            if text and width + len(text) <= columns():
                line += (self.style(text, colour) if colour else text) + "  "
                width += len(text) + 2
        self._permanent([line.rstrip()])

    def _on_sample(self, event: Event) -> None:
        lines = []
        for text in words.sample_lines(event):
            lines += wrap(text, columns() - 6)
        shown = lines[:6] + ([self.style("...", "dim")] if len(lines) > 6 else [])
        bar = self.style(self.glyphs.bar, "dim")
        self._permanent([f"    {bar} {line}" for line in shown])

    def _on_test(self, event: Event) -> None:
        self._draw("")
        self._permanent(["", *self._rows(words.test_rows(event))])

    def _on_skip(self, event: Event) -> None:
        self._permanent(self._note("!", words.skip_text(event), "yellow"))

    def _on_end(self, event: Event) -> None:
        self._draw("")
        reason = words.text_of(event, "reason")
        unfinished = words.is_unfinished(event)
        word, colour = ("", "yellow") if unfinished else ("done: ", "green")
        title = clip(word + reason if reason else "done", columns() - 2)
        commands = [
            "  " + self.style(("next" if index == 0 else "").ljust(LABEL_WIDTH), "dim") + command
            for index, command in enumerate(words.next_commands(event))
        ]
        rows = self._rows(words.end_rows(event, self._start))
        notes = [n for text in words.end_notes(event) for n in self._note("!", text, "yellow")]
        title = "  " + self.style(title, "bold", colour)
        self._permanent(["", title, "", *rows, *notes, *commands, ""])

    def _bar(self, share: float, width: int) -> str:
        filled = round(max(0.0, min(1.0, share)) * width)
        done, todo = self.glyphs.done * filled, self.glyphs.todo * (width - filled)
        return self.style(done, "cyan") + self.style(todo, "dim")


@dataclass(frozen=True)
class Part:
    """A part of the step line: a value with a long and a short wording around it.

    On a narrow terminal parts of the highest rank are dropped first. The live line pads a value to
    `width`, so that nothing moves while numbers change.
    """

    value: str
    long: str
    short: str
    rank: int
    width: int = 0

    @property
    def text(self) -> str:
        """The long wording without padding."""
        return self.long.format(self.value)

    def padded(self, *, is_long: bool) -> str:
        """The wording with the value padded."""
        return (self.long if is_long else self.short).format(self.value.rjust(self.width))


def step_parts(event: Event) -> list[Part]:
    """Returns the parts of a step: percent, loss, bits, speed, ceiling, input wait, ETA."""
    table: tuple[tuple[str, Callable[[float], str], str, str, int, int], ...] = (
        ("progress", _whole_percent, "{}", "{}", 0, 4),
        ("loss", "{:.3f}".format, "loss {}", "loss {}", 3, 5),
        ("bits_per_char", "{:.3f}".format, "{} bits/char", "{} bpc", 1, 5),
        ("tokens_per_s", short_count, "{} tokens/s", "{} tok/s", 2, 5),
        ("windows_per_s", short_count, "{} windows/s", "{} win/s", 2, 5),
        ("ceiling_share", percent, "{} of ceiling", "{} ceil", 4, 3),
        ("input_wait_share", percent, "input wait {}", "wait {}", 5, 4),
        ("eta_s", clock, "ETA {}", "ETA {}", 2, 0),
    )
    return [
        Part(form(value), long, short, rank, width)
        for key, form, long, short, rank, width in table
        if (value := words.number(event, key)) is not None
    ]


def _whole_percent(share: float) -> str:
    return f"{100 * min(1.0, share):.0f}%"


def live_line(event: Event, width: int, style: Style, bar: Callable[[float, int], str]) -> str:
    """Returns the live line: at most `width` columns, the bar taking what the numbers leave."""
    parts = step_parts(event)
    texts = [part.padded(is_long=True) for part in parts]
    if _room(texts, width) < MAX_BAR // 2:
        texts = [part.padded(is_long=False) for part in parts]
    while _room(texts, width) < MIN_BAR and len(parts) > 1:
        drop = max(range(len(parts)), key=lambda index: parts[index].rank)
        del parts[drop], texts[drop]
    share = words.number(event, "progress")
    room = min(MAX_BAR, _room(texts, width))
    line = "  ".join(_emphasised(t, part, style) for t, part in zip(texts, parts, strict=True))
    if share is None or room < MIN_BAR:
        return line
    return bar(share, room) + " " + line


def _room(texts: list[str], width: int) -> int:
    return width - cell_width("  ".join(texts)) - 1


def _emphasised(text: str, part: Part, style: Style) -> str:
    before, value, after = text.partition(part.value)
    return style(before, "dim") + style(value, "bold") + style(after, "dim")


def prepare_text(event: Event) -> str:
    """Returns ``123 MB of 1.00 GB, 12%``."""
    done, total = words.number(event, "done_bytes") or 0, words.number(event, "total_bytes")
    if not total:
        return short_bytes(done)
    return f"{short_bytes(done)} of {short_bytes(total)}, {percent(done / total)}"


def progress_text(event: Event) -> str:
    """Returns ``judging the test part: 512 of 3,389 windows, 15%``."""
    done, total = words.number(event, "done") or 0, words.number(event, "total") or 0
    share = f", {percent(done / total)}" if total else ""
    doing, unit = words.text_of(event, "doing"), words.text_of(event, "unit")
    return f"{doing}: {done:,.0f} of {total:,.0f} {unit}{share}"


def default_output(*, use_json: bool) -> Output:
    """Returns the observer for standard output."""
    return observer_for(sys.stdout, use_json=use_json)
