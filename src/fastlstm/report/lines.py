"""What an event says: the wording shared by the terminal and the plain output.

Events come from the trainer as plain dicts; a key may be missing or None, and then its part of the
line is left out.
"""

from __future__ import annotations

import os.path
import shlex
from collections.abc import Mapping
from typing import Any

from fastlstm.errors import counted
from fastlstm.report.terminal import (
    Glyphs,
    clean,
    clock,
    is_number,
    percent,
    short_bytes,
    short_count,
)

Event = dict[str, Any]


def text_of(event: Event, key: str) -> str:
    """Returns the value as one clean line of text; empty when absent."""
    value = event.get(key)
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        value = ", ".join(str(part) for part in value)
    return clean(str(value)).replace("\n", " ").replace("\t", " ")


def number(event: Event, key: str) -> float | None:
    """Returns the value when it is a finite number, else None."""
    value = event.get(key)
    return float(value) if is_number(value) else None  # type: ignore[arg-type]


def count_of(event: Event, key: str, noun: str) -> str:
    """Returns ``123,456,789 tokens``, or an empty string when absent."""
    value = number(event, key)
    return "" if value is None else counted(round(value), noun)


def joined(parts: list[str], separator: str = ", ") -> str:
    """Joins the parts that say something."""
    return separator.join(part for part in parts if part)


def header_rows(event: Event, glyphs: Glyphs) -> list[tuple[str, str]]:
    """Returns (label, text) rows for the start of a run: data, model, precision, kernels, end."""
    rows = [
        ("run", text_of(event, "run")),
        ("data", _data_text(event)),
        ("tokens", _split_text(event)),
        ("windows", _windows_text(event)),
        ("", _order_text(event)),
        ("model", _model_text(event)),
        ("", _cost_text(event)),
        ("", _variant_text(event)),
        ("training", _training_text(event, glyphs)),
        ("machine", _machine_text(event)),
        ("precision", _precision_text(event)),
    ]
    kernels = [clean(str(line)) for line in event.get("kernels") or []]
    rows += [("kernels" if index == 0 else "", line) for index, line in enumerate(kernels)]
    end = text_of(event, "end")
    what = "of wall clock, report included" if end.startswith("budget ") else ""
    after = joined([end.removeprefix("budget "), what], " ")
    rows.append(("ends", f"after {after}" if end else ""))
    if event.get("resumed_from") is not None:
        used = number(event, "resumed_s")
        after = "" if used is None else f", after {clock(used)} of wall clock"
        rows.append(("resumed", f"from step {event['resumed_from']:,}{after}"))
    return [(label, text) for label, text in rows if text]


def _data_text(event: Event) -> str:
    if event.get("task") == "forecast":
        series = number(event, "series") or 1
        many = f" of {series:,.0f} series" if series > 1 else ""
        every = f"every {text_of(event, 'frequency').removeprefix('1 ')}"
        rows = count_of(event, "rows", "row") + many
        return joined([text_of(event, "source"), rows, every])
    size = number(event, "vocab_size")
    vocab = text_of(event, "vocab")
    words = f"{vocab} vocabulary of {size:,.0f}" if size is not None else vocab
    return joined([text_of(event, "source"), words])


def _split_text(event: Event) -> str:
    splits = ("train_tokens", "train"), ("valid_tokens", "validation"), ("test_tokens", "test")
    return joined([f"{n:,.0f} {word}" for key, word in splits if (n := number(event, key))])


def _windows_text(event: Event) -> str:
    parts = ("train_windows", "training"), ("valid_windows", "validation")
    found = [f"{n:,.0f} {word}" for key, word in parts if (n := number(event, key))]
    roles = ("target", "of"), ("past", "past"), ("future", "known ahead"), ("static", "static")
    named = [f"{word} {text_of(event, role)}" for role, word in roles if event.get(role)]
    return joined([joined([*found, *named[:1]]), *named[1:]], "; ")


