"""`fastlstm info [RUN]`: a run, its files checked; or this machine and its kernels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, Positional, parse
from fastlstm.cli.inputs import require_run
from fastlstm.cli.options import JSON
from fastlstm.cli.output import print_result
from fastlstm.errors import EXIT_FAILED, EXIT_OK, CorruptFileError, counted
from fastlstm.report.events import number
from fastlstm.report.lines import (
    ceiling_share,
    count_of,
    gpu_state,
    joined,
    labelled,
    model_rows,
    si,
)
from fastlstm.report.terminal import clock, short_bytes, short_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.forecast.files import StoredForecaster
    from fastlstm.report.events import Event
    from fastlstm.report.history import History
    from fastlstm.report.lines import Row
    from fastlstm.sequence.files import StoredSequenceModel

COMMAND = Command(
    verb="info",
    summary="Show a run and check its files; without RUN, show this machine and its kernels.",
    positionals=(Positional("RUN", "a run directory or a checkpoint", is_optional=True),),
    options=(JSON,),
    examples=("fastlstm info", "fastlstm info runs/book"),
)


def run(argv: list[str]) -> int:
    """Prints the facts; returns 1 when a file of the run is damaged."""
    parsed = parse(COMMAND, argv)
    facts, rows = _run_facts(*parsed.positionals) if parsed.positionals else _machine_facts()
    print_result(facts, rows, parsed["json"])
    return EXIT_FAILED if facts.get("damage") else EXIT_OK


def _run_facts(name: str) -> tuple[dict[str, Any], list[Row]]:
    """Facts of a run; every published file and checkpoint is checked against its hash."""
    require_run(name)
    path = Path(name)

    from fastlstm.report.history import read_history
    from fastlstm.runs.run_directory import RunDirectory, kind_of_run

    directory = RunDirectory(path)
    model: dict[str, Any] = {}
    rows: list[Row] = []
    damage: list[str] = []
    try:
        kinds = {"forecaster": _forecaster, "sequence": _sequence_model}
        model, rows = kinds.get(kind_of_run(path) or "", _text_model)(path)
    except CorruptFileError as error:
        damage.append(str(error))
    damage += [str(error) for error in directory.verify() if str(error) not in damage]
    trained, shown = _history_facts(read_history(directory.metrics_path), model.get("compression"))
    checkpoints = [item.name for item in directory.checkpoints()]
    return {"run": name, **model, **trained, "checkpoints": checkpoints, "damage": damage}, [
        ("run", name),
        *rows,
        *shown,
        ("checkpoints", ", ".join(checkpoints) or "none"),
        *(("damage", text) for text in damage),
        *([] if damage else [("files", "all match their recorded SHA-256")]),
    ]


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
    if about.get("is_trained") is False:
        stored += ", not trained (training lost more)"
    if (file := path / "model.safetensors").is_file():
        stored += f", {short_bytes(file.stat().st_size)} on disk"
    return [("compressed", f"from {about['source']['path']:.200}"), ("", stored)]


def _history_facts(history: History, compression: Any) -> tuple[dict[str, Any], list[Row]]:
    """Returns facts of the training; the best evaluation only if the stored model is its model."""
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
    is_trained = not isinstance(compression, dict) or compression.get("is_trained") is not False
    if best is not None and is_trained:
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


def _machine_facts() -> tuple[dict[str, Any], list[Row]]:
    from fastlstm.system import hardware
    from fastlstm.system.ceilings import ceiling_dtype, measured_ceilings

    cpu, gpu = hardware.cpu(), hardware.gpu()
    threads = hardware.default_threads()
    ceilings = {"fp32": measured_ceilings("fp32", threads)}
    has_bf16 = ceiling_dtype("bf16", "cpu") == "bf16"
    ceilings["bf16"] = measured_ceilings("bf16", threads) if has_bf16 else ceilings["fp32"]
    peaks = hardware.peak_gflops(threads)
    kernels = _kernel_lines("cpu", ("fp32", "bf16"))
    gpu_facts, gpu_rows = _gpu_facts() if gpu is not None else ({}, [])
    facts: dict[str, Any] = {
        "cpu": {**dataclasses.asdict(cpu), "features": sorted(cpu.features)},
        "gpu": dataclasses.asdict(gpu) if gpu is not None else None,
        "threads": threads,
        "ceilings": {dtype: dataclasses.asdict(value) for dtype, value in ceilings.items()},
        "peak_gflops": peaks,
        "kernels": kernels,
        **gpu_facts,
    }
    sizes = {"L1d": cpu.l1d_bytes, "L2": cpu.l2_bytes, "L3": cpu.l3_bytes}
    caches = [f"{name} {short_bytes(size)}" for name, size in sizes.items() if size]
    quota, refusal = hardware.quota(), hardware.gpu_refusal()
    limit = "" if quota is None else f", of a CPU quota of {quota:.3g}"
    none = "none usable by torch" + ("" if refusal in (None, *hardware.NO_GPU) else f": {refusal}")
    rows = [
        ("cpu", cpu.model),
        ("instructions", cpu.isa),
        ("cores", f"{cpu.cores} for this process{limit}, {counted(threads, 'thread')} by default"),
        ("caches", ", ".join(caches) or "unknown"),
        ("gpu", gpu.name if gpu is not None else none),
    ]
    for dtype, value in ceilings.items():
        how = value.gemm_by
        if dtype == "bf16" and not has_bf16:
            how += ", as in fp32: oneDNN has no bf16 instructions on this CPU"
        speed = f"{si(1e9 * value.gemm_gflops)}FLOP/s in matrix products ({how})"
        rows.append((f"ceiling {dtype}", f"{speed}, copy {value.copy_gb_s:.1f} GB/s"))
    rows += [(f"peak {isa}", f"{si(1e9 * gflops)}FLOP/s") for isa, gflops in peaks.items()]
    return facts, rows + labelled("lstm", kernels) + gpu_rows


def _gpu_facts() -> tuple[dict[str, Any], list[Row]]:
    """Returns state, ceilings and kernels of the GPU."""
    import torch

    from fastlstm.system.ceilings import measured_ceilings
    from fastlstm.system.gpu_usage import gpu_usage
    from fastlstm.training.device import others_gb
    from fastlstm.training.precision import precisions_of

    device = torch.device("cuda")
    precisions = precisions_of(device)
    ceilings = {name: measured_ceilings(name, device="cuda") for name in precisions}
    kernels, usage = _kernel_lines("cuda", precisions), gpu_usage()
    total = torch.cuda.mem_get_info(device)[1]
    facts = {
        "gpu_ceilings": {name: dataclasses.asdict(value) for name, value in ceilings.items()},
        "gpu_kernels": kernels,
        "gpu_state": usage,
    }
    others = f"{others_gb(device):.1f} GB held by other processes"
    rows = [("gpu memory", f"{short_bytes(total)}, {others}")]
    states = [gpu_state(gpu) for gpu in usage.get("gpus", ())]
    rows += [("gpu state", text) for text in states if text]
    for name, value in ceilings.items():
        speed = f"{si(1e9 * value.gemm_gflops)}FLOP/s in matrix products"
        rows.append((f"gpu {name}", f"{speed}, copy {value.copy_gb_s:,.0f} GB/s"))
    return facts, rows + labelled("gpu lstm", kernels)


def _kernel_lines(device: str, precisions: Sequence[str]) -> list[str]:
    """Returns the kernel of a layer of the default size, by precision."""
    import torch

    from fastlstm.nn.lstm import LSTM
    from fastlstm.ops.explain import explain
    from fastlstm.training.precision import autocast

    layer, lines = LSTM(128, 512).to(device), []
    for name in precisions:
        with autocast(name, torch.device(device)):
            lines.append(f"{name}, H=512, {explain(layer)[0]}")
    return [line.replace("layer 0: ", "") for line in lines]
