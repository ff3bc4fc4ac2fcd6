"""`fastlstm profile RUN --generation`: what holds the writing of text back."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.generate import SAMPLING_OPTIONS, WEIGHTS_OPTION
from fastlstm.cli.inputs import require_run
from fastlstm.cli.options import given_options, json_option
from fastlstm.cli.output import print_result, say
from fastlstm.cli.parser import parse
from fastlstm.cli.train_command import train_words
from fastlstm.errors import EXIT_OK, CommandError
from fastlstm.system.fields import parse_duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastlstm.report.lines import Row
    from fastlstm.tuning.generation_profile import GenerationProfile
    from fastlstm.tuning.verdicts import Verdict

_OWN = ("generation", "measure", "no_verify", "json")
_VERIFY_S, _LIMIT_S = 1.0, 120.0
COMMAND = Command(
    verb="profile",
    summary="Find the bottlenecks of writing text and measure what removing each gains.",
    positionals=(Positional("RUN", "a run directory or one of its checkpoints"),),
    options=(
        Option("generation", bool, False, "profile the writing of text", is_switch=True),
        Option("measure", str, "15s", "time for all measurements", value="TIME"),
        Option("no_verify", bool, False, "do not run the first recommendation", is_switch=True),
        json_option("one JSON object"),
        Option("prompt", str, "", "text to continue"),
        *SAMPLING_OPTIONS,
        WEIGHTS_OPTION,
    ),
    examples=("fastlstm profile runs/book --generation",),
    subject="generation",
)


def run(argv: list[str]) -> int:
    """Prints the profile; returns 0."""
    parsed = parse(COMMAND, argv)
    seconds = parse_duration(parsed["measure"], "measure")
    settings = given_options(parsed, SAMPLING_OPTIONS)
    if "stop" in settings:
        settings["stop"] = tuple(settings["stop"])
    path = parsed.positionals[0]
    require_run(path, "text")

    from fastlstm.text.sampling import known_settings, sampling_of
    from fastlstm.text.stored_model import load_stored_model
    from fastlstm.tuning.generation_profile import profile_generation
    from fastlstm.tuning.generation_variants import as_stored

    model = load_stored_model(path)
    if model.note:
        say(f"note: {model.note}")
    sampling = sampling_of(known_settings(model.generation), settings)
    base = as_stored(model, parsed["weights"], sampling, parsed["prompt"])
    profile = profile_generation(base, seconds)
    commands = {v.cause: _command(argv, path, v) for v in profile.recommended}
    verified = None
    first = next(iter(profile.recommended), None)
    if not parsed["no_verify"] and first is not None and "streams" not in first.options:
        length = max(1, round(_VERIFY_S * profile.tokens_per_s))
        verified = measured_gain(_words(argv, {}), _words(argv, first.options), length)
    verdicts = [{**v.to_dict(), "command": commands.get(v.cause)} for v in profile.verdicts]
    facts = {**profile.to_dict(), "verdicts": verdicts, "verified_gain": verified}
    print_result(facts, rows(profile, commands, verified), parsed["json"])
    return EXIT_OK


def _words(argv: list[str], options: Mapping[str, Any]) -> list[str]:
    """Returns the words behind `fastlstm generate`."""
    return train_words(COMMAND, _OWN, argv, options)


def _command(argv: list[str], path: str, verdict: Verdict) -> str | None:
    """Returns the command that does what a verdict found, or None where no option does it."""
    options = verdict.options
    if "streams" in options:
        return _batch_command(argv, path, options["streams"])
    if "threads" in options:
        return f"OMP_NUM_THREADS={options['threads']} " + shlex.join(
            ["fastlstm", "generate", *_words(argv, {})]
        )
    return shlex.join(["fastlstm", "generate", *_words(argv, options)])


def _batch_command(argv: list[str], path: str, count: int) -> str:
    """Returns the command that writes `count` texts at once, otherwise as a command line says."""
    parsed = parse(COMMAND, argv)
    weights = "" if parsed["weights"] is None else f", weights={_literal(parsed['weights'])}"
    given = given_options(parsed, SAMPLING_OPTIONS)
    settings = "".join(f", {name}={_literal(value)}" for name, value in given.items())
    prompts = f"[{_literal(parsed['prompt'])}] * {count}"
    load = f"LM.load({_literal(path)}{weights})"
    call = f"{load}.generate_batch({prompts}, max_tokens=500{settings})"
    return shlex.join(["python", "-c", f"from fastlstm import LM; print({call})"])


def _literal(value: object) -> str:
    """Returns a text, a number or a list of texts in Python; the shell has the single quotes."""
    return json.dumps(value, ensure_ascii=False)


def measured_gain(a: Sequence[str], b: Sequence[str], length: int) -> float:
    """Returns how much faster `fastlstm generate` writes with other arguments, by running both in
    the order ABBA.

    Args:
        a: arguments of the first.
        b: arguments of the second.
        length: tokens to write.

    Raises:
        CommandError: one of them failed.
    """
    speeds = [_speed(words, length) for words in (a, b, b, a)]
    return (speeds[1] + speeds[2]) / (speeds[0] + speeds[3]) - 1.0


def _speed(words: Sequence[str], length: int) -> float:
    argv = [sys.executable, "-m", "fastlstm", "generate", *words, f"--length={length}", "--json"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"verifying failed: {error}; leave it out with --no-verify") from None
    events = [json.loads(line) for line in done.stdout.splitlines()] if not done.returncode else []
    ends = [event for event in events if event.get("event") == "end"]
    if not ends or not ends[0]["tokens_per_s"]:
        why = done.stderr.strip().splitlines()[-1:] or ["it wrote nothing"]
        raise CommandError(f"verifying failed: {why[0]}; leave it out with --no-verify")
    return float(ends[0]["tokens_per_s"])


def _other_formats(profile: GenerationProfile, best: Verdict) -> list[str]:
    """Returns what the other formats of the weights gain."""
    others = [v for v in profile.timed if v.cause == "weights" and v.options != best.options]
    return [
        f"{v.options['weights']}: {100 * v.gain:+.0f} %, {v.evidence}"
        for v in others
        if v.is_recommended
    ]


def rows(
    profile: GenerationProfile, commands: Mapping[str, str | None], verified: float | None
) -> list[Row]:
    """Returns the lines of the result."""
    from fastlstm.cli.profile_rows import gain_text, noise_rows

    speed = f"{profile.chars_per_s:,.0f} characters/s"
    if abs(profile.tokens_per_s / profile.chars_per_s - 1.0) > 0.01:
        speed += f", {profile.tokens_per_s:,.0f} tokens/s"
    found: list[Row] = [("speed", f"{speed}, one text"), ("kernels", profile.kernels)]
    if not profile.recommended:
        found.append(("verdict", "nothing above 5 %: this is as fast as it gets here"))
    for place, verdict in enumerate(profile.recommended):
        found.append((f"{place + 1}. {verdict.cause}", f"{gain_text(verdict)}; {verdict.effect}"))
        found.append(("", verdict.evidence))
        if place == 0 and verified is not None:
            found.append(("", f"verified by running it: {100 * verified:+.0f} %"))
        if verdict.cause == "weights":
            found += [("", text) for text in _other_formats(profile, verdict)]
        if (command := commands.get(verdict.cause)) is not None:
            found.append(("", command))
    found += [
        ("sampler", f"{100 * verdict.share:.0f} % of the time")
        for verdict in profile.verdicts
        if verdict.cause == "sampler" and not verdict.is_recommended
    ]
    for one in profile.streams:
        text = f"{one.chars_per_s:,.0f} characters/s, {one.chars_per_s_each:,.0f} each"
        found.append((f"{one.count} at once", text))
    found += [("not timed", reason) for reason in profile.not_timed]
    return found + noise_rows(profile.others)