def _model_text(event: Event) -> str:
    model = event.get("model")
    if not isinstance(model, dict):
        return ""
    if "horizon" in model:
        return _forecaster_text(model)
    return joined(
        [
            f"{_layers_text(model)} of {count_of(model, 'rnn_size', 'unit') or '? units'}",
            f"embedding {model['embed_size']}" if "embed_size" in model else "",
        ]
    )


def _forecaster_text(model: dict[str, Any]) -> str:
    return joined(
        [
            f"{count_of(model, 'input_size', 'step')} read, {model['horizon']} answered, in"
            f" segments of {model.get('segment')}",
            f"{_layers_text(model)} of {count_of(model, 'hidden_size', 'unit') or '? units'}",
            f"targets {model.get('channels')}",
        ]
    )


def _layers_text(model: dict[str, Any]) -> str:
    return count_of({"num_layers": 1, **model}, "num_layers", "LSTM layer")


def _order_text(event: Event) -> str:
    """How a forecaster's training windows are drawn, where it is not each once an epoch."""
    if is_number(event.get("tbptt")):
        return f"streams in order, {count_of(event, 'tbptt', 'step')} a chunk, state carried on"
    return "every series equally often" if event.get("balance") is True else ""


def _variant_text(event: Event) -> str:
    model = event.get("model")
    if not isinstance(model, dict):
        return ""
    parts = []
    kind = f"{model['dropout_kind']} " if "dropout_kind" in model else ""
    for key, word in (
        ("dropout", f"{kind}dropout"),
        ("recurrent_dropout", "recurrent dropout"),
    ):
        if is_number(model.get(key)) and model[key] > 0:
            parts.append(f"{word} {model[key]:.3g}")
    extras = {"layer_norm": "layer norm", "residual": "residual", "tie_weights": "tied weights"}
    return joined(parts + [word for key, word in extras.items() if model.get(key)])


def _cost_text(event: Event) -> str:
    unit = "window" if event.get("task") == "forecast" else "token"
    flop = number(event, f"flop_per_{unit}")
    return joined(
        [
            count_of(event, "num_parameters", "parameter"),
            f"{si(flop)}FLOP per {unit}" if flop is not None else "",
        ]
    )


def si(value: float) -> str:
    """Returns ``8.4 M``: the number, a space and the SI prefix, ready for a unit."""
    short = short_count(value)
    return f"{short[:-1]} {short[-1]}" if short[-1] in "kMGT" else f"{short} "


def _training_text(event: Event, glyphs: Glyphs) -> str:
    rate, batch, length = (number(event, k) for k in ("learning_rate", "batch_size", "seq_length"))
    accumulate = number(event, "accumulate") or 1
    size = ""
    if batch is not None and length is not None:
        factor = f" {glyphs.times} {accumulate:.0f}" if accumulate > 1 else ""
        lanes, tokens = counted(batch, "lane"), counted(length, "token")
        size = f"{lanes} {glyphs.times} {tokens}{factor} per step"
    elif batch is not None:
        size = f"{counted(batch, 'window')} per step"
    seed = event.get("seed")
    return joined(
        [
            text_of(event, "optimizer"),
            f"learning rate {rate:.3g}" if rate is not None else "",
            size,
            f"seed {seed}" if seed is not None else "",
        ]
    )


def _machine_text(event: Event) -> str:
    peak = number(event, "ceiling_gflops")
    how = text_of(event, "ceiling_how") or "measured"
    return joined(
        [
            text_of(event, "device"),
            count_of(event, "threads", "thread"),
            f"ceiling {si(1e9 * peak)}FLOP/s ({how})" if peak is not None else "",
        ]
    )


def _precision_text(event: Event) -> str:
    why = text_of(event, "precision_why")
    return text_of(event, "precision") + (f": {why}" if why else "")


def eval_parts(event: Event) -> list[str]:
    """Returns the parts of an evaluation's line; the caller chooses separator and emphasis."""
    split = {"valid": "validation"}.get(text_of(event, "split"), text_of(event, "split"))
    bits, loss, perplexity = (number(event, k) for k in ("bits_per_char", "loss", "perplexity"))
    return [
        f"step {number(event, 'step') or 0:,.0f}",
        split,
        f"{bits:.4f} bits/char" if bits is not None else "",
        f"{loss:.4f} {'loss' if bits is None else 'nats'}" if loss is not None else "",
        f"perplexity {perplexity:.4g}" if perplexity is not None else "",
    ]


