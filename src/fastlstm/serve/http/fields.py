"""Fields of a JSON request: each is stated once, parses itself and describes itself in OpenAPI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastlstm.errors import nearest_hint
from fastlstm.serve.http.errors import ApiError, shown, value_name

Schema = dict[str, Any]
Fields = Mapping[str, "Field"]


def bad_field(name: str, message: str) -> ApiError:
    """Returns the error of a wrong field."""
    return ApiError(400, message, name)


class Field:
    """One field of a request.

    Attributes:
        description: for the OpenAPI document; may be empty.
    """

    description: str = ""

    def parse(self, name: str, value: Any) -> Any:
        """Returns the checked value.

        Raises:
            ApiError: 400, names the field, what came and what was expected.
        """
        raise NotImplementedError

    def schema(self) -> Schema:
        """Returns the JSON schema of a value that `parse` takes."""
        raise NotImplementedError

    def described(self, *, is_nullable: bool = True) -> Schema:
        """Returns the schema with the description; null stands for a field left out."""
        schema = self.schema()
        if is_nullable:
            schema = or_null(*schema.get("anyOf", [schema]))
        return {**schema, "description": self.description} if self.description else schema


@dataclass(frozen=True)
class Integer(Field):
    """A whole number; 3.0 is one, too.

    Attributes:
        low: least value.
        high: largest value.
        unit: for the error.
    """

    low: int
    high: int
    unit: str = ""
    description: str = ""

    def parse(self, name: str, value: Any) -> int:
        """Returns the number."""
        number = whole_number(value)
        if number is None or not self.low <= number <= self.high:
            raise bad_field(
                name,
                f"{name} is {value_name(value)}, expected a whole number{self.unit}, {self.low} to"
                f" {self.high}",
            )
        return number

    def schema(self) -> Schema:
        """Returns the JSON schema."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Number(Field):
    """A number.

    Attributes:
        low: least value.
        high: largest value.
        expected: the bounds in words, for the error; by default both.
    """

    low: float
    high: float
    expected: str = ""

    def parse(self, name: str, value: Any) -> float:
        """Returns the number."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:  # never so of NaN
            expected = self.expected or f"{self.low:g} to {self.high:g}"
            raise bad_field(name, f"{name} is {value_name(value)}, expected a number, {expected}")
        return float(value)

    def schema(self) -> Schema:
        """Returns the JSON schema."""
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Flag(Field):
    """True or false."""

    def parse(self, name: str, value: Any) -> bool:
        """Returns the flag."""
        if not isinstance(value, bool):
            raise bad_field(name, f"{name} is {value_name(value)}, expected true or false")
        return value

    def schema(self) -> Schema:
        """Returns the JSON schema."""
        return {"type": "boolean"}


@dataclass(frozen=True)
class Text(Field):
    """A string that is valid Unicode.

    Attributes:
        max_length: in characters.
    """

    max_length: int
    description: str = ""

    def parse(self, name: str, value: Any) -> str:
        """Returns the string."""
        if not isinstance(value, str):
            raise bad_field(name, f"{name} is {value_name(value)}, expected a string")
        if len(value) > self.max_length:
            raise bad_field(
                name, f"{name} has {len(value)} characters, expected at most {self.max_length}"
            )
        return valid_text(name, value)

    def schema(self) -> Schema:
        """Returns the JSON schema."""
        return {"type": "string", "maxLength": self.max_length}


@dataclass(frozen=True)
class Object(Field):
    """An object of known fields.

    Attributes:
        fields: by name; null is no value of theirs.
    """

    fields: Fields
    description: str = ""

    def parse(self, name: str, value: Any) -> dict[str, Any]:
        """Returns the values of the fields that are there."""
        if not isinstance(value, dict):
            raise bad_field(name, f"{name} is {value_name(value)}, expected an object")
        check_names(value, self.fields, of=name)
        return {key: self.fields[key].parse(key, found) for key, found in value.items()}

    def schema(self) -> Schema:
        """Returns the JSON schema."""
        return object_schema(self.fields, is_nullable=False)


def parse_fields(values: Mapping[str, Any], fields: Fields, kind: str = "field") -> dict[str, Any]:
    """Returns the values that are given, checked; null counts as not given.

    Raises:
        ApiError: 400, an unknown name or a wrong value.
    """
    check_names(values, fields, kind)
    return {
        name: fields[name].parse(name, value) for name, value in values.items() if value is not None
    }


def object_schema(
    fields: Fields, *, required: tuple[str, ...] = (), is_nullable: bool = True
) -> Schema:
    """Returns the JSON schema of an object of these fields and no others."""
    properties = {
        name: field.described(is_nullable=is_nullable and name not in required)
        for name, field in fields.items()
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(required)} if required else schema


def or_null(*schemas: Schema) -> Schema:
    """Returns the schema of one of several, or null."""
    return {"anyOf": [*schemas, {"type": "null"}]}


def check_names(
    names: Iterable[str], known: Iterable[str], kind: str = "field", of: str = ""
) -> None:
    """Refuses unknown names: what they ask for would be left out silently.

    Raises:
        ApiError: 400, names the nearest.
    """
    known = tuple(known)
    for name in names:
        if name not in known:
            where, hint = f" of {of}" if of else "", nearest_hint(name[:64], known)
            message = f"unknown {kind} '{shown(name)}'{where}{hint}; leave it out"
            raise bad_field(of or name[:64], message)


def whole_number(value: Any) -> int | None:
    """Returns a whole number of JSON, where 3.0 is one and true is none; else None."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def valid_text(name: str, text: str) -> str:
    """Returns a text.

    Raises:
        ApiError: 400, it has half a surrogate pair.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise bad_field(
            name, f"{name} has half a surrogate pair at character {error.start}; send whole ones"
        ) from None
    return text
