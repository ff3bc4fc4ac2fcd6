"""`fastlstm evaluate RUN DATA`: bits per character of a text, errors on a table or sequences."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.cli.command import Command, Option, Parsed, Positional, switch
from fastlstm.cli.inputs import (
    one_or_many,
    open_forecaster,
    open_model,
    read_sequences,
    refuse_runs,
    refuse_swapped,
    require_run,
    warn_of_table,
)
from fastlstm.cli.options import JSON, READ_OPTIONS, device_option
from fastlstm.cli.output import print_result, say
from fastlstm.cli.training import parse_for_run
from fastlstm.errors import EXIT_OK, DataError, counted
from fastlstm.report.lines import Row, forecast_name, score_text, series_rows
from fastlstm.runs.run_directory import Kind
from fastlstm.text.config import PARTS
from fastlstm.text.data.sources import open_source

if TYPE_CHECKING:
    from fastlstm.text.evaluation import Evaluation
    from fastlstm.text.lm import LM

_LANES = 16
_SPLIT = "split of {}, divided as in training"
_WINDOW = "score windows of N tokens, each from a zero state, as for stateless models"
_PARALLEL = (
    "parts of the text scored in parallel; 1 is exact and slower; default is 16, on a GPU 256"
)
_UNKNOWN = (
    "characters outside the vocabulary of RUN: count skips them and reports their number; refuse"
    " makes them an error"
)
COMMAND = Command(
    verb="evaluate",
    summary="Measure bits per character and byte, and perplexity, on a text.",
    positionals=(
        Positional("RUN", "a run directory or one of its checkpoints"),
        Positional("TEXT", "a text in any form that train takes as SOURCE"),
    ),
    options=(
        Option("split", f"only this {_SPLIT.format('TEXT')}", Literal["train", "valid", "test"]),
        Option("zero_state_window", _WINDOW, int),
        Option("lanes", _PARALLEL, int),
        Option("max_tokens", "score at most N tokens", int),
        Option("unknown", _UNKNOWN, Literal["count", "refuse"], "count"),
        device_option("auto uses a GPU if there is one"),
        JSON,
    ),
    examples=(
        "fastlstm evaluate runs/book other.txt",
        "fastlstm evaluate runs/book book.txt --split valid --zero-state-window 128",
    ),
    other="For a forecaster (--split, --stride, --season, --scaled) or a sequence model:\n"
    "fastlstm evaluate RUN --help, with its run directory",
)
TABLE_COMMAND = Command(
    verb="evaluate",
    summary="Measure the errors of a forecaster and of simple forecasts on a table.",
    positionals=(
        Positional("RUN", "a run directory of a forecaster"),
        Positional("DATA", "a table in any form that train takes", is_many=True),
    ),
    options=(
        Option("split", _SPLIT.format("DATA"), Literal["valid", "test"], "test"),
        Option("stride", "rows between forecast origins", int, 1),
        Option("season", "period of the seasonal naive forecast, in steps", int),
        switch("scaled", "errors in standard deviations of the training rows"),
        device_option("auto uses a GPU for 64 windows or more"),
        JSON,
        *READ_OPTIONS,
    ),
    examples=("fastlstm evaluate runs/etth1 ETTh1.csv --scaled",),
)
SEQUENCE_COMMAND = Command(
    verb="evaluate",
    summary="Measure a sequence model on sequences whose answers are known.",
    positionals=(
        Positional("RUN", "a run directory of a sequence model"),
        Positional("DATA", "a .npz file: X (N, T, C), y (N), and lengths (N) of padded sequences"),
    ),
    options=(JSON,),
    examples=("fastlstm evaluate runs/gestures test.npz",),
)
COMMANDS: dict[Kind, Command] = {
    "text": COMMAND, "forecaster": TABLE_COMMAND, "sequence": SEQUENCE_COMMAND
}  # fmt: skip


def run(argv: list[str]) -> int:
    """Prints the figures on standard output; returns the exit code."""
    kind, parsed = parse_for_run(argv, COMMANDS)
    path, *data = parsed.positionals
    refuse_swapped("evaluate", path, data)
    measure: dict[Kind, Callable[..., tuple[dict[str, Any], list[Row]]]] = {
        "text": _text_figures,
        "forecaster": _table_figures,
        "sequence": _sequence_figures,
    }
    print_result(*measure[kind](parsed, path, *data), parsed["json"])
    return EXIT_OK


def _text_figures(parsed: Parsed, path: str, text: str) -> tuple[dict[str, Any], list[Row]]:
    split, window = parsed["split"], parsed["zero_state_window"]
    require_run(path, "text")
    refuse_runs([text])
    open_source(text)  # a misspelt name is an error before torch is loaded
    warn_of_table(text)
    lm = open_model(path, device=parsed["device"])
    if lm.stored_format != "fp32":
        say(f"note: weights are stored as {lm.stored_format}; texts are scored with them in fp32")
    result, lanes = _evaluate(lm, text, parsed)
    mode, where = "carried state", f"up to {counted(lanes, 'lane')}"
    sizes = {"lanes": lanes}
    if window is not None:
        mode, where = "zero state per window", f"windows of {counted(window, 'token')}"
        sizes = {"zero_state_window": window}
    facts = {"run": path, "text": text, "split": split, "mode": mode, **sizes}
    return {**facts, **dataclasses.asdict(result)}, [
        ("model", path),
        ("text", text + (f", {split} split" if split else "")),
        ("mode", f"{mode}, {where}"),
        *result._rows(),
    ]


def _evaluate(lm: LM, text: str, parsed: Parsed) -> tuple[Evaluation, int]:
    """Scores a text or one split of it, divided as in training. Returns the figures and lanes."""
    from fastlstm.system.hardware import has_gpu
    from fastlstm.text.evaluation import LANES_ON_GPU, evaluate_on, with_unknown
    from fastlstm.text.held_out import held_out_names, part_of

    split = parsed["split"]
    if (file := held_out_names(lm.config).get(split or "")) is not None:
        raise DataError(
            f"the {PARTS[str(split)]} split of this run is {file}, not a share of its text;"
            f" evaluate {file} without `split`"
        )
    data = lm.read(text, parsed["unknown"])
    if split is None and lm.config.get("data", {}).get("key") == data.key:
        num = len(part_of(lm.config, data, "train"))
        share = f"{num / len(data.ids):.0%}"
        say(f"note: the model was trained on {share} of {text}; `--split valid` scores other text")
    settings = {name: parsed[name] for name in ("zero_state_window", "max_tokens")}
    lanes = parsed["lanes"]
    if lanes is None:
        lanes = LANES_ON_GPU if lm.device != "cpu" and has_gpu() else _LANES
    ids = part_of(lm.config, data, split)
    result = evaluate_on(lm.device, lm.model, ids, lm.tokenizer, lanes=lanes, **settings)
    size = lm.tokenizer.vocab_size
    return with_unknown(result, data.num_unknown, data.num_chars, data.unknown, size), lanes


def _table_figures(parsed: Parsed, path: str, *data: str) -> tuple[dict[str, Any], list[Row]]:
    model = open_forecaster(parsed, data)
    split, settings = parsed["split"], {n: parsed[n] for n in ("stride", "season", "scaled")}
    found = model.evaluation(split, frame=one_or_many(list(data)), **settings)
    facts = {"run": path, "data": list(data), "split": split, **settings, "scores": found.figures}
    facts |= {"season": found.season, "series": found.worst_series()}
    units = "standard deviations of the training rows" if facts["scaled"] else "units of the table"
    return facts, [
        ("run", path),
        ("data", f"{', '.join(data)}, {split} split, in {units}"),
        *((forecast_name(name, facts), score_text(v)) for name, v in found.figures.items()),
        *series_rows(facts["series"]),
    ]


def _sequence_figures(parsed: Parsed, path: str, data: str) -> tuple[dict[str, Any], list[Row]]:
    X, y = read_sequences(data, needs_answers=True)

    import numpy as np

    from fastlstm.sequence.estimators import SequenceClassifier, model_of
    from fastlstm.sequence.files import read_sequence_model

    model = model_of(read_sequence_model(path))
    y = y.reshape(len(y)) if y.shape[1:] == (1,) else y
    facts: dict[str, Any] = {"run": path, "data": data, "sequences": len(X)}
    rows = [("run", path), ("data", f"{data}, {counted(len(X), 'sequence')}")]
    if isinstance(model, SequenceClassifier):
        facts["accuracy"] = model.score(X, y)
        labels, counts = np.unique(y, return_counts=True)
        if not set(labels.tolist()) & set(model.classes_.tolist()):
            raise DataError(f"no label of {data} is a class of {path}: {model.classes_.tolist()}")
        known, given = model.classes_.tolist(), labels.tolist()
        if strange := [label for label in given if label not in known]:
            never = ", ".join(str(label) for label in known if label not in given) or "none"
            say(
                f"note: {', '.join(map(str, strange))} in {data} is no class of the model and"
                f" counts as wrong; classes that do not occur: {never}"
            )
        facts["most_frequent"] = float(counts.max() / len(y))
        likeliest = f"always {labels[counts.argmax()]}: {facts['most_frequent']:.2%}"
        rows.append(("accuracy", f"{facts['accuracy']:.2%}; {likeliest}"))
        pairs = Counter(zip(y.tolist(), model.predict(X).tolist(), strict=True))
        facts["answers"] = [{"label": a, "answer": b, "num": n} for (a, b), n in pairs.items()]
        for label, num in zip(labels.tolist(), counts.tolist(), strict=True):
            answered = sum(n for (_, answer), n in pairs.items() if answer == label)
            right = pairs[label, label]
            found = f"{right:,} of {num:,} found ({right / num:.0%})"
            rows.append((f"class {label}", f"{found}; {right:,} of {answered:,} answers right"))
        return facts, rows
    facts["r2"] = model.score(X, y)
    facts["mae"] = float(np.abs(model.predict(X).reshape(y.shape) - y).mean())
    rows.append(("R²", f"{facts['r2']:.4f}; 0 is the mean of the answers, 1 is exact"))
    return facts, [*rows, ("mae", f"{facts['mae']:.4g} in units of the answers")]
