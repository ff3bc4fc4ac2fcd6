"""`fastlstm tune SOURCE --out DIR`: finds the best settings within a budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.cli.command import Command, Option, Parsed, Positional, switch
from fastlstm.cli.options import CONFIG, JSON, of_training_runs
from fastlstm.cli.output import print_result
from fastlstm.cli.training import read_training
from fastlstm.errors import EXIT_OK, UsageError, nearest_hint
from fastlstm.report.lines import Row
from fastlstm.report.terminal import short_bytes
from fastlstm.system.fields import parse_amount, parse_duration, parse_latency
from fastlstm.system.storage import write_file

if TYPE_CHECKING:
    from fastlstm.tuning.job import Job

_AXES = "batch,seq-length,size,optimizer,lr,output-rank"
_TABLE_AXES = "size,batch,lr,dropout,input,patch,normalize"
_MORE_AXES = "threads,precision"
_FORMATS = Literal["fp32", "fp16", "int8", "int4"]
_PROVEN = 1.0
"""Percent of gain above which the best settings are better by more than chance (benchmarks/log)."""

_EVERY = "time of all short runs; default is twice the budget, or 90s if that is longer"
_LATENCY = "time of a token of one stream, or of the forecast of a window, such as 1ms"
_WEIGHTS = "format of the weights for --max-bytes, and of a text for --max-latency"
_WHAT = f"what to tune; {_MORE_AXES} may be added"
COMMAND, TABLE_COMMAND = of_training_runs(
    Command(
        verb="tune",
        summary="Find the settings with the best result within a budget, by complete short runs.",
        positionals=(Positional("SOURCE", "what the run trains on", is_many=True),),
        options=(
            Option("out", "directory of the search", group="run", value="DIR", is_required=True),
            CONFIG,
            switch("resume", "continue the search in DIR", "run"),
            JSON,
            Option("tune_time", _EVERY, group="search", value="TIME"),
            Option("seeds", "runs of every trial, with consecutive seeds", int, 1, "search"),
            Option("max_latency", _LATENCY, group="limits", value="TIME"),
            Option("max_bytes", "size of the weights: 500k, 2M", group="limits", value="SIZE"),
            Option("weights", _WEIGHTS, _FORMATS, "fp32", "limits"),
        ),
        examples=(
            "fastlstm tune book.txt --out tuning/book --budget 5m",
            "fastlstm tune book.txt --out tuning/book --max-latency 50us --weights int8",
            "fastlstm tune ETTh1.csv --horizon 96 --out tuning/etth1 --max-latency 2ms",
        ),
        other="Options that are given stay fixed.\n",
    ),
    texts=(Option("axes", _WHAT, str, _AXES, "search", "LIST"),),
    tables=(Option("axes", _WHAT, str, _TABLE_AXES, "search", "LIST"),),
)


def run(argv: list[str]) -> int:
    """Prints every short run, then the best settings; returns 0."""
    job = read_training(argv, COMMAND, TABLE_COMMAND, _own)
    parsed, config, (axes, limits, time_s) = job.parsed, job.config, job.own

    import yaml

    from fastlstm.tuning.size_limits import SizeLimits
    from fastlstm.tuning.tune import Search, job_of, tune_run

    search = Search(
        job.source, config, job.names, Path(parsed["out"]), time_s, axes, SizeLimits(**limits),
        parsed["seeds"], parsed["resume"],
    )  # fmt: skip

    def show(label: str, text: str) -> None:
        if not parsed["json"]:
            print_result({}, [(f"{label:<10}", text)], use_json=False)

    facts = tune_run(search, show)
    chosen = {"budget": config.budget or config.default_budget, **facts["best"]["options"]}
    words, path = job.train_command(chosen), search.out / "config.yaml"
    values = {name: getattr(config, name) for name in job.names} | chosen
    lists = {k: ",".join(map(str, v)) for k, v in values.items() if isinstance(v, tuple)}
    write_file(path, yaml.safe_dump({**values, **lists}, sort_keys=True).encode())
    lines = rows(facts, job_of(config), words, path)
    print_result({**facts, "command": words, "config": str(path)}, lines, parsed["json"])
    return EXIT_OK


def _own(parsed: Parsed) -> tuple[tuple[str, ...], dict[str, Any], float | None]:
    """Returns what to tune, the limits, and the time of the search; raises UsageError."""
    shown = f"{_AXES if parsed.command is COMMAND else _TABLE_AXES},{_MORE_AXES}"
    known, time = shown.split(","), parsed["tune_time"]
    axes = tuple(part.strip() for part in parsed["axes"].split(",") if part.strip())
    for axis in axes:
        if axis not in known:
            raise UsageError(
                f"--axes has '{axis}'{nearest_hint(axis, known)}, expected some of {shown}"
            )
    if not axes:
        raise UsageError(f"--axes is empty, expected some of {shown}")
    if not 1 <= parsed["seeds"] <= 100:
        raise UsageError(f"--seeds is {parsed['seeds']}, expected 1 to 100")
    latency, size = parsed["max_latency"], parsed["max_bytes"]
    limits = {
        "max_latency_s": None if latency is None else parse_latency(latency, "max_latency"),
        "max_bytes": None if size is None else parse_amount(size, "max_bytes"),
        "weights": parsed["weights"],
    }
    return axes, limits, None if time is None else parse_duration(time, "tune_time")


def rows(facts: dict[str, Any], job: Job, command: str, path: Path) -> list[Row]:
    """Returns the lines of the result."""
    best, label = facts["best"], facts["best"]["label"]
    expected, of_default = best["expected"], best["default_expected"]
    change = 100 * (expected / of_default - 1)
    against = f"default {job.figure(of_default, False)}, {change:+.1f} %"
    against += "; not proven: it may be chance" * (change > -_PROVEN)
    if math.isinf(of_default):
        against = "runs of the default failed"
    elif label == "default":
        against = "no change gains more than noise"
    shown: list[Row] = [("best", f"{label}: {job.figure(expected)}{job.ending} ({against})")]
    shown += front(facts, job)
    if worth := facts["importance"]:
        shares = ", ".join(f"{axis} {100 * share:.0f} %" for axis, share in worth.items())
        shown.append(("importance", f"{shares}, by Optuna"))
    shown.append(("dashboard", f"optuna-dashboard sqlite:///{path.with_name('study.db')}"))
    return [*shown, ("config", str(path)), ("command", command)]


def front(facts: dict[str, Any], job: Job) -> list[Row]:
    """Returns the Pareto front of sizes in result and latency, fastest first."""
    best: dict[int, tuple[float, float]] = {}
    for run in facts["trials"]:
        if run["expected"] is not None:
            size, result = int(run["options"][job.size]), (-run["seconds"], run["expected"])
            best[size] = min(best.get(size, result), result)  # the longest run counts
    sizes = sorted(facts["default"]["sizes"], key=lambda size: float(size["latency_s"]))
    shown: list[Row] = []
    least = float("inf")
    for size in sizes:
        bits = best.get(size[job.size], (0.0, least))[1]
        if bits < least:
            least = bits
            latency = f"{1e6 * size['latency_s']:.1f} us per {job.per}"
            text = f"{latency}, {short_bytes(size['num_bytes'])}"
            label = "" if shown else "front"
            shown.append((label, f"{size[job.size]} units: {job.figure(bits)}, {text}"))
    return shown
