"""`fastlstm fanout DATA --by COLUMN`: one forecaster for each group of a table."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, Option
from fastlstm.cli.config_file import resolve_config, write_config_file
from fastlstm.cli.inputs import one_or_many, require_horizon, require_tables
from fastlstm.cli.options import FORECAST_OPTIONS, TABLES, config_option, json_option
from fastlstm.cli.output import print_json, say, table
from fastlstm.cli.parser import parse
from fastlstm.errors import EXIT_FAILED, EXIT_OK, UsageError, counted
from fastlstm.forecast.config import ForecastConfig
from fastlstm.report.markup import visible
from fastlstm.report.progress import Output
from fastlstm.report.terminal import clip, clock, columns, is_terminal
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system import hardware
from fastlstm.training.options import MAY_CHANGE
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.signals import StopFlag, ended_like_ctrl_c

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.fanout.fanout import Jobs, Progress
    from fastlstm.fanout.groups import Group
    from fastlstm.fanout.store import Entry, FanoutStore

_THREADS = 1
"""Of a job where none are given: the bits of a model depend on them, so not on the machine."""
_MAX_SHOWN = 40
_MAY_CHANGE = MAY_CHANGE - {"steps", "epochs", "budget", "patience", "threads", "device"}
"""Options that a later start may change: the models are the same."""

COMMAND = Command(
    verb="fanout",
    summary="Train a forecaster for each group of a table, on this machine or on Ray.",
    positionals=(TABLES,),
    options=(
        Option("out", str, None, "directory of the runs, one for each group", "run", value="DIR"),
        Option("by", str, None, "column whose values are the groups", "run", value="COLUMN"),
        Option(
            "jobs", int | None, None,
            "groups that train at the same time; default is one for each core, or\nfewer with"
            " --threads", "run",
        ),
        Option(
            "ray", str, None,
            "train on a Ray cluster: auto, or HOST:PORT; DIR is on storage\nthat all its nodes"
            " share", "run", value="ADDRESS",
        ),
        config_option(),
        json_option("one JSON object at the end"),
        *FORECAST_OPTIONS,
    ),
    required=("out", "by"),
    examples=(
        "fastlstm fanout sales.csv --by store --horizon 28 --steps 900 --out stores",
        "fastlstm fanout sales.csv --by store --horizon 28 --out /nfs/x --ray auto",
    ),
    other="The options are those of fastlstm train for a table. The same command continues\n"
    "where it was stopped. A job has one thread unless --threads is given.",
)  # fmt: skip


def run(argv: list[str]) -> int:
    """Prints every group that ends and a table of all; returns 1 where one failed."""
    parsed = parse(COMMAND, argv)
    config, names = resolve_config(parsed, FORECAST_OPTIONS, ForecastConfig)
    require_tables(parsed.positionals)
    require_horizon(names, parsed.positionals)
    threads = config.threads or _THREADS
    slots = parsed["jobs"]
    if slots is not None and slots < 1:
        raise UsageError(f"--jobs is {slots}, expected 1 or more")
    if slots is not None and parsed["ray"] is not None:
        raise UsageError("--jobs runs on this machine and --ray on a cluster; give one of them")
    slots = slots or max(1, hardware.cores() // threads)

    from fastlstm.fanout.fanout import fan_out
    from fastlstm.fanout.local_jobs import LocalJobs
    from fastlstm.fanout.ray_jobs import ray_jobs, require_answer

    if parsed["ray"] is not None:
        require_answer(parsed["ray"])
    budget_s = StopCriterion.of(config, 1).budget_s
    place = RunDirectory(parsed["out"])
    place.create()
    show = Shown(parsed["json"])
    with ExitStack() as stack:
        with ended_like_ctrl_c():
            stack.enter_context(place.lock())
            stack.callback(place.remove_if_empty)
            at_once = slots if parsed["ray"] is None else None
            store = _store(place.path, parsed, config, names, threads, at_once, budget_s)
        jobs: Jobs = LocalJobs(slots)
        if parsed["ray"] is not None and store.waiting():
            jobs = stack.enter_context(ray_jobs(parsed["ray"], place.path, threads))
        else:
            _warn_of_cores(slots, threads)
        with StopFlag() as stop, show:
            fan_out(store, jobs, budget_s, stop, show.entry, show.progress)
    if parsed["json"]:
        print_json(store.facts())
    else:
        sys.stdout.write(summary(store))
    return EXIT_OK if store.counts()["done"] == len(store.entries) else EXIT_FAILED


def _store(
    path: Path, parsed: Any, config: ForecastConfig, names: set[str], threads: int,
    slots: int | None, budget_s: float | None,
) -> FanoutStore:  # fmt: skip
    """Returns the groups of a directory; divides the table where it is new."""
    from fastlstm.fanout.groups import GroupedTable
    from fastlstm.fanout.store import CONFIG, TABLES, FanoutStore
    from fastlstm.forecast.data.opening import open_records

    records, by = open_records(one_or_many(parsed.positionals)), parsed["by"]
    options = {name: getattr(config, name) for name in sorted(names)} | {"threads": threads}
    if config.cache_dir is not None:
        options["cache_dir"] = str(Path(config.cache_dir).absolute())
    about = {
        "by": by,
        "files": records.signature,
        "options": {name: value for name, value in options.items() if name not in _MAY_CHANGE},
    }

    def divide(tables: Path) -> Sequence[Group]:
        grouped = GroupedTable(records, by, config)
        groups = grouped.groups()
        _require_few(len(groups), by, slots, budget_s)
        grouped.write(tables, groups)
        return groups

    store = FanoutStore(path, about, divide)
    write_config_file(path / TABLES / CONFIG, options)
    return store


def _require_few(num_groups: int, by: str, slots: int | None, budget_s: float | None) -> None:
    """Refuses more groups than can be meant; says how many there are and how long they take.

    Args:
        num_groups: values of the column.
        by: the column.
        slots: groups that train at the same time; None where that is not known.
        budget_s: of each group, None where it ends by steps.
    """
    from fastlstm.fanout.groups import MAX_GROUPS

    time = ""
    if budget_s is not None:
        total, how = clock(math.ceil(num_groups / (slots or 1)) * budget_s), "one after the other"
        how = how if slots is None else f"with {counted(slots, 'job')} at a time"
        time = f", {total} {how} and {clock(budget_s)} each"
    if num_groups > MAX_GROUPS:
        raise UsageError(
            f"column '{by}' has {num_groups:,} values, expected at most {MAX_GROUPS:,}: a model of"
            f" each{time}; name another column with --by, or train one model of all with fastlstm"
            f" train --series {by}"
        )
    say(f"{counted(num_groups, 'group')} of '{by}'{time}")


def _warn_of_cores(slots: int, threads: int) -> None:
    """Says where the jobs have more threads than cores, or leave most cores idle."""
    cores, used = hardware.cores(), slots * threads
    if used > cores:
        say(f"warning: {slots} x {threads} threads on {counted(cores, 'core')}: they wait for each"
            " other; give fewer --jobs or --threads")  # fmt: skip


class Shown:
    """What is shown while groups train: a line for each that ends, and a live one below."""

    def __init__(self, is_json: bool) -> None:
        self._is_silent, self._output = is_json, Output(sys.stdout)
        self._is_live = not is_json and is_terminal(sys.stdout)

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def entry(self, entry: Entry) -> None:
        """Shows a group that ended."""
        if not self._is_silent:
            said = entry.reason or _against_naive(entry)
            parts = [entry.state, clock(entry.seconds), *([said] if said else [])]
            self._write(f"{_name(entry)}: {', '.join(map(visible, parts))}\n")

    def progress(self, progress: Progress) -> None:
        """Redraws the live line."""
        if self._is_live:
            parts = [
                f"{getattr(progress, name)} {name}"
                for name in ("done", "running", "failed", "left")
            ]
            parts += [] if progress.eta_s is None else [f"ETA {clock(progress.eta_s)}"]
            self._write(clip(", ".join(parts), columns()))

    def _write(self, text: str) -> None:
        self._output.write(("\r\x1b[2K" if self._is_live else "") + text)


def _against_naive(entry: Entry) -> str:
    if entry.mae is None or not entry.naive_mae:
        return ""
    return f"mae {entry.mae:.4g}, {entry.mae / entry.naive_mae:.2f} of seasonal naive"


def summary(store: FanoutStore) -> str:
    """Returns a table of the groups, failed ones first, and where all of them are."""
    order = {"failed": 0}
    entries = sorted(store.entries, key=lambda entry: order.get(entry.state, 1))
    heads = ["group", "rows", "state", "time", "valid loss", "test mae", "of naive"]
    rows = [heads]
    for entry in entries[:_MAX_SHOWN]:
        share = None if entry.mae is None or not entry.naive_mae else entry.mae / entry.naive_mae
        rows.append(
            [
                clip(_name(entry), _MAX_SHOWN), f"{entry.rows:,}", entry.state,
                clock(entry.seconds), _figure(entry.loss), _figure(entry.mae),
                "-" if share is None else f"{share:.2f}",
            ]
        )  # fmt: skip
    lines = ["", table(rows)]
    if len(entries) > _MAX_SHOWN:
        lines.append(f"and {len(entries) - _MAX_SHOWN:,} more")
    failed = [entry for entry in entries if entry.state == "failed"]
    lines += [f"failed: {_name(e)}: {visible(e.reason or '')}" for e in failed]
    counts = ", ".join(f"{count} {state}" for state, count in store.counts().items())
    lines.append(f"{counts}; all in {store.path / 'fanout.json'}")
    return "\n".join(lines) + "\n"


def _name(entry: Entry) -> str:
    return visible(entry.name) or "''"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
