"""The gate on its own: names of hosts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.http.keys import KeyGate, Keys


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        *[(name, True) for name in (b"MyMachine", b"mymachine:8000", b"MYMACHINE", b"localhost")],
        *[(name, False) for name in (b"mymachine.evil.example", b"my", b"notmymachine")],
    ],
)
def test_the_name_that_a_server_was_started_with_is_its_own(host: bytes, is_known: bool) -> None:
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    gate: Any = KeyGate(app, Keys(()), "MyMachine")
    scope = {"path": "/v1/models", "method": "GET", "headers": [(b"host", host)]}
    if is_known:
        asyncio.run(gate(scope, None, None))
        assert passed == ["/v1/models"]
    else:
        with pytest.raises(ApiError) as caught:
            asyncio.run(gate(scope, None, None))
        assert caught.value.status == 421
        assert passed == []
