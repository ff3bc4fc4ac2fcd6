"""States of prompts read before: one that begins alike goes on from there.

An LSTM's state is a few kilobytes however long the prompt, so remembering it costs next to nothing.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastlstm.serve.http.keys import NOBODY

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_TOKENS = 256
"""Shorter prompts are read in no time."""


class Prefix(NamedTuple):
    """What is known of a prompt.

    Attributes:
        key: to remember its state by; None where it is not worth it, or known already.
        num_known: tokens at its beginning that need not be read.
        state: `Stream.save` after these, or None.
    """

    key: tuple[int, bytes] | None = None
    num_known: int = 0
    state: bytes | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the prompt need be read."""
        return self.state is not None and self.key is None


NOTHING = Prefix()


class Prefixes:
    """The states that were used last, of at most `size` prompts a key; safe between threads.

    Args:
        size: 0 remembers none.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # Of each key its own: neither what is found nor what is dropped tells of another's prompts.
        self._states: dict[bytes, OrderedDict[tuple[int, bytes], bytes]] = {}
        self._lock = threading.Lock()

    def find(self, tokens: Sequence[int], tenant: bytes = NOBODY) -> Prefix:
        """Returns the longest beginning of a prompt whose state a key made known."""
        if self._size == 0 or len(tokens) < MIN_TOKENS:
            return NOTHING
        with self._lock:
            known = self._states.setdefault(tenant, OrderedDict())
            lengths = {length for length, _ in known if length <= len(tokens)}
        data = np.asarray(tokens, np.int64).tobytes()
        digest, done, keys = hashlib.sha256(), 0, []
        for length in sorted({*lengths, len(tokens)}):
            digest.update(memoryview(data)[8 * done : 8 * length])
            done = length
            keys.append((length, digest.digest()))
        with self._lock:
            for key in reversed(keys):
                state = known.get(key)
                if state is not None:
                    known.move_to_end(key)
                    return Prefix(None if key == keys[-1] else keys[-1], key[0], state)
        return Prefix(keys[-1])

    def remember(self, key: tuple[int, bytes], state: bytes, tenant: bytes = NOBODY) -> None:
        """Keeps a state under the `key` that `find` gave; the one unused longest makes room."""
        with self._lock:
            known = self._states[tenant]
            known[key] = state
            known.move_to_end(key)
            while len(known) > self._size:
                known.popitem(last=False)
