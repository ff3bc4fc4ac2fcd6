"""Keys that outlive new fields."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from fastlstm.errors import ConfigError
from fastlstm.system.cache import make_key
from fastlstm.system.fields import key_fields, parse_amount


@dataclass(frozen=True)
class Inner:
    size: int = 1


@dataclass(frozen=True)
class Options:
    name: str
    inner: Inner = field(default_factory=Inner)
    kind: str = "plain"


@dataclass(frozen=True)
class LaterInner(Inner):
    added: float = 0.5


@dataclass(frozen=True)
class Later(Options):
    inner: LaterInner = field(default_factory=LaterInner)
    added_too: tuple[int, ...] = ()
    made: list[int] = field(default_factory=list)


FIRST = ("name", "inner", "kind", "size")


def key(options: object) -> str:
    return make_key(key_fields(options, FIRST))


def test_a_field_at_its_default_changes_no_key() -> None:
    assert key_fields(Later("a"), FIRST) == {"name": "a", "inner": {"size": 1}, "kind": "plain"}
    assert key(Later("a")) == key(Options("a"))


def test_every_other_value_does() -> None:
    others = [
        Later("b"), Later("a", kind="other"), Later("a", LaterInner(2)), Later("a", added_too=(1,)),
        Later("a", LaterInner(added=0.25)), Later("a", made=[1]),
    ]  # fmt: skip
    assert len({key(each) for each in [Later("a"), *others]}) == len(others) + 1


@pytest.mark.parametrize(
    ("text", "amount"),
    [("200000/s", 2e5), ("200000", 2e5), ("500k/s", 5e5), ("1.5M", 1.5e6), (" 2 G ", 2e9)],
)
def test_amounts(text: str, amount: float) -> None:
    assert parse_amount("target", text, "/s") == amount


@pytest.mark.parametrize(
    "text", ["", "k", "-1", "1m", "1e3", "nan", "0/s", "1//s", "1 /h", "9" * 16]
)
def test_bad_amounts(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number above 0 such as 200000/s, 500k/s or"):
        parse_amount("target", text, "/s")
