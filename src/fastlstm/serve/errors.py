"""What a client is told when it goes wrong: OpenAI's error object, never our internals."""

from __future__ import annotations

import json

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """An answer that is not 200.

    Args:
        status: of the HTTP response.
        message: what came, what was expected, what to do.
        param: the field at fault, or None.
        code: a word for programs, or None.
        headers: to go with it.
        closes: the connection is of no more use (the request was not read to its end).
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

    @property
    def body(self) -> bytes:
        """The error object as JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return error_json(self.message, kind, self.param, self.code)


class Overloaded(ApiError):
    """Every place is taken."""

    def __init__(self) -> None:
        message = "the server is at its capacity; send the request again later"
        super().__init__(429, message, None, "overloaded", {"retry-after": "1"})


class Unavailable(ApiError):
    """The server is not open yet, or not any more."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, None, "unavailable", {"retry-after": "5"})


def error_json(
    message: str, kind: str = "server_error", param: str | None = None, code: str | None = None
) -> bytes:
    """Returns OpenAI's error object, ASCII."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}, separators=(",", ":")).encode("ascii")
