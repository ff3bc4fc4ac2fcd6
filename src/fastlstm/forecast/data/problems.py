"""What is wrong with a table, collected so that all of it can be said at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastlstm.errors import DataError, DataErrors

_MOST = 20


class Problems:
    """Errors of one table, one per column and those of no column.

    Args:
        name: what messages call the table.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: list[DataError] = []
        self._columns: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._found)

    def __contains__(self, column: object) -> bool:
        return column in self._columns

    def add(self, error: DataError, column: str | None = None) -> None:
        """Notes an error; of a column the first one counts."""
        if column is None or column not in self._columns:
            self._found.append(error)
        if column is not None:
            self._columns.add(column)

    @contextmanager
    def fatal(self) -> Iterator[None]:
        """Raises all that was found where the block raises a DataError, that one included."""
        try:
            yield
        except DataError as error:
            if error not in self._found and not isinstance(error, DataErrors):
                self.add(error)
            self.raise_all()

    def raise_all(self) -> None:
        """Raises what was found.

        Raises:
            DataError: the only one, or `DataErrors` of all.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            shown = self._found[:_MOST]
            more = len(self._found) - len(shown)
            head = f"{self._name}: {len(self._found)} things are wrong with this table"
            raise DataErrors(head + (f", the first {_MOST}" if more else ""), *shown)
