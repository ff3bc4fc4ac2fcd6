"""The text of events, for the terminal, plain lines and the report.

If a key of an event is missing or None, its part of a line is left out.
"""

from __future__ import annotations

import os.path
import shlex
from collections.abc import Sequence
from functools import partial

from fastlstm.errors import counted
from fastlstm.report.events import (
    SPLITS,
    Event,
    measure_of,
    metrics_of,
    number,
    rank_seconds,
    text_of,
    unit_of,
)
from fastlstm.report.markup import visible
from fastlstm.report.terminal import Glyphs, clock, percent, short_bytes, short_count
from fastlstm.system import hardware

Row = tuple[str, str]
"""A label and a text; a row without a label continues the row above."""


def count_of(event: Event, key: str, noun: str) -> str:
    """Returns ``123,456,789 tokens``, or an empty string when absent."""
    value = number(event, key)
    return "" if value is None else counted(round(value), noun)


def joined(*parts: str, separator: str = ", ") -> str:
    """Joins the parts that are not empty."""
    return separator.join(part for part in parts if part)


_MAX_NAMED = 5
_LISTED_RANKS = 4


def _filled(form: str, value: object) -> str:
    """Returns `form` with the value; empty if the value is None or empty."""
    return "" if value in (None, "") else form.format(value)


def _part_of(event: Event, key: str) -> Event:
    part = event.get(key)
    return part if isinstance(part, dict) else {}


def labelled(label: str, lines: object) -> list[Row]:
    """Returns rows for a list of lines, with the label on the first; none for another value."""
    texts = [visible(line) for line in lines] if isinstance(lines, list) else []
    return [("" if index else label, text) for index, text in enumerate(texts)]


def header_rows(start: Event, glyphs: Glyphs) -> list[Row]:
    """Returns the rows for the start of a run: data, model, training, machine, kernels, end."""
    sizes, end = _part_of(start, "num_units"), text_of(start, "end")
    used, budget = number(start, "resumed_s"), end.removeprefix("budget ")
    after = "" if used is None else f", after {clock(used)} of wall-clock time"
    splits = [f"{n:,.0f} {word}" for key, word in SPLITS.items() if (n := number(sizes, key))]
    columns = [_filled(f"{word} {{}}", text_of(start, role)) for role, word in _ROLES.items()]
    rows = [
        ("run", text_of(start, "run")),
        ("data", _data_text(start)),
        (unit_of(start), joined(*splits)),
        ("", joined(*columns, separator="; ")),
        ("", _order_text(start)),
        *labelled("model", model_lines(start)),
        ("training", _training_text(start, glyphs)),
        ("machine", _machine_text(start)),
        ("processes", _processes_text(start)),
        ("precision", joined(*map(partial(text_of, start), _PRECISION), separator=": ")),
        *labelled("kernels", start.get("kernels")),
        (
            "ends",
            _filled("after {}", end)
            if budget == end
            else f"after {budget} of wall-clock time, including the report",
        ),
        ("resumed", _filled("from step {:,.0f}" + after, number(start, "resumed_from"))),
    ]
    return [(label, text) for label, text in rows if text]


_PRECISION = ("precision", "precision_why")
_ROLES = {
    **{"target": "target", "past": "past covariates", "future": "future covariates"},
    "static": "static covariates",
}


def _data_text(start: Event) -> str:
    series, size = number(start, "series") or 1, number(start, "vocab_size")
    every = _filled("every {}", text_of(start, "frequency").removeprefix("1 "))
    return joined(
        text_of(start, "source"),
        count_of(start, "rows", "row") + (f" of {series:,.0f} series" if series > 1 else ""),
        "no time column: rows are counted" if every == "every rows" else every,
        text_of(start, "vocab") + _filled(" vocabulary of {:,.0f}", size),
    )


def _order_text(start: Event) -> str:
    """Returns the order of training windows if it is not the default."""
    if number(start, "tbptt") is not None:
        return f"series in order, {count_of(start, 'tbptt', 'step')} per chunk, state carried over"
    return "all series sampled equally often" if start.get("balance") is True else ""


