"""CRC-32C, the checksum of TensorFlow's checkpoints, of many bytes at once."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
_MAX_LANES = 4096


def crc32c(data: bytes | memoryview, crc: int = 0) -> int:
    """Returns the checksum of bytes that follow others whose checksum is `crc`."""
    lanes = min(_MAX_LANES, len(data) // 64)
    state = crc ^ 0xFFFF_FFFF
    steps = len(data) // lanes if lanes else 0
    array = np.frombuffer(data, np.uint8)
    if lanes > 1:
        # Each lane is a part of the bytes from a state of 0; 32 more tell what `steps` zero bytes
        # make of every bit of a state: the checksum is linear.
        columns = np.zeros((steps, lanes + 32), np.uint8)
        columns[:, :lanes] = array[: lanes * steps].reshape(lanes, steps).T
        states = np.zeros(lanes + 32, np.uint32)
        states[lanes:] = np.uint32(1) << np.arange(32, dtype=np.uint32)
        table = _table()
        for column in columns:
            states = table[(states ^ column) & 0xFF] ^ (states >> 8)
        parts, bits = states[:lanes].tolist(), states[lanes:].tolist()
        for part in parts:
            shifted = 0
            for bit in range(32):
                if state >> bit & 1:
                    shifted ^= bits[bit]
            state = shifted ^ part
        array = array[lanes * steps :]
    entries = _table().tolist()
    for byte in array.tolist():
        state = entries[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFF_FFFF


def masked(crc: int) -> int:
    """Returns a checksum as it is stored beside what it was made of."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF


@cache
def _table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)
