"""Manifests of parts that were renamed, exchanged or forged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastlstm.errors import DataError
from fastlstm.runs.manifest import FileRecord, Manifest
from fastlstm.runs.parts import Part, PartDirectory


@pytest.fixture
def parts(tmp_path: Path) -> PartDirectory:
    """Two parts, each a file that says which it is."""
    directory = PartDirectory(tmp_path)
    for number in range(2):

        def produce(out: Any, number: int = number) -> None:
            out.write(f"part {number}".encode())

        directory.write(Part(number, 2), {"command": "x"}, {}, ".arrow", produce)
    return directory


def exchanged(first: Path, second: Path) -> None:
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def forged(**changes: Any) -> Callable[[Path], None]:
    def forge(place: Path) -> None:
        path = place / "part-00001-of-00002.json"
        manifest = Manifest.from_bytes(path.read_bytes(), path)
        files = changes.get("files", manifest.files)
        extra = {**manifest.extra, **{n: v for n, v in changes.items() if n != "files"}}
        path.write_bytes(Manifest(files, extra=extra).to_bytes())

    return forge


def exchange_manifests(place: Path) -> None:
    exchanged(place / "part-00000-of-00002.json", place / "part-00001-of-00002.json")


def exchange_all(place: Path) -> None:
    exchange_manifests(place)
    exchanged(place / "part-00000-of-00002.arrow", place / "part-00001-of-00002.arrow")


@pytest.mark.parametrize(
    ("damage", "numbers"),
    [
        (exchange_manifests, "0-1"),
        (exchange_all, "0-1"),
        (forged(work=5), "1"),
        (forged(facts=[1]), "1"),
        (forged(files={"part-00001-of-00002.arrow/../../x": FileRecord(6, "0" * 64)}), "1"),
        (forged(files={"part-00000-of-00002.arrow": FileRecord(6, "0" * 64)}), "1"),
    ],
)
def test_a_manifest_that_is_not_the_parts_own_is_none(
    parts: PartDirectory, tmp_path: Path, damage: Callable[[Path], None], numbers: str
) -> None:
    assert [stored.part.number for stored in parts.collect()] == [0, 1]
    damage(tmp_path)
    with pytest.raises(DataError, match=f"lacks . parts? of 2: {numbers}; start"):
        parts.collect()
    assert parts.find(Part(1, 2)) is None
