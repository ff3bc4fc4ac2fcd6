"""Sequences: the newest rows of each, so that a client sends only new ones."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import counted
from fastlstm.serve.admission import Places
from fastlstm.serve.http.errors import ApiError, shown
from fastlstm.serve.http.keys import NOBODY

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class SequenceStep:
    """A request of the sequence `id`, perhaps its first or last one; 7 and "7" are two."""

    id: str | int
    starts: bool = False
    ends: bool = False


@dataclass
class _Sequence:
    rows: Floats
    statics: Floats | None
    used_s: float


class SequenceStore:
    """The newest rows of every sequence; not thread-safe.

    A sequence belongs to the key that started it: other keys neither see nor change it, and may
    have one of the same name.

    Of each `num_rows` are stored, and needed for a forecast; after `idle_s` seconds without a
    request it is forgotten.
    """

    def __init__(
        self,
        num_rows: int,
        places: Places,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_rows, self._places, self._idle_s = num_rows, places, idle_s
        self._clock = clock
        self._sequences: OrderedDict[tuple[bytes, str | int], _Sequence] = OrderedDict()

    def __len__(self) -> int:
        self._forget_idle()
        return len(self._sequences)

    def add(
        self, step: SequenceStep, rows: Floats, statics: Floats | None, tenant: bytes = NOBODY
    ) -> tuple[Floats, Floats | None]:
        """Adds rows; returns the window that ends with them, and the static values.

        Shapes: `rows` ``(n, columns)``, `statics` ``(S,)``; None keeps the earlier ones.

        Raises:
            ApiError: no such sequence (404) or no room for another (503), nothing is stored; too
                few rows so far (409), these are stored.
        """
        self._forget_idle()
        key = (tenant, step.id)
        if step.starts:
            if key not in self._sequences:
                self._take_place(tenant)
            sequence = _Sequence(rows[:0], statics, 0.0)
        elif key in self._sequences:
            sequence = self._sequences[key]
        else:
            why = f"it was not started, has ended, or was idle for {self._idle_s:g} s"
            start = f"start it with sequence_start and its last {counted(self._num_rows, 'row')}"
            raise ApiError(404, f"there is no sequence {_shown(step.id)}: {why}; {start}")
        if statics is not None:
            sequence.statics = statics
        # A new array: windows that were handed out stay as they are.
        sequence.rows = np.concatenate([sequence.rows, rows])[-self._num_rows :].copy()
        sequence.used_s = self._clock()
        self._sequences[key] = sequence
        self._sequences.move_to_end(key)
        if step.ends:
            self._forget(key)
        if len(sequence.rows) < self._num_rows:
            missing = self._num_rows - len(sequence.rows)
            what = "it has ended" if step.ends else f"they are kept, send {missing} more"
            rows_so_far = f"{counted(len(sequence.rows), 'row')} so far"
            needed = f"a forecast needs {self._num_rows}"
            raise ApiError(409, f"sequence {_shown(step.id)} has {rows_so_far}, {needed}; {what}")
        return sequence.rows, sequence.statics

    def _take_place(self, tenant: bytes) -> None:
        if not self._places.has_room(tenant, 1):
            who, count = "the server keeps", self._places.num_taken
            if not self._places.is_full:
                who, count = "this API key has", self._places.held(tenant)
            what = "end one (sequence_end), or send this one again later"
            message = f"{who} {counted(count, 'sequence')}, the limit now; {what}"
            raise ApiError(503, message, headers={"retry-after": "5"})
        self._places.take(tenant, 1)

    def _forget(self, key: tuple[bytes, str | int]) -> None:
        del self._sequences[key]
        self._places.release(key[0], 1)

    def _forget_idle(self) -> None:
        before_s = self._clock() - self._idle_s
        while self._sequences:
            first = next(iter(self._sequences))
            if self._sequences[first].used_s >= before_s:
                return
            self._forget(first)


def _shown(name: str | int) -> str:
    return f"'{shown(name)}'" if isinstance(name, str) else str(name)
