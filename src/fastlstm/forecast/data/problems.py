"""Collects the errors of a table, to report all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastlstm.errors import DataError, DataErrors

_SHOWN = 20


class Problems:
    """Errors of the table `name`: the first of each column, and those of no column."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._errors: list[DataError] = []
        self._columns: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._errors)

    def __contains__(self, column: object) -> bool:
        return column in self._columns

    def add(self, error: DataError, column: str | None = None) -> None:
        """Adds an error; further errors of the same column are dropped."""
        if column is None or column not in self._columns:
            self._errors.append(error)
        if column is not None:
            self._columns.add(column)

    @contextmanager
    def fatal(self) -> Iterator[None]:
        """Raises all errors so far when the block raises a DataError, that error included."""
        try:
            yield
        except DataError as error:
            if error not in self._errors and not isinstance(error, DataErrors):
                self.add(error)
            self.raise_all()

    def raise_all(self) -> None:
        """Raises the only error, or `DataErrors` of all; does nothing without any."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            head = f"{self._name}: this table has {len(self._errors)} errors"
            more = f", the first {_SHOWN}" if len(self._errors) > _SHOWN else ""
            raise DataErrors(head + more, *self._errors[:_SHOWN])
