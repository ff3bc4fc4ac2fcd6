"""The arguments of a verb: declared, described in `--help` and docs/cli.md, read from argv.

The arguments of `fastlstm train` are the fields of `TrainConfig` with the sentences of its
docstring. Dashes and underscores in flags are equivalent. The error of an unknown flag names the
nearest one.
"""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fastlstm.errors import UsageError, nearest_hint

HELP_WIDTH = 80
MOST_SHOWN = 40
"""A verb with more options describes the common ones and names the rest; `--help-all` describes
all."""
_FLAG_COLUMN, _NAME_COLUMN = 26, 12
_CLAUSE_END = re.compile(r"(?<!e\.g)[.;] ")
_TEXT_VALUES = {
    **{"out": "RUN", "config": "FILE", "cache_dir": "DIR", "budget": "TIME"},
    **{"split": "A/B/C", "valid": "FILE", "test": "FILE"},
}
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Option:
    """One flag.

    Attributes:
        name: with underscores; the flag is the same with dashes.
        help: one sentence without the default.
        type: annotation of the value, such as ``int | None``.
        default: value when the flag is absent; None is not shown.
        group: heading it is listed under.
        value: name of the value in help; by default it depends on the type.
        is_repeatable: may be given several times; the value is a list.
        is_list: may be given several times; the values are joined by commas.
        is_switch: takes no value; present means true.
        is_required: must be given; shown in the usage line.
        is_common: `--help` of a verb with many options describes it.
    """

    name: str
    help: str
    type: Any = str
    default: Any = None
    group: str = "options"
    value: str = ""
    is_repeatable: bool = False
    is_list: bool = False
    is_switch: bool = False
    is_required: bool = False
    is_common: bool = True

    @property
    def flag(self) -> str:
        """The flag as typed: ``--rnn-size``."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        """Whether it is a flag without a value: ``--layer-norm`` or ``--no-layer-norm``."""
        return unwrap_optional(self.type) is bool

    @property
    def usage(self) -> str:
        """The flag with its value: ``--rnn-size N``, ``--[no-]layer-norm``."""
        if self.is_switch:
            return self.flag
        if self.is_bool:
            return f"--[no-]{self.flag[2:]}"
        kind = unwrap_optional(self.type)
        names = {int: "N", float: "X"}
        name = self.value or _TEXT_VALUES.get(self.name, names.get(kind, "TEXT"))
        if get_origin(kind) is Literal:
            name = "{" + ",".join(map(str, get_args(kind))) + "}"
        return f"{self.flag} {name}"

    @property
    def described(self) -> str:
        """The help sentence, then the default."""
        text = self.help + ("; may be repeated" if self.is_repeatable else "")
        if self.is_switch or self.default is None or self.default in ("", [], ()):
            return text
        shown = {True: "on", False: "off"}[self.default] if self.is_bool else self.default
        return f"{text} [{shown}]"


def switch(name: str, text: str, group: str = "options") -> Option:
    """Returns an option without a value."""
    return Option(name, text, bool, False, group, is_switch=True)


@dataclass(frozen=True)
class Positional:
    """One argument without a flag; `is_many` takes one or more."""

    name: str
    help: str
    is_many: bool = False

    @property
    def usage(self) -> str:
        """The argument as usage lines show it: ``SOURCE [SOURCE ...]``."""
        return f"{self.name} [{self.name} ...]" if self.is_many else self.name


@dataclass(frozen=True)
class Command:
    """A verb: its name, its purpose, its arguments.

    Options are in the order of the help text; examples are complete command lines; `other` is the
    last line of the help text, about another use of the verb.
    """

    verb: str
    summary: str
    positionals: tuple[Positional, ...]
    options: tuple[Option, ...]
    examples: tuple[str, ...] = ()
    other: str = ""

    @property
    def usage(self) -> str:
        """One line: ``fastlstm train SOURCE [SOURCE ...] --out RUN [options]``."""
        parts = ["fastlstm", self.verb, *(argument.usage for argument in self.positionals)]
        parts += [option.usage for option in self.options if option.is_required]
        return " ".join([*parts, "[options]"])


def by_group(options: Sequence[Option]) -> dict[str, list[Option]]:
    """Returns options by heading, headings in order of first appearance."""
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault(option.group, []).append(option)
    return groups


def unwrap_optional(annotation: Any) -> Any:
    """Returns ``int`` for ``int | None``, the first part of any union; else the annotation."""
    if get_origin(annotation) in (Union, UnionType):
        return next(part for part in get_args(annotation) if part is not NoneType)
    return annotation


def expected(annotation: Any) -> str:
    """Returns what a value of this annotation looks like, for error text."""
    kind = unwrap_optional(annotation)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")


def attribute_help(cls: type) -> dict[str, str]:
    """Returns the sentences of the ``Attributes:`` sections of a class and its base classes."""
    sentences: dict[str, str] = {}
    for base in reversed(cls.__bases__):
        sentences.update(attribute_help(base))
    doc = textwrap.dedent((cls.__doc__ or "").partition("Attributes:")[2])
    doc = re.split(r"^\w+:$", doc, flags=re.MULTILINE)[0]  # the next section
    name = ""
    for line in doc.splitlines():
        if match := re.fullmatch(r"\s*(\w+): (.+)", line):
            name = match[1]
            sentences[name] = match[2].strip()
        elif name and line.strip():
            sentences[name] += " " + line.strip()
    return sentences


def options_from_dataclass(cls: type, groups: Mapping[str, str]) -> tuple[Option, ...]:
    """Returns one Option per field of a dataclass, with the sentences of its docstring.

    `groups` is heading -> names of fields, in order; names after a ``|`` are not common. Raises
    KeyError: a field without a sentence or without a group.
    """
    hints, sentences = get_type_hints(cls), attribute_help(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    grouped: dict[str, tuple[str, bool]] = {}
    for heading, names in groups.items():
        common, _, others = names.partition("|")
        grouped |= {name: (heading, True) for name in common.split()}
        grouped |= {name: (heading, False) for name in others.split()}
    if missing := set(fields) ^ set(grouped):
        raise KeyError(f"{cls.__name__} and its help groups differ in {sorted(missing)}")
    return tuple(
        Option(
            name, sentences[name].rstrip("."), hints[name], fields[name].default, heading,
            is_common=is_common,
        )
        for name, (heading, is_common) in grouped.items()
    )  # fmt: skip


def help_text(command: Command, shows_all: bool) -> str:
    """Returns what ``fastlstm VERB --help`` or ``--help-all`` prints, at most 80 columns wide."""
    shows_all |= len(command.options) <= MOST_SHOWN
    shown = tuple(option for option in command.options if shows_all or option.is_common)
    lines = textwrap.wrap(
        "usage: " + command.usage, HELP_WIDTH - 1, subsequent_indent=" " * 7, break_on_hyphens=False
    )
    lines += ["", command.summary, ""]
    for argument in command.positionals:
        lines += _entry(argument.name, argument.help)
    hidden = [option for option in command.options if option not in shown]
    if hidden:
        shown = tuple(
            replace(o, help=_CLAUSE_END.split(o.help)[0], group="most used") for o in shown
        )
    for heading, options in by_group(shown).items():
        lines += ["", f"{heading}:"]
        for option in options:
            lines += _entry(option.usage, option.described)
    lines += _entry("--help", "show this text")
    if hidden:
        lines += ["", f"{len(hidden)} more, described by --help-all:"]
        for heading, options in by_group(hidden).items():
            lines += _entry(heading, " ".join(option.flag for option in options), _NAME_COLUMN)
    if command.examples:
        lines += ["", "examples:", *(f"  {example}" for example in command.examples)]
    lines += ["", command.other] if command.other else []
    return "\n".join(lines) + "\n"


def _entry(left: str, text: str, column: int = _FLAG_COLUMN) -> list[str]:
    # A percent sign stays with its number.
    tied = text.replace(" %", "\0%")
    wrapped = textwrap.wrap(tied, HELP_WIDTH - 1 - column, break_on_hyphens=False)
    body = [line.replace("\0", " ") for line in wrapped] or [""]
    head = f"  {left}"
    fits = len(head) <= column - 2
    lines = [head.ljust(column) + body.pop(0)] if fits else [head]
    return lines + [" " * column + line for line in body]


@dataclass(frozen=True)
class Parsed:
    """A command line, read: values of the options that were set, each in its option's type."""

    command: Command
    positionals: list[str]
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """The value, or the default of the option."""
        if name in self.values:
            return self.values[name]
        return next(option.default for option in self.command.options if option.name == name)

    def given(self, options: Sequence[Option]) -> dict[str, Any]:
        names = {option.name for option in options}
        return {name: value for name, value in self.values.items() if name in names}


