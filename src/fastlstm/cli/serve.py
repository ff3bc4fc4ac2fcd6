"""`fastlstm serve RUN`: text by OpenAI's API, forecasts by the Open Inference Protocol."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from fastlstm.cli.command import Command, Option, Parsed, Positional, options_from_dataclass, parse
from fastlstm.cli.inputs import require_run
from fastlstm.cli.output import say
from fastlstm.errors import EXIT_OK, ConfigError, MissingExtraError, counted
from fastlstm.serve.settings import GROUPS, Settings
from fastlstm.system import environment
from fastlstm.system.redaction import hide

_MIN_SESSION_KEY = 16
_NEW_KEY = "make a key with: openssl rand -hex 32"
_SETTINGS = options_from_dataclass(Settings, GROUPS)
_KEY = "key that clients must send; visible to other users of the machine"
_SESSION_KEY = "a file with the key that signs sessions; they stay valid across restarts"
COMMAND = Command(
    verb="serve",
    summary="Serve a text model (OpenAI's API) or a forecaster (Open Inference Protocol).",
    positionals=(
        Positional("RUN", "a run directory, one of its checkpoints, or a saved Forecaster"),
    ),
    options=(
        *_SETTINGS,
        Option("api_key", _KEY, str, (), "keys", is_repeatable=True),
        Option("api_key_file", "a file with one key per line", group="keys"),
        Option("session_key_file", _SESSION_KEY, group="keys"),
    ),
    examples=(
        "fastlstm serve runs/book",
        "fastlstm serve runs/book --host 0.0.0.0 --api-key-file keys.txt",
    ),
)


def run(argv: list[str]) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit code."""
    parsed = parse(COMMAND, argv)
    settings = Settings(**{option.name: parsed[option.name] for option in _SETTINGS})
    keys, session_key = _api_keys(parsed), _session_key(parsed)
    require_run(parsed.positionals[0], verb="serve")
    _serve_function()(parsed.positionals[0], settings, keys, session_key, say)
    return EXIT_OK


def _serve_function() -> Callable[..., None]:
    try:
        from fastlstm.serve.server import serve
    except ModuleNotFoundError as error:
        if error.name in ("starlette", "uvicorn", "h11", "prometheus_client", "msgspec"):
            raise MissingExtraError(
                f"fastlstm serve needs {error.name}: pip install 'fastlstm[serve]'"
            ) from None
        raise
    return serve


def _api_keys(parsed: Parsed) -> list[str]:
    keys, path = list(parsed["api_key"]), parsed["api_key_file"]
    if path is not None:
        data = _read(path)
        try:
            lines = [key for line in data.decode("utf-8").splitlines() if (key := line.strip())]
        except UnicodeDecodeError as error:
            number = data.count(b"\n", 0, error.start) + 1
            raise ConfigError(f"{path}: line {number} is not UTF-8; {_NEW_KEY}") from None
        if not lines:
            raise ConfigError(f"{path} has no key, expected one per line")
        keys += lines
    if from_environment := environment.value("FASTLSTM_API_KEY"):
        keys.append(from_environment)
    for key in keys:
        if not key or not key.isprintable() or " " in key:
            raise ConfigError("an API key is empty or has blanks; use printable characters only")
    hide(keys)
    return keys


def _session_key(parsed: Parsed) -> bytes | None:
    path, text = parsed["session_key_file"], environment.value("FASTLSTM_SESSION_KEY")
    key = _read(path).strip() if path is not None else os.fsencode(text) if text else None
    if key is not None and len(key) < _MIN_SESSION_KEY:
        length = counted(len(key), "byte")
        raise ConfigError(
            f"the session key has {length}, expected at least {_MIN_SESSION_KEY}; {_NEW_KEY}"
        )
    return key


def _read(path: str) -> bytes:
    """Returns the content of a file of keys; warns if every user can read it."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                say(f"WARNING: every user of this machine can read {path}; run: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror or error})") from None
