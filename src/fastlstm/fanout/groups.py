"""The groups of a table: the rows with one value of a column, each written to files of its own."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv
from pyarrow import parquet as pq

from fastlstm.errors import DataError, Setting, nearest_hint
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.csv_records import csv_delimiter
from fastlstm.forecast.data.ingest import without_views
from fastlstm.forecast.data.names import Names, canonical, without_nan
from fastlstm.forecast.data.preparation import role_request
from fastlstm.forecast.data.problems import Problems
from fastlstm.forecast.data.records import Records
from fastlstm.forecast.data.roles import find_roles, listed
from fastlstm.system import storage

MAX_GROUPS = 10_000
_HELD_BYTES = 256 << 20
"""Rows held in memory before they are written, a file of each group that has some."""
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}", re.ASCII)
_OTHER = re.compile(r"[^A-Za-z0-9_-]+", re.ASCII)
_OWN_FILES = ("fanout.json",)


@dataclass(frozen=True)
class Group:
    """One value of the column.

    Attributes:
        name: the value as a text.
        directory: name of its run directory.
        rows: that have this value.
    """

    name: str
    directory: str
    rows: int


def directory_names(names: Sequence[str]) -> list[str]:
    """Returns a safe name of a directory for every name, no two the same.

    Plain names stay as they are; others, and those that differ in case only, are shortened to
    plain characters and get "~" with a hash of the name.
    """
    spelt = Counter(name.lower() for name in names)
    own = {name.lower() for name in _OWN_FILES}

    def safe(name: str) -> str:
        if _PLAIN.fullmatch(name) and spelt[name.lower()] == 1 and name.lower() not in own:
            return name
        shown = _OTHER.sub("_", name)[:40].strip("_-") or "group"
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{shown}~{digest[:16]}"

    return [safe(name) for name in names]


class GroupedTable:
    """A table divided by a column.

    Args:
        records: the table.
        by: the column.
        config: of the forecasters.

    The column is left out of the groups' tables, where it is constant, unless it has a role.

    Raises:
        DataError: there is no such column, it has the role of time or target, or the roles of the
            other columns are wrong.
    """

    def __init__(self, records: Records, by: str, config: ForecastConfig) -> None:
        self._records, self._by = records, by
        names = records.schema.names
        if by not in names:
            raise DataError(
                f"{records.name} has no column '{by}' (given as --by){nearest_hint(by, names)}; its"
                f" columns: {listed(names)}"
            )
        problems, request = Problems(records.name), role_request(config)
        with problems.fatal():
            roles = find_roles(records, request, problems)
            if by == roles.time or by in request.target:
                role = "the time" if by == roles.time else "a target"
                raise DataError(
                    f"{records.name}: column '{by}' is {role}, expected a column that"
                    " groups rows, such as a store or a sensor;"
                    " name another with ", Setting("by", ...),
                )  # fmt: skip
            named = (*request.static, *request.categorical, *request.ignore, *request.future)
            self._is_kept = by in (roles.series, *(request.past or ()), *named)
            if not self._is_kept:
                without = role_request(config, ignore=(*request.ignore, by))
                find_roles(records, without, problems)
        problems.raise_all()
        kind = records.schema.field(by).type
        self._type = pa.string() if records.is_parsed else kind
        self._kind = kind if records.is_parsed else None

    def groups(self) -> list[Group]:
        """Returns the groups in order of first appearance; reads their column only.

        Raises:
            DataError: a row without a value, or no rows.
        """
        names, counts, done = Names(self._kind), Counter[int](), 0
        for batch in self._records.batches({self._by: self._type}):
            codes = self._codes(names, without_views(batch), done)
            done += len(codes)
            used, rows = np.unique(codes, return_counts=True)
            counts.update(dict(zip(used.tolist(), rows.tolist(), strict=True)))
        if not done:
            raise DataError(f"{self._records.name} has column names but no rows")
        texts = list(map(canonical, names.plain()))
        places = zip(texts, directory_names(texts), strict=True)
        return [Group(name, place, counts[n]) for n, (name, place) in enumerate(places)]

    def write(self, folder: Path, groups: Sequence[Group]) -> None:
        """Writes the rows of every group to `folder`/<directory>, in one pass.

        Texts of CSV files are written as they are, others as Parquet.

        Raises:
            StorageError: a write failed.
            DataError: the table changed meanwhile.
        """
        records, names = self._records, Names(self._kind)
        types = {
            field.name: pa.string() if records.is_parsed else field.type for field in records.schema
        }
        with storage.storage_errors(folder, "make a directory"):
            for group in groups:
                (folder / group.directory).mkdir(parents=True)
        files = _GroupFiles(folder, groups, () if self._is_kept else (self._by,), records.is_parsed)
        done = 0
        for batch in records.batches(types):
            batch = without_views(batch)
            codes = self._codes(names, batch, done)
            done += len(codes)
            files.add(batch, codes)
        files.flush()
        records.require_unchanged()

    def _codes(self, names: Names, batch: pa.RecordBatch, done: int) -> NDArray[np.int64]:
        """Returns the number of every row's group."""
        column = without_nan(batch.column(self._by))
        if column.null_count:
            row = int(column.is_null().to_numpy(zero_copy_only=False).argmax())
            raise DataError(
                f"{self._records.name}: row {done + row + 1} has no value in '{self._by}', by which"
                " the table is divided; give it one, or remove such rows"
            )
        return names.number(column)


class _GroupFiles:
    """Collects rows of groups and writes them, a file per group and flush."""

    def __init__(
        self, folder: Path, groups: Sequence[Group], left_out: Sequence[str], is_text: bool
    ) -> None:
        self._folder, self._groups, self._left_out = folder, groups, left_out
        self._is_text, self._number, self._num_bytes = is_text, 0, 0
        self._held: dict[int, list[pa.Table]] = {}

    def add(self, batch: pa.RecordBatch, codes: NDArray[np.int64]) -> None:
        table = pa.Table.from_batches([batch]).drop_columns(list(self._left_out))
        table = _without_dictionaries(table)
        if (np.diff(codes) < 0).any():
            order = np.argsort(codes, kind="stable")
            table, codes = table.take(pa.array(order)), codes[order]
        starts = np.flatnonzero(np.diff(codes, prepend=-1)).tolist()
        for begin, end in itertools.pairwise([*starts, len(codes)]):
            self._held.setdefault(int(codes[begin]), []).append(table.slice(begin, end - begin))
        self._num_bytes += table.nbytes
        if self._num_bytes > _HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what is held."""
        for code, parts in self._held.items():
            table = pa.concat_tables(parts, promote_options="permissive")
            place = self._folder / self._groups[code].directory / f"{self._number:05d}"
            self._write(table, place)
        self._held.clear()
        self._number, self._num_bytes = self._number + 1, 0

    def _write(self, table: pa.Table, place: Path) -> None:
        path = place.with_suffix(".csv" if self._is_text else ".parquet")
        with storage.storage_errors(path, "write"):
            if self._is_text:
                options = csv.WriteOptions(delimiter=csv_delimiter(table.schema.names))
                csv.write_csv(table, path, options)
            else:
                pq.write_table(table, path)
            storage.fsync_file(path)


def _without_dictionaries(table: pa.Table) -> pa.Table:
    """Returns a table with plain values: a dictionary would be written whole for every group."""
    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            plain = table.column(place).cast(field.type.value_type)
            table = table.set_column(place, field.name, plain)
    return table
