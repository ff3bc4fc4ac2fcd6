"""What the golden runs are trained on: made by whole numbers, so that it is the same everywhere."""

from typing import Any

import numpy as np
import pyarrow as pa

_TEXT = "the quick brown fox jumps over a lazy dog; why does it do that? naïve café 12"
_WORDS = _TEXT.split()


def draws(seed):
    """Yields whole numbers from 0 to 32767: the example generator of the C standard."""
    state = seed
    while True:
        state = (state * 1103515245 + 12345) % (1 << 31)
        yield state >> 16


def text(num_chars):
    """Returns so many characters of words and lines, some of them not ASCII."""
    numbers, parts, length = draws(1), [], 0
    while length < num_chars:
        number = next(numbers)
        parts.append(_WORDS[number % len(_WORDS)] + ("\n" if number % 11 == 0 else " "))
        length += len(parts[-1])
    return "".join(parts)[:num_chars]


def values(num, seed):
    """Returns a season of 8 with a trend and noise; multiples of 1/16, exact in float32."""
    numbers = draws(seed)
    found = [(k % 8) * 8 + k + next(numbers) % 24 for k in range(num)]
    return (np.array(found) / 16).astype(np.float32)


def table(num_rows=100, num_series=1, **changes):
    """Returns hourly rows of several series, each 30 rows shorter than the one before it.

    Columns: unique_id, ds, y, temp (past), plan (known ahead), day (known ahead, names),
    shop (static, names), size (static).
    """
    columns: dict[str, list[Any]] = {}
    for series in range(num_series):
        num = num_rows - 30 * series
        hours = np.datetime64("2024-01-01", "us") + np.arange(num).astype("timedelta64[h]")
        part = {
            "unique_id": [f"s{series}"] * num,
            "ds": hours.tolist(),
            "y": values(num, 7 * series + 1).tolist(),
            "temp": values(num, 7 * series + 2).tolist(),
            "plan": values(num, 7 * series + 3).tolist(),
            "day": [("mon", "tue", "wed")[k // 8 % 3] for k in range(num)],
            "shop": [("north", "south")[series % 2]] * num,
            "size": [series + 0.5] * num,
        }
        for name, found in part.items():
            columns.setdefault(name, []).extend(found)
    return pa.table({**columns, **changes})


def holed(frame):
    """Returns a table that lacks every seventh y, and rows 40 to 42."""
    y = [None if k % 7 == 3 else v for k, v in enumerate(frame["y"].to_pylist())]
    rows = [k for k in range(len(y)) if k not in (40, 41, 42)]
    place = frame.column_names.index("y")
    return frame.set_column(place, "y", pa.array(y, pa.float64())).take(rows)


def counts(num):
    """Returns small counts, many of them 0."""
    numbers = draws(5)
    return [max(0, next(numbers) % 9 - 3) for _ in range(num)]


def sequences(num, even):
    """Returns sequences of two columns, of 10 steps or of 4 to 12."""
    numbers = draws(9)
    lengths = [10 if even else 4 + next(numbers) % 9 for _ in range(num)]
    return [
        np.stack([values(n, 3 * k + 1), values(n, 3 * k + 2)], 1) % 5 for k, n in enumerate(lengths)
    ]
