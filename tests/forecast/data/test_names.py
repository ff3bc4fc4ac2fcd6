"""Names of series are numbered in order of first appearance, over any batches, types and slices."""

from __future__ import annotations

import datetime
import random
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastlstm.forecast.data.names import Names, canonical, without_nan
from fastlstm.system import hardware

DAY = datetime.date(2024, 2, 29)
VALUES = {
    "texts": (["", "a", "ä" * 9, "12345678", "123456789", "12345678\0", "x" * 5000], pa.string()),
    "large texts": (["b", "", "bb"], pa.large_string()),
    "integers": ([0, -1, 7, 2**62, -(2**63)], pa.int64()),
    "unsigned": ([2**64 - 1, 0, 7], pa.uint64()),
    "bytes": ([b"", b"\xff\x00", b"a"], pa.binary()),
    "floats": ([0.5, -0.0, 0.0, 7.0, 1e300], pa.float64()),
    "truth": ([True, False], pa.bool_()),
    "decimals": ([Decimal("7.00"), Decimal("7.10")], pa.decimal128(5, 2)),
    "days": ([DAY, datetime.date(1, 1, 1)], pa.date32()),
}


def expected(values: list[Any], numbers: dict[str, int]) -> list[int]:
    return [numbers.setdefault(canonical(value), len(numbers)) for value in values]


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_every_type(kind: str) -> None:
    values, of = VALUES[kind]
    names, numbers, draw = Names(), dict[str, int](), random.Random(0)
    for size in (1, 2, 5, 40):
        batch = draw.choices(values, k=size)
        whole = pa.array([values[0], *batch, values[-1]], of)
        assert names.number(whole[1:-1]).tolist() == expected(batch, numbers)
    assert len(names) == len(numbers)


def test_types_in_turns() -> None:
    """True, 1 and 1.0 are equal keys of a dict, but only the last two are one name."""
    names = Names()
    batches = (pa.array([1, 2]), pa.array([2.0, 1.0]), pa.array([True]), pa.array(["2", "true"]))
    assert [names.number(batch).tolist() for batch in batches] == [[0, 1], [1, 0], [2], [1, 2]]
    assert names.plain() == ["1", "2", "true"]
    assert len(names.notes("store")) == 3


def test_many_names_in_many_batches() -> None:
    """100,000 names by day: Python looks at each of them once, however many days there are."""
    texts = pa.array([f"ITEM_{i // 10:06}_STORE_{i % 10}" for i in range(100_000)])
    looked = list[Any]()

    class Counted(Names):
        def _of(self, value: Any) -> int:
            looked.append(value)
            return super()._of(value)

    names, rng = Counted(), np.random.default_rng(0)
    order = np.arange(0)
    for share in (0.5, 0.9, 1.0):
        chosen = rng.permutation(len(texts))[: int(share * len(texts))]
        order = np.concatenate([order, chosen[~np.isin(chosen, order)]])
        number = np.empty(len(texts), dtype=np.int64)
        number[order] = np.arange(len(order))
        found = names.number(texts.take(pa.array(chosen)))
        np.testing.assert_array_equal(found, number[chosen])
    assert looked == texts.take(pa.array(order)).to_pylist()


def test_missing_names() -> None:
    names = Names()
    column = pa.array(["a", None, "b", None, "a"])
    assert names.number(column)[[0, 2, 4]].tolist() == [0, 1, 0]
    assert names.number(pa.array([None, None], pa.string())).tolist() == [0, 0]
    assert names.plain() == ["a", "b"]


TEXTS = pa.array(["unused", "a", "b"])
MISSING: dict[str, tuple[pa.Array, list[Any]]] = {
    "a name without a row": (
        pa.DictionaryArray.from_arrays(pa.array([None, 2, 1]), TEXTS),
        ["b", "a"],
    ),
    "of no type": (pa.nulls(2), []),
    "NaN": (pa.array([float("nan"), 2.0, 1.0]).dictionary_encode(), [2.0, 1.0]),
}


@pytest.mark.parametrize("kind", MISSING)
def test_a_missing_name_is_none(kind: str) -> None:
    column, names = MISSING[kind]
    found = Names()
    found.number(without_nan(column))
    assert found.plain() == names


def test_empty_names_have_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """C's functions refuse a null pointer even to no bytes."""
    keys_of = hardware.native().TextKeys

    class Keys:
        def __init__(self, *secret: int) -> None:
            self._keys = keys_of(*secret)

        def find(self, offsets: int, data: int, *rest: int) -> list[int]:
            assert offsets != 0
            assert data != 0
            return self._keys.find(offsets, data, *rest)

    monkeypatch.setattr(hardware, "native", lambda: SimpleNamespace(TextKeys=Keys))
    for texts in (["", ""], [""], []):
        assert Names().number(pa.array(texts, pa.string())).tolist() == [0] * len(texts)
