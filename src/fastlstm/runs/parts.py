"""Results in parts, which any scheduler may compute in any order, on any machines.

A part is a file and, written after it, a manifest with its size and SHA-256 and what it was made
of::

    part-00003-of-00064.arrow
    part-00003-of-00064.json

A part without a manifest, or whose file differs from it, is not there: it is computed again. So is
one whose manifest is that of another part. A part that was made of something else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
_NAME = re.compile(r"part-([0-9]{5})-of-([0-9]{5})\.json")
_FILE = re.compile(r"part-[0-9]{5}-of-[0-9]{5}\..*", re.DOTALL)


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
        if place == "":  # its path would be the current directory
            raise UsageError("the directory of all parts is '', expected a name, such as parts")
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
        self,
        part: Part,
        work: Mapping[str, Any],
        is_current: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> bool:
        """Returns whether a part is there, made of `work`.

        Args:
            part: which.
            work: what it has to be made of.
            is_current: tells from its facts whether it has to be computed again.

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
        if stored is None or not (is_current is None or is_current(stored.facts)):
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

        Raises:
            DataError: the manifest would be too large to be read back.
        """
        file = part.stem + suffix
        record = FileRecord(*self._folder.write(file, produce))
        manifest = Manifest({file: record}, extra={"work": dict(work), "facts": dict(facts)})
        data = manifest.to_bytes()
        if len(data) > MAX_JSON_BYTES:
            raise DataError(
                f"the manifest of part {part} has {counted(len(data), 'byte')}, expected at most"
                f" {MAX_JSON_BYTES:,}: too many files in one part; give more parts, and another ",
                Setting("out"),
            )
        self._folder.write(f"{part.stem}.json", lambda out: out.write(data))
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
        if damaged := [part.part.number for part in parts if not self.is_intact(part)]:
            raise self._damaged(damaged, parts[0].part.count)
        return parts

    def _damaged(self, numbers: Sequence[int], count: int) -> CorruptFileError:
        is_one = len(numbers) == 1
        return CorruptFileError(
            f"{self.name}: {'part' if is_one else 'parts'} {ranges(numbers)} of {count}"
            f" {'is' if is_one else 'are'} damaged; compute"
            f" {'it again with ' if is_one else 'each again, the first with '}",
            Setting("shard", f"{numbers[0]}/{count}"),
        )

    @contextmanager
    def reading(self, stored: StoredPart) -> Iterator[Any]:
        """Opens the file of a part with pyarrow; what it cannot be read as is damage.

        Raises:
            CorruptFileError: names the part.
        """
        import pyarrow as pa

        try:
            with self._folder.open(stored.file) as file:
                yield file
        except (
            OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
            pa.ArrowException, CorruptFileError,
        ) as error:  # fmt: skip
            raise self._damaged([stored.part.number], stored.part.count) from error

    def require_unchanged(self, stored: Sequence[StoredPart]) -> None:
        """Raises DataError if a part was removed or written anew since `collect`."""
        now = [self._read(part.part) for part in stored]
        changed = [
            part.part.number
            for part, found in zip(stored, now, strict=True)
            if found is None or found.record != part.record
        ]
        if changed:
            raise DataError(
                f"{self.name}: {'part' if len(changed) == 1 else 'parts'} {ranges(changed)} of"
                f" {stored[0].part.count} changed while being joined; start merge again when no"
                " process writes parts any more"
            )

    def _numbers(self) -> list[tuple[int, int]]:
        matches = (_NAME.fullmatch(name) for name in self._folder.names())
        found = ((int(match[1]), int(match[2])) for match in matches if match)
        return sorted((number, count) for number, count in found if number < count)

    def _refuse_other_counts(self, part: Part) -> None:
        others = {count for _, count in self._numbers()} - {part.count}
        if others:
            raise DataError(
                f"{self.name} has parts of {min(others)}, this is one of {part.count}; give"
                " another ", Setting("out"), ", or remove those",
            )  # fmt: skip

    def _read(self, part: Part) -> StoredPart | None:
        """Returns what a manifest says; None if it is missing, damaged or of another part."""
        name = f"{part.stem}.json"
        try:
            with self._folder.open(name) as file:
                data = file.read(MAX_JSON_BYTES + 1)
            manifest = Manifest.from_bytes(data, Path(self._folder.place(name)))
            [(file_name, record)] = manifest.files.items()
            work, facts = manifest.extra["work"], manifest.extra["facts"]
        except (OSError, FastLSTMError, KeyError, ValueError):
            return None
        is_own = file_name.startswith(f"{part.stem}.")  # not that of another, copied or renamed
        if not (is_own and isinstance(work, dict) and isinstance(facts, dict)):
            return None
        return StoredPart(part, work, facts, file_name, record)


def refuse_part_name(out: str) -> None:
    """Raises UsageError if a file to write has the name of a part, which may be one to join."""
    if _FILE.fullmatch(Path(out).name):
        raise UsageError(Setting("out", out), " has the name of a part; give another name")


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
