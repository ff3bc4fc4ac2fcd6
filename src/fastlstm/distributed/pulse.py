"""Rank 0 shows that it lives, however long it evaluates or writes."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

_EVERY_S = 5.0
_END_S = 2.0
"""How long a thread is waited for at the end."""


class Pulse:
    """A thread in which rank 0 says every few seconds that it lives, and the others listen.

    They wait for the orders of rank 0 without a deadline: it may evaluate for hours. A process that
    is stopped, or a machine that has vanished, says nothing in any thread.

    Args:
        is_leader: whether this is rank 0.
        deadline_s: of silence.

    Attributes:
        is_silent: whether rank 0 has said nothing for so long, or is gone.
    """

    def __init__(self, is_leader: bool, deadline_s: float) -> None:
        self.is_silent = False
        self._group = dist.new_group(timeout=timedelta(seconds=deadline_s), backend="gloo")
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._beat if is_leader else self._listen, name="pulse", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Ends the thread."""
        self._is_over.set()
        self._thread.join(_END_S)

    def _beat(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.wait(_EVERY_S)
            if self._told(is_last) is None:
                return

    def _listen(self) -> None:
        while (is_last := self._told(False)) is not None:
            if is_last:
                return
        self.is_silent = True

    def _told(self, is_last: bool) -> bool | None:
        """Says, or hears, whether it is the last time; None where rank 0 is not heard."""
        told = torch.tensor([float(is_last)])
        try:
            dist.broadcast(told, 0, self._group)
        except RuntimeError:
            return None
        return bool(told)
