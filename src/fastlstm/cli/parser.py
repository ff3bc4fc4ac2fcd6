"""From argv to typed values: every verb is read the same way.

Dashes and underscores in flags are the same, and an unknown flag names the nearest known one.
Values of YAML files are converted by the same function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin

from fastlstm.cli.command import Command, Option, expected, unwrap_optional
from fastlstm.errors import UsageError, nearest_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Parsed:
    """The values of a command line.

    Attributes:
        command: what was parsed for.
        positionals: arguments without a flag.
        values: by name of the options that were set, each in the type of its annotation.
    """

    command: Command
    positionals: list[str]
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """The value, or the default of the option."""
        if name in self.values:
            return self.values[name]
        return next(option.default for option in self.command.options if option.name == name)


@dataclass
class Arguments:
    """A command line split into its parts, values still as text.

    Attributes:
        positionals: arguments without a flag.
        options: with their values; that of a switch is "true" or "false".
        unknown: flags that no option has.
        is_help: ``--help`` was among them; what follows it is not read.
    """

    positionals: list[str] = field(default_factory=list)
    options: list[tuple[Option, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    is_help: bool = False


class HelpRequested(Exception):
    """``--help`` or ``-h`` was used; `command` is the one to describe."""

    def __init__(self, command: Command) -> None:
        super().__init__()
        self.command = command


class UnknownFlagError(UsageError):
    """A flag that the command does not have; `flag` is its normal form."""

    def __init__(self, command: Command, flag: str) -> None:
        hint = nearest_hint(flag, [*_flags(command.options), "--help"])
        super().__init__(f"unknown flag '{flag}'{hint}")
        self.flag = flag


def parse(command: Command, argv: Sequence[str]) -> Parsed:
    """Reads the arguments of one verb.

    Raises:
        HelpRequested: help was asked for.
        UsageError: an unknown flag, a missing or superfluous argument, a value of the wrong type.
    """
    arguments = split_arguments(command.options, argv)
    if arguments.is_help:
        raise HelpRequested(command)
    for flag in arguments.unknown:
        raise UnknownFlagError(command, flag)
    _check_positionals(command, arguments.positionals)
    present = {option.name for option, value in arguments.options if value}
    for option in command.options:
        if option.name in command.required and option.name not in present:
            raise UsageError(f"{option.flag} is missing; usage: {command.usage}")
    values: dict[str, Any] = {}
    for option, text in arguments.options:
        try:
            value = typed(text, option.type)
        except ValueError:
            raise UsageError(
                f"{option.flag} is {text!r}, expected {expected(option.type)}"
            ) from None
        if option.is_repeatable:
            value = [*values.get(option.name, ()), value]
        elif option.is_list and values.get(option.name) and value:
            value = f"{values[option.name]},{value}"
        values[option.name] = value
    return Parsed(command, arguments.positionals, values)


def typed(value: Any, annotation: Any) -> Any:
    """Returns a value in the type of an annotation.

    Args:
        value: a text of the command line, or what YAML made of one.
        annotation: int, float, bool, str, or a Literal of texts, each perhaps ``| None``; a float
            may be ``| tuple[float, float]``: two numbers with a comma.

    Raises:
        ValueError: the value is none of that type.
    """
    kind = unwrap_optional(annotation)
    if value in (None, "null") and NoneType in get_args(annotation):
        return None
    if kind is str:
        if isinstance(value, list):  # names in YAML
            return ",".join(map(str, value))
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(value)
        return str(value)
    text = str(value)
    if kind is int:
        return int(text)
    if kind is float:
        limit = 2 if any(get_origin(part) is tuple for part in get_args(annotation)) else 1
        parts = value if isinstance(value, list) else text.split(",")
        numbers = tuple(float(str(part)) for part in parts)
        if not all(map(math.isfinite, numbers)) or not 1 <= len(numbers) <= limit:
            raise ValueError(value)
        return numbers if len(numbers) > 1 else numbers[0]
    choices = _BOOLS if kind is bool else {choice: choice for choice in get_args(kind)}
    key = text.lower() if kind is bool else text
    if key not in choices:
        raise ValueError(value)
    return choices[key]


def split_arguments(options: Sequence[Option], argv: Sequence[str]) -> Arguments:
    """Splits a command line into positionals and options.

    Raises:
        UsageError: a flag with a value it does not take, or without one it needs.
    """
    by_flag = _flags(options)
    arguments = Arguments()
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--":
            arguments.positionals += rest
            break
        if token in ("-h", "--help"):
            arguments.is_help = True
            break
        if not token.startswith("-") or token == "-":
            arguments.positionals.append(token)
            continue
        flag, has_value, value = token.partition("=")
        flag = flag.replace("_", "-")
        if flag not in by_flag:
            arguments.unknown.append(flag)
            continue
        option, fixed = by_flag[flag]
        if has_value and fixed == "false":
            raise UsageError(f"{flag} takes no value, got {value!r}")
        if not has_value:
            value = fixed if fixed is not None else _next_value(option, rest, by_flag)
        arguments.options.append((option, value))
    return arguments


def _flags(options: Sequence[Option]) -> dict[str, tuple[Option, str | None]]:
    """Flag -> (option, value it stands for when none is written)."""
    flags: dict[str, tuple[Option, str | None]] = {}
    for option in options:
        flags[option.flag] = (option, "true" if option.is_bool else None)
        if option.is_bool and not option.is_switch:
            flags["--no-" + option.flag[2:]] = (option, "false")
    return flags


def _next_value(option: Option, rest: list[str], flags: dict[str, Any]) -> str:
    if not rest or rest[0].partition("=")[0].replace("_", "-") in flags:
        raise UsageError(f"{option.flag} needs a value: {option.usage}")
    return rest.pop(0)


def _check_positionals(command: Command, values: list[str]) -> None:
    known = command.positionals
    needed = [argument for argument in known if not argument.is_optional]
    if len(values) < len(needed):
        argument = needed[len(values)]
        raise UsageError(f"{argument.name} is missing: {argument.help}; usage: {command.usage}")
    if not any(argument.is_many for argument in known) and len(values) > len(known):
        extra = values[len(known)]
        raise UsageError(f"unexpected argument {extra!r}; usage: {command.usage}")
