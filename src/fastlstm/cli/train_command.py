"""The command of `fastlstm train` that does what another verb measured."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli.parser import split_arguments, typed

if TYPE_CHECKING:
    from fastlstm.cli.command import Command

_FOLDERS = {"train": "runs", "tune": "tuning"}


def train_words(
    command: Command, own: Collection[str], argv: list[str], options: Mapping[str, Any]
) -> list[str]:
    """Returns the words of `fastlstm train` for a command line of another verb, without --out.

    Args:
        command: the other verb.
        own: names of its options that train has not.
        argv: words behind the verb.
        options: to set instead of what argv says.
    """
    arguments = split_arguments(command.options, argv)
    # A name that begins with a dash would be a flag; "-" is standard input.
    words = [f"./{w}" if w.startswith("-") and w != "-" else w for w in arguments.positionals]
    for option, value in arguments.options:
        if option.name in (*own, "out", *options):
            continue
        if option.is_bool:
            words.append(option.flag if typed(value, bool) else f"--no-{option.flag[2:]}")
        else:
            words += [option.flag, value]
    for name, value in options.items():
        words += [
            f"--{name.replace('_', '-')}",
            f"{value:g}" if type(value) is float else f"{value}",
        ]
    return words


def train_command(
    command: Command, own: Collection[str], argv: list[str], options: Mapping[str, Any],
    verb: str = "train", taken: Collection[str] = (),
) -> str:  # fmt: skip
    """Returns the command that trains, or tunes, with other options.

    Its directory does not exist yet, and none of the commands in `taken` makes it.
    """
    arguments = split_arguments(command.options, argv)
    names = {"out"} - set(own)
    given = [value for option, value in arguments.options if option.name in names]
    name = Path(arguments.positionals[0]).name.split(".")[0] or "run"
    first = given[-1] if given else f"{_FOLDERS[verb]}/{name}"
    places = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    others = {shlex.split(text)[-1] for text in taken}
    out = next(place for place in places if not (os.path.exists(place) or place in others))
    return shlex.join(["fastlstm", verb, *train_words(command, own, argv, options), "--out", out])
