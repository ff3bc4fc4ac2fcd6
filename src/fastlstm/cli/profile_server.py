"""`fastlstm profile http://HOST:PORT`: where the time of a server's requests goes."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.inputs import require_run
from fastlstm.cli.options import json_option
from fastlstm.cli.output import print_result, say
from fastlstm.cli.parser import parse
from fastlstm.errors import EXIT_OK, ConfigError, FastLSTMError, UsageError
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.serve.settings import Settings
from fastlstm.system import environment
from fastlstm.system.fields import parse_duration

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fastlstm.report.lines import Row
    from fastlstm.text.stored_model import StoredModel
    from fastlstm.tuning.server_profile import ServerProfile
    from fastlstm.tuning.verdicts import Verdict

_MAX_CLIENTS = 512
_VARIANTS_S = 10.0
_MAX_KEYS = 1 << 20
"""Characters read of a file of API keys, which may be a device without end."""
COMMAND = Command(
    verb="profile",
    summary="Show where a server spends the time of requests, and what each option gains.",
    positionals=(Positional("URL", "a running fastlstm serve, such as http://127.0.0.1:8000"),),
    options=(
        Option("measure", str, "15s", "time to watch the server", value="TIME"),
        Option("load", int, 0, "send requests for so many texts at a time; this machine only"),
        Option("run", str, None, "run that is served (default: its name, here or in runs/)"),
        Option("api_key_file", str, None, "a file with an API key (default: FASTLSTM_API_KEY)"),
        json_option("one JSON object"),
    ),
    examples=(
        "fastlstm profile http://127.0.0.1:8000",
        "fastlstm profile http://127.0.0.1:8000 --load 16 --run runs/book",
    ),
    subject="server",
)


def is_url(text: str) -> bool:
    """Whether a word of the command line is a server's address."""
    return text.lower().startswith(("http://", "https://"))


def run(argv: list[str]) -> int:
    """Prints the profile; returns 0."""
    parsed = parse(COMMAND, argv)
    seconds, num_clients = parse_duration(parsed["measure"], "measure"), parsed["load"]
    if not 0 <= num_clients <= _MAX_CLIENTS:
        raise ConfigError(f"--load is {num_clients}, expected 0 to {_MAX_CLIENTS}")
    if parsed["run"] is not None:
        require_run(parsed["run"], "text")
    key = _api_key(parsed["api_key_file"])

    from fastlstm.tuning.server_metrics import ServerClient
    from fastlstm.tuning.server_profile import profile_server, watch_server

    server = ServerClient(parsed.positionals[0], key)
    times, answers = watch_server(server, seconds, num_clients)
    path, model = _served_run(times.model, parsed["run"])
    profile = profile_server(times, model, min(seconds, _VARIANTS_S), answers)
    commands = {
        v.cause: _command(server.host, server.port, path, times.model, v)
        for v in profile.verdicts
        if v.options and v.gain > 0 and v.cause != "sampler"
    }
    verdicts = [{**v.to_dict(), "command": commands.get(v.cause)} for v in profile.verdicts]
    facts = {**profile.to_dict(), "url": server.url, "verdicts": verdicts}
    print_result(facts, rows(profile, commands, has_key=bool(key)), parsed["json"])
    return EXIT_OK


def _api_key(path: str | None) -> str:
    if path is None:
        return environment.api_key()
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file.read(_MAX_KEYS).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a file with a key") from None
    if not lines:
        raise ConfigError(f"{path} has no key, expected one per line")
    return lines[0]


def _served_run(about: Mapping[str, str], given: str | None) -> tuple[str, StoredModel | None]:
    """Returns the run that is served and its model; None where it is not on this machine.

    Raises:
        UsageError: the run that was given is another model.
        FastLSTMError: it cannot be read.
    """
    from fastlstm.text.decoder import make_decoder
    from fastlstm.text.stored_model import load_stored_model

    name = about["name"]
    places = [given] if given is not None else [os.path.join("runs", name), name]
    for path in places:
        if kind_of_run(path) != "text":
            continue
        try:
            model = load_stored_model(path)
            decoder = make_decoder(model.weights, model.model_config, about["weights"])
        except FastLSTMError:
            if given is not None:
                raise
            continue
        if decoder.model_hash.startswith(about["hash"]):
            return path, model
        if given is not None:
            raise UsageError(f"{path} is not the model that the server has; name the run of it")
    say(f"note: the run '{name}' is not here, so nothing is timed beside it; name it with --run")
    return os.path.join("runs", name), None


def _command(
    host: str, port: int, path: str | Path, about: Mapping[str, str], verdict: Verdict
) -> str:
    """Returns the command that starts the server with another option."""
    defaults, options = Settings(), dict[str, Any](host=host, port=port)
    for name in ("weights", "threads", "max_streams", "max_queue"):
        options[name] = verdict.options.get(name, about[name])
    if host == "localhost":
        del options["host"]
    words = ["fastlstm", "serve", str(path)]
    for name, value in options.items():
        if str(value) != str(getattr(defaults, name)):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def rows(profile: ServerProfile, commands: Mapping[str, str], *, has_key: bool) -> list[Row]:
    """Returns the lines of the result."""
    from fastlstm.cli.profile_rows import gain_text

    times = profile.times
    speed = f"{times.tokens_per_s:,.0f} tokens/s, {times.requests_per_s:.3g} requests/s"
    found: list[Row] = [
        ("speed", f"{speed}, {times.num_texts:.1f} texts under way"),
        ("a text", _shares_text(times.texts)),
        ("engine", _shares_text(times.engine)),
        ("event loop", _shares_text(times.http)),
    ]
    for place, verdict in enumerate(profile.recommended):
        gain = gain_text(verdict).replace(" speed", " speed of a text", 1)
        found.append((f"{place + 1}. {verdict.cause}", f"{gain}; {verdict.effect}"))
        found.append(("", verdict.evidence))
        if verdict.cause in commands:
            found.append(("", commands[verdict.cause]))
    for verdict in profile.verdicts:
        if not verdict.is_recommended and verdict.cause in ("http", "idle", "queue"):
            share = f"{100 * verdict.share:.0f} %"
            found.append((verdict.cause, f"{share}; {verdict.evidence}"))
            if verdict.cause in commands:
                found.append(("", commands[verdict.cause]))
    if not profile.recommended:
        found.append(("verdict", "nothing above 5 %"))
    elif has_key:
        found.append(("note", "add the API keys that the server was started with"))
    if refused := sum(n for status, n in profile.answers.items() if status != 200):
        found.append(("refused", f"{refused:,} of {sum(profile.answers.values()):,} requests"))
    return found + [("not timed", reason) for reason in profile.not_timed]


def _shares_text(shares: Mapping[str, float]) -> str:
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return " · ".join(f"{name} {100 * share:.0f} %" for name, share in ordered)
