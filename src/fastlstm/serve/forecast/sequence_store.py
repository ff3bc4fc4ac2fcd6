"""What is kept of sequences: the newest rows of each, so that a client sends only what is new."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import counted
from fastlstm.serve.http.errors import ApiError, shown
from fastlstm.serve.http.keys import NOBODY
from fastlstm.serve.places import Places

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class Step:
    """What a request says about its sequence.

    Attributes:
        id: its name or number; 7 and "7" are two sequences.
        starts: the rows are its first.
        ends: it is to be forgotten afterwards.
    """

    id: str | int
    starts: bool = False
    ends: bool = False


@dataclass
class _Kept:
    rows: Floats
    statics: Floats | None
    used_s: float


class SequenceStore:
    """The newest rows of every sequence. Not for several threads.

    A sequence belongs to the key that began it: others neither see nor change it, and may have one
    of the same name.

    Args:
        num_rows: kept of each, and needed for a forecast.
        places: for sequences.
        idle_s: a sequence that is not asked for so long is forgotten.
        clock: seconds.
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
        self._kept: OrderedDict[tuple[bytes, str | int], _Kept] = OrderedDict()

    def __len__(self) -> int:
        """Sequences that are kept."""
        self._forget_idle()
        return len(self._kept)

    def add(
        self, step: Step, rows: Floats, statics: Floats | None, tenant: bytes = NOBODY
    ) -> tuple[Floats, Floats | None]:
        """Adds rows, and returns the window that ends with them and what is static.

        Args:
            step: of which sequence.
            rows: new ones, shape ``(n, columns)``.
            statics: shape ``(S,)``; None for those of before.
            tenant: whose it is.

        Raises:
            ApiError: no such sequence (404) or no room for another (503), nothing is kept; too few
                rows so far (409), these are kept.
        """
        self._forget_idle()
        key = (tenant, step.id)
        if step.starts:
            if key not in self._kept:
                self._take_place(tenant)
            kept = _Kept(rows[:0], statics, 0.0)
        else:
            kept = self._found(key)
        if statics is not None:
            kept.statics = statics
        # A new array: windows that were handed out stay as they are.
        kept.rows = np.concatenate([kept.rows, rows])[-self._num_rows :].copy()
        kept.used_s = self._clock()
        self._kept[key] = kept
        self._kept.move_to_end(key)
        if step.ends:
            self._forget(key)
        if len(kept.rows) < self._num_rows:
            missing = self._num_rows - len(kept.rows)
            raise ApiError(
                409,
                f"sequence {_shown(step.id)} has {counted(len(kept.rows), 'row')} so far, a"
                f" forecast needs {self._num_rows}; "
                + ("it has ended" if step.ends else f"they are kept, send {missing} more"),
            )
        return kept.rows, kept.statics

    def _take_place(self, tenant: bytes) -> None:
        if not self._places.has_room(tenant, 1):
            who, count = "the server keeps", self._places.num_taken
            if not self._places.is_full:
                who, count = "this API key has", self._places.held(tenant)
            raise ApiError(
                503,
                f"{who} {counted(count, 'sequence')}, which is all it may now; end one"
                " (sequence_end), or send this one again later",
                headers={"retry-after": "5"},
            )
        self._places.take(tenant, 1)

    def _forget(self, key: tuple[bytes, str | int]) -> None:
        del self._kept[key]
        self._places.give_back(key[0], 1)

    def _found(self, key: tuple[bytes, str | int]) -> _Kept:
        kept = self._kept.get(key)
        if kept is None:
            raise ApiError(
                404,
                f"there is no sequence {_shown(key[1])}: it never began, has ended, or was idle"
                f" for {self._idle_s:g} s; begin it with sequence_start and its last"
                f" {counted(self._num_rows, 'row')}",
            )
        return kept

    def _forget_idle(self) -> None:
        before_s = self._clock() - self._idle_s
        while self._kept:
            first = next(iter(self._kept))
            if self._kept[first].used_s >= before_s:
                return
            self._forget(first)


def _shown(name: str | int) -> str:
    return f"'{shown(name)}'" if isinstance(name, str) else str(name)
