"""`fastlstm tune SOURCE --out DIR`: the settings that end best within a budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.config_file import resolve_config, write_config_file
from fastlstm.cli.inputs import one_or_many, refuse_runs, require_horizon, require_tables
from fastlstm.cli.kind import command_for
from fastlstm.cli.options import FORECAST_OPTIONS, TEXT_OPTIONS, config_option, json_option
from fastlstm.cli.output import print_result
from fastlstm.cli.parser import parse
from fastlstm.cli.train_command import train_command
from fastlstm.errors import EXIT_OK, UsageError, nearest_hint
from fastlstm.forecast.config import ForecastConfig
from fastlstm.report.terminal import short_bytes
from fastlstm.system.fields import parse_amount, parse_duration, parse_latency
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.sources import open_source

if TYPE_CHECKING:
    from fastlstm.cli.parser import Parsed
    from fastlstm.report.lines import Row
    from fastlstm.tuning.job import Job
    from fastlstm.tuning.tune import Search, Tuned

_OWN = ("out", "tune_time", "axes", "max_latency", "max_bytes", "weights", "seeds", "jobs",
        "resume", "json")  # fmt: skip
_AXES = "batch,seq-length,size,optimizer,lr,output-rank"
_TABLE_AXES = "size,batch,lr,dropout,input,patch,normalize"
_MORE_AXES = "threads,precision"
_PROVEN = 1.0
"""Percent from which a gain of the best settings is more than chance (benchmarks/log)."""


def _options(axes: str, latency: str, weights: str) -> tuple[Option, ...]:
    """Returns the options of a search."""
    return (
        Option("out", str, None, "directory of the search", "run", value="DIR"),
        config_option(),
        Option("resume", bool, False, "continue the search in DIR", "run", is_switch=True),
        json_option("one JSON object"),
        Option(
            "tune_time", str, None,
            "time of all short runs; default is twice the budget, or 90s if that is longer",
            "search", value="TIME",
        ),
        Option(
            "axes", str, axes, f"what to tune; {_MORE_AXES} may be added", "search", value="LIST"
        ),
        Option("seeds", int, 1, "runs of every trial, with seeds that follow --seed", "search"),
        Option("jobs", int, 1, "trials at a time; they share the cores", "search"),
        Option(
            "max_latency", str, None, f"time that {latency} may take, such as 1ms", "limits",
            value="TIME",
        ),
        Option(
            "max_bytes", str, None, "size of the weights, such as 500k or 2M", "limits",
            value="SIZE",
        ),
        Option(
            "weights", Literal["fp32", "fp16", "int8", "int4"], "fp32",
            f"format of the weights that {weights} for", "limits",
        ),
    )  # fmt: skip


COMMAND = Command(
    verb="tune",
    summary="Find the settings with the best result within a budget, by complete short runs.",
    positionals=(Positional("SOURCE", "what the run trains on", is_many=True),),
    options=(
        *_options(_AXES, "a token of one stream", "the limits are"),
        *TEXT_OPTIONS,
    ),
    required=("out",),
    examples=(
        "fastlstm tune book.txt --out tuning/book --budget 5m",
        "fastlstm tune book.txt --out tuning/book --max-latency 50us --weights int8",
    ),
    other="The options are those of fastlstm train for a text; those that are given stay.\n"
    "For a table of time series: fastlstm tune --horizon N --help",
)
TABLE_COMMAND = Command(
    verb="tune",
    summary="Find the settings of a forecaster with the best result within a budget.",
    positionals=(Positional("DATA", "the table that the run trains on", is_many=True),),
    options=(
        *_options(_TABLE_AXES, "the forecast of one window", "the limit of bytes is"),
        *FORECAST_OPTIONS,
    ),
    required=("out",),
    examples=(
        "fastlstm tune ETTh1.csv --target OT --horizon 96 --out tuning/etth1 --budget 2m",
        "fastlstm tune ETTh1.csv --horizon 24 --out tuning/etth1 --max-latency 2ms",
    ),
    other="The options are those of fastlstm train for a table; those that are given stay.",
)


def run(argv: list[str]) -> int:
    """Prints every short run, then the best settings; returns 0."""
    command = command_for(argv, COMMAND, TABLE_COMMAND)
    parsed = parse(command, argv)
    sources = parsed.positionals
    config: TrainConfig | ForecastConfig
    if command is COMMAND:
        config, names = resolve_config(parsed, TEXT_OPTIONS, TrainConfig)
    else:
        config, names = resolve_config(parsed, FORECAST_OPTIONS, ForecastConfig)
        require_horizon(names, sources)
    axes, limits = _axes(parsed["axes"], command), _limits(parsed)
    time_s = None
    if parsed["tune_time"] is not None:
        time_s = parse_duration(parsed["tune_time"], "tune_time")
    if not 1 <= parsed["seeds"] <= 100:
        raise UsageError(f"--seeds is {parsed['seeds']}, expected 1 to 100")
    if not 1 <= parsed["jobs"] <= 100:
        raise UsageError(f"--jobs is {parsed['jobs']}, expected 1 to 100")
    if command is COMMAND:
        refuse_runs(sources)
        open_source(sources)  # a misspelt name is an error before torch is loaded
    else:
        require_tables(sources)

    from fastlstm.tuning.size_limits import SizeLimits
    from fastlstm.tuning.tune import Search, job_of, tune_run

    search = Search(
        Path(parsed["out"]), time_s, axes, SizeLimits(**limits), parsed["seeds"], parsed["resume"],
        parsed["jobs"],
    )  # fmt: skip

    def show(label: str, text: str) -> None:
        if not parsed["json"]:
            print_result({}, [(f"{label:<10}", text)], use_json=False)

    found = tune_run(one_or_many(sources), config, names, search, show)
    words = train_command(
        command, _OWN, argv, {"budget": config.budget or config.default_budget, **found.options}
    )
    path = _write_config(search, config, names, found)
    facts = {**found.facts, "command": words, "config": str(path)}
    print_result(facts, rows(found, job_of(config), words, path), parsed["json"])
    return EXIT_OK


def _axes(text: str, command: Command) -> tuple[str, ...]:
    shown = f"{_AXES if command is COMMAND else _TABLE_AXES},{_MORE_AXES}"
    known = shown.split(",")
    axes = tuple(part.strip() for part in text.split(",") if part.strip())
    for axis in axes:
        if axis not in known:
            raise UsageError(
                f"--axes has '{axis}'{nearest_hint(axis, known)}, expected some of {shown}"
            )
    if not axes:
        raise UsageError(f"--axes is empty, expected some of {shown}")
    return axes


def _limits(parsed: Parsed) -> dict[str, Any]:
    latency, size = parsed["max_latency"], parsed["max_bytes"]
    return {
        "max_latency_s": None if latency is None else parse_latency(latency, "max_latency"),
        "max_bytes": None if size is None else parse_amount("max_bytes", size),
        "weights": parsed["weights"],
    }


def _write_config(
    search: Search, config: TrainConfig | ForecastConfig, names: set[str], found: Tuned
) -> Path:
    """Writes config.yaml for `fastlstm train --config`."""
    path = search.out / "config.yaml"
    given = {name: getattr(config, name) for name in names}
    budget = config.budget or config.default_budget
    write_config_file(path, {**given, "budget": budget, **found.options})
    return path


def rows(found: Tuned, job: Job, command: str, path: Path) -> list[Row]:
    """Returns the lines of the result."""
    change = 100 * (found.expected / found.default_expected - 1)
    against = f"default {job.figure(found.default_expected, False)}, {change:+.1f} %"
    against += "; not proven: it may be chance" * (change > -_PROVEN)
    if math.isinf(found.default_expected):
        against = "runs of the default failed"
    elif found.label == "default":
        against = "no change gains more than noise"
    shown: list[Row] = [
        ("best", f"{found.label}: {job.figure(found.expected)}{job.ending} ({against})")
    ]
    shown += front(found, job)
    if worth := found.facts.get("importance"):
        shares = ", ".join(f"{axis} {100 * share:.0f} %" for axis, share in worth.items())
        shown.append(("importance", f"{shares}, by Optuna"))
    shown.append(("dashboard", f"optuna-dashboard sqlite:///{path.with_name('study.db')}"))
    return [*shown, ("config", str(path)), ("command", command)]


def front(found: Tuned, job: Job) -> list[Row]:
    """Returns the sizes of which no other is both better and faster, fastest first."""
    best: dict[int, tuple[float, float]] = {}
    for run in found.facts["trials"]:
        if run["expected"] is not None:
            size, result = int(run["options"][job.size]), (-run["seconds"], run["expected"])
            best[size] = min(best.get(size, result), result)  # the longest run says most
    sizes = sorted(found.facts["default"]["sizes"], key=lambda size: float(size["latency_s"]))
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
