"""The barriers of lstm_cluster.cu in all orders in which a few blocks can run.

usage: python campaigns/cluster_phases.py

A model of what the kernels wait for: warps of blocks that take turns in any order, messages that
arrive in any order, and barriers that count bytes as mbarriers do. Every state is visited. A warp
that reads a buffer finds the step it expects there, nobody waits for ever, and nothing is written
where somebody still reads. Planted faults must be found. Run it after a change of the barriers, and
change the model with them: tests/ops/cuda/test_emulated.py runs the source itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, NamedTuple


class Barrier(NamedTuple):
    """An mbarrier of one arrival; it is in a phase until that has come and all bytes have."""

    phase: int = 0
    pending: int = 1
    bytes: int = 0

    def changed(self, pending, num_bytes):
        after = Barrier(self.phase, self.pending + pending, self.bytes + num_bytes)
        assert after.pending >= 0, "armed twice in a phase"
        return Barrier(self.phase + 1) if after.pending == after.bytes == 0 else after


class State(NamedTuple):
    """Of the whole cluster.

    Attributes:
        at: operation that each warp has come to.
        barriers: of each block, group and buffer.
        steps: what each of their senders has written there.
        own: step whose gradients each warp has put into its block's own buffers.
        messages: on their way, as (block, group, buffer, sender, step).
    """

    at: tuple[int, ...]
    barriers: tuple[Barrier, ...]
    steps: tuple[tuple[int, ...], ...]
    own: tuple[tuple[int, ...], ...]
    messages: frozenset[tuple[int, ...]]


class Fault(Exception):
    pass


@dataclass(frozen=True)
class Model:
    """What is explored.

    Args:
        is_backward: which kernel.
        T: steps.
        groups: of rows, in turn.
        blocks: of the cluster.
        warps: of a block.
        is_overlapped: whether a group is multiplied before the one before it sends.
        fault: planted: "arm", "buffer", "parity", "sync" or "read late".
    """

    is_backward: bool
    T: int
    groups: int = 1
    blocks: int = 2
    warps: int = 1
    is_overlapped: bool = False
    fault: str = ""

    def program(self, warp):
        """Returns the operations of a warp, as its kernel has them."""
        order = list(product(range(self.T), range(self.groups)))
        begun = [self._begun(warp, t, s) for t, s in order]
        ended = [self._ended(t, s) for t, s in order]
        if self.is_overlapped:
            begun = [begun[0] + begun[1], *begun[2:], []]
        return list(chain.from_iterable(chain.from_iterable(zip(begun, ended, strict=True))))

    def _begun(self, warp, t, s):
        """Returns how a warp takes up a group: it waits for what it reads."""
        if t == 0:
            return []
        buffer, parity = self._buffer(t - 1 if self.is_backward else t), ((t - 1) >> 1) & 1
        is_armed = t + 1 < self.T - 1 if self.is_backward else t + 2 < self.T
        is_armed &= warp == 0 and not (self.fault == "arm" and t == 1)
        found: list[tuple[Any, ...]] = [("await", s, buffer, parity ^ (self.fault == "parity"))]
        found.append(("arm", s, buffer) if is_armed else ("go on", s, buffer))
        return found if self.fault == "read late" else [*found, ("read", s, buffer, t)]

    def _ended(self, t, s):
        """Returns how a warp leaves a group: it sends."""
        found, backward = list[tuple[Any, ...]](), self.is_backward
        if backward:
            found.append(("write", s, t & 1, t))
            if self.fault != "sync":
                found.append(("sync",))
        if t + 1 < self.T:
            if backward:
                found.append(("multiply", s, t & 1, t))
            found.append(("send", s, self._buffer(t if backward else t + 1), t + 1))
        if t > 0 and self.fault == "read late":
            found.append(("read", s, self._buffer(t - 1 if backward else t), t))
        return found

    def _buffer(self, t):
        return 0 if self.fault == "buffer" else t & 1

    def place(self, block, group, buffer):
        return (block * self.groups + group) * 2 + buffer

    def explore(self):
        """Visits every state; returns how many there are."""
        num_warps = self.blocks * self.warps
        programs = [self.program(number % self.warps) for number in range(num_warps)]
        # Forward all warps send to all blocks, backward each block's messages to one come from one.
        senders = self.blocks if self.is_backward else num_warps
        num_barriers = self.blocks * self.groups * 2
        armed = Barrier().changed(-1, senders)
        start = State(
            (0,) * num_warps, (armed,) * num_barriers, ((0,) * senders,) * num_barriers,
            ((-1,) * self.warps,) * num_barriers, frozenset(),
        )  # fmt: skip
        seen, left = {start}, [start]
        while left:
            state = left.pop()
            after = [*self._delivered(state), *self._moved(state, programs)]
            is_over = all(at == len(p) for at, p in zip(state.at, programs, strict=True))
            if not after and not is_over:
                raise Fault("all wait for ever")
            new = set(after) - seen
            seen |= new
            left += new
        return len(seen)

    def _delivered(self, state):
        for message in state.messages:
            block, group, buffer, sender, step = message
            place = self.place(block, group, buffer)
            steps = list(state.steps[place])
            steps[sender] = step
            yield state._replace(
                barriers=_with(state.barriers, place, state.barriers[place].changed(0, -1)),
                steps=_with(state.steps, place, tuple(steps)),
                messages=state.messages - {message},
            )

    def _moved(self, state, programs):
        for number, at in enumerate(state.at):
            if at == len(programs[number]):
                continue
            kind, *values = programs[number][at]
            after = self._after(state, number, programs, kind, values)
            if after is not None:
                yield (
                    after._replace(at=_with(after.at, number, at + 1)) if kind != "sync" else after
                )

    def _after(self, state, number, programs, kind, values):
        """Returns the state behind an operation of a warp, or None while it waits."""
        block, warp = divmod(number, self.warps)
        if kind == "sync":  # the last one to come takes all of its block on
            own = range(block * self.warps, (block + 1) * self.warps)
            if len({state.at[n] for n in own}) > 1:
                return None
            return state._replace(at=tuple(a + (n in own) for n, a in enumerate(state.at)))
        place = self.place(block, *values[:2])
        if kind == "go on":
            return state
        if kind == "await":
            return state if state.barriers[place].phase & 1 != values[2] else None
        if kind == "arm":
            barrier = state.barriers[place].changed(-1, len(state.steps[place]))
            return state._replace(barriers=_with(state.barriers, place, barrier))
        if kind == "read":
            if set(state.steps[place]) != {values[2]}:
                raise Fault(f"step {values[2]} reads {state.steps[place]}")
            return state
        if kind == "write":
            return state._replace(
                own=_with(state.own, place, _with(state.own[place], warp, values[2]))
            )
        if kind == "multiply":
            if set(state.own[place]) != {values[2]}:
                raise Fault(f"step {values[2]} multiplies {state.own[place]}")
            return state
        to = range(self.blocks)
        if self.is_backward:
            to, number = range(warp, self.blocks, self.warps), block
        sent = {(each, *values[:2], number, values[2]) for each in to}
        if sent & state.messages:
            raise Fault("a message is sent twice")
        return state._replace(messages=state.messages | sent)


def _with(values, place, value):
    return (*values[:place], value, *values[place + 1 :])


SIZES: tuple[dict[str, int], ...] = (
    *({"T": T} for T in (1, 2, 3, 5, 8)),
    {"T": 3, "groups": 2}, {"T": 5, "groups": 2}, {"T": 4, "blocks": 3},
    {"T": 3, "warps": 2}, {"T": 4, "warps": 2},
)  # fmt: skip
FAULTS = (
    *((False, fault, 1) for fault in ("arm", "buffer", "parity", "read late")),
    *((True, fault, 1) for fault in ("arm", "buffer", "parity")),
    (True, "sync", 2),
)
"""Whether backward, what is planted, and warps."""


def main() -> int:
    """Explores every size; says what was not found."""
    for is_backward in (False, True):
        for sizes in SIZES:
            print(f"backward={is_backward} {sizes}: {Model(is_backward, **sizes).explore()} states")
    for T, groups in ((2, 2), (3, 2), (4, 2), (2, 3), (3, 3)):
        num = Model(False, T, groups, is_overlapped=True).explore()
        print(f"T={T} groups={groups}, multiplied before another sends: {num} states")
    planted = {
        "one group cannot overlap with itself": Model(False, 3, is_overlapped=True),
        **{str(f): Model(f[0], T=5, warps=f[2], fault=f[1]) for f in FAULTS},
    }
    missed = 0
    for name, model in planted.items():
        try:
            model.explore()
        except (Fault, AssertionError) as error:
            print(f"found: {name}: {error}")
        else:
            print(f"missed: {name}")
            missed += 1
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
