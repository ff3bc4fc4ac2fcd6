"""Results in parts, which any scheduler may compute in any order, on any machines.

A part is a file and, written after it, a manifest with its size and SHA-256 and what it was made
of::

    part-00003-of-00064.arrow
    part-00003-of-00064.json

A part without a manifest, or whose file differs from it, is not there: it is computed again. A part
that was made of something else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlstm.errors import (
    CorruptFileError,
    DataError,
    FastLSTMError,
    Setting,
    UsageError,
    counted,
)
from fastlstm.runs.manifest import FileRecord, Manifest
from fastlstm.system.folder import Produce, open_folder
from fastlstm.system.storage import MAX_JSON_BYTES

MAX_PARTS = 99_999
_SHARD = re.compile(r"(\d{1,9})/(\d{1,9})")
_NAME = re.compile(r"part-(\d{5})-of-(\d{5})\.json")


@dataclass(frozen=True)
class Part:
    """One part of a result: its number, from 0, of how many."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_PARTS:
            raise UsageError(
                Setting("shard", f"{self.number}/{self.count}"),
                f" has {self.count} parts, expected 1 to {MAX_PARTS}",
            )
        if not 0 <= self.number < self.count:
            raise UsageError(
                Setting("shard", f"{self.number}/{self.count}"),
                f" is out of range: parts are numbered from 0, here 0/{self.count} to"
                f" {self.count - 1}/{self.count}",
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @staticmethod
    def parse(text: str) -> Part:
        """Reads ``3/64``. Raises UsageError."""
        match = _SHARD.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                Setting("shard", text),
                " is not a part, expected its number from 0 and how many there are, such as 3/64",
            )
        return Part(int(match[1]), int(match[2]))

    @property
    def stem(self) -> str:
        """The name of its files, without their suffix."""
        return f"part-{self.number:05d}-of-{self.count:05d}"

    def share(self, num_units: int) -> tuple[int, int]:
        """Returns first and end of its units; parts are as even as can be, and in order."""
        return tuple(num_units * n // self.count for n in (self.number, self.number + 1))  # type: ignore[return-value]


@dataclass(frozen=True)
class StoredPart:
    """A part that is there.

    Attributes:
        part: which.
        work: what it was made of, JSON values; the same in all parts of one result.
        facts: more about this one.
        file: name of its file.
        record: of the file.
    """

    part: Part
    work: Mapping[str, Any]
    facts: Mapping[str, Any]
    file: str
    record: FileRecord


class PartDirectory:
    """The parts of one result, in a directory or below a URL."""

    def __init__(self, place: str | Path) -> None:
        self._folder = open_folder(place)
        self.name = self._folder.name

    def find(self, part: Part) -> StoredPart | None:
        """Returns a part if it is there, whole.

        Raises:
            DataError: the directory has parts of another number.
        """
        self._refuse_other_counts(part)
        stored = self._read(part)
        return stored if stored is not None and self.is_intact(stored) else None

    def is_intact(self, stored: StoredPart) -> bool:
        """Returns whether the file of a part is the one that was written; reads it."""
        record = stored.record
        return self._folder.digest(stored.file) == (record.size, record.sha256)

    def holds(
        self, part: Part, work: Mapping[str, Any], facts: Mapping[str, Any] | None = None
    ) -> bool:
        """Returns whether a part is there, made of `work`, with these facts among its own.

        Raises:
            DataError: parts of something else are there.
        """
        self._refuse_other_counts(part)
        others = (self._read(Part(*numbers)) for numbers in self._numbers())
        any_other = next((stored for stored in others if stored is not None), None)
        stored = self._read(part)
        for found in (any_other, stored):
            if found is not None and (differing := _differing(found.work, work)):
                raise DataError(
                    f"{self._folder.place(found.part.stem)} was made of another {differing}; give"
                    " another ", Setting("out"), ", or remove the parts of before",
                )  # fmt: skip
        if stored is None or any(stored.facts.get(n) != v for n, v in (facts or {}).items()):
            return False
        return self.is_intact(stored)

    def write(
        self,
        part: Part,
        work: Mapping[str, Any],
        facts: Mapping[str, Any],
        suffix: str,
        produce: Produce,
    ) -> StoredPart:
        """Computes and writes a part: its file, then its manifest.

        `facts` are read after `produce`, which may add some.
        """
        file = part.stem + suffix
        record = FileRecord(*self._folder.write(file, produce))
        manifest = Manifest({file: record}, extra={"work": dict(work), "facts": dict(facts)})
        self._folder.write(f"{part.stem}.json", lambda out: out.write(manifest.to_bytes()))
        return StoredPart(part, work, facts, file, record)

    def collect(self) -> list[StoredPart]:
        """Returns all parts in order, checked to be there, whole and of one result.

        Raises:
            DataError: there are none, some are missing, or they are of several results.
            CorruptFileError: files are damaged; all are named.
        """
        found = self._numbers()
        if not found:
            raise DataError(
                f"{self.name} has no parts; they are written with ",
                Setting("shard", "0/64"),
                " and this directory as ",
                Setting("out"),
            )
        counts = sorted({count for _, count in found})
        if len(counts) > 1:
            raise DataError(
                f"{self.name} has parts of {' and of '.join(map(str, counts))}, expected those of"
                " one result; move the others away"
            )
        stored = {n: self._read(Part(n, counts[0])) for n, _ in found}
        missing = [n for n in range(counts[0]) if stored.get(n) is None]
        if missing:
            raise DataError(
                f"{self.name} lacks {counted(len(missing), 'part')} of {counts[0]}:"
                f" {ranges(missing)}; start them again with the same ",
                Setting("shard", f"{missing[0]}/{counts[0]}"),
            )
        parts = [stored[n] for n in range(counts[0])]
        return self._checked([part for part in parts if part is not None])

    def _checked(self, parts: list[StoredPart]) -> list[StoredPart]:
        for part in parts[1:]:
            if differing := _differing(part.work, parts[0].work):
                raise DataError(
                    f"{self._folder.place(part.part.stem)} was made of another {differing} than"
                    f" {parts[0].part.stem}; compute one of them again"
                )
        damaged = [part.part.number for part in parts if not self.is_intact(part)]
        if damaged:
            count, is_one = parts[0].part.count, len(damaged) == 1
            raise CorruptFileError(
                f"{self.name}: {'part' if is_one else 'parts'} {ranges(damaged)} of {count}"
                f" {'is' if is_one else 'are'} damaged; compute"
                f" {'it again with ' if is_one else 'each again, the first with '}",
                Setting("shard", f"{damaged[0]}/{count}"),
            )
        return parts

    def open(self, stored: StoredPart) -> Any:
        """Opens the file of a part with pyarrow."""
        return self._folder.open(stored.file)

    def _numbers(self) -> list[tuple[int, int]]:
        matches = (_NAME.fullmatch(name) for name in self._folder.names())
        return sorted((int(match[1]), int(match[2])) for match in matches if match)

    def _refuse_other_counts(self, part: Part) -> None:
        others = {count for _, count in self._numbers()} - {part.count}
        if others:
            raise DataError(
                f"{self.name} has parts of {min(others)}, this is one of {part.count}; give"
                " another ", Setting("out"), ", or remove those",
            )  # fmt: skip

    def _read(self, part: Part) -> StoredPart | None:
        """Returns what a manifest says; None without one, or if it is damaged or another part's."""
        name = f"{part.stem}.json"
        try:
            with self._folder.open(name) as file:
                data = file.read(MAX_JSON_BYTES + 1)
            manifest = Manifest.from_bytes(data, Path(self._folder.place(name)))
            [(file_name, record)] = manifest.files.items()
            work, facts = manifest.extra["work"], manifest.extra["facts"]
            is_own = re.fullmatch(rf"{part.stem}\.\w+", file_name) is not None
            if is_own and isinstance(work, Mapping) and isinstance(facts, Mapping):
                return StoredPart(part, work, facts, file_name, record)
            return None
        except (OSError, FastLSTMError, KeyError, ValueError):
            return None


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Returns the names of what differs between two works, or an empty text."""
    names = sorted(n for n in {*first, *second} if first.get(n) != second.get(n))
    return " and ".join(names)


def ranges(numbers: Sequence[int]) -> str:
    """Returns ``3, 7-12`` for the numbers 3, 7, 8 … 12, which increase."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
