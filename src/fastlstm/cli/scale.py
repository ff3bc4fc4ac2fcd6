"""`fastlstm scale RUN`: the predicted gain of training on several machines."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fastlstm.cli.command import Command, Option, Parsed, Positional
from fastlstm.cli.options import CONFIG, JSON, of_training_runs
from fastlstm.cli.output import print_result
from fastlstm.cli.training import TrainingRun, read_training, with_source_of_run
from fastlstm.errors import EXIT_OK, UsageError
from fastlstm.report.lines import Row
from fastlstm.report.terminal import short_count
from fastlstm.system.fields import parse_latency, parse_rate
from fastlstm.training.signals import ended_like_ctrl_c

if TYPE_CHECKING:
    from fastlstm.tuning.scale import Link, ScalingPrediction, ScalingWay, StepCost

_SPEED = "speed of the network of a machine: 1gbit, 100mbit, 125MB/s"
COMMAND, TABLE_COMMAND = of_training_runs(
    Command(
        verb="scale",
        summary="Predict time and efficiency of training on several machines like this one.",
        positionals=(Positional("SOURCE", "a run, or what a run trains on", is_many=True),),
        options=(
            CONFIG,
            Option("nodes", "numbers of machines, separated by commas", str, "2,4,8", value="N,N"),
            Option("link", _SPEED, value="SPEED", is_required=True),
            Option("latency", "time of a message one way", str, "0.1ms", value="TIME"),
            JSON,
        ),
        examples=(
            "fastlstm scale runs/book --nodes 2,8,64,1000 --link 1gbit",
            "fastlstm scale book.txt --nodes 4 --link 100mbit --latency 25ms",
            "fastlstm scale ETTh1.csv --horizon 96 --nodes 4 --link 10gbit",
        ),
        other="Values of --wire and --sync-every are compared unless given.\n",
    )
)
_LIST = 8


@ended_like_ctrl_c()
def run(argv: list[str]) -> int:
    """Prints the prediction; returns 0."""
    argv, _ = with_source_of_run(argv, COMMAND, TABLE_COMMAND)
    job = read_training(argv, COMMAND, TABLE_COMMAND, _network)
    parsed, config, (nodes, speed, latency) = job.parsed, job.config, job.own

    from fastlstm.tuning.scale import Link, facts, predict_scale

    link = Link(speed, latency)
    wire = config.wire if "wire" in parsed.values else None
    every = config.sync_every if "sync_every" in parsed.values else None
    cost = _measured(job)
    found = [predict_scale(cost, number, link, wire, every) for number in nodes]
    print_result(facts(cost, link, found), rows(cost, link, found), parsed["json"])
    return EXIT_OK


def _network(parsed: Parsed) -> tuple[list[int], float, float]:
    """Returns the numbers of machines, bytes a second, and seconds of a message."""
    speed, latency = parse_rate(parsed["link"], "link"), parse_latency(parsed["latency"], "latency")
    text = parsed["nodes"]
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 2 <= int(word) <= 100_000 for word in words):
        raise UsageError(
            f"--nodes is {text!r:.60}, expected numbers from 2 to 100,000 such as 2,8,64"
        )
    if len(words) > _LIST:
        raise UsageError(f"--nodes has {len(words)} numbers, expected at most {_LIST}")
    return sorted({int(word) for word in words}), speed, latency


def _measured(job: TrainingRun) -> StepCost:
    """Sets the run up as `train` does, in one process and in a directory that is removed, and
    times its steps."""
    from fastlstm.tuning.planned_run import plan_run
    from fastlstm.tuning.scale import measured_cost

    costs: list[StepCost] = []
    of_texts = {} if job.is_table else {"pipeline": 0}
    config = replace(job.config, sync_every=1, wire="fp32", **of_texts)
    plan_run(job.source, config, job.names, lambda trainer: costs.append(measured_cost(trainer)))
    return costs[0]


def rows(cost: StepCost, link: Link, found: list[ScalingPrediction]) -> list[Row]:
    """Returns the lines of the result."""
    from fastlstm.tuning.scale import shown

    passes = ", ".join(f"{shown(s)} of {n}" for n, s in cost.passes)
    step_s = cost.step_s(cost.rows)
    rate = cost.rows * cost.units_per_row / step_s
    lines: list[Row] = [
        ("one node", f"{shown(step_s)} a step, {short_count(rate)} {cost.unit}/s"),
        ("", f"{cost.description}; {cost.rows} rows, {cost.numbers / 1e6:.3g} M numbers"),
        ("measured", f"passes {passes} rows; update {shown(cost.update_s)}"),
        ("link", f"{8e-6 * link.bytes_per_s:,.4g} Mbit/s, {1e3 * link.latency_s:g} ms one way"),
    ]
    told = f"1.5x: 1.5 times the {cost.unit}/s of one node; computes 90 %: waits 10 % of a step"
    lines.append(("each way", told))
    for one in found:
        lines += _rows_of(cost, one)
    lines.append(("", "same batch: the run learns the same, sooner"))
    lines.append(("", f"a batch on each: more {cost.unit}/s; a larger batch learns less from each"))
    return lines


def _rows_of(cost: StepCost, one: ScalingPrediction) -> list[Row]:
    from fastlstm.tuning.scale import shown

    used, step_s = one.strong[0].used, cost.step_s(cost.rows)
    label, rate = f"{one.nodes} nodes", cost.rows * cost.units_per_row / step_s
    lines = [
        (label, f"same batch on {used}, {cost.rows / used:.3g} rows each: {_ways(one.strong)}")
    ]
    weak = one.weak[0].used
    each = f"batch on each of {weak}" if weak != one.nodes else "batch on each"
    fastest = max(one.weak, key=lambda way: way.speedup)
    total = f"{short_count(rate * fastest.speedup)} {cost.unit}/s"
    lines.append(("", f"{each}: {_ways(one.weak)}; {total}"))
    lines.append(("", f"advice for the same batch: {one.reason}"))
    way = one.best or max(one.strong, key=lambda way: way.speedup)
    whole_s = way.compute_s + way.exposed_s
    part = f"{shown(way.compute_s)} of {shown(whole_s)} = {100 * way.efficiency:.0f} %"
    lines.append(("", f"{way.name}: computes {part}"))
    lines.append(("", f"waits {shown(way.exposed_s)} = {way.formula}"))
    return lines


def _ways(ways: list[ScalingWay]) -> str:
    """Returns "fp32 1.8x, computes 55 % · bf16 2.4x, computes 70 %"."""
    return " · ".join(
        f"{w.name} {w.speedup:.3g}x, computes {100 * w.efficiency:.0f} %" for w in ways
    )
