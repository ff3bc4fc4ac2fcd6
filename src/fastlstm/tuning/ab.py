"""`fastlstm ab`: which of two commands is faster, measured in turns."""

from __future__ import annotations

import dataclasses
import random
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np

from fastlstm.errors import CommandError, ConfigError, Message, Setting
from fastlstm.system.machine_usage import MachineUsage
from fastlstm.training.step_time import settled
from fastlstm.tuning.command import Command, parse_command
from fastlstm.tuning.machine import describe_machine
from fastlstm.tuning.paired_times import (
    LOOKS,
    Estimate,
    Verdict,
    estimate,
    pairs_needed,
    verdict,
)
from fastlstm.tuning.process import StepWorker, run_whole, stop_all

TURN_S = 0.4
"""How long a worker steps before the other one does."""
_WARM_UP_STEPS = _MIN_STEPS = 3
_BLOCKS_PER_GROUP = (2, 6)
"""At least and at most; between them as many as take as long as setting up the first group."""
_MAX_DETECT = 1.0


@dataclass(frozen=True)
class Pair:
    """Times of A and B beside each other, and the number of the processes they are of."""

    a: float
    b: float
    group: int


@dataclass(frozen=True)
class Comparison:
    """What was measured of two commands, and what it shows.

    Attributes:
        a, b: the commands.
        detect: the smallest slowdown that matters, as a share.
        measured: what a time is: "seconds of the whole command" or "seconds per 1,000 tokens in
            training steps, median step of a turn".
        found: ratio B / A and its interval, over all looks together of 95 %.
        verdict: what it shows.
        needed: about how many pairs a verdict needs; None where unknown.
        pairs: all that were measured.
        seconds: that the measurement took.
        others: share of the machine's cores that other processes used, or None.
        machine: CPU and versions.
    """

    a: str
    b: str
    detect: float
    measured: str
    found: Estimate
    verdict: Verdict
    needed: int | None
    pairs: tuple[Pair, ...]
    seconds: float
    others: float | None
    machine: dict[str, object]

    def to_dict(self) -> dict[str, object]:
        """Returns all of it for JSON."""
        return dataclasses.asdict(self)


def compare_commands(
    a: str,
    b: str,
    *,
    detect: float = 0.03,
    max_time_s: float = 300.0,
    seed: int | None = None,
    observer: Callable[[Estimate], None] | None = None,
) -> Comparison:
    """Measures two commands in turns until a verdict is clear or time is over.

    Two `fastlstm train` commands are compared by their training steps, in workers that are set up
    once per group of pairs; any others by the wall clock of whole processes.

    Args:
        a: a command line; a shell runs it only where it needs one.
        b: the other one.
        detect: the smallest slowdown of B that matters, as a share.
        max_time_s: ends the measurement, and any single run.
        seed: of the order of the turns; default a new one each time.
        observer: called after each block with what is known so far.

    Raises:
        ConfigError: a command or a setting that makes no sense.
        CommandError: a command failed, was killed or took too long.
    """
    if not 0.0 < detect <= _MAX_DETECT:
        raise ConfigError(
            Setting("detect"), f" is {detect:.4g}, expected a share above 0, at most 1"
        )
    commands = parse_command("A", a), parse_command("B", b)
    if all(command.training is not None for command in commands):
        source: WholeCommands | TrainingSteps = TrainingSteps(commands, max_time_s)
    else:
        source = WholeCommands(commands, max_time_s)
    started, usage = time.perf_counter(), MachineUsage()
    try:
        with closing(source.blocks(random.Random(seed), started + max_time_s)) as blocks:
            pairs = _pairs_until_clear(blocks, detect, observer)
    finally:
        stop_all()
    if not pairs:
        raise CommandError(
            Message(
                f"no block of four turns fitted into {max_time_s:.4g} s; give a longer ",
                Setting("max_time"),
            )
        )
    found = _estimate(pairs)
    seconds, shows = time.perf_counter() - started, verdict(found, detect)
    needed = pairs_needed(found, detect) if shows is Verdict.UNDECIDED else None
    return Comparison(
        a, b, detect, source.measured, found, shows, needed, tuple(pairs), seconds,
        usage.read().get("others_share"), describe_machine(),
    )  # fmt: skip


def _pairs_until_clear(
    blocks: Iterator[tuple[Pair, Pair]],
    detect: float,
    observer: Callable[[Estimate], None] | None,
) -> list[Pair]:
    """Returns the pairs of all blocks, or those up to the first look that shows a verdict."""
    pairs = list[Pair]()
    for block in blocks:
        pairs += block
        found = _estimate(pairs)
        if observer is not None:
            observer(found)
        is_clear = len(pairs) in LOOKS and verdict(found, detect) is not Verdict.UNDECIDED
        if is_clear or len(pairs) >= LOOKS[-1]:
            break
    return pairs


