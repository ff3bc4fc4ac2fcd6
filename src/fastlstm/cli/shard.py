"""Parts of a table's result by number: the option, and parts that are there already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Option
from fastlstm.cli.options import READ_OPTIONS, given_options
from fastlstm.errors import UsageError, counted
from fastlstm.runs.parts import Part, PartDirectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.cli.parser import Parsed
    from fastlstm.runs.parts import StoredPart

SHARD_OPTION = Option(
    "shard",
    str | None,
    None,
    "only part I of N, numbered from 0, into the directory --out; fastlstm merge joins them",
    value="I/N",
)

FORECAST_SUFFIXES = (".parquet", ".csv", ".arrow")
"""Of the files that forecasts are written to: forecast_file.SUFFIXES, without loading pyarrow."""


def part_of(parsed: Parsed) -> tuple[Part, str]:
    """Returns the part that a command line asks for, and the directory of all parts.

    Raises:
        UsageError: no directory, or no number of a part.
    """
    part, out = Part.parse(parsed["shard"]), parsed["out"]
    if out is None:
        raise UsageError("--shard needs --out DIR, the directory of all parts")
    if out.lower().endswith(FORECAST_SUFFIXES):
        folder = out.rpartition(".")[0] or "parts"
        merged = f"merge {folder}" + (f" --out {out}" if parsed.command.verb == "forecast" else "")
        raise UsageError(
            f"--out {out} is a file's name; with --shard it is the directory of all parts: give"
            f" --out {folder}, and fastlstm {merged} joins them"
        )
    return part, out


def show_part(directory: str, part: Part, stored: StoredPart | None) -> None:
    """Prints what was written, or that the part was there."""
    name = f"{directory}: part {part}"
    size = "" if stored is None else counted(stored.record.size, "byte")
    print(f"{name} is there already" if stored is None else f"{name}, {size}")


class Shard:
    """The part that a command line asks for.

    Attributes:
        part: which.
        directory: of all parts.
        request: tells the same command line again; see `part_request`.
    """

    def __init__(self, parsed: Parsed, tables: Sequence[str], options: dict[str, Any]) -> None:
        from fastlstm.forecast.part_request import request_key

        self.part, self.directory = part_of(parsed)
        run = parsed.positionals[0]
        options = {"command": parsed.command.verb, **options}
        options |= given_options(parsed, READ_OPTIONS)
        self.request = request_key(run, tables, options)

    def is_done(self) -> bool:
        """Whether the same command line has made this part; says so."""
        stored = PartDirectory(self.directory).find(self.part)
        if stored is None or stored.facts.get("request") != self.request:
            return False
        self.show(None)
        return True

    def show(self, stored: StoredPart | None) -> None:
        """Prints what was written, or that the part was there."""
        show_part(self.directory, self.part, stored)
