"""Collects the errors of a table, to report all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastlstm.errors import DataError, DataErrors

_SHOWN = 20

Finding = tuple[str, dict[str, Any]]
"""What a table looks like, and the options that read it so."""


class CurableError(DataError):
    """A table that other options would read: `found`, of which the message names the options."""

    def __init__(self, message: str, *found: Finding) -> None:
        super().__init__(message)
        self.found = found


def findings(error: DataError) -> list[Finding]:
    """Returns what an error, or every one of `DataErrors`, has found; empty if one has nothing."""
    errors = error.args[1:] if isinstance(error, DataErrors) else (error,)
    found = [getattr(error, "found", ()) for error in errors]
    return [one for each in found for one in each] if all(found) else []


def merged(found: Sequence[Finding], options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the options of all findings with `options`; tuples are joined."""
    options = dict(options or {})
    for _, more in found:
        for name, value in more.items():
            is_list = isinstance(value, tuple) and isinstance(options.get(name), tuple)
            options[name] = (*dict.fromkeys(options[name] + value),) if is_list else value
    return options


def looks_like(name: str, found: Sequence[Finding], end: str) -> CurableError:
    """Returns the error for a table that looks like findings, with all options that they need."""
    what = listed_findings(found)
    return CurableError(f"{name} looks like {what}: add {settings(merged(found))}{end}", *found)


def listed_findings(found: Sequence[Finding]) -> str:
    """Returns what a table looks like, as a message lists it."""
    words = list(dict.fromkeys(text for text, _ in found))
    return ", ".join(words[:-1]) + (" and " if words[1:] else "") + words[-1]


def settings(options: dict[str, Any]) -> str:
    """Returns options as messages show them."""
    return ", ".join(f"`{name}={_shown(value)}`" for name, value in options.items())


def _shown(value: Any) -> str:
    if not isinstance(value, tuple):
        return repr(value)
    texts = [v if isinstance(v, str) else repr(v).removesuffix(".0") for v in value]
    is_number = len(value) == 1 and not isinstance(value[0], str)
    return texts[0] if is_number else repr(",".join(texts))


class Problems:
    """Errors of the table `name`: the first of each column, and all of no column."""

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