def _estimate(pairs: list[Pair]) -> Estimate:
    a, b = (np.array([getattr(pair, side) for pair in pairs]) for side in "ab")
    return estimate(a, b, np.array([pair.group for pair in pairs]))


def _block(rng: random.Random, group: int, measure: Callable[[int], float]) -> tuple[Pair, Pair]:
    """Measures ABBA or BAAB, by chance; `measure` takes 0 for A and 1 for B."""
    first = rng.randrange(2)
    halves = list[Pair]()
    for order in ((first, 1 - first), (1 - first, first)):
        times = {side: measure(side) for side in order}
        halves.append(Pair(times[0], times[1], group))
    return halves[0], halves[1]


class WholeCommands:
    """Any two commands, by the wall clock of whole processes; each block is a group.

    The first run of each is not counted: it warms up caches.
    """

    measured = "seconds of the whole command"

    def __init__(self, commands: tuple[Command, Command], limit_s: float) -> None:
        self._commands, self._limit_s = commands, limit_s

    def blocks(self, rng: random.Random, end: float) -> Generator[tuple[Pair, Pair]]:
        """Yields blocks of pairs while another one fits before `end` of the clock."""
        block_s = 2.0 * sum(run_whole(command, self._limit_s) for command in self._commands)
        group = 0
        while time.perf_counter() + block_s < end:
            started = time.perf_counter()
            yield _block(rng, group, lambda side: run_whole(self._commands[side], self._limit_s))
            block_s, group = time.perf_counter() - started, group + 1


class TrainingSteps:
    """Two training runs, by the steps of workers that are started anew for each group.

    The time of a turn is that of its median step: with processes beside them the median of 16
    steps varied half as much as their mean (robust deviation of pairs 0.09 and 0.165).

    Args:
        commands: A and B.
        limit_s: for setting up a worker, or one of its answers.
        time_of: the time of a turn by those of its steps.
        blocks: of a group of processes; 0 has as many as take as long as setting up the first.
    """

    def __init__(
        self,
        commands: tuple[Command, Command],
        limit_s: float,
        time_of: Callable[[Sequence[float]], float] = median,
        blocks: int = 0,
    ) -> None:
        self._commands, self._limit_s, self._unit = commands, limit_s, "units"
        self._time_of, self._blocks = time_of, blocks

    @property
    def measured(self) -> str:
        """What a time is."""
        return f"seconds per 1,000 {self._unit} in training steps, median step of a turn"

    def blocks(self, rng: random.Random, end: float) -> Generator[tuple[Pair, Pair]]:
        """Yields blocks of pairs while another group fits before `end` of the clock."""
        group, group_s, blocks = 0, 0.0, self._blocks
        while time.perf_counter() + group_s < end:
            started = time.perf_counter()
            with self._workers() as (workers, counts):
                blocks = blocks or _blocks_worth(time.perf_counter() - started)

                def turn(side: int) -> float:
                    steps = settled(workers[side].step(counts[side]))
                    return 1_000.0 * self._time_of([seconds / units for seconds, units in steps])

                for _ in range(blocks):
                    yield _block(rng, group, turn)
                    if time.perf_counter() >= end:
                        break
            group_s, group = time.perf_counter() - started, group + 1

    @contextmanager
    def _workers(self) -> Iterator[tuple[list[StepWorker], list[int]]]:
        """Starts both at once; returns them, warmed up, with their steps per turn."""
        with ExitStack() as stack:
            folders = [
                stack.enter_context(tempfile.TemporaryDirectory(prefix="fastlstm-ab-"))
                for _ in self._commands
            ]
            stack.callback(stop_all)
            workers = [
                StepWorker(command, folder, self._limit_s)
                for command, folder in zip(self._commands, folders, strict=True)
            ]
            units = [worker.ready() for worker in workers]
            if units[0] != units[1]:
                raise ConfigError(
                    f"A counts {units[0]} and B {units[1]}: their steps cannot be compared"
                )
            self._unit, counts = units[0], list[int]()
            for worker in workers:
                worker.step(_WARM_UP_STEPS)
                step_s = median(seconds for seconds, _ in worker.step(_WARM_UP_STEPS))
                counts.append(max(_MIN_STEPS, round(TURN_S / step_s)))
            yield workers, counts


def _blocks_worth(set_up_s: float) -> int:
    """Returns how many blocks to measure with workers that took so long to set up."""
    least, most = _BLOCKS_PER_GROUP
    return min(most, max(least, round(set_up_s / (4.0 * TURN_S))))
