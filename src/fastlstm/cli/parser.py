"""From argv to typed values: every verb is read the same way.

The flags are recognised here, so that an unknown one names its nearest and dashes and underscores
are the same; `jsonargparse` turns the text into the annotated types. YAML files go the same way.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, Option, expected, unwrap_optional
from fastlstm.errors import ConfigError, UsageError, nearest_hint
from fastlstm.report.terminal import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Parsed:
    """What a command line said.

    Attributes:
        positionals: arguments without a flag.
        values: only what was given, by option name, in the annotated type.
    """

    positionals: list[str]
    values: dict[str, Any]

    def get(self, command: Command, name: str) -> Any:
        """Returns the value given, else the option's default."""
        if name in self.values:
            return self.values[name]
        return next(option.default for option in command.options if option.name == name)


class HelpRequested(Exception):
    """``--help`` or ``-h`` stood on the command line; `given` stood before it."""

    def __init__(self, given: list[tuple[Option, str]]) -> None:
        super().__init__()
        self.given = given


def parse(command: Command, argv: Sequence[str]) -> Parsed:
    """Reads the arguments of one verb.

    Raises:
        HelpRequested: help was asked for.
        UsageError: an unknown flag, a missing or superfluous argument, a value of the wrong type.
    """
    positionals, given = split_arguments(command.verb, command.options, argv)
    _check_positionals(command, positionals)
    for name in command.required:
        if not any(option.name == name and value for option, value in given):
            option = next(option for option in command.options if option.name == name)
            raise UsageError(f"{option.flag} is missing; usage: {command.usage}")
    return Parsed(positionals, typed_values([option for option, _ in given], given))


def typed_values(options: Sequence[Option], given: Sequence[tuple[Option, str]]) -> dict[str, Any]:
    """Converts text by annotation; a value that does not fit is a UsageError naming the flag."""
    tokens = [f"{option.flag}={text}" for option, text in given]
    try:
        namespace = _typed_parser(options).parse_args(tokens, defaults=False)
    except argparse.ArgumentError as error:
        raise UsageError(_type_message(error, given)) from None
    return {option.name: getattr(namespace, option.name) for option, _ in given}


def typed_object(options: Sequence[Option], values: dict[str, Any], origin: str) -> dict[str, Any]:
    """Checks values that a file gave by annotation.

    Raises:
        ConfigError: a value of the wrong type; `origin` and the key are named.
    """
    by_name = {option.name: option for option in options}
    ready = {name: _as_text_field(by_name[name], value) for name, value in values.items()}
    checked: dict[str, Any] = {}
    for name, value in ready.items():
        option = by_name[name]
        try:
            namespace = _typed_parser([option]).parse_object({name: value}, defaults=False)
        except argparse.ArgumentError:
            raise ConfigError(
                f"{origin}: '{name}' is {value!r}, expected {expected(option.type)}"
            ) from None
        checked[name] = getattr(namespace, name)
    return checked


def _as_text_field(option: Option, value: Any) -> Any:
    """YAML reads ``budget: 300`` as a number; a text option takes it as the text 300.

    A list of names is a text with commas.
    """
    if isinstance(value, list) and unwrap_optional(option.type) is str:
        return ",".join(map(str, value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number and unwrap_optional(option.type) is str else value


def _typed_parser(options: Sequence[Option]) -> Any:
    # 0.12 s; --help does without it.
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="fastlstm", exit_on_error=False, default_env=False, add_help=False)
    for option in {option.name: option for option in options}.values():
        more: dict[str, Any] = {"action": "append"} if option.is_repeatable else {}
        parser.add_argument(option.flag, type=option.type, default=option.default, **more)
    return parser


def _type_message(error: argparse.ArgumentError, given: Sequence[tuple[Option, str]]) -> str:
    match = re.search(r'key "(\w+)"', str(error))
    for option, text in reversed(given):
        if match is not None and option.name == match[1]:
            return f"{option.flag} is {text!r}, expected {expected(option.type)}"
    return one_line(str(error))


def split_arguments(
    verb: str, options: Sequence[Option], argv: Sequence[str]
) -> tuple[list[str], list[tuple[Option, str]]]:
    """Returns the arguments without a flag, and the options with their values as text.

    Raises:
        HelpRequested: help was asked for.
        UsageError: an unknown flag, or one with a value too many or too few.
    """
    by_flag = _flags(options)
    positionals: list[str] = []
    given: list[tuple[Option, str]] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--":
            positionals += rest
            break
        if token in ("-h", "--help"):
            raise HelpRequested(given)
        if not token.startswith("-") or token == "-":
            positionals.append(token)
            continue
        flag, has_value, value = token.partition("=")
        flag = flag.replace("_", "-")
        if flag not in by_flag:
            hint = nearest_hint(flag, [*by_flag, "--help"])
            raise UsageError(f"unknown flag '{flag}'{hint}; see fastlstm {verb} --help")
        option, fixed = by_flag[flag]
        if has_value and (option.is_switch or fixed == "false"):
            raise UsageError(f"{flag} takes no value, got {value!r}")
        if not has_value:
            value = fixed if fixed is not None else _next_value(flag, rest, by_flag)
        given.append((option, value))
    return positionals, given


def _flags(options: Sequence[Option]) -> dict[str, tuple[Option, str | None]]:
    """Flag -> (option, value it stands for when none is written)."""
    found: dict[str, tuple[Option, str | None]] = {}
    for option in options:
        found[option.flag] = (option, "true" if option.is_bool else None)
        if option.is_bool and not option.is_switch:
            found["--no-" + option.flag[2:]] = (option, "false")
    return found


def _next_value(flag: str, rest: list[str], flags: dict[str, Any]) -> str:
    if not rest or rest[0].partition("=")[0].replace("_", "-") in flags:
        option = flags[flag][0]
        raise UsageError(f"{flag} needs a value: {option.usage}")
    return rest.pop(0)


def _check_positionals(command: Command, given: list[str]) -> None:
    needed = [argument for argument in command.positionals if not argument.is_optional]
    if len(given) < len(needed):
        argument = needed[len(given)]
        raise UsageError(f"{argument.name} is missing: {argument.help}; usage: {command.usage}")
    if not any(a.is_many for a in command.positionals) and len(given) > len(command.positionals):
        extra = given[len(command.positionals)]
        raise UsageError(f"unexpected argument {extra!r}; usage: {command.usage}")
