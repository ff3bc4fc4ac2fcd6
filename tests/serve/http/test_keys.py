"""The gate on its own: names of hosts."""

from __future__ import annotations

from typing import Any

import pytest

from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.http.keys import Keys, check_access


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        *[(name, True) for name in (b"MyMachine", b"mymachine:8000", b"MYMACHINE", b"localhost")],
        *[(name, False) for name in (b"mymachine.evil.example", b"my", b"notmymachine")],
    ],
)
def test_the_name_that_a_server_was_started_with_is_its_own(host: bytes, is_known: bool) -> None:
    scope: Any = {
        "path": "/v1/models", "method": "GET", "headers": [(b"host", host)], "state": {}
    }  # fmt: skip
    if is_known:
        check_access(scope, Keys(()), "MyMachine")
        assert scope["state"]["tenant"] == b""
    else:
        with pytest.raises(ApiError) as caught:
            check_access(scope, Keys(()), "MyMachine")
        assert caught.value.status == 421
