"""How long processes exchange what a training step leaves, over links of a given speed.

What travels is what `distributed/` sends. Of n numbers of b bytes in W processes, L = log2 W::

    sum        2 (W-1)/W n b / β  +  2 L (τ + m)  +  (W-1)/W n a     halving, doubling; additions
    Muon       (W-1)/W g 2 / β    +  (W-1) (τ + m)  +  L q           blocks, gathered around a ring
    order      L (τ + o)                                             rank 0 says what is next
    copy       r / β                                                 carried state, to one neighbour
    late       sum of v in bf16 - compute of a quarter of k          what optimizers keep, if longer

β is the speed of a link in bytes a second, less headers and answers; τ the time of a message one
way; m, a, o and q what Python, the transport and the kernel cost. After a pause TCP's window
is small: over a link with latency it takes round trips until it fills it (`ramp_s`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastlstm.training.options import OVERLAP

WIRE_BYTES = {"fp32": 4, "bf16": 2}
PAYLOAD = 2 * 1448 / (2 * 1514 + 66)
"""Of the bytes on a link that carries as much each way: the rest are the headers of two packets,
and the answer to two of the other direction."""
MESSAGE_S = 0.35e-3
"""m: fitted to replays on shaped links (benchmarks/log)."""
ORDER_S = 0.2e-3
GATHER_S = 2.2e-3
"""q: fitted to a small model, whose steps are little else."""
ADD_S = {"fp32": 0.5e-9, "bf16": 1.0e-9}
"""a: seconds a number."""
_FIRST_WINDOW = 14_480
"""Bytes that TCP sends before the first answer: ten packets."""
_HALVING_S = 0.2
"""Of a pause, with a round trip, in which TCP's window is halved: its shortest time-out."""


@dataclass(frozen=True)
class Link:
    """What joins two nodes.

    Attributes:
        bytes_per_s: in each direction, with headers.
        latency_s: of a message one way.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    @property
    def payload_per_s(self) -> float:
        return PAYLOAD * self.bytes_per_s

    def ramp_s(self, sent: float, pause_s: float) -> float:
        """Returns the seconds that `sent` bytes after a pause take longer than without one.

        In a pause TCP's window is halved again and again, down to a first one of ten packets; then
        it doubles with each round trip until it is what the link holds.
        """
        trip_s = 2 * self.latency_s
        full = self.payload_per_s * trip_s
        halvings = min(60, int(pause_s / (_HALVING_S + trip_s)))
        first = max(_FIRST_WINDOW, full / 2.0**halvings)
        if full <= first:
            return 0.0
        rounds = math.log2(min(full, max(sent, first)) / first)
        lost_s = rounds * trip_s - first * (2.0**rounds - 1.0) / self.payload_per_s
        return max(0.0, float(lost_s))


@dataclass(frozen=True)
class Exchange:
    """What the processes of a run exchange.

    Attributes:
        numbers: n, that are summed: gradients; after local steps weights and their moving average.
        wire: `fp32` or `bf16`.
        gathered: g, numbers of Muon's blocks in all; 0 where each process has all of them.
        carried: r, bytes of carried state that go to the next rank.
        background: v, numbers that are summed in bf16 while local steps are taken.
    """

    numbers: int
    wire: str = "fp32"
    gathered: int = 0
    carried: int = 0
    background: int = 0


@dataclass(frozen=True)
class Waiting:
    """Seconds in which a process waits for the others, by reason.

    Attributes:
        sums, blocks, orders: of one exchange.
        background: beyond the local steps that hide it.
        every: steps between two.
    """

    sums: float
    blocks: float
    orders: float
    background: float = 0.0
    every: int = 1

    @property
    def step_s(self) -> float:
        """Seconds in each step, on average."""
        return (self.sums + self.blocks + self.orders + self.background) / self.every


def waiting(
    exchange: Exchange, link: Link, size: int, every: int = 1, compute_s: float = 0.0
) -> Waiting:
    """Returns how long processes wait.

    Args:
        exchange: of the run; Muon's blocks are gathered where it has some.
        link: of each process.
        size: W, a power of two.
        every: steps between sums.
        compute_s: of a step.
    """
    if size == 1:
        return Waiting(0.0, 0.0, 0.0, every=every)
    levels, share = size.bit_length() - 1, (size - 1) / size
    message_s = link.latency_s + MESSAGE_S
    pause_s, background = every * compute_s, 0.0
    if exchange.background:
        hidden_s = compute_s * math.ceil(every / OVERLAP)
        behind_s = _sum_s(exchange.background, "bf16", link, size, pause_s=0.0)
        background = max(0.0, behind_s - hidden_s)
        pause_s -= min(behind_s, hidden_s)
    sums = _sum_s(exchange.numbers, exchange.wire, link, size, pause_s)
    sums += exchange.carried / link.payload_per_s
    blocks = 0.0
    if exchange.gathered:
        sent = share * exchange.gathered * WIRE_BYTES["bf16"]
        blocks = sent / link.payload_per_s + (size - 1) * message_s + levels * GATHER_S
    orders = levels * (link.latency_s + ORDER_S)
    return Waiting(sums, blocks, orders, background, every)


def _sum_s(numbers: int, wire: str, link: Link, size: int, pause_s: float) -> float:
    """Returns the seconds of a sum that begins after a pause."""
    levels, share, whole = size.bit_length() - 1, (size - 1) / size, numbers * WIRE_BYTES[wire]
    seconds = 2 * share * whole / link.payload_per_s + share * numbers * ADD_S[wire]
    seconds += 2 * levels * (link.latency_s + MESSAGE_S)
    for level in range(1, levels + 1):  # each has another peer, over a connection of its own
        seconds += link.ramp_s(whole / 2**level, pause_s)
    return seconds


def shown(seconds: float) -> str:
    """Returns "12.3 ms" or "1.23 s"."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