@dataclass
class Arguments:
    """A command line split into its parts. Values are text; a switch has "true" or "false".

    Nothing after ``--help`` or ``--help-all`` is read; `help` is that word.
    """

    positionals: list[str] = field(default_factory=list)
    options: list[tuple[Option, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    help: str = ""


class HelpRequested(Exception):
    """``--help``, ``-h`` or ``--help-all`` was used; its text is the answer."""


class UnknownFlagError(UsageError):
    """A flag that the command does not have; `flag` is its normal form."""

    def __init__(self, command: Command, flag: str) -> None:
        hint = nearest_hint(flag, [*_flags(command.options), "--help", "--help-all"])
        super().__init__(f"unknown flag '{flag}'{hint}")
        self.flag = flag


def parse(command: Command, argv: Sequence[str]) -> Parsed:
    """Reads the arguments of one verb. Raises HelpRequested; UsageError: an unknown flag, a missing
    or superfluous argument, a value of the wrong type."""
    arguments = split_arguments(command.options, argv)
    if arguments.help:
        raise HelpRequested(help_text(command, arguments.help == "--help-all"))
    for flag in arguments.unknown:
        raise UnknownFlagError(command, flag)
    _check_positionals(command, arguments.positionals)
    present = {option.name for option, value in arguments.options if value}
    for option in command.options:
        if option.is_required and option.name not in present:
            raise UsageError(f"{option.flag} is missing; usage: {command.usage}")
    values: dict[str, Any] = {}
    for option, text in arguments.options:
        try:
            value = typed(text, option.type)
        except ValueError:
            message = f"{option.flag} is {text!r:.60}, expected {expected(option.type)}"
            raise UsageError(message) from None
        if option.is_repeatable:
            value = [*values.get(option.name, ()), value]
        elif option.is_list and values.get(option.name) and value:
            value = f"{values[option.name]},{value}"
        values[option.name] = value
    return Parsed(command, arguments.positionals, values)


def typed(value: Any, annotation: Any) -> Any:
    """Converts a text of the command line, or a value of a YAML file, to the type of an annotation.

    The annotation is int, float, bool, str or a Literal of texts, with or without ``| None``; float
    with ``| tuple[float, float]`` also takes two numbers separated by a comma. Raises ValueError:
    the value does not have that type.
    """
    kind = unwrap_optional(annotation)
    if value in (None, "null") and NoneType in get_args(annotation):
        return None
    if kind is str:
        if isinstance(value, list):  # names in YAML
            return ",".join(map(str, value))
        if isinstance(value, dict) and dict[str, Any] in get_args(annotation):
            return value
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
    """Splits a command line into positionals and options. Raises UsageError: a flag with a value
    that it does not take, or without a value that it needs."""
    by_flag = _flags(options)
    arguments = Arguments()
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--":
            arguments.positionals += rest
            break
        if token in ("-h", "--help", "--help-all"):
            arguments.help = token
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
        if not has_value and fixed is None:
            if not rest or rest[0].partition("=")[0].replace("_", "-") in by_flag:
                raise UsageError(f"{option.flag} needs a value: {option.usage}")
            value = rest.pop(0)
        arguments.options.append((option, value if has_value or fixed is None else fixed))
    return arguments


def _flags(options: Sequence[Option]) -> dict[str, tuple[Option, str | None]]:
    """Flag -> (option, its value if none follows)."""
    flags: dict[str, tuple[Option, str | None]] = {}
    for option in options:
        flags[option.flag] = (option, "true" if option.is_bool else None)
        if option.is_bool and not option.is_switch:
            flags["--no-" + option.flag[2:]] = (option, "false")
    return flags


def _check_positionals(command: Command, values: list[str]) -> None:
    known = command.positionals
    if len(values) < len(known):
        argument = known[len(values)]
        raise UsageError(f"{argument.name} is missing: {argument.help}; usage: {command.usage}")
    if not any(argument.is_many for argument in known) and len(values) > len(known):
        extra = values[len(known)]
        raise UsageError(f"unexpected argument {extra!r}; usage: {command.usage}")
