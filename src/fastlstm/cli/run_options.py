"""What both kinds of `train` take beside their configuration, and how flags and file become it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Option
from fastlstm.cli.config_file import read_config_file
from fastlstm.errors import Stopped, in_flags
from fastlstm.system.fields import built

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from fastlstm.cli.parser import Parsed
    from fastlstm.system.fields import ConfigT

    Observer = Callable[[dict[str, Any]], None]

_ENDS = frozenset({"steps", "epochs", "budget"})

RUN_OPTIONS = (
    Option("out", str, None, "run directory to write", "run"),
    Option(
        "resume",
        bool,
        False,
        "go on from the newest checkpoint in RUN if there is one, else start",
        "run",
        is_switch=True,
    ),
    Option(
        "config",
        str,
        None,
        "YAML file whose keys are the options below, or a run's config.json; flags win",
        "run",
    ),
    Option("json", bool, False, "print one JSON object per event instead", "run", is_switch=True),
)


class Shown:
    """An observer that shows settings as flags, and an end once.

    Args:
        output: what shows events.
        use_json: it writes JSON.

    A context manager: where the end of a stopped run was shown where errors are shown, too, the
    error needs no line of its own.
    """

    def __init__(self, output: Observer, use_json: bool) -> None:
        self._output, self._use_json, self._has_ended = output, use_json, False

    def __call__(self, event: dict[str, Any]) -> None:
        if event.get("event") == "message":
            event = {**event, "text": in_flags(event["text"])}
        self._has_ended |= event.get("event") == "end"
        self._output(event)

    def __enter__(self) -> Shown:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Stopped) and self._has_ended and not self._use_json:
            error.is_shown = _is_one_stream()


def _is_one_stream() -> bool:
    """Returns whether standard output and standard error go to one place."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def resolve_config(
    parsed: Parsed, options: Sequence[Option], kind: type[ConfigT]
) -> tuple[ConfigT, set[str]]:
    """Returns the configuration, and which of its fields were given.

    Args:
        parsed: the command line.
        options: one per field of the configuration.
        kind: its class. Its defaults yield to the file of --config, that to flags.

    Raises:
        ConfigError: an unknown key, or a value outside its range.
    """
    path = parsed.values.get("config")
    file: dict[str, Any] = {} if path is None else read_config_file(Path(path), options)
    names = {option.name for option in options}
    flags = {name: value for name, value in parsed.values.items() if name in names}
    # An end on the command line replaces the file's; two flags still contradict each other.
    kept = {k: v for k, v in file.items() if not (k in _ENDS and _ENDS & set(flags))}
    origin = "command line" if path is None else str(path)
    return built(kind, {**kept, **flags}, origin), set(file) | set(flags)
