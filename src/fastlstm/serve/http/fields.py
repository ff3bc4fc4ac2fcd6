"""Fields of a JSON request: each is stated once, parses itself and describes itself in OpenAPI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastlstm.errors import nearest_hint
from fastlstm.serve.http.errors import ApiError, shown, value_name

Schema = dict[str, Any]
Fields = Mapping[str, "Field"]


class Field:
    """One field of a request.

    `parse` returns a value, checked, or raises ApiError 400, which names the field, what came and
    what was expected. `schema` returns the JSON schema of what `parse` takes.
    """

    description: str = ""

    def parse(self, name: str, value: Any) -> Any:
        raise NotImplementedError

    def schema(self) -> Schema:
        raise NotImplementedError


@dataclass(frozen=True)
class Integer(Field):
    """A whole number, such as 3 or 3.0, from `low` to `high`; the error names the unit."""

    low: int
    high: int
    unit: str = ""
    description: str = ""

    def parse(self, name: str, value: Any) -> int:
        number = whole_number(value)
        if number is None or not self.low <= number <= self.high:
            expected = f"a whole number{self.unit}, {self.low} to {self.high}"
            raise unexpected(name, value, expected)
        return number

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Number(Field):
    """A number from `low` to `high`; `bounds` says so in other words."""

    low: float
    high: float
    bounds: str = ""

    def parse(self, name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:  # never so of NaN
            bounds = self.bounds or f"{self.low:g} to {self.high:g}"
            raise unexpected(name, value, f"a number, {bounds}")
        return float(value)

    def schema(self) -> Schema:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


class Flag(Field):
    """True or false."""

    def parse(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise unexpected(name, value, "true or false")
        return value

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Text(Field):
    """A string of valid Unicode, at most `max_length` characters long."""

    max_length: int
    description: str = ""

    def parse(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise unexpected(name, value, "a string")
        if len(value) > self.max_length:
            message = f"{name} has {len(value)} characters, expected at most {self.max_length}"
            raise ApiError(400, message, name)
        return valid_text(name, value)

    def schema(self) -> Schema:
        return {"type": "string", "maxLength": self.max_length}


@dataclass(frozen=True)
class Object(Field):
    """An object of known fields, each of which may be left out but not null."""

    fields: Fields
    description: str = ""

    def parse(self, name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise unexpected(name, value, "an object")
        check_names(value, self.fields, of=name)
        return {key: self.fields[key].parse(f"{name}.{key}", item) for key, item in value.items()}

    def schema(self) -> Schema:
        return object_schema({key: field.schema() for key, field in self.fields.items()})


def parse_fields(values: Mapping[str, Any], fields: Fields, kind: str = "field") -> dict[str, Any]:
    """Returns the values that came, checked in the order of `fields`; null counts as left out."""
    check_names(values, fields, kind)
    return {
        name: field.parse(name, values[name])
        for name, field in fields.items()
        if values.get(name) is not None
    }


def fields_schema(fields: Fields) -> Schema:
    """Returns the JSON schema of what `parse_fields` takes."""
    properties = {}
    for name, field in fields.items():
        schema = field.schema()
        properties[name] = or_null(*schema.get("anyOf", [schema]))
        if field.description:
            properties[name]["description"] = field.description
    return object_schema(properties)


def object_schema(properties: Schema, *required: str) -> Schema:
    """Returns the JSON schema of an object with no other properties."""
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(required)} if required else schema


def or_null(*schemas: Schema) -> Schema:
    """Returns the schema of one of several, or null."""
    return {"anyOf": [*schemas, {"type": "null"}]}


def check_names(
    names: Iterable[str], known: Iterable[str], kind: str = "field", of: str = ""
) -> None:
    """Raises ApiError 400 for an unknown name, which would otherwise be ignored silently."""
    known = tuple(known)
    for name in names:
        if name not in known:
            where, hint = f" of {of}" if of else "", nearest_hint(name[:64], known)
            message = f"unknown {kind} '{shown(name)}'{where}{hint or '; leave it out'}"
            raise ApiError(400, message, of or name[:64])


def whole_number(value: Any) -> int | None:
    """Returns a whole number of JSON, where 3.0 is one and true is none; else None."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def valid_text(name: str, text: str) -> str:
    """Returns a field's text; raises ApiError 400 if it has an unpaired surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"{name} has an unpaired surrogate at character {error.start}; send whole ones"
        raise ApiError(400, message, name) from None
    return text


def unexpected(name: str, value: Any, expected: str) -> ApiError:
    """Returns the error of a field with an unexpected value."""
    return ApiError(400, f"{name} is {value_name(value)}, expected {expected}", name)