def model_lines(start: Event) -> list[str]:
    """Returns the layers of a model, its cost, and its dropout and other options."""
    model = _part_of(start, "model")
    units = count_of(model, "rnn_size", "unit") or count_of(model, "hidden_size", "unit")
    is_counted = bool(model) and "stack" not in model  # `fastlstm info` lists an imported stack
    layers = count_of({"num_layers": 1, **model}, "num_layers", "LSTM layer") if is_counted else ""
    flop, unit = number(start, "flop_per_unit"), unit_of(start).removesuffix("s")
    rates = {
        **{"dropout": "dropout", "weight_drop": "weight drop"},
        "recurrent_dropout": "recurrent dropout",
    }
    kinds = {"dropout": _filled("{} ", text_of(model, "dropout_kind"))}
    switches = {
        **{"layer_norm": "layer norm", "output_norm": "output norm", "residual": "residual"},
        "tie_weights": "tied weights",
    }
    inputs = [_filled("embedding {}", text_of(model, "embed_size"))]
    if steps := count_of(model, "input_size", "step"):  # the windows of a forecaster
        patch = text_of(model, "patch") or text_of(model, "segment")
        inputs = [f"{steps} in, {text_of(model, 'horizon')} out", _filled("patches of {}", patch)]
    options = [
        f"{kinds.get(key, '')}{word} {rate:.3g}"
        for key, word in rates.items()
        if (rate := number(model, key))
    ]
    lines = [
        joined(
            *inputs,
            joined(layers, _filled("of {}", units), separator=" "),
            _filled("{} channels", text_of(model, "channels")),
            _filled("output of rank {}", text_of(model, "output_rank")),
        ),
        joined(
            count_of(start, "num_parameters", "parameter"),
            "" if flop is None else f"{si(flop)}FLOP per {unit}",
        ),
        joined(*options, *(word for key, word in switches.items() if model.get(key) is True)),
    ]
    return [text for text in lines if text]


def model_rows(facts: Event) -> list[Row]:
    """Returns the rows of a stored model with these `model` and `num_parameters`."""
    size = f"{short_bytes(4 * facts['num_parameters'])} of weights in fp32"
    return [*labelled("model", model_lines(facts)), ("size", size)]


def _training_text(start: Event, glyphs: Glyphs) -> str:
    length, accumulate = number(start, "seq_length"), number(start, "accumulate") or 1
    noun = unit_of(start).removesuffix("s") if length is None else "lane"
    size = [count_of(start, "batch_size", noun), count_of(start, "seq_length", "token")]
    size += [f"{accumulate:.0f}"] if accumulate > 1 else []
    return joined(
        text_of(start, "optimizer"),
        _filled("learning rate {:.3g}", number(start, "learning_rate")),
        _filled("{} per step", joined(*size, separator=f" {glyphs.times} ")),
        _filled("seed {}", text_of(start, "seed")),
    )


def _machine_text(start: Event) -> str:
    peak, how = number(start, "ceiling_gflops"), text_of(start, "ceiling_how") or "measured"
    gpus, gpu = start.get("gpus"), list[str]()
    if text_of(start, "device") == "cuda":
        one = gpus[0] if isinstance(gpus, list) and len(gpus) == 1 else None
        gpu = [text_of(start, "machine"), gpu_state(one) if isinstance(one, dict) else ""]
    return joined(
        text_of(start, "device"),
        *gpu,
        count_of(start, "threads", "thread"),
        f"ceiling {si(1e9 * peak)}FLOP/s ({how})" if peak else "",
    )


def gpu_state(gpu: Event) -> str:
    """Returns power and clock of one of the `gpus` of an event; empty without figures."""
    most = _filled(" of {:.0f}", number(gpu, "power_limit_w"))
    power, clock = number(gpu, "power_w"), number(gpu, "clock_mhz")
    return joined(_filled("{:.0f}" + most + " W", power), _filled("{:.0f} MHz", clock))


def si(value: float) -> str:
    """Returns a number, a space and an SI prefix, such as ``8.4 M``, for a unit to follow."""
    short = short_count(value)
    return f"{short[:-1]} {short[-1]}" if short[-1] in "kMGT" else f"{short} "


def _processes_text(start: Event) -> str:
    """Returns ``2 on 1 machine (gloo), 1 thread each``; empty for one."""
    about = _part_of(start, "processes")
    if (num := number(about, "num")) is None:
        return ""
    machines, threads = number(about, "machines"), number(about, "threads")
    every = number(about, "sync_every") or 1
    stages = start.get("stages")
    parts = [f"{num:,.0f}"]
    if num > 1:
        where = "" if machines is None else f" on {counted(machines, 'machine')}"
        parts = [f"{num:,.0f}{where}" + (f" ({text_of(about, 'backend')})")]
        parts += [] if threads is None else [f"{counted(threads, 'thread')} each"]
    if isinstance(stages, list):
        parts.append("layers " + " / ".join(map(visible, stages)))
    elif num > 1 and every > 1:
        parts.append(f"weights averaged every {every:,.0f} steps")
    if num > 1 and about.get("wire") == "bf16":
        parts.append("sent in bf16")
    return ", ".join(parts)


