"""The routes and their errors before a model is loaded."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from fastlstm.serve.app import make_app
from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.http.keys import Keys, check_access
from fastlstm.serve.service import Service
from running_server import SETTINGS


def ask(method: str, path: str) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(Service(SETTINGS, Keys(()))))
        async with httpx.AsyncClient(transport=transport, base_url="http://any.name") as client:
            return await client.request(method, path)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health/live", 200),
        ("GET", "/v2/health/live", 200),
        ("GET", "/metrics", 200),
        ("GET", "/v2", 200),
        ("GET", "/health/ready", 503),
        ("GET", "/v2/health/ready", 503),
        ("GET", "/", 503),
        ("GET", "/openapi.json", 503),
        ("GET", "/v1/models", 503),
        ("GET", "/v1/models/tiny/x", 503),
        ("POST", "/v1/completions", 503),
        ("POST", "/v1/chat/completions", 503),
        ("GET", "/v2/models/tiny", 503),
        ("GET", "/v2/models/tiny/versions/1/ready", 503),
        ("POST", "/v2/models/tiny/infer", 503),
        ("POST", "/v2/models/tiny/versions/1/infer", 503),
        ("GET", "/v1/completions", 405),
        ("POST", "/metrics", 405),
        ("GET", "/nothing", 404),
        ("GET", "/health/live/", 404),
    ],
)
def test_every_path_answers_in_json_with_an_id(method, path, status):
    answer = ask(method, path)
    assert answer.status_code == status, answer.text
    assert len(answer.headers["x-request-id"]) == 32
    if status == 503:
        assert "still being loaded" in answer.text
    if status == 404:
        assert f"there is no path {path}; /openapi.json lists all paths" in answer.text
    if status == 405:
        assert f"{path} does not take {method}" in answer.text
        assert answer.headers["allow"]


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        *[(name, True) for name in (b"MyMachine", b"mymachine:8000", b"MYMACHINE", b"localhost")],
        *[(name, False) for name in (b"mymachine.evil.example", b"my", b"notmymachine")],
    ],
)
def test_the_host_name_of_the_server_is_accepted(host, is_known):
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
