"""`fastlstm serve RUN`: text as OpenAI's API gives it, forecasts by the Open Inference Protocol."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from fastlstm.cli.command import Command, Option, Positional, options_from_dataclass
from fastlstm.cli.inputs import require_run
from fastlstm.cli.output import say
from fastlstm.cli.parser import parse
from fastlstm.errors import EXIT_OK, ConfigError, MissingExtraError, counted
from fastlstm.serve.settings import GROUPS, Settings
from fastlstm.system import environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastlstm.cli.parser import Parsed

_KEYS = "keys"
_MIN_SESSION_KEY = 16
COMMAND = Command(
    verb="serve",
    summary="Serve a text by OpenAI's API, a forecaster by the Open Inference Protocol.",
    positionals=(
        Positional("RUN", "a run directory, one of its checkpoints, or a saved Forecaster"),
    ),
    options=(
        *options_from_dataclass(Settings, GROUPS),
        Option(
            "api_key",
            str,
            (),
            "clients must send this key; other users of the machine can see it here",
            _KEYS,
            is_repeatable=True,
        ),
        Option("api_key_file", str, None, "a file with one key per line", _KEYS),
        Option(
            "session_key_file",
            str,
            None,
            "a file whose content signs session states, so that they outlive the server",
            _KEYS,
        ),
    ),
    examples=(
        "fastlstm serve runs/book",
        "fastlstm serve runs/book --host 0.0.0.0 --api-key-file keys.txt",
    ),
)


def run(argv: list[str]) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit code."""
    parsed = parse(COMMAND, argv)
    names = [name for group in GROUPS.values() for name in group]
    settings = Settings(**{name: parsed[name] for name in names})
    keys, session_key = _api_keys(parsed), _session_key(parsed)
    require_run(parsed.positionals[0])
    _serve_function()(parsed.positionals[0], settings, keys, session_key, say)
    return EXIT_OK


def _serve_function() -> Callable[..., None]:
    try:
        from fastlstm.serve.server import serve
    except ModuleNotFoundError as error:
        if error.name in ("starlette", "uvicorn", "h11", "prometheus_client"):
            raise MissingExtraError(
                f"fastlstm serve needs {error.name}: pip install 'fastlstm[serve]'"
            ) from None
        raise
    return serve


def _api_keys(parsed: Parsed) -> list[str]:
    keys = list(parsed["api_key"])
    path = parsed["api_key_file"]
    if path is not None:
        found = [_decoded(line, path, n) for n, line in enumerate(_read(path).splitlines(), 1)]
        if not any(found):
            raise ConfigError(f"{path} has no key, expected one per line")
        keys += [key for key in found if key]
    from_environment = environment.api_key()
    if from_environment:
        keys.append(from_environment)
    for key in keys:
        if not key or not key.isprintable() or " " in key:
            raise ConfigError("an API key is empty or has blanks; use printable characters only")
    return keys


def _decoded(line: bytes, path: str, number: int) -> str:
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path}: line {number} is not UTF-8; use keys of printable characters,"
            " 'openssl rand -hex 32' makes one"
        ) from None


def _session_key(parsed: Parsed) -> bytes | None:
    path = parsed["session_key_file"]
    given = environment.session_key()
    key = _read(path).strip() if path is not None else os.fsencode(given) if given else None
    if key is not None and len(key) < _MIN_SESSION_KEY:
        raise ConfigError(
            f"the session key has {counted(len(key), 'byte')}, expected at least"
            f" {_MIN_SESSION_KEY}; 'openssl rand -hex 32' makes one"
        )
    return key


def _read(path: str) -> bytes:
    """Returns what a file of keys holds, and warns where every user can read it."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                say(f"WARNING: every user of this machine can read {path}; run: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror or error})") from None
