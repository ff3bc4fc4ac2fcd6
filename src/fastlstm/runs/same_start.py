"""A directory that a command fills over several starts: each has the options of the first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastlstm.errors import UsageError

_NO_FLAGS = {"source", "limits", "machine"}


def require_same_start(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares what a command was asked for with what the first start was, both JSON values.

    Raises:
        UsageError: an option differs, of those on top and those under `options`.
    """
    first, asked = _flat(before), _flat(now)
    for name in dict.fromkeys([*asked, *first]):
        old, new = first.get(name), asked.get(name)
        if old == new:
            continue
        if name == "files":
            raise UsageError(
                f"'{path}' was started with another table, or it was changed since; give another"
                " `out`"
            )
        if name in _NO_FLAGS:
            raise UsageError(
                f"'{path}' was started with another {name}: {old!s:.200}, not {new!s:.200}; give"
                " another `out`"
            )
        if old is None:
            raise UsageError(
                f"'{path}' was started without `{name}`; leave it out, or give another `out`"
            )
        wrong = "not without it" if new is None else f"not {_short(new)}"
        raise UsageError(f"'{path}' was started with `{name}={old!r}`, {wrong}; give another `out`")


def _flat(about: Mapping[str, Any]) -> dict[str, Any]:
    options = about.get("options")
    rest = {name: value for name, value in about.items() if name != "options"}
    return rest | (dict(options) if isinstance(options, Mapping) else {})


def _short(value: Any) -> str:
    return repr(value)[:200]
