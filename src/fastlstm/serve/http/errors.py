"""Errors for clients: the error object of each protocol, and errors of JSON fields."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import TypeVar

import msgspec

from fastlstm.errors import nearest_hint
from fastlstm.report.markup import clipped

T = TypeVar("T")

MAX_SHOWN = 200
"""Characters of a value that an error repeats."""
MAX_NUMBER = (1 << 53) - 1
"""The largest whole number that every JSON parser reads."""
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}

ENDING = "the server is shutting down; send the request to another one"


class ApiError(Exception):
    """An answer other than 200; `param` is the field at fault, `code` is for programs.

    With `closes` the connection is closed, because the request was not read to its end.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        *,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        if closes:
            self.headers["connection"] = "close"

    def body_at(self, path: str) -> bytes:
        """Returns the error object as JSON, in the form of the path's protocol."""
        is_plain = path in ("/v2", "/forecast") or path.startswith("/v2/")
        return msgspec.json.encode({"error": self.message}) if is_plain else self.body

    def response(self) -> bytes:
        """Returns the whole HTTP/1.1 response, which ends the connection."""
        kind = {"content-type": "application/json", "connection": "close"}
        own = {**kind, "content-length": len(self.body), **self.headers}
        lines = "\r\n".join(f"{name}: {value}" for name, value in own.items())
        head = f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n{lines}\r\n\r\n"
        return head.encode("ascii") + self.body

    @property
    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return error_json(self.message, kind, self.param, self.code)


class Disconnected(Exception):
    """The client has left, or was cut off."""


class Overloaded(ApiError):
    """Every place is taken, or every place that a key may have."""

    def __init__(self, *, is_full: bool = True, status: int = 429) -> None:
        what = "the server is at its capacity"
        if not is_full:
            what = "this API key has all the places it may have now"
        message = f"{what}; send the request again later"
        super().__init__(status, message, None, "overloaded", {"retry-after": "1"})


class Unavailable(ApiError):
    """The server is not ready yet, or is closing."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, None, "unavailable", {"retry-after": "5"})


def no_model(name: str, own: str) -> ApiError:
    """Returns the error of a request for a model other than `own`."""
    message = f"there is no model '{clipped(name, MAX_SHOWN)}' here; this server serves '{own}'"
    return ApiError(404, message, "model", "model_not_found")


def error_json(
    message: str, kind: str = "server_error", param: str | None = None, code: str | None = None
) -> bytes:
    """Returns OpenAI's error object."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def decode(
    data: bytes | msgspec.Raw,
    decoder: msgspec.json.Decoder[T],
    names: Collection[str] = (),
    within: str = "",
    notes: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Decodes JSON; raises ApiError 400 with the field at fault as `param`.

    The error of an unknown field suggests the nearest field in `names`. `within` names the JSON
    value in errors. `notes` has, by field, text to add to the error of a wrong value.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise invalid(str(error), names, within, notes) from None
    except RecursionError:
        raise ApiError(400, "the JSON is nested too deep; send it flatter") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = str(error).removeprefix("JSON is malformed: ")
        message = f"the request is not valid JSON: {clipped(why, MAX_SHOWN)}"
        raise ApiError(400, message, None, "invalid_json") from None


def invalid(text: str, names: Collection[str], within: str, notes: Mapping[str, str]) -> ApiError:
    """Returns the error of msgspec's message; see `decode`."""
    place = _PLACE.search(text)
    what = text[: place.start()] if place else text
    field = within + (place[1] if place else "")
    if unknown := _UNKNOWN.fullmatch(what):
        others = [name for name in names if name != unknown[1]]  # it is a field of another part
        hint = nearest_hint(unknown[1][:64], others) or "; leave it out"
        where = f" of {field}" if field else ""
        message = f"unknown field '{clipped(unknown[1], MAX_SHOWN)}'{where}{hint}"
        return ApiError(400, message, _root(field) or unknown[1][:64])
    message = f"{field or 'the request'}: {what[0].lower()}{what[1:]}"
    return ApiError(400, message + notes.get(_root(field), ""), _root(field) or None)


def _root(field: str) -> str:
    return re.split(r"[.\[]", field, maxsplit=1)[0]


def refused(field: str, expected: str) -> ApiError:
    """Returns the error of a value of the right type that the model or other fields exclude."""
    return ApiError(400, f"{field}: {expected}", field)
