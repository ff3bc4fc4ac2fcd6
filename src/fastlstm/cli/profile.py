"""`fastlstm profile SOURCE`: bottlenecks of a training run, and commands that remove them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, Option, Positional, switch
from fastlstm.cli.options import CONFIG, JSON, of_training_runs
from fastlstm.cli.output import print_result, say
from fastlstm.cli.training import TrainingRun, read_training, with_source_of_run
from fastlstm.errors import EXIT_OK, StorageError
from fastlstm.report.lines import Row, labelled
from fastlstm.report.terminal import short_bytes
from fastlstm.runs.run_directory import PROFILE_FILE, TRAINER_FILE
from fastlstm.system.fields import parse_duration
from fastlstm.system.storage import finite, write_json
from fastlstm.training.signals import ended_like_ctrl_c

if TYPE_CHECKING:
    from fastlstm.tuning.op_times import OpTime
    from fastlstm.tuning.profile import Profile
    from fastlstm.tuning.verdicts import Verdict

_NUM_OPS = 14
_UNDECIDED = (
    "undecided: a change may gain more than 5 %; "
    "give a longer --measure, or repeat on an idle machine"
)
_UNKNOWN = "but it changes learning, and its effect on the result is not known: tune measures it"
_MIN_OTHERS = 0.1
"""The profile reports other processes that use at least this share of the cores."""
_TRACE = "write a trace of three steps as Chrome trace JSON (opens in Perfetto)"
COMMAND, TABLE_COMMAND = of_training_runs(
    Command(
        verb="profile",
        summary="Find the bottlenecks of a training run and measure what removing each gains.",
        positionals=(Positional("SOURCE", "what the run trains on, or a run", is_many=True),),
        options=(
            Option("out", "run directory that the printed commands name", group="run"),
            CONFIG,
            Option("measure", "time for all measurements", str, "12s", value="TIME"),
            switch("ops", "list the operations of a step: time and share of the ceiling"),
            Option("trace", _TRACE, value="FILE"),
            JSON,
        ),
        examples=(
            "fastlstm profile book.txt --batch-size 8 --threads 1",
            "fastlstm profile runs/book --ops",
            "fastlstm profile ETTh1.csv --horizon 96 --threads 1",
        ),
    )
)


@ended_like_ctrl_c()
def run(argv: list[str]) -> int:
    """Prints the profile; returns 0."""
    argv, run_path = with_source_of_run(argv, COMMAND, TABLE_COMMAND)
    job = read_training(
        argv, COMMAND, TABLE_COMMAND, lambda parsed: parse_duration(parsed["measure"], "measure")
    )
    parsed = job.parsed
    trace = None if parsed["trace"] is None else Path(parsed["trace"])

    from fastlstm.tuning.op_times import check_trace
    from fastlstm.tuning.planned_run import chosen_sizes
    from fastlstm.tuning.profile import profile_run

    if trace is not None:
        check_trace(trace)
    profile, options = profile_run(job.source, job.config, job.names, job.own, parsed["ops"], trace)
    commands = _commands(profile, job, chosen_sizes(job.config, options))
    verdicts = [{**v.to_dict(), "command": commands.get(v.cause)} for v in profile.verdicts]
    facts = {**profile.to_dict(), "verdicts": verdicts}
    found = rows(profile, commands)
    if trace is not None:
        found.append(("trace", f"{trace}, {short_bytes(trace.stat().st_size)}; Perfetto opens it"))
    print_result(facts, found, parsed["json"])
    # In a run whose trainer is stored, an unknown file counts as damage.
    if run_path is not None and not (run_path / TRAINER_FILE).exists():
        try:
            write_json(run_path / PROFILE_FILE, finite(facts))
        except StorageError as error:
            say(f"note: this profile is not kept in the run: {error}")
    return EXIT_OK


def _commands(profile: Profile, job: TrainingRun, fixed: Mapping[str, Any]) -> dict[str, str]:
    """Returns, by cause, the command of each recommended change and of each axis for tune."""
    commands = dict[str, str]()
    for v in profile.recommended:
        if v.options:
            commands[v.cause] = job.train_command({**fixed, **v.options}, taken=commands.values())
    budget = job.config.budget or job.config.default_budget
    for v in profile.to_try:
        tuned = {**fixed, "budget": budget, "axes": v.axis}
        commands[v.cause] = job.train_command(tuned, "tune", commands.values())
    return commands


def rows(profile: Profile, commands: Mapping[str, str]) -> list[Row]:
    """Returns the lines of a profile; `commands` are by cause."""
    shares = sorted(profile.phases.items(), key=lambda item: -item[1])
    ceiling = profile.ceiling_share
    of_ceiling = "" if ceiling is None else f", {100 * ceiling:.0f} % of the ceiling"
    found: list[Row] = [
        ("speed", f"{profile.units_per_s:,.0f} {profile.unit}/s in steps{of_ceiling}"),
        *([("ceiling", profile.ceiling_how)] if of_ceiling and profile.ceiling_how else []),
        *labelled("kernels", list(profile.kernels)),
        ("time", " · ".join(f"{n.replace('_', ' ')} {100 * s:.0f} %" for n, s in shares)),
    ]
    if not profile.recommended:
        healthy = _UNDECIDED if profile.is_undecided else "nothing above 5 %: this run is healthy"
        text = "no change is a sure gain" if profile.to_try else healthy
        found.append(("verdict", text + of_ceiling))
    for place, verdict in enumerate(profile.recommended):
        found.append((f"{place + 1}. {verdict.cause}", f"{gain_text(verdict)}; {verdict.effect}"))
        found.append(("", verdict.evidence))
        if verdict.cause in commands:
            found.append(("", commands[verdict.cause]))
    for place, verdict in enumerate(profile.to_try, len(profile.recommended) + 1):
        found.append((f"{place}. {verdict.cause}", f"{gain_text(verdict)}, {_UNKNOWN}"))
        found.append(("", f"{100 * verdict.share:.0f} % of the time; {verdict.evidence}"))
        found.append(("", commands[verdict.cause]))
    found += [("not advised", _not_advised(v)) for v in profile.verdicts if v.is_mentioned]
    found += [("not timed", text) for text in profile.not_timed]
    found += _op_rows(profile.ops)
    if (others := profile.others) is not None and others > _MIN_OTHERS:
        used = f"other processes used {100 * others:.0f} % of the cores"
        found.append(("noise", f"{used}; repeat on an idle machine"))
    return found


def gain_text(verdict: Verdict) -> str:
    """Returns "+45 % speed (41 to 49 %)"; for a change of learning also the time to a quality."""
    text = f"{100 * verdict.gain:+.0f} % speed"
    if verdict.low == verdict.high:
        text = "" if verdict.quality_gain is not None else f"{text}, by accounting"
    elif not math.isfinite(verdict.high):
        text = f"{text} (no interval)"
    else:
        text = f"{text} ({100 * verdict.low:.0f} to {100 * verdict.high:.0f} %)"
    if verdict.quality_gain is None or verdict.quality_gain == verdict.gain:
        return text
    sooner = f"the same quality {100 * verdict.quality_gain:+.0f} % sooner"
    return f"{text}, {sooner}" if text else sooner


def _not_advised(verdict: Verdict) -> str:
    if verdict.is_undecided:
        reason = "its threads waited for cores that other processes had"
        reason = reason if verdict.is_held_back else "too unsure for a verdict"
        return f"{verdict.cause}: {gain_text(verdict)}, {reason}"
    text = f"{verdict.cause}: {100 * verdict.gain:+.0f} % speed, "
    if verdict.quality_low is not None:
        return f"{text}but the run is not expected to reach the same quality sooner"
    return f"{text}but it changes learning, and its effect on the result is not known"


def _op_rows(ops: tuple[OpTime, ...]) -> list[Row]:
    """Returns one line for each of the longest operations of a step."""
    width = max((len(op.name) for op in ops[:_NUM_OPS]), default=0)
    found: list[Row] = []
    for op in ops[:_NUM_OPS]:
        text = f"{op.name:<{width}} {1e3 * op.seconds:8.2f} ms {100 * op.share:5.1f} %"
        text += f" {op.calls:6.1f} calls"
        if op.gflops is not None:
            text += f" {op.gflops:7.1f} GFLOP/s"
        if op.ceiling_share is not None:
            text += f", {100 * op.ceiling_share:.0f} % of the ceiling"
        found.append(("" if found else "a step", text))
    return found
