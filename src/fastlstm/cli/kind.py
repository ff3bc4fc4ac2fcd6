"""Which module a verb is in: some verbs are about a text or about a table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from fastlstm.run_directory import holds_forecaster

if TYPE_CHECKING:
    from collections.abc import Sequence

TABLE_MODULES = {"train": "train_series", "evaluate": "evaluate_series"}
"""Verb -> module for tables; the module named as the verb is for texts."""
ABOUT_TABLES = (*TABLE_MODULES.values(), "prepare", "forecast")
_TABLE_SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".npy")
_HORIZON_KEY = re.compile(r'^\s*"?horizon"?\s*:', re.MULTILINE)


def module_of(verb: str, argv: Sequence[str]) -> str:
    """Returns the module of `fastlstm.cli` that runs a verb with these arguments.

    A table is meant where a flag says so that texts have not (`--horizon`, `--target` …), a file
    is of a kind that holds only tables, or the run or the configuration is a forecaster's.
    """
    if verb not in TABLE_MODULES:
        return verb
    is_about_table = _trains_on_table(argv) if verb == "train" else _is_forecaster(argv)
    return TABLE_MODULES[verb] if is_about_table else verb


def _is_forecaster(argv: Sequence[str]) -> bool:
    return any(holds_forecaster(token) for token in argv if not token.startswith("-"))


def _trains_on_table(argv: Sequence[str]) -> bool:
    from fastlstm.cli import train, train_series

    text, table = ({o.name for o in m.COMMAND.options} for m in (train, train_series))
    for place, token in enumerate(argv):
        flag, _, value = token.partition("=")
        value = value or "".join(argv[place + 1 : place + 2])
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if flag.startswith("--"):
            is_table = name in table - text
            is_table |= name == "out" and holds_forecaster(value)
            is_table |= name == "config" and _has_horizon(value)
        else:
            is_value = place > 0 and argv[place - 1].startswith("--") and "=" not in argv[place - 1]
            is_table = not is_value and token.endswith(_TABLE_SUFFIXES)
        if is_table:
            return True
    return False


def _has_horizon(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return bool(_HORIZON_KEY.search(file.read(1 << 16).decode("utf-8", "replace")))
    except OSError:
        return False  # the verb says what is wrong with it