def eval_parts(event: Event) -> list[str]:
    """Returns the parts of an evaluation's line."""
    split, names = text_of(event, "split"), metrics_of([event])
    units = {"bits_per_char": "bits/char", "loss": "nats" if "bits_per_char" in names else "loss"}
    pruned = number(event, "pruned")
    return [
        f"step {number(event, 'step') or 0:,.0f}",
        SPLITS.get(split, split),
        *(
            f"{event[key]:.4f} {units[key]}" if key in units else f"{name} {event[key]:.4g}"
            for key, name in names.items()
            if key not in ("bits_per_byte", "pruned")
        ),
        *([] if pruned is None else [f"pruned to {percent(pruned)}"]),
    ]


def outlook_text(event: Event) -> str:
    """Returns ``predicted final validation: 1.612 ± 0.021 bits/char``, empty where unknown."""
    bits, error = number(event, "bits_per_char"), number(event, "error")
    if bits is None:
        return ""
    within = "" if error is None else f" ± {error:.3f}"
    longer = _filled("; with one hour more {:.3f}", number(event, "hour_more_bits_per_char"))
    return f"predicted final validation: {bits:.3f}{within} bits/char{longer}"


def sample_lines(event: Event, max_lines: int = 8) -> list[str]:
    """Returns at most `max_lines` lines of a sample, with visible control characters."""
    text = visible(str(event.get("text") or "").replace("\r\n", "\n"), "\n\t").expandtabs(4)
    lines = text.strip("\n").rstrip().split("\n")
    return lines if len(lines) <= max_lines else [*lines[:max_lines], "..."]


def progress_text(event: Event) -> str:
    """Returns ``evaluating the test set: 512 of 3,389 windows, 15%``."""
    done, total = number(event, "done") or 0, number(event, "total")
    doing, unit = text_of(event, "doing"), text_of(event, "unit")
    if not total:
        return doing
    return f"{doing}: {done:,.0f} of {total:,.0f} {unit}, {percent(done / total)}"


def prepare_text(event: Event) -> str:
    """Returns ``reading: 123 MB of 1.00 GB, 12%``."""
    done, total = number(event, "done_bytes") or 0, number(event, "total_bytes")
    of = f" of {short_bytes(total)}, {percent(done / total)}" if total else ""
    return f"reading: {short_bytes(done)}{of}"


def skip_text(event: Event) -> str:
    """Returns one sentence about a step that was skipped or rolled back."""
    what = joined(text_of(event, "what"), text_of(event, "tensor"), separator=" in ")
    text = f"step {number(event, 'step') or 0:,.0f}: {what}"
    return joined(text, text_of(event, "action"), separator="; ")


def checkpoint_text(event: Event) -> str:
    """Returns one sentence about a saved checkpoint."""
    size, name = number(event, "bytes"), os.path.basename(text_of(event, "path").rstrip("/"))
    return joined(
        f"step {number(event, 'step') or 0:,.0f}",
        _filled("saved {}", name),
        "" if size is None else short_bytes(size),
        _filled("{:.2f} s", number(event, "seconds")),
    )


def ranks_text(event: Event) -> str:
    """Returns the times of a step's passes on each rank, or of the fastest and slowest of many."""
    seconds = rank_seconds(event)
    if len(seconds) <= _LISTED_RANKS:
        return "/".join(f"{1e3 * s:.0f}" for s in seconds) + (" ms" if seconds else "")
    low, high = min(seconds), max(seconds)
    return f"{1e3 * low:.0f}-{1e3 * high:.0f} ms, slowest {seconds.index(high)}"


def test_rows(event: Event) -> list[Row]:
    """Returns the errors of a forecaster and of naive forecasts."""
    rows = [
        (forecast_name(visible(who), event), score_text(errors))
        for who, errors in _part_of(event, "scores").items()
    ]
    if rows and number(event, "windows") is not None:
        targets = event.get("targets") or []
        units = "units of the table"
        if len(targets) > 1:
            units = f"the units of {len(targets):,} targets together; rel_mae and mase have no unit"
            rows += _target_rows(targets)
        rows.insert(0, ("test", f"{windows_text(event)}, errors in {units}"))
    return rows + series_rows(_part_of(event, "series"))


