"""The two commands that `ab` compares: what is run, and whether it is a training run."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from fastlstm.errors import ConfigError, Setting

_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"|\\.", re.DOTALL)
_OPERATORS = re.compile(r"[|&;<>()$`\n]")
_PATTERNS = re.compile(r"[*?\[~]")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_WRAPPERS = ("env", "nice", "taskset", "numactl")
"""Programs that may stand before `fastlstm train` and run what follows them."""
STEP_WORKER = "fastlstm.cli.step_worker"
"""The module that has a training run step on demand."""


@dataclass(frozen=True)
class Command:
    """One of the two commands.

    Attributes:
        name: "A" or "B".
        text: as it was given.
        argv: what is executed: its words, or a shell with the text.
        training: executes the same training run as a worker that steps on demand; None where the
            command is no `fastlstm train`.
    """

    name: str
    text: str
    argv: tuple[str, ...]
    training: tuple[str, ...] | None


def parse_command(name: str, text: str) -> Command:
    """Returns a command of text; only what needs a shell gets one.

    Raises:
        ConfigError: it is empty, a quote is not closed, or its program does not exist.
    """
    option = Setting(name.lower())
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(option, f" is {text!r}: {error}".lower()) from None
    if not words:
        raise ConfigError(option, " is empty, expected a command")
    bare = _QUOTED.sub("", text)
    if _OPERATORS.search(bare):
        return Command(name, text, ("/bin/sh", "-c", text), None)
    if _ASSIGNMENT.match(words[0]):
        words = ["env", *words]
    if words[0] == "fastlstm" and shutil.which("fastlstm") is None:
        words[:1] = [sys.executable, "-m", "fastlstm"]  # the one that runs now
    if shutil.which(words[0]) is None:
        raise ConfigError(option, f": there is no program {words[0]!r}")
    argv = ("/bin/sh", "-c", text) if _PATTERNS.search(bare) else tuple(words)
    return Command(name, text, argv, _training(name, words))


def _training(name: str, words: list[str]) -> tuple[str, ...] | None:
    """Returns the words of a training command as those of a worker; None for any other."""
    for place, word in enumerate(words):
        if place and words[0] not in _WRAPPERS:
            return None
        program, rest = Path(word).name, words[place + 1 :]
        if program == "fastlstm" and rest[:1] == ["train"]:
            interpreter, flags = _interpreter(word), rest[1:]
        elif program.startswith("python") and rest[:3] == ["-m", "fastlstm", "train"]:
            interpreter, flags = word, rest[3:]
        else:
            continue
        if {"-h", "--help"} & set(flags):
            return None
        if "--resume" in flags:
            raise ConfigError(
                f"{name} is a training run with ", Setting("resume", True),
                ": ab measures the steps of a new run; leave it out",
            )  # fmt: skip
        return (*words[:place], interpreter, "-m", STEP_WORKER, *flags)
    return None


def _interpreter(program: str) -> str:
    """Returns the Python that a `fastlstm` script belongs to: the one beside it."""
    script = shutil.which(program)
    beside = None if script is None else Path(script).parent / "python"
    return str(beside) if beside is not None and beside.exists() else sys.executable
