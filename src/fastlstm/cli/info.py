"""`fastlstm info RUN`: a run, its files checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, Positional, parse
from fastlstm.cli.inputs import require_run
from fastlstm.cli.options import JSON
from fastlstm.cli.output import print_result
from fastlstm.errors import EXIT_FAILED, EXIT_OK, CorruptFileError, counted
from fastlstm.report.events import Event, number
from fastlstm.report.history import History, read_history
from fastlstm.report.lines import Row, ceiling_share, count_of, joined, labelled, model_rows
from fastlstm.report.terminal import clock, short_bytes, short_count
from fastlstm.runs.run_directory import RunDirectory, kind_of_run

if TYPE_CHECKING:
    from fastlstm.forecast.files import StoredForecaster
    from fastlstm.sequence.files import StoredSequenceModel

COMMAND = Command(
    verb="info",
    summary="Show a run and check its files; fastlstm doctor shows this machine.",
    positionals=(
        Positional("RUN", "a run directory or a checkpoint (this machine: fastlstm doctor)"),
    ),
    options=(JSON,),
    examples=("fastlstm info runs/book",),
)


def run(argv: list[str]) -> int:
    """Prints the facts; returns 1 when a file of the run is damaged.

    Every published file and checkpoint is checked against its hash.
    """
    parsed = parse(COMMAND, argv)
    (name,) = parsed.positionals
    require_run(name)
    path = Path(name)

    directory = RunDirectory(path)
    model: dict[str, Any] = {}
    rows: list[Row] = []
    damage: list[str] = []
    try:
        kinds = {"forecaster": _forecaster, "sequence": _sequence_model}
        model, rows = kinds.get(kind_of_run(path) or "", _text_model)(path)
    except CorruptFileError as error:
        damage.append(str(error))
    known = "".join(damage)  # with the checkpoint to use instead
    damage += [text for error in directory.verify() if (text := str(error)) not in known]
    trained, shown = _history_facts(read_history(directory.metrics_path))
    checkpoints = [item.name for item in directory.checkpoints()]
    facts = {"run": name, **model, **trained, "checkpoints": checkpoints, "damage": damage}
    rows = [("run", name), *rows, *shown, ("checkpoints", ", ".join(checkpoints) or "none")]
    rows += [("damage", text) for text in damage]
    rows += [] if damage else [("files", "all match their recorded SHA-256")]
    print_result(facts, rows, parsed["json"])
    return EXIT_FAILED if damage else EXIT_OK


def _forecaster(path: Path) -> tuple[dict[str, Any], list[Row]]:
    from fastlstm.forecast.files import read_forecaster

    stored = read_forecaster(path)
    names = {"targets": list(stored.columns["target"]), "columns": list(stored.schema.columns)}
    facts = {**_stored_facts(stored), **names}
    rows = stored.rows()
    if (compression := stored.compression) is not None:
        facts["compression"] = dict(compression.about)
        rows += _compression_rows(facts, path)
        rows += [] if compression.note is None else [("", compression.note)]
    return {"kind": "forecaster", **facts}, rows


def _sequence_model(path: Path) -> tuple[dict[str, Any], list[Row]]:
    from fastlstm.sequence.files import read_sequence_model

    stored = read_sequence_model(path)
    answers, facts = stored.answers, _stored_facts(stored)
    is_class = answers.kind == "labels"
    what = f"one of {len(answers)} classes" if is_class else counted(len(answers), "number")
    rows = [("answers", f"{what} for each sequence")]
    if layers := facts["model"].get("stack", {}).get("layers"):  # of another framework
        kinds = [layer.get("function", layer["kind"].removesuffix("Layer")) for layer in layers]
        rows.append(("layers", ", ".join(kinds)))
    return {"kind": "sequence", "answers": answers.kind, **facts}, [*rows, *model_rows(facts)]


def _stored_facts(stored: StoredForecaster | StoredSequenceModel) -> dict[str, Any]:
    return {
        "model": dataclasses.asdict(stored.network.config),
        "train": dataclasses.asdict(stored.config),
        "num_parameters": sum(p.numel() for p in stored.network.parameters()),
    }


def _text_model(path: Path) -> tuple[dict[str, Any], list[Row]]:
    from fastlstm.text.files import language_model_rows, load_language_model

    loaded = load_language_model(path)
    tokenizer, config = loaded.tokenizer, loaded.config
    facts = {
        **{"files": str(loaded.path), "model": loaded.model.config.to_dict()},
        **{name: config.get(name) for name in ("train", "data", "compression")},
        **{"num_parameters": loaded.model.num_parameters, "note": loaded.note},
        **{"vocab": tokenizer.kind, "vocab_size": tokenizer.vocab_size},
    }
    return facts, [*language_model_rows(loaded), *_compression_rows(facts, loaded.path)]


def _compression_rows(facts: dict[str, Any], path: Path) -> list[Row]:
    """Returns the source of a compressed model, and how its weights are stored."""
    about = facts["compression"]
    if not isinstance(about, dict):
        return []
    stored = f"weights in {about['weights']}"
    if about["prune"] is not None:
        what = {"none": "weights", "blocks": "blocks", "units": "hidden units"}[about["structured"]]
        stored = f"{100 * about['prune']:.4g} % of the {what} pruned, {stored}"
    if (file := path / "model.safetensors").is_file():
        stored += f", {short_bytes(file.stat().st_size)} on disk"
    return [("compressed", f"from {about['source']['path']:.200}"), ("", stored)]


def _history_facts(history: History) -> tuple[dict[str, Any], list[Row]]:
    """Returns facts of the training."""
    best, end, unit, measure = history.best, history.end or {}, history.unit, history.measure
    last = history.steps[-1] if history.steps else {}
    facts = {
        f"best_{measure.key}": (best or {}).get(measure.key),
        "best_step": (best or {}).get("step"),
        "step": _whole("step", end, last),
        "unit": unit,
        "units": _whole("units", end, last),
        "units_per_s": history.rate,
        "ceiling_share": ceiling_share(history.start, history.rate),
        "elapsed_s": history.elapsed_s,
        "end": end.get("reason"),
        "kernels": history.start.get("kernels"),
    }
    rows: list[Row] = []
    if best is not None:
        text = f"{best[measure.key]:.4f} validation {measure.label}"
        rows.append(("best", f"{text} at step {facts['best_step']:,}"))
    if facts["step"] is not None:
        amount = [count_of(facts, "step", "step"), count_of(facts, "units", unit.removesuffix("s"))]
        time = "" if history.elapsed_s is None else f" in {clock(history.elapsed_s)}"
        rate = history.rate
        speed = "" if rate is None else f"{short_count(rate)} {unit}/s in training steps"
        rows.append(("trained", joined(joined(*amount) + time, speed)))
        rows.append(("ended", str(facts["end"] or "not recorded: still running, or killed")))
    return facts, rows + labelled("kernels", facts["kernels"])


def _whole(key: str, *events: Event) -> int | None:
    """Returns a count from the first event that has a valid one."""
    counts = (number(event, key) for event in events)
    return next((int(count) for count in counts if count is not None), None)
