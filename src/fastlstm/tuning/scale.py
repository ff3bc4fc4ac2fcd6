"""`fastlstm scale`: predicts the speed of data parallelism over more machines.

The seconds of a sum of n numbers of b bytes over a ring of W processes, with links of β bytes a
second and τ seconds a message::

    2 (W-1)/W n b / β  +  2 (W-1) (τ + m)         m: Python, gloo and the operating system
"""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from fastlstm.tuning.variants import EXACT, changed_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.training.trainer import Trainer

WIRE_BYTES = {"fp32": 4, "bf16": 2}
PAYLOAD = 2 * 1448 / (2 * 1514 + 66)
"""Share of data in the bytes on a link, with equal traffic in both directions."""
MESSAGE_S = 0.35e-3
"""m, fitted to measurements on shaped links (benchmarks/log)."""
_WAYS = (("fp32", 1), ("bf16", 1), ("fp32", 8), ("fp32", 25))
WORTH_IT = 1.05
"""Least speedup at which more nodes are advised."""
_SAME, _CLEARLY = 0.98, 1.1
"""fp32 is preferred to bf16 from this share of the best exact speed; local steps are advised from
this multiple of that speed."""
LOCAL_LOSS = {8: "at most 0.01 bits/char worse", 25: "0.01 to 0.03 bits/char worse"}
_TIMED_S, _MIN_TIMED, _MAX_TIMED = 0.5, 3, 12
_DIVISORS = (1, 2, 4, 8)
"""Divisors of the batch that are timed."""


@dataclass(frozen=True)
class Link:
    """A link of two nodes: bytes a second in each direction, and seconds of a message one way."""

    bytes_per_s: float
    latency_s: float = 0.0

    def sum_s(self, numbers: int, wire: str, size: int) -> float:
        """Returns the seconds of a sum over `size` processes."""
        sent = 2 * (size - 1) / size * numbers * WIRE_BYTES[wire]
        return sent / (PAYLOAD * self.bytes_per_s) + 2 * (size - 1) * (self.latency_s + MESSAGE_S)


@dataclass(frozen=True)
class StepCost:
    """The cost of a step on one machine.

    Attributes:
        rows: rows of a batch with its accumulation.
        passes: (rows, seconds) of forward and backward passes, rows descending.
        update_s: seconds of clipping and update.
        numbers: trained parameters.
    """

    unit: str
    rows: int
    units_per_row: float
    passes: tuple[tuple[int, float], ...]
    update_s: float
    numbers: int
    description: str

    def step_s(self, rows: float) -> float:
        """Returns the seconds of a step of so many rows: on the line through the two nearest
        measurements, and at least in proportion to the smallest one."""
        if len(self.passes) == 1:
            only, seconds = self.passes[0]
            return seconds * rows / only + self.update_s
        pairs = list(itertools.pairwise(self.passes))
        (many, long_s), (few, short_s) = next((p for p in pairs if rows >= p[1][0]), pairs[-1])
        seconds = short_s + (long_s - short_s) * (rows - few) / (many - few)
        fewest, fewest_s = self.passes[-1]
        return max(seconds, fewest_s * min(1.0, rows / fewest)) + self.update_s


@dataclass(frozen=True)
class ScalingWay:
    """One way to train on a number of nodes, such as "bf16" or "fp32 every 8".

    Attributes:
        every: steps between sums.
        used: nodes with rows.
        compute_s, exposed_s: seconds of a step for computing, and waiting for the network.
        speedup: units a second relative to one node.
        formula: `exposed_s` with its numbers.
    """

    name: str
    every: int
    used: int
    compute_s: float
    exposed_s: float
    speedup: float
    formula: str

    @property
    def efficiency(self) -> float:
        """Share of the time in which a node computes."""
        return self.compute_s / (self.compute_s + self.exposed_s)


@dataclass(frozen=True)
class ScalingPrediction:
    """All ways to train on a number of nodes: `strong` divides the batch of the run, `weak` has the
    same batch on every node; `best` is None if one node is as fast."""

    nodes: int
    strong: list[ScalingWay]
    weak: list[ScalingWay]
    best: ScalingWay | None
    reason: str


def predict_scale(
    cost: StepCost, nodes: int, link: Link, wire: str | None = None, every: int | None = None
) -> ScalingPrediction:
    """Predicts training on `nodes` machines like this one; compares all values of `wire` and of
    `every`, the steps between sums, that are None."""
    ways = [way for way in _WAYS if wire in (None, way[0]) and every in (None, way[1])]
    ways = ways or [(wire or "fp32", every or 1)]
    used = min(nodes, cost.rows)  # each needs a row
    strong = [_way(cost, used, cost.rows / used, link, *way) for way in ways]
    weak = [_way(cost, nodes, cost.rows, link, *way) for way in ways]
    return ScalingPrediction(nodes, strong, weak, *_chosen(cost, strong))


