"""Names of series and categories, numbered; 7, 7.0 and "7" are the same name in any file."""

from __future__ import annotations

import re
import secrets
from array import array
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastlstm.system import hardware

_without_fraction = partial(re.compile(r"^(-?\d+)\.0+\Z").sub, r"\1")
"""Returns the text of a number without a fraction of zeros: "7" for "7.0"."""


def is_text(kind: pa.DataType) -> bool:
    """Returns whether a column of this type holds text."""
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def canonical(name: Any) -> str:
    """Returns the text that names are compared by: "7" for 7, 7.0 and "7", "true" for True."""
    if isinstance(name, bool):
        return str(name).lower()
    if isinstance(name, float | Decimal) and name == name and name % 1 == 0:
        return str(int(name))
    return str(name)


class _Seen:
    """The values of one type that have a number. Python looks at each of them once: in a table by
    date every series occurs in every batch."""

    def __init__(self) -> None:
        self._keys = hardware.native().TextKeys(secrets.randbits(64), secrets.randbits(64))
        self._numbers = array("q")

    def numbers(self, values: pa.Array, number_of: Callable[[Any], int]) -> NDArray[np.int64]:
        """Returns the number of each value; `number_of` is called with the new ones in order."""
        is_cast = is_text(values.type) or pa.types.is_integer(values.type)
        texts = values if is_cast else pa.array(map(str, values.to_pylist()), pa.string())
        texts, keys = texts.cast(pa.large_string()), np.empty(len(values), dtype=np.int64)
        _, offsets, data = texts.buffers()
        begin, base = offsets.address + 8 * texts.offset, (data or offsets).address  # never null
        new = self._keys.find(begin, base, len(keys), keys.ctypes.data)
        self._numbers.extend(map(number_of, values.take(pa.array(new, pa.int64())).to_pylist()))
        return np.asarray(np.frombuffer(self._numbers, dtype=np.int64)[keys])


class Names:
    """Numbers the names of a column in order of first appearance; `kind` is Arrow's type of the
    column where it was read as text instead."""

    def __init__(self, kind: pa.DataType | None = None) -> None:
        self._numbers: dict[str, int] = {}
        self._values: list[Any] = []
        self._same: dict[str, tuple[Any, Any]] = {}
        self._seen = defaultdict[pa.DataType, _Seen](_Seen)
        self._read: Callable[[str], str] = str
        if kind is not None and pa.types.is_floating(kind):
            self._read = _without_fraction
        elif kind is not None and pa.types.is_boolean(kind):
            self._read = str.lower

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, number: int) -> Any:
        return self._values[number]

    def plain(self) -> list[Any]:
        """Returns all names as JSON values of one type."""
        kinds = {type(value) for value in self._values}
        is_plain = len(kinds) == 1 and kinds <= {str, int, float, bool}
        return list(self._values) if is_plain else [canonical(value) for value in self._values]

    def notes(self, column: str) -> list[str]:
        """Returns a line for every name that occurs in two spellings."""
        return [
            f"column '{column}': {a!r} and {b!r} are the same name" for a, b in self._same.values()
        ]

    def number(self, column: pa.Array) -> NDArray[np.int64]:
        """Returns the number of every name; numbers of nulls are arbitrary."""
        if is_text(column.type) and not column.null_count:
            return self._numbers_of(column)
        column = column.dictionary_encode()
        there = column.indices.drop_null()
        if len(there) == 0:
            return np.zeros(len(column), dtype=np.int64)
        indices = column.indices.fill_null(there[0])
        places = indices.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
        starts = places[np.flatnonzero(np.diff(places, prepend=-1))]
        used, first = np.unique(starts, return_index=True)
        used = used[np.argsort(first)]
        numbers = np.zeros(len(column.dictionary), dtype=np.int64)
        numbers[used] = self._numbers_of(column.dictionary.take(pa.array(used)))
        return np.asarray(numbers[places])

    def _numbers_of(self, values: pa.Array) -> NDArray[np.int64]:
        return self._seen[values.type].numbers(values, self._of)

    def _of(self, value: Any) -> int:
        if isinstance(value, str):
            value = self._read(value)
        name = canonical(value)
        number = self._numbers.setdefault(name, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        elif (first := self._values[number]) != value or type(first) is not type(value):
            self._same.setdefault(name, (first, value))
        return number


def without_nan(column: pa.Array) -> pa.Array:
    """Returns a column of names with NaN, also of its dictionary, and nulls of that as nulls."""
    if isinstance(column, pa.DictionaryArray):
        names = column.dictionary
        if names.null_count or pa.types.is_floating(names.type):
            column = column.dictionary_decode()
    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