def _target_rows(targets: Sequence[Event]) -> list[Row]:
    """Returns a row of the MAE of each target, beside the better of the naive forecasts'."""
    rows = [
        (row["mae"], min(row["naive_mae"], row["seasonal_naive_mae"]), visible(row["target"]))
        for row in targets
        if None not in (row.get(key) for key in ("mae", "naive_mae", "seasonal_naive_mae"))
    ]
    head = tail = ""
    if len(rows) > _MAX_NAMED:
        rows.sort(key=lambda row: row[0] / (row[1] or 1e-300), reverse=True)
        head = f"the worst of {len(rows):,}: "
        tail = "; report.html lists all"
    named = [f"{name} {mae:.4g} ({naive:.4g})" for mae, naive, name in rows[:_MAX_NAMED]]
    return [("mae by target (best naive forecast)", head + ", ".join(named) + tail)]


def forecast_name(who: str, event: Event) -> str:
    """Returns the name of a kind of forecast, with the season of the seasonal naive one."""
    season = number(event, "season")
    is_seasonal = who == "seasonal_naive" and season is not None
    return who.replace("_", " ") + (f" (season {season:.0f})" if is_seasonal else "")


def series_rows(series: Event) -> list[Row]:
    """Returns a row that names series with a larger error than the seasonal naive forecast's."""
    num, of = number(series, "num_worse") or 0, number(series, "num_compared") or 0
    if not num:
        return []
    named = [
        f"{visible(str(row['series']))} ({visible(row['target'])}) {row['mae']:.4g} for"
        f" {row['seasonal_naive_mae']:.4g}"
        for row in series["worst"][: min(int(num), _MAX_NAMED)]
    ]
    text = f"{num:,.0f} of {of:,.0f} series by MAE: {', '.join(named)}"
    return [("worse than seasonal naive", text + (", …" if num > _MAX_NAMED else ""))]


def windows_text(event: Event) -> str:
    """Returns the number of evaluated test windows: ``512 of 3,389 windows``."""
    return _share_text(event, "windows", "of_windows", "window")


def _share_text(event: Event, part: str, whole: str, noun: str) -> str:
    done, total = number(event, part) or 0, number(event, whole) or 0
    share = f"{done:,.0f} of " if total > done else ""
    return share + counted(max(done, total), noun)


def score_text(errors: Event) -> str:
    """Returns ``num_values 13,440  mse 0.357  mae 0.389 …``."""
    figures = ((name, figure_text(errors, name, score_form(name))) for name in errors)
    return "  ".join(f"{name} {text}" for name, text in figures if text and name != "season")


def figure_text(event: Event, key: str, form: str = ".4f") -> str:
    """Returns a number of an event as text, empty when absent."""
    value = number(event, key)
    return "" if value is None else format(value, form)


def score_form(name: str) -> str:
    """Returns the format of a score: counts whole, errors with four digits."""
    return ",.0f" if name.startswith("num_") else ".4g"


def is_unfinished(end: Event) -> bool:
    """True when an end event says that the run was stopped from outside."""
    return text_of(end, "reason").startswith("stopped")


def rate_of(end: Event) -> float | None:
    """Returns the units per second of training steps of an end event."""
    units, seconds = number(end, "units"), number(end, "train_s")
    return units / seconds if units and seconds else None


def ceiling_share(start: Event, rate: float | None) -> float | None:
    """Returns the share of the ceiling at `rate` units per second; None if unknown."""
    flop, ceiling = number(start, "flop_per_unit"), number(start, "ceiling_gflops")
    return hardware.ceiling_share(rate * flop / 1e9, ceiling) if rate and flop and ceiling else None


def end_rows(end: Event, start: Event) -> list[Row]:
    """Returns the rows for the end of a run; `start` is the event of its start."""
    unit, measure = unit_of(start), measure_of({**start, **end})
    elapsed, rate = number(end, "elapsed_s"), rate_of(end)
    share, units = ceiling_share(start, rate), number(end, "units")
    memory, best_step = number(end, "peak_memory_bytes"), number(end, "best_step")
    best = figure_text(end, f"best_{measure.key}")
    overall = units / elapsed if units and elapsed else None
    test = _part_of(end, "test")
    rows = {
        "best": [
            _filled(f"{{}} validation {measure.label}", best)
            + (_filled(" at step {:,.0f}", best_step) if best else "")
        ],
        "test": [
            _filled(f"{{}} {measure.label}", figure_text(test, measure.key)),
            _filled("perplexity {}", figure_text(test, "perplexity", ".4g")),
            _share_text(test, "num_units", "of_units", unit.removesuffix("s")) if test else "",
        ],
        "speed": [
            "" if rate is None else f"{short_count(rate)} {unit}/s in training steps",
            "" if share is None else f"{percent(share)} of the ceiling",
            "" if overall is None else f"{short_count(overall)} {unit}/s overall",
        ],
        "trained": [
            count_of(end, "step", "step"),
            count_of(end, "units", unit.removesuffix("s")),
            "" if memory is None else f"peak memory {short_bytes(memory)}",
        ],
        "time": ["" if elapsed is None else f"{clock(elapsed)} total", spent_text(end)],
    }
    return [(label, text) for label, parts in rows.items() if (text := joined(*parts))]


