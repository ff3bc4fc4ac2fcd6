"""`fastlstm ab --a CMD --b CMD`: which of two commands is faster."""

from __future__ import annotations

import math
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, Option
from fastlstm.cli.options import json_option
from fastlstm.cli.output import print_result
from fastlstm.cli.parser import parse
from fastlstm.errors import EXIT_OK, UsageError, counted
from fastlstm.report.terminal import clip, clock, columns, is_terminal
from fastlstm.system.fields import parse_duration

if TYPE_CHECKING:
    from fastlstm.report.lines import Row
    from fastlstm.tuning.ab import Comparison
    from fastlstm.tuning.paired_times import Estimate

EXIT_SLOWER = 3
EXIT_UNDECIDED = 4
_EXITS = {"slower": EXIT_SLOWER, "not slower": EXIT_OK, "undecided": EXIT_UNDECIDED}

COMMAND = Command(
    verb="ab",
    summary="Measure two commands in turns and say whether B is slower than A.",
    positionals=(),
    options=(
        Option("a", str, None, "the command to compare with", value="CMD"),
        Option("b", str, None, "the command that may be slower", value="CMD"),
        Option("detect", str, "3%", "the smallest slowdown that matters", value="X%"),
        Option("max_time", str, "5m", "time for all of it, and for one run", value="TIME"),
        json_option("one JSON object, with all pairs"),
    ),
    required=("a", "b"),
    examples=(
        "fastlstm ab --a 'fastlstm train a.txt' --b 'fastlstm train a.txt --threads 4'",
        "fastlstm ab --a ./old --b ./new --detect 1% --max-time 10m",
    ),
    other="Exit status: 0 not slower by more than X, 3 B is slower, 4 undecided.",
)


def run(argv: list[str]) -> int:
    """Prints the comparison; returns 0, 3 or 4."""
    parsed = parse(COMMAND, argv)
    detect, max_time_s = _share(parsed["detect"]), parse_duration(parsed["max_time"], "max_time")

    from fastlstm.training.signals import ended_like_ctrl_c
    from fastlstm.tuning.ab import compare_commands

    with ended_like_ctrl_c(), closing(Progress()) as show:
        result = compare_commands(
            parsed["a"], parsed["b"], detect=detect, max_time_s=max_time_s, observer=show
        )
    print_result(result.to_dict(), rows(result), parsed["json"])
    return _EXITS[result.verdict]


def _share(text: str) -> float:
    """Returns 0.03 for "3%" and for "0.03"."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100.0 if text.strip().endswith("%") else 1.0)
    except ValueError:
        share = math.nan
    if not 0.0 < share <= 1.0:
        raise UsageError(f"--detect is {text!r}, expected a share above 0% such as 3% or 0.03")
    return share


class Progress:
    """One line on standard error with the pairs so far, drawn only on a terminal."""

    def __init__(self) -> None:
        self._is_drawn, self._is_live = False, is_terminal(sys.stderr)

    def __call__(self, found: Estimate) -> None:
        if self._is_live:
            text = f"{counted(found.pairs + found.dropped, 'pair')}  B/A {ratio_text(found)}"
            sys.stderr.write("\r\x1b[2K" + clip(text, columns()))
            sys.stderr.flush()
            self._is_drawn = True

    def close(self) -> None:
        if self._is_drawn:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def ratio_text(found: Estimate) -> str:
    """Returns "1.049 (1.031 to 1.068)"; without an interval where there is none yet."""
    if not _has_interval(found):
        return f"{found.ratio:.3f}, no interval yet"
    return f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"


def _has_interval(found: Estimate) -> bool:
    return math.isfinite(found.high) and found.low > 0.0


def rows(result: Comparison) -> list[Row]:
    """Returns the lines of the result."""
    found = result.found
    noise = f"{100 * (math.exp(found.spread) - 1):.1f} % between pairs"
    if result.others is not None:
        noise += f"; other processes used {100 * result.others:.0f} % of the cores"
    dropped = f", {found.dropped} left out as disturbed" if found.dropped else ""
    pairs = f"{counted(found.pairs + found.dropped, 'pair')}{dropped}"
    looks = ", 95 % interval over all looks" if _has_interval(found) else ""
    return [
        ("verdict", verdict_text(result)),
        ("B / A", f"{ratio_text(found)}{looks}"),
        ("measured", f"{result.measured}; {median_text(result)}"),
        (
            "pairs",
            f"{pairs}, {counted(found.groups, 'group')} of processes, {clock(result.seconds)}",
        ),
        ("noise", noise),
    ]


def verdict_text(result: Comparison) -> str:
    """Returns the verdict as a sentence."""
    from fastlstm.tuning.paired_times import LOOKS

    found, limit = result.found, f"{100 * result.detect:.4g} %"
    change = f"{100 * abs(found.ratio - 1):.1f} %"
    if result.verdict == "slower":
        return f"B is slower than A, by about {change}"
    if result.verdict == "not slower":
        if found.low > 1.0:
            return f"B is slower than A by about {change}, not by more than {limit}"
        faster = f"; it is faster, by about {change}" if found.high < 1.0 else ""
        return f"B is not slower than A by more than {limit}{faster}"
    needs = "more pairs" if result.needed is None else f"about {counted(result.needed, 'pair')}"
    if result.needed is not None and result.needed > LOOKS[-1]:
        return (
            f"undecided: needs {needs}, and at most {LOOKS[-1]} are taken; give a larger --detect,"
            " or measure on a quieter machine"
        )
    return f"undecided: needs {needs}, or a quieter machine"


def median_text(result: Comparison) -> str:
    """Returns the median times of both sides."""
    times: dict[str, list[Any]] = {side: [getattr(p, side) for p in result.pairs] for side in "ab"}
    middle = {side: sorted(found)[len(found) // 2] for side, found in times.items()}
    return f"A {middle['a']:.4g} s, B {middle['b']:.4g} s"
