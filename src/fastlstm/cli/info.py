"""`fastlstm info [RUN]`: a run and the state of its files, or this machine and its kernels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.parser import parse
from fastlstm.cli.table import print_json, print_rows
from fastlstm.errors import EXIT_FAILED, EXIT_OK, CorruptFileError, counted
from fastlstm.report.history import number
from fastlstm.report.lines import ceiling_share, si
from fastlstm.report.terminal import clock, short_bytes, short_count
from fastlstm.runs.find_run import require_run
from fastlstm.system.storage import finite

if TYPE_CHECKING:
    from fastlstm.report.history import Event, History
    from fastlstm.text.files import LoadedModel

COMMAND = Command(
    verb="info",
    summary="Show a run and check its files; without RUN, show this machine and its kernels.",
    positionals=(Positional("RUN", "a run directory or a checkpoint", is_optional=True),),
    options=(Option("json", bool, False, "print one JSON object", is_switch=True),),
    examples=("fastlstm info", "fastlstm info runs/book"),
)

Row = tuple[str, str]


def run(argv: list[str]) -> int:
    """Prints what there is to know; returns 1 when a file of the run is damaged."""
    parsed = parse(COMMAND, argv)
    if parsed.positionals:
        facts, rows, code = _run_facts(Path(parsed.positionals[0]))
    else:
        facts, rows, code = *_machine_facts(), EXIT_OK
    if parsed.values.get("json"):
        print_json(finite(facts))
    else:
        print_rows(rows)
    return code


def _run_facts(path: Path) -> tuple[dict[str, Any], list[Row], int]:
    """Facts of a run; every published file and checkpoint is checked against its hash."""
    require_run(path)

    from fastlstm.report.history import read_history
    from fastlstm.runs.run_directory import RunDirectory, kind_of_run
    from fastlstm.text.files import load_language_model

    directory = RunDirectory(path)
    model: dict[str, Any] = {}
    model_rows: list[Row] = []
    damage: list[str] = []
    try:
        kind = kind_of_run(path)
        if kind in ("forecaster", "sequence"):
            model, model_rows = (_forecaster if kind == "forecaster" else _sequence_model)(path)
        else:
            loaded = load_language_model(path)
            model, model_rows = _model_facts(loaded), _model_rows(loaded)
    except CorruptFileError as error:
        damage.append(str(error))
    damage += [str(error) for error in directory.verify() if str(error) not in damage]
    history = read_history(directory.metrics_path)
    checkpoints = [item.name for item in directory.checkpoints()]
    facts: dict[str, Any] = {
        "run": str(path),
        **model,
        **_history_facts(history),
        "checkpoints": checkpoints,
        "damage": damage,
    }
    rows = [
        ("run", str(path)),
        *model_rows,
        *_history_rows(history),
        ("checkpoints", ", ".join(checkpoints) or "none"),
        *[("damage", text) for text in damage],
        *([] if damage else [("files", "all match their recorded SHA-256")]),
    ]
    return facts, rows, EXIT_FAILED if damage else EXIT_OK


def _forecaster(path: Path) -> tuple[dict[str, Any], list[Row]]:
    from fastlstm.forecast.files import read_forecaster

    stored = read_forecaster(path)
    sizes, fit = stored.network.config, stored.schema
    targets = fit.columns[: sizes.num_targets]
    parameters = sum(p.numel() for p in stored.network.parameters())
    facts = {
        "kind": "forecaster",
        "model": dataclasses.asdict(sizes),
        "train": dataclasses.asdict(stored.config),
        "targets": list(targets),
        "columns": list(fit.columns),
        "num_parameters": parameters,
    }
    layers = counted(sizes.num_layers, "LSTM layer")
    return facts, [
        ("forecasts", f"{', '.join(targets)}, every {str(fit.frequency).removeprefix('1 ')}"),
        ("model", f"{counted(sizes.input_size, 'step')} read, {sizes.horizon} answered; {layers} of"
         f" {counted(sizes.hidden_size, 'unit')}"),
        ("size", f"{counted(parameters, 'parameter')}, {short_bytes(4 * parameters)} in fp32"),
    ]  # fmt: skip


def _sequence_model(path: Path) -> tuple[dict[str, Any], list[Row]]:
    from fastlstm.sequence.files import read_sequence_model

    stored = read_sequence_model(path)
    sizes, answers = stored.network.config, stored.answers
    parameters = sum(p.numel() for p in stored.network.parameters())
    facts = {
        "kind": "sequence",
        "answers": answers.kind,
        "model": dataclasses.asdict(sizes),
        "train": dataclasses.asdict(stored.config),
        "num_parameters": parameters,
    }
    count = counted(len(answers), "number")
    what = f"one of {len(answers)} classes" if answers.kind == "labels" else count
    return facts, [
        ("answers", f"{what} for each sequence"),
        ("model", f"{counted(sizes.num_columns, 'column')} read;"
         f" {counted(sizes.num_layers, 'LSTM layer')} of {counted(sizes.hidden_size, 'unit')}"),
        ("size", f"{counted(parameters, 'parameter')}, {short_bytes(4 * parameters)} in fp32"),
    ]  # fmt: skip


def _model_facts(loaded: LoadedModel) -> dict[str, Any]:
    return {
        "files": str(loaded.path),
        "model": loaded.config.get("model"),
        "train": loaded.config.get("train"),
        "data": loaded.config.get("data"),
        "num_parameters": loaded.model.num_parameters,
        "vocab": loaded.tokenizer.kind,
        "vocab_size": loaded.tokenizer.vocab_size,
        "note": loaded.note,
    }


def _model_rows(loaded: LoadedModel) -> list[Row]:
    config = loaded.model.config
    layers = counted(config.num_layers, "LSTM layer")
    data = loaded.config.get("data")
    source = data.get("source") if isinstance(data, dict) else None
    weights = 4 * loaded.model.num_parameters
    rows = [
        ("model", f"{layers} of {counted(config.rnn_size, 'unit')}, embedding {config.embed_size}"),
        (
            "size",
            f"{counted(loaded.model.num_parameters, 'parameter')}, {short_bytes(weights)} in fp32",
        ),
        ("vocabulary", f"{loaded.tokenizer.kind}, {counted(loaded.tokenizer.vocab_size, 'token')}"),
    ]
    rows += [("trained on", str(source))] if source else []
    return rows + ([("note", loaded.note)] if loaded.note else [])


def _history_facts(history: History) -> dict[str, Any]:
    best, end = history.best or {}, history.end or {}
    key = "best_loss" if history.is_forecast else "best_bits_per_char"
    last = history.steps[-1] if history.steps else {}
    return {
        key: best.get(history.measure),
        "best_step": best.get("step"),
        "step": _whole("step", end, last),
        history.unit: _whole(history.unit, end, last),
        f"{history.unit}_per_s": history.rate,
        "ceiling_share": ceiling_share(history.start, history.rate),
        "elapsed_s": history.elapsed_s,
        "end": end.get("reason"),
        "kernels": history.start.get("kernels"),
    }


def _whole(key: str, *events: Event) -> int | None:
    """Returns a count from the first event that has it: the file may hold anything."""
    found = (number(event, key) for event in events)
    return next((int(value) for value in found if value is not None), None)


def _history_rows(history: History) -> list[Row]:
    facts = _history_facts(history)
    rows: list[Row] = []
    unit = history.unit
    if history.best is not None:
        measure = "loss" if history.is_forecast else "bits/char"
        text = f"{history.best[history.measure]:.4f} validation {measure}"
        rows.append(("best", f"{text} at step {facts['best_step']:,}"))
    if None not in (facts["step"], facts[unit], facts["elapsed_s"]):
        rate = facts[f"{unit}_per_s"]
        speed = f", {short_count(rate)} {unit}/s in the steps alone" if rate is not None else ""
        amount = f"{counted(facts['step'], 'step')}, {counted(facts[unit], unit[:-1])}"
        rows.append(("trained", f"{amount} in {clock(facts['elapsed_s'])}{speed}"))
    if facts["step"] is not None:
        rows.append(("ended", str(facts["end"] or "no end recorded: still running, or killed")))
    kernels = facts["kernels"] if isinstance(facts["kernels"], list) else []
    rows += [("kernels" if index == 0 else "", str(line)) for index, line in enumerate(kernels)]
    return rows


def _machine_facts() -> tuple[dict[str, Any], list[Row]]:
    from fastlstm.system import hardware

    cpu, gpu = hardware.cpu(), hardware.gpu()
    threads = hardware.default_threads()
    ceilings = {dtype: hardware.ceilings(dtype, threads) for dtype in ("fp32", "bf16")}
    peaks = hardware.peak_gflops(threads)
    kernels = _kernel_lines()
    facts: dict[str, Any] = {
        "cpu": {**dataclasses.asdict(cpu), "features": sorted(cpu.features)},
        "gpu": dataclasses.asdict(gpu) if gpu is not None else None,
        "threads": threads,
        "ceilings": {dtype: dataclasses.asdict(value) for dtype, value in ceilings.items()},
        "peak_gflops": peaks,
        "kernels": kernels,
    }
    caches = [
        f"{name} {short_bytes(size)}"
        for name, size in (("L1d", cpu.l1d_bytes), ("L2", cpu.l2_bytes), ("L3", cpu.l3_bytes))
        if size
    ]
    rows = [
        ("cpu", cpu.model),
        ("kernels up to", cpu.isa),
        ("cores", f"{cpu.cores} for this process, {counted(threads, 'thread')} by default"),
        ("caches", ", ".join(caches) or "unknown"),
        ("gpu", gpu.name if gpu is not None else "none that torch can use"),
    ]
    for dtype, value in ceilings.items():
        speed = f"{si(1e9 * value.gemm_gflops)}FLOP/s in matrix products ({value.gemm_by})"
        rows.append((f"ceiling {dtype}", f"{speed}, copy {value.copy_gb_s:.1f} GB/s"))
    rows += [(f"peak {isa}", f"{si(1e9 * gflops)}FLOP/s") for isa, gflops in peaks.items()]
    return facts, rows + [("lstm", line) for line in kernels]


def _kernel_lines() -> list[str]:
    """What a layer of the default size would run here, in fp32 and bf16."""
    import torch

    from fastlstm.nn.drop_in import LSTM
    from fastlstm.ops.dispatch import explain

    layer = LSTM(128, 512)
    lines = [f"fp32, H=512, {explain(layer)[0]}"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lines.append(f"bf16, H=512, {explain(layer)[0]}")
    return [line.replace("layer 0: ", "") for line in lines]
