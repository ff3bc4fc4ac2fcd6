"""JSON requests as msgspec's Structs: what is wrong is refused in one line that names the field."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import msgspec

from fastlstm.errors import nearest_hint
from fastlstm.serve.http.errors import ApiError, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

T = TypeVar("T")

MAX_NUMBER = (1 << 53) - 1
"""The largest whole number that every JSON parser reads."""
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


def decode(
    data: bytes | msgspec.Raw,
    decoder: msgspec.json.Decoder[T],
    names: Collection[str] = (),
    within: str = "",
    notes: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Returns what JSON holds; raises ApiError 400, whose param is the field.

    Args:
        data: the JSON.
        decoder: of the type that is expected.
        names: fields that there are; an unknown one is compared with these.
        within: what the JSON is, in words.
        notes: by field, what ends the error of a wrong value in it.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), names, within, notes) from None
    except RecursionError:
        raise ApiError(400, "the JSON is nested too deep; send it flatter") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = str(error).removeprefix("JSON is malformed: ")
        message = f"the request is not valid JSON: {shown(why)}"
        raise ApiError(400, message, None, "invalid_json") from None


def _invalid(text: str, names: Collection[str], within: str, notes: Mapping[str, str]) -> ApiError:
    place = _PLACE.search(text)
    what = text[: place.start()] if place else text
    field = within + (place[1] if place else "")
    if unknown := _UNKNOWN.fullmatch(what):
        hint = nearest_hint(unknown[1][:64], names) or "; leave it out"
        where = f" of {field}" if field else ""
        message = f"unknown field '{shown(unknown[1])}'{where}{hint}"
        return ApiError(400, message, _root(field) or unknown[1][:64])
    message = f"{field or 'the request'}: {what[0].lower()}{what[1:]}"
    return ApiError(400, message + notes.get(_root(field), ""), _root(field) or None)


def _root(field: str) -> str:
    return re.split(r"[.\[]", field, maxsplit=1)[0]


def refused(field: str, expected: str) -> ApiError:
    """Returns the error of a field whose value fits its type but not the model or other fields."""
    return ApiError(400, f"{field}: {expected}", field)