_SHOWN_AS = {"judging": "testing"}


def spent_text(end: Event) -> str:
    """Returns the time by phase: ``setup 9.8 s (11 %), steps 71.3 s …``; adds up to the total."""
    spent, elapsed = end.get("spent_s"), number(end, "elapsed_s")
    if not isinstance(spent, dict) or elapsed is None:
        return ""
    known: Event = {"setup": spent.get("setup"), "steps": end.get("train_s"), **spent}
    parts = {name: s for name in known if (s := number(known, name)) is not None}
    parts["other"] = max(elapsed - sum(parts.values()), 0.0)
    shown = {_SHOWN_AS.get(name, visible(name)): s for name, s in parts.items() if s >= 0.05}
    share = f" ({100 * parts.get('setup', 0.0) / max(elapsed, 1e-3):.0f} %)"
    return joined(*(f"{n} {s:.1f} s{share if n == 'setup' else ''}" for n, s in shown.items()))


_NO_USE = "do not rely on this model"
_EQUAL = 0.005
"""Relative difference below which errors count as equal."""
_EARLY = 0.5
"""Share of the steps before which a best step is early."""


def end_notes(end: Event, start: Event) -> list[str]:
    """Returns warnings about the model of a finished run; `start` is the event of its start."""
    if is_unfinished(end):
        return []
    notes, errors = [], _part_of(end, "test_error")
    best, steps = (number(end, key) or 0 for key in ("best_step", "step"))
    is_whole = text_of(end, "reason") == text_of(start, "end")  # no callback has ended it
    if end.get("best_step") == 0 and steps:
        notes.append(
            "no better than the start, whose weights the run keeps; give a longer run or a lower"
            " --learning-rate"
        )
    elif 0 < best < _EARLY * steps and is_whole and not end.get("caveats"):
        notes.append(
            f"step {best:,.0f} of {steps:,.0f} is the best, and the run keeps its weights: the"
            f" {steps - best:,.0f} steps after it brought nothing; take a smaller budget, or more"
            " dropout or weight decay"
        )
    own = number(errors, "forecaster")
    for name in ("ridge", "seasonal_naive", "naive"):
        error = number(errors, name)
        if own is None or error is None or error > own:
            continue
        is_equal = own < (1 + _EQUAL) * error
        notes.append(
            f"{'no better' if is_equal else 'worse'} than the {name.replace('_', ' ')} forecast on"
            f" the test set: {text_of(errors, 'measure')} {own:.4g} vs {error:.4g}; "
            + ("a linear regression does as well" if name == "ridge" else _NO_USE)
        )
    caveats = end.get("caveats")
    notes += map(visible, caveats if isinstance(caveats, list) else [])
    if end.get("still_improving") is True and not caveats:
        notes.append("the validation loss was still falling at the end; a longer run would help")
    return notes


_NEXT = {
    "text": ("fastlstm generate {} --length 500", "fastlstm evaluate {} OTHER_TEXT"),
    "forecast": ("fastlstm forecast {} DATA --out pred.csv", "fastlstm evaluate {} DATA"),
}


def next_commands(end: Event, start: Event) -> list[str]:
    """Returns the next commands after a run, none without a run directory."""
    if "run" in end and end["run"] is None:
        return []
    commands = ["the same command with --resume"] if is_unfinished(end) else []
    if _part_of(end, "compression").get("is_published") is False:
        more = "a larger --max-loss, or more --steps or --budget"
        commands.append(f"the same command with --resume and {more}")
    # Before the first evaluation there is no model to use, nor before a compression is measured.
    if end.get("has_model", (number(end, "best_step") or 0) >= 0):
        run = shlex.quote(text_of(end, "run") or "RUN")
        known = _NEXT.get(text_of({**start, **end}, "task") or "text", ())
        commands += [command.format(run) for command in (*known, "fastlstm info {}")]
    if report := text_of(end, "report"):
        commands.append(f"{report} (open it in a browser)")
    if logs := text_of(end, "tensorboard"):
        commands.append(f"tensorboard --logdir {shlex.quote(logs)}")
    return commands