def sample_lines(event: Event, max_lines: int = 8) -> list[str]:
    """Returns the text of a sample without control characters, at most `max_lines` lines of it."""
    text = clean(str(event.get("text") or "")).expandtabs(4)
    lines = text.strip("\n").rstrip().split("\n")
    return lines if len(lines) <= max_lines else [*lines[:max_lines], "..."]


def skip_text(event: Event) -> str:
    """Returns one sentence about a step that was skipped or rolled back."""
    what = joined([text_of(event, "what"), text_of(event, "tensor")], " in ")
    action = text_of(event, "action")
    return f"step {number(event, 'step') or 0:,.0f}: {what}" + (f"; {action}" if action else "")


def checkpoint_text(event: Event) -> str:
    """Returns one sentence about a saved checkpoint."""
    size, seconds = number(event, "bytes"), number(event, "seconds")
    details = joined(
        [
            short_bytes(size) if size is not None else "",
            f"{seconds:.2f} s" if seconds is not None else "",
        ]
    )
    name = os.path.basename(text_of(event, "path").rstrip("/"))
    step = f"step {number(event, 'step') or 0:,.0f}"
    return joined([step, f"saved {name}" if name else "", details])


def test_rows(event: Event) -> list[tuple[str, str]]:
    """Returns (label, text) rows of a forecaster's errors beside those of naive forecasts."""
    scores = event.get("scores")
    rows = []
    for who, found in scores.items() if isinstance(scores, dict) else ():
        rows.append((clean(str(who)).replace("_", " "), score_text(found)))
    windows, of_windows = number(event, "windows"), number(event, "of_windows")
    if rows and windows is not None:
        share = f"{windows:,.0f} of " if of_windows and of_windows > windows else ""
        judged = f"{share}{counted(max(windows, of_windows or 0), 'window')}"
        rows.insert(0, ("test", f"{judged}, in units of the table"))
    return rows


def score_text(found: Mapping[str, Any]) -> str:
    """Returns ``num_values 13,440  mse 0.357  mae 0.389 …``."""
    return "  ".join(
        f"{name} {value:{score_form(name)}}" for name, value in found.items() if is_number(value)
    )


def score_form(name: str) -> str:
    """Returns how the figure of that name is written: counts whole, errors with four digits."""
    return ",.0f" if name.startswith("num_") else ".4g"


def is_unfinished(event: Event) -> bool:
    """True when an end event says that the run was stopped from outside."""
    reason = text_of(event, "reason").lower()
    return any(word in reason for word in ("stopped", "signal", "sigterm", "sigint", "interrupt"))


def ceiling_share(start: Event, rate: float | None) -> float | None:
    """Returns the share of the ceiling that so many tokens per second reach, where it is known."""
    flop, ceiling = number(start, "flop_per_token"), number(start, "ceiling_gflops")
    return rate * flop / 1e9 / ceiling if rate and flop and ceiling else None


def end_rows(event: Event, start: Event) -> list[tuple[str, str]]:
    """Returns (label, text) rows for the end of a run; `start` is the event of its start."""
    elapsed, train_s = number(event, "elapsed_s"), number(event, "train_s")
    is_forecast = event.get("task") == "forecast"
    unit = "windows" if is_forecast else "tokens"
    measure = "loss" if is_forecast else "bits/char"
    tokens = number(event, unit)
    best = number(event, "best_loss" if is_forecast else "best_bits_per_char")
    rate = tokens / train_s if tokens and train_s else None
    share = ceiling_share(start, rate)
    memory = number(event, "peak_memory_bytes")
    best_step = number(event, "best_step")
    where = f" at step {best_step:,.0f}" if best_step is not None else ""
    overall = tokens / elapsed if tokens and elapsed else None
    rows = (
        ("best", [f"{best:.4f} validation {measure}{where}" if best is not None else ""]),
        ("test", _test_parts(event)),
        (
            "speed",
            [
                f"{short_count(rate)} {unit}/s in the steps alone" if rate is not None else "",
                f"{percent(share)} of the ceiling" if share is not None else "",
                f"{short_count(overall)} {unit}/s over the whole time" if overall else "",
            ],
        ),
        (
            "trained",
            [
                count_of(event, "step", "step"),
                count_of(event, unit, unit[:-1]),
                f"{short_bytes(memory)} of memory at most" if memory is not None else "",
            ],
        ),
        ("time", [f"{clock(elapsed)} in all" if elapsed is not None else "", spent_text(event)]),
    )
    return [(label, text) for label, parts in rows if (text := joined(parts))]


