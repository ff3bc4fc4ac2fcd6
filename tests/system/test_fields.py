"""Keys that outlive new fields."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastlstm.system.cache import make_key
from fastlstm.system.fields import key_fields


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
