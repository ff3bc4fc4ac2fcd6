"""Prefix cache: states of prompts; a prompt with the same beginning continues from there.

An LSTM's state is a few kilobytes however long the prompt, so keeping it is cheap.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastlstm.serve.http.keys import NOBODY

MIN_TOKENS = 256
"""Shorter prompts are read fast enough without a cache."""


class Prefix(NamedTuple):
    """The cached part of a prompt.

    Attributes:
        key: cache key for the state of the whole prompt; None if this state is cached, or the
            prompt is too short.
        num_known: tokens at the beginning that need not be read.
        state: `Stream.save` after these, or None.
    """

    key: tuple[int, bytes] | None = None
    num_known: int = 0
    state: bytes | None = None

    @property
    def is_whole(self) -> bool:
        return self.state is not None and self.key is None


NOTHING = Prefix()


class PrefixCache:
    """The most recently used states, of at most `size` prompts per API key; thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Per key: hits and evictions must not depend on the prompts of other keys.
        self._states: dict[bytes, OrderedDict[tuple[int, bytes], bytes]] = {}
        self._lock = threading.Lock()

    def find(self, tokens: Sequence[int], tenant: bytes = NOBODY) -> Prefix:
        """Returns the longest cached beginning of a key's prompt."""
        if self._size == 0 or len(tokens) < MIN_TOKENS:
            return NOTHING
        with self._lock:
            states = self._states.setdefault(tenant, OrderedDict())
            lengths = {length for length, _ in states if length <= len(tokens)}
        data = memoryview(np.asarray(tokens, np.int64).tobytes())
        digest, hashed, keys = hashlib.sha256(), 0, []
        for length in sorted({*lengths, len(tokens)}):
            digest.update(data[8 * hashed : 8 * length])
            hashed = length
            keys.append((length, digest.digest()))
        with self._lock:
            for key in reversed(keys):
                state = states.get(key)
                if state is not None:
                    states.move_to_end(key)
                    return Prefix(None if key == keys[-1] else keys[-1], key[0], state)
        return Prefix(keys[-1])

    def store(self, key: tuple[int, bytes], state: bytes, tenant: bytes = NOBODY) -> None:
        """Stores a state under the `key` of `find`; evicts the least recently used."""
        with self._lock:
            states = self._states[tenant]
            states[key] = state
            states.move_to_end(key)
            while len(states) > self._size:
                states.popitem(last=False)