def _way(cost: StepCost, used: int, rows: float, link: Link, wire: str, every: int) -> ScalingWay:
    compute_s, sum_s = cost.step_s(rows), link.sum_s(cost.numbers, wire, used)
    formula = (
        f"2·{used - 1}/{used} · {cost.numbers / 1e6:.3g} M · {WIRE_BYTES[wire]} B /"
        f" {PAYLOAD * link.bytes_per_s / 1e6:.4g} MB/s + messages = {shown(sum_s)}"
    )
    name = wire if every == 1 else f"{wire} every {every}"
    formula = formula if every == 1 else f"({formula}) / {every} steps"
    speedup = used * rows / (compute_s + sum_s / every) / (cost.rows / cost.step_s(cost.rows))
    return ScalingWay(name, every, used, compute_s, sum_s / every, speedup, formula)


def _chosen(cost: StepCost, ways: Sequence[ScalingWay]) -> tuple[ScalingWay | None, str]:
    fastest = max(ways, key=lambda way: way.speedup)
    exact = [way for way in ways if way.every == 1]
    best = next((w for w in exact if w.speedup > _SAME * max(e.speedup for e in exact)), fastest)
    local = max((w for w in ways if w.every > 1), key=lambda w: w.speedup, default=None)
    if fastest.speedup < WORTH_IT:
        text = f"{shown(fastest.compute_s)} a step and waits {shown(fastest.exposed_s)}"
        return None, (
            f"one node is as fast: it takes {shown(cost.step_s(cost.rows))} a step; of"
            f" {fastest.used} each computes {text} ({fastest.name})"
        )
    if local is None or local.speedup < max(_CLEARLY * best.speedup, WORTH_IT):
        return best, f"{best.name}: {best.speedup:.3g} times one node"
    lost = LOCAL_LOSS.get(local.every, "quality not measured")
    return local, (
        f"{local.name}: {local.speedup:.3g} times one node; local steps learn a little less"
        f" ({lost}); without them {best.name}, {best.speedup:.3g} times"
    )


def measured_cost(trainer: Trainer) -> StepCost:
    """Times steps with the batch of a run, and with a half, a quarter and an eighth of it."""
    task, options = trainer.task, trainer.plan.options
    passes, update_s, units = list[tuple[int, float]](), 0.0, 0.0
    for divisor in _DIVISORS:
        size = options.batch_size // divisor
        if size * divisor != options.batch_size:
            break
        other = changed_run(trainer, "rows", EXACT, {"batch_size": size}, 0)
        try:
            rows = size * options.accumulate
            passes_s, other_update_s, taken = _fastest(other.trainer)
            fewest_s = passes[-1][1] if passes else passes_s
            passes.append((rows, min(passes_s, fewest_s)))  # a slower one was disturbed
            if divisor == 1:
                update_s, units = other_update_s, taken / rows
        finally:
            other.close()
    numbers = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    threads = torch.get_num_threads()
    about = f"{options.optimizer}, {options.precision}, {threads} thread{'s' * (threads > 1)} of"
    return StepCost(
        task.unit, passes[0][0], units, tuple(passes), update_s, numbers,
        f"{about} {trainer.plan.device.type.upper()}",
    )  # fmt: skip


def _fastest(trainer: Trainer) -> tuple[float, float, int]:
    """Returns the least seconds of passes and of updates in a few steps, and the units per step."""
    passes, updates, units = list[float](), list[float](), 0
    spent, until = trainer.stepper.seconds, time.perf_counter() + _TIMED_S
    for number in range(_MAX_TIMED):
        batch, before = trainer.task.loader.next(), dict(spent)
        units = max(units, trainer.task.size(batch))
        trainer.step(batch, 0.0)
        if number > 0 or time.perf_counter() > until:  # the first step is a little slower
            passes.append(spent["forward_backward"] - before["forward_backward"])
            updates.append(spent["optimizer"] - before["optimizer"])
        if len(passes) >= _MIN_TIMED and time.perf_counter() > until:
            break
        if passes and time.perf_counter() > until + 4 * _TIMED_S:
            break
    return min(passes), min(updates), units


def facts(cost: StepCost, link: Link, found: Sequence[ScalingPrediction]) -> dict[str, object]:
    """Returns the predictions as plain values."""
    return {
        "step": {**asdict(cost), "step_s": cost.step_s(cost.rows)},
        "link_bytes_per_s": link.bytes_per_s,
        "latency_s": link.latency_s,
        "nodes": [asdict(one) for one in found],
    }


def shown(seconds: float) -> str:
    """Returns "12.3 ms" or "1.23 s"."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
