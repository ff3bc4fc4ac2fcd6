"""The arguments of a verb, from which `--help` and docs/cli.md are made.

Those of `fastlstm train` are the fields of `TrainConfig`, with the sentences of its docstring.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HELP_WIDTH = 80
_FLAG_COLUMN = 26
_TEXT_VALUES = {
    "out": "RUN", "config": "FILE", "cache_dir": "DIR", "budget": "TIME", "split": "A/B/C",
    "valid": "FILE", "test": "FILE",
}  # fmt: skip


@dataclass(frozen=True)
class Option:
    """One flag.

    Attributes:
        name: with underscores; the flag is the same with dashes.
        type: annotation of the value, such as ``int | None``.
        default: value when the flag is absent; None is not shown.
        help: one sentence without the default.
        group: heading it is listed under.
        is_repeatable: may be given several times; the value is a list.
        is_list: may be given several times; the values are joined by commas.
        is_switch: takes no value; present means true.
        value: name of the value in help; by default it depends on the type.
    """

    name: str
    type: Any
    default: Any
    help: str
    group: str = "options"
    is_repeatable: bool = False
    is_list: bool = False
    is_switch: bool = False
    value: str = ""

    @property
    def flag(self) -> str:
        """The flag as typed: ``--rnn-size``."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        """True for on/off options, which also have a ``--no-`` form unless they are switches."""
        return self.type is bool

    @property
    def usage(self) -> str:
        """The flag with its value: ``--rnn-size N``, ``--[no-]layer-norm``."""
        if self.is_switch:
            return self.flag
        return f"--[no-]{self.flag[2:]}" if self.is_bool else f"{self.flag} {value_name(self)}"

    @property
    def described(self) -> str:
        """The sentence with the default behind it."""
        text = self.help + ("; may be repeated" if self.is_repeatable else "")
        if self.is_switch or self.default is None or self.default in ("", [], ()):
            return text
        shown = {True: "on", False: "off"}[self.default] if self.is_bool else self.default
        return f"{text} [{shown}]"


@dataclass(frozen=True)
class Positional:
    """One argument without a flag; `is_many` takes one or more, `is_optional` none or one."""

    name: str
    help: str
    is_many: bool = False
    is_optional: bool = False

    @property
    def usage(self) -> str:
        """The argument as usage lines show it: ``SOURCE [SOURCE ...]``."""
        if self.is_many:
            return f"{self.name} [{self.name} ...]"
        return f"[{self.name}]" if self.is_optional else self.name


@dataclass(frozen=True)
class Command:
    """A verb: its name, its purpose, its arguments.

    Attributes:
        verb: word after `fastlstm`.
        summary: one sentence.
        positionals: arguments without a flag, in order.
        options: flags, in the order help lists them.
        required: names of required options, shown in the usage line.
        examples: complete command lines.
        other: last line of the help text, about another use of the verb.
        subject: what it is about, where a verb has several commands; shown in docs/cli.md.
    """

    verb: str
    summary: str
    positionals: tuple[Positional, ...]
    options: tuple[Option, ...]
    required: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    other: str = ""
    subject: str = ""

    @property
    def usage(self) -> str:
        """One line: ``fastlstm train SOURCE [SOURCE ...] --out RUN [options]``."""
        parts = ["fastlstm", self.verb, *(argument.usage for argument in self.positionals)]
        parts += [option.usage for option in self.options if option.name in self.required]
        return " ".join([*parts, "[options]"])

    def groups(self) -> list[tuple[str, list[Option]]]:
        """Options by heading, headings in order of first appearance."""
        groups: dict[str, list[Option]] = {}
        for option in self.options:
            groups.setdefault(option.group, []).append(option)
        return list(groups.items())


def unwrap_optional(annotation: Any) -> Any:
    """Returns ``int`` for ``int | None``, the first part of any union; else the annotation."""
    if get_origin(annotation) in (Union, UnionType):
        return next(part for part in get_args(annotation) if part is not NoneType)
    return annotation


def value_name(option: Option) -> str:
    """Returns the placeholder for a value: ``N``, ``X``, ``TEXT`` or ``{char,byte,bpe}``."""
    kind = unwrap_optional(option.type)
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    by_type = {int: "N", float: "X", str: _TEXT_VALUES.get(option.name, "TEXT")}
    return option.value or by_type.get(kind, "")


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


def options_from_dataclass(cls: type, groups: Mapping[str, Sequence[str]]) -> tuple[Option, ...]:
    """Returns one Option per field, ordered by `groups` (heading -> field names).

    Raises:
        KeyError: a field without a sentence or without a group.
    """
    hints = get_type_hints(cls)
    sentences = attribute_help(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    grouped = [(heading, name) for heading, names in groups.items() for name in names]
    missing = set(fields) ^ {name for _, name in grouped}
    if missing:
        raise KeyError(f"{cls.__name__} and its help groups differ in {sorted(missing)}")
    return tuple(
        Option(name, hints[name], fields[name].default, sentences[name].rstrip("."), heading)
        for heading, name in grouped
    )


def help_text(command: Command) -> str:
    """Returns what ``fastlstm VERB --help`` prints, at most 80 columns wide."""
    lines = textwrap.wrap(
        "usage: " + command.usage, HELP_WIDTH - 1, subsequent_indent=" " * 7, break_on_hyphens=False
    )
    lines += ["", command.summary, ""]
    for argument in command.positionals:
        lines += _entry(argument.name, argument.help)
    for heading, options in command.groups():
        lines += ["", f"{heading}:"]
        for option in options:
            lines += _entry(option.usage, option.described)
    lines += _entry("--help", "show this text")
    if command.examples:
        lines += ["", "examples:", *(f"  {example}" for example in command.examples)]
    lines += ["", command.other] if command.other else []
    return "\n".join(lines) + "\n"


def _entry(left: str, text: str) -> list[str]:
    # A percent sign stays with its number.
    tied = text.replace(" %", "\0%")
    wrapped = textwrap.wrap(tied, HELP_WIDTH - 1 - _FLAG_COLUMN, break_on_hyphens=False)
    body = [line.replace("\0", " ") for line in wrapped] or [""]
    head = f"  {left}"
    fits = len(head) <= _FLAG_COLUMN - 2
    lines = [head.ljust(_FLAG_COLUMN) + body.pop(0)] if fits else [head]
    return lines + [" " * _FLAG_COLUMN + line for line in body]