def _test_parts(event: Event) -> list[str]:
    """Returns what the best model of texts scored on a test text of its own."""
    test = event.get("test")
    if not isinstance(test, dict):
        return []
    bits, perplexity = number(test, "bits_per_char"), number(test, "perplexity")
    num, total = number(test, "num_units"), number(test, "of_units")
    share = f"{num:,.0f} of " if num and total and num < total else ""
    return [
        f"{bits:.4f} bits/char" if bits is not None else "",
        f"perplexity {perplexity:.4g}" if perplexity is not None else "",
        share + count_of(test, "of_units", "token"),
    ]


_PARTS = {"setup": "set-up", "steps": "steps"}


def spent_text(event: Event) -> str:
    """Returns what the time went into: ``set-up 9.8 s, steps 21.3 s …``; it adds up to all."""
    spent, elapsed = event.get("spent_s"), number(event, "elapsed_s")
    if not isinstance(spent, dict) or elapsed is None:
        return ""
    known = {"setup": spent.get("setup"), "steps": event.get("train_s"), **spent}
    parts = {name: float(s) for name, s in known.items() if is_number(s)}
    parts["other"] = max(elapsed - sum(parts.values()), 0.0)
    return joined([f"{_PARTS.get(name, name)} {s:.1f} s" for name, s in parts.items() if s >= 0.05])


def end_notes(event: Event) -> list[str]:
    """Returns what to know about the model of a run that went to its end."""
    if is_unfinished(event):
        return []
    notes = []
    errors = event.get("test_error")
    if isinstance(errors, dict) and is_number(errors.get("forecaster")):
        measure, own = errors.get("measure"), errors["forecaster"]
        better = {
            name: errors[name]
            for name in ("seasonal_naive", "naive")
            if is_number(errors.get(name)) and errors[name] <= own
        }
        notes += [
            f"{'no better' if f'{error:.4g}' == f'{own:.4g}' else 'worse'} than the"
            f" {name.replace('_', ' ')} forecast on the test part: {measure} {own:.4g} against"
            f" {error:.4g}; do not rely on this model"
            for name, error in better.items()
        ]
    if event.get("still_improving") is True:
        text = "still improving: the validation loss was falling at the end"
        notes.append(f"{text}; a longer run would be better")
    return notes


def next_commands(event: Event) -> list[str]:
    """Returns what to type after a run."""
    run = text_of(event, "run") or "RUN"
    name, is_forecast = shlex.quote(run), event.get("task") == "forecast"
    commands = ["the same command with --resume"] if is_unfinished(event) else []
    # Before the first evaluation there is nothing that can forecast or write.
    has_model = (number(event, "best_step") or 0) >= 0
    if has_model and is_forecast:
        commands.append(f"fastlstm forecast {name} DATA --out pred.csv")
    elif has_model:
        commands.append(f"fastlstm generate {name} --length 500")
    if has_model and (is_forecast or not is_unfinished(event)):
        source = "DATA" if is_forecast else "TEXT"
        commands += [f"fastlstm evaluate {name} {source}", f"fastlstm info {name}"]
    if report := text_of(event, "report"):
        commands.append(f"{report} (open it in a browser)")
    if logs := text_of(event, "tensorboard"):
        commands.append(f"tensorboard --logdir {shlex.quote(logs)}")
    return commands
