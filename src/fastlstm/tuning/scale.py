"""`fastlstm scale`: what more machines would make of a run, from a step on one and their network.

For each number of nodes the ways to train are compared: the same batch divided among them, summed
in float32 or bfloat16 in every step or after local steps; the layers divided; and the same batch on
each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fastlstm.tuning.scale_law import MESSAGE_S, WIRE_BYTES, Link, shown, waiting
from fastlstm.tuning.step_cost import StepCost

_WAYS = (("fp32", 1), ("bf16", 1), ("bf16", 8), ("bf16", 25))
_CHUNKS = 8
"""Of time, in a pipeline."""
WORTH_IT = 1.05
"""Times the speed of one node, below which more are not advised."""
_SAME = 0.98
"""Of the fastest exact way's speed: float32 is preferred to bf16, which is no longer independent of
the number of nodes, and both to a pipeline."""
_CLEARLY = 1.1
"""Times the speed of the exact way, from which one that changes learning is named."""
LOCAL_LOSS = {
    8: "at most 0.01 bits/char worse in 600 steps",
    25: "0.01 bits/char worse with 2 nodes, 0.03 with 4, in 600 steps; less in longer runs",
}


@dataclass(frozen=True)
class Way:
    """One way to train on a number of nodes.

    Attributes:
        kind: `data`, `local` or `pipeline`.
        wire: of what is sent.
        every: steps between sums.
        used: nodes that have work.
        rows: of each node.
        compute_s: of a step.
        exposed_s: of a step, in which nodes wait for the network (and each other, in a pipeline).
        speedup: over one node, in units a second.
        formula: `exposed_s` with its numbers.
    """

    kind: str
    wire: str
    every: int
    used: int
    rows: float
    compute_s: float
    exposed_s: float
    speedup: float
    formula: str

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """Share of the time in which a node computes."""
        return self.compute_s / self.step_s

    @property
    def name(self) -> str:
        if self.kind == "pipeline":
            return "pipeline"
        if self.every > 1:
            return f"{self.wire} every {self.every}"
        return self.wire

    @property
    def changes_learning(self) -> bool:
        return self.every > 1

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "name": self.name, "step_s": self.step_s,
                "efficiency": self.efficiency}  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """All ways to train on a number of nodes.

    Attributes:
        nodes: that there are.
        strong: ways with the batch of the run divided.
        weak: the same batch on every node.
        best: the fastest exact way, or one with local steps that is clearly faster; None where one
            node is as fast.
        reason: why.
    """

    nodes: int
    strong: list[Way]
    weak: list[Way]
    best: Way | None
    reason: str

    def to_dict(self) -> dict[str, object]:
        return {
            "nodes": self.nodes, "strong": [way.to_dict() for way in self.strong],
            "weak": [way.to_dict() for way in self.weak],
            "best": None if self.best is None else self.best.to_dict(), "reason": self.reason,
        }  # fmt: skip


def predict_scale(
    cost: StepCost, nodes: int, link: Link, wire: str | None = None, every: int | None = None
) -> Prediction:
    """Predicts training on `nodes` machines like the one that was timed.

    Args:
        cost: of a step on one.
        nodes: at least 2.
        link: of each node.
        wire: None compares both.
        every: steps between sums; None compares 1, 8 and 25.
    """
    ways = [way for way in _WAYS if wire in (None, way[0]) and every in (None, way[1])]
    ways = ways or [(wire or "bf16", every or 1)]
    used = 1 << (nodes.bit_length() - 1)  # processes are a power of two
    at_most = 1 << (cost.rows.bit_length() - 1)  # each has a row
    strong = [
        _divided(cost, min(used, at_most), cost.rows / min(used, at_most), link, *way)
        for way in ways
    ]
    if cost.num_layers > 1 and every in (None, 1):
        strong.append(_pipeline(cost, min(nodes, cost.num_layers), link))
    weak = [_divided(cost, used, cost.rows, link, *way) for way in ways]
    best, reason = _chosen(cost, strong)
    return Prediction(nodes, strong, weak, best, reason)


def _divided(cost: StepCost, used: int, rows: float, link: Link, wire: str, every: int) -> Way:
    """Returns the way of `used` nodes with so many rows each."""
    is_local = every > 1
    exchange = cost.exchange(wire, rows, is_local)
    compute_s = cost.compute_s(rows, 1 if is_local else used)
    waits = waiting(exchange, link, used, every, compute_s)
    speed = f"{link.payload_per_s / 1e6:.4g} MB/s"
    sent = f"2·{used - 1}/{used} · {exchange.numbers / 1e6:.3g} M · {WIRE_BYTES[wire]} B"
    formula = f"{sent} / {speed} + messages = {shown(waits.sums)}"
    if waits.blocks:
        formula += f"; Muon's blocks {shown(waits.blocks)}"
    formula += f"; order {shown(waits.orders)}"
    if waits.background:
        formula += f"; optimizers {shown(waits.background)} longer than the steps that hide them"
    if is_local:
        formula = f"({formula}) / {every} steps"
    speedup = used * rows / (compute_s + waits.step_s) / (cost.rows / cost.step_s)
    kind = "local" if is_local else "data"
    return Way(kind, wire, every, used, rows, compute_s, waits.step_s, speedup, formula)


def _pipeline(cost: StepCost, used: int, link: Link) -> Way:
    """Returns the way of a pipeline over layers and chunks of time (a wavefront)."""
    share = -(-cost.num_layers // used) / cost.num_layers  # of the slowest stage
    passes_s = share * cost.passes_s(cost.rows)
    chunk_s = passes_s / _CHUNKS
    message = cost.boundary_per_row * cost.rows / _CHUNKS
    message_s = message / link.payload_per_s + link.latency_s + MESSAGE_S
    turns = _CHUNKS + used - 1
    backward_s = 2 * chunk_s / 3
    in_turns_s = turns * (max(chunk_s - backward_s, message_s) + max(backward_s, message_s))
    filling_s = 2 * (used - 1) * message_s
    compute_s = passes_s + share * cost.update_s
    waits_s = in_turns_s + filling_s - passes_s
    formula = (
        f"{_CHUNKS} chunks: {used - 1} of {turns} turns wait, {shown((used - 1) * chunk_s)};"
        f" {2 * _CHUNKS} messages of {message / 1e6:.3g} MB, {shown(message_s)} each"
    )
    speedup = cost.step_s / (compute_s + waits_s)
    return Way("pipeline", "", 1, used, cost.rows, compute_s, waits_s, speedup, formula)


def _chosen(cost: StepCost, ways: Sequence[Way]) -> tuple[Way | None, str]:
    """Returns the way that is advised, and why."""
    fastest = max(ways, key=lambda way: way.speedup)
    exact = [way for way in ways if not way.changes_learning]
    best = next((w for w in exact if w.speedup > _SAME * max(e.speedup for e in exact)), fastest)
    local = max((w for w in ways if w.changes_learning), key=lambda w: w.speedup, default=None)
    if fastest.speedup < WORTH_IT:
        text = f"{shown(fastest.compute_s)} a step and waits {shown(fastest.exposed_s)}"
        return None, (
            f"one node is as fast: it takes {shown(cost.step_s)} a step; of {fastest.used} each"
            f" computes {text} ({fastest.name})"
        )
    if local is None or local.speedup < max(_CLEARLY * best.speedup, WORTH_IT):
        return best, f"{best.name}: {best.speedup:.3g} times one node"
    lost = LOCAL_LOSS.get(local.every, "quality not measured")
    return local, (
        f"{local.name}: {local.speedup:.3g} times one node; local steps learn a little less"
        f" ({lost}); without them {best.name}, {best.speedup:.3g} times"
    )
