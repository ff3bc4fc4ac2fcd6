"""Routes, keys, errors, logs and metrics of a server of texts."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from fastlstm.serve.app import make_app
from fastlstm.serve.http.access import Access
from fastlstm.serve.http.errors import ApiError, Disconnected, Unavailable
from fastlstm.serve.http.keys import Keys, is_local
from fastlstm.serve.log import Log
from fastlstm.serve.metrics import Metrics
from fastlstm.serve.server import ServerRunner, bits_per_char
from running_server import SETTINGS, FaultyDecoder, Running

KEY = "sk-Test_1.ä"


@pytest.fixture
def guarded(serve):
    running: Running = serve(keys=("other", KEY))
    return running


def every_path(running: Running) -> list[str]:
    """The paths of the route table, a name filled in."""
    app = make_app(running.runner.service)
    routes = app._app.routes  # type: ignore[attr-defined]
    return [re.sub(r"\{.*\}", "tiny", route.path) for route in routes]


def with_key(key: str, scheme: str = "Bearer") -> dict[str, bytes]:
    return {"authorization": f"{scheme} {key}".encode()}


def test_without_a_key_only_health_and_the_page_answer(guarded):
    paths = every_path(guarded)
    assert {"/v1/completions", "/metrics", "/v1/models/tiny", "/"} <= set(paths)
    assert {"/v2", "/v2/models/tiny", "/v2/models/tiny/infer"} <= set(paths)
    others = ["/nope", "//v1/models", "/v1/models/", "/health/live/", "/health/live/../../metrics"]
    for path in [*paths, *others, "/metrics?x=/health/live", "/%2e/metrics"]:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            answer = guarded.client.request(method, path)
            is_open = path.removeprefix("/v2") in ("/health", "/health/live", "/health/ready")
            is_page = path == "/" and method in ("GET", "HEAD")
            if is_open or is_page:
                assert answer.status_code in (200, 405), (method, path)
            else:
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
    for path in paths:
        status = guarded.client.get(path, headers=with_key(KEY)).status_code
        assert status in (200, 405) or (status == 404 and path.startswith("/v2/models/"))


@pytest.mark.parametrize(
    "headers",
    [
        with_key(KEY.upper()),
        with_key(" " + KEY),
        with_key(KEY[:-1]),
        with_key(KEY, "Basic"),
        with_key(f"{KEY}, Bearer {KEY}"),
        {"authorization": KEY.encode()},
        {"api-key": KEY.encode()},
        {"host": b"x/health/live"},
        {"host": b"x/health/live?"},
        {"x-forwarded-for": b"127.0.0.1", "x-original-url": b"/health/live"},
    ],
)
def test_a_key_is_exact(guarded, headers):
    assert guarded.client.get("/v1/models", headers=headers).status_code == 401


def test_each_key_is_accepted_and_two_headers_are_not(guarded):
    for key in ("other", KEY):
        assert guarded.client.get("/v1/models", headers=with_key(key)).status_code == 200
    assert guarded.client.get("/v1/models", headers=with_key(KEY, "bearer")).status_code == 200
    twice = [("authorization", f"Bearer {KEY}".encode())] * 2
    assert guarded.client.get("/v1/models", headers=twice).status_code == 401
    assert not Keys(())


def test_errors_have_one_shape(server):
    cases: list[tuple[int, httpx.Response]] = [
        (404, server.client.get("/nope")),
        (404, server.client.get("/v1/models/other")),
        (400, server.client.post("/v1/chat/completions", json={})),
        (405, server.client.get("/v1/completions")),
        (405, server.client.put("/v1/models")),
        (415, server.client.post("/v1/completions", content=b"{}")),
        (415, server.client.post("/v1/completions", data={"prompt": "a"})),
        (400, server.post(prompt=7)),
        (400, server.post(session="x")),
        (404, server.post(model="other")),
    ]
    for status, answer in cases:
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert answer.headers["content-type"] == "application/json"
        assert "Traceback" not in answer.text
        assert ".py" not in answer.text
    assert cases[3][1].headers["allow"] == "POST"


def test_compressed_and_oversized_bodies(serve):
    server = serve(max_body=2000, max_prompt_tokens=100)
    post = server.client.post
    kind = {"content-type": "application/json"}
    packed = post("/v1/completions", content=b"x", headers={**kind, "content-encoding": "gzip"})
    assert packed.status_code == 415
    assert post("/v1/completions", content=b" " * 2001, headers=kind).status_code == 413

    def parts() -> Any:
        yield from [b" " * 100] * 100

    assert post("/v1/completions", content=parts(), headers=kind).status_code == 413
    answer = server.post(prompt="a" * 101)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "prompt_too_long"
    assert server.post(prompt=[1] * 101).status_code == 400
    assert server.post(prompt="a" * 100).status_code == 200


def test_request_ids(server):
    get = server.client.get
    good = "A-b_c.9" * 9
    assert get("/health/live", headers={"x-request-id": good}).headers["x-request-id"] == good
    for bad in (b"a b", b"x" * 65, b"\x1b[31m", b"", "é".encode(), b"a;b"):
        answer = get("/health/live", headers={"x-request-id": bad})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


def test_one_log_line_per_request_whatever_is_in_it(serve, capfd):
    server = serve(log=True)
    server.post(prompt="a cat", max_tokens=3)
    server.client.get("/a%0d%0a%1b[31m%e2%80%a8" + "x" * 1000)
    server.client.get("/health/live", headers={"x-request-id": b"\xe2\x80\xa8"})
    server.end()  # the line of a request is written when its answer is out
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["status"] for line in lines] == [200, 404, 200]
    assert lines[0]["prompt_tokens"] == 5
    assert lines[0]["key"] is None
    assert 0 < lines[0]["first_chunk_s"] <= lines[0]["seconds"]
    assert lines[0]["completion_tokens"] == 3
    assert "cat" not in json.dumps(lines[0])
    assert lines[1]["path"].startswith("/a\r\n\x1b")
    assert len(lines[1]["path"]) <= 200


def test_log_and_metrics_say_how_a_request_ended(serve, lm, capfd):
    decoder = FaultyDecoder(lm.decoder)
    server = serve(
        model=replace(lm, decoder=decoder), log=True, max_streams=1, max_queue=0, max_tokens=10**9
    )
    assert server.post(prompt="a", max_tokens=3).status_code == 200
    for body in ({"prompt": 1}, {"x\n": 1}):
        assert server.post(**body).status_code == 400
    assert server.client.get("/nothing").status_code == 404
    decoder.fails.set()
    assert server.post(prompt="a", max_tokens=3).status_code == 500
    endless = {"prompt": "a", "max_tokens": 10**9, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=endless) as answer:
        events = answer.iter_lines()
        next(events)
        assert server.post(prompt="a", max_tokens=3).status_code == 429
        decoder.fails.set()
        assert "error" in list(events)[-2]
    while server.scheduler.num_held:
        time.sleep(0.001)
    with server.client.stream("POST", "/v1/completions", json=endless) as answer:
        next(answer.iter_lines())
    server.end()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[0] == "{"]
    assert [line["param"] for line in lines if line["status"] == 400] == ["prompt", "x\n"]
    found = Counter((line["status"], line["outcome"]) for line in lines)
    assert found == {
        (200, "ok"): 1, (400, "client_error"): 2, (404, "client_error"): 1, (500, "failed"): 1,
        (200, "failed"): 1, (429, "rejected"): 1, (200, "disconnected"): 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("failure", "error", "status", "outcome"),
    [
        ("", asyncio.CancelledError(), 503, "cancelled"),
        ("", Disconnected(), 499, "disconnected"),
        ("stalled", Disconnected(), 499, "stalled"),
        ("stalled", asyncio.CancelledError(), 503, "stalled"),
    ],
)
def test_the_first_failure_is_logged(capfd, failure, error, status, outcome):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["record"].failure = failure
        raise error

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "headers": [], "method": "GET", "path": "/"}
    log = Log(Metrics().log_dropped)
    metrics = Metrics()
    access: Any = Access(app, metrics, log=log)
    asyncio.run(access(scope, None, send))
    log.close()
    line = json.loads(capfd.readouterr().err)
    assert (line["status"], line["outcome"]) == (status, outcome)
    assert metrics.requests.labels(str(status))._value.get() == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (asyncio.CancelledError(), "cancelled"),
        (Unavailable("the server is shutting down"), "cancelled"),
        (ApiError(500, "planted"), "failed"),
        (RuntimeError("planted"), "failed"),
    ],
)
def test_half_an_answer_ends_with_its_connection(error, outcome):
    sent: list[str] = []

    class Connection:
        def abort(self) -> None:
            sent.append("abort")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        raise error

    async def send(message: Any) -> None:
        sent.append(message["type"])

    scope = {"type": "http", "headers": [], "method": "GET", "path": "/"}
    metrics = Metrics()
    access: Any = Access(app, metrics, log=None)
    asyncio.run(access({**scope, "state": {"connection": Connection()}}, None, send))
    assert sent == ["http.response.start", "abort"]
    assert metrics.outcomes.labels(outcome)._value.get() == 1


@pytest.mark.parametrize("name", ["content-type", "content-encoding"])
def test_a_header_with_two_meanings_is_refused(server, name):
    given = [(name, "5"), (name, "identity"), ("content-type", "application/json")]
    answer = server.client.post("/v1/completions", content=b'{"prompt":"a"}', headers=given)
    assert answer.status_code == 400
    assert f"the header '{name}' comes " in answer.json()["error"]["message"]


@pytest.mark.parametrize("streams", [True, False])
def test_a_text_cut_off_at_shutdown_counts_as_cancelled(serve, capfd, streams):
    server = serve(log=True, max_tokens=10**9, grace=0.1)
    endless = {"prompt": "a", "max_tokens": 10**9, "stream": streams}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, **endless)
        while not server.scheduler.num_active:
            time.sleep(0.001)
        server.loop.call_soon_threadsafe(server.runner.end)
        answer = asked.result()
    assert "shutting down" in answer.text
    server.end()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[0] == "{"]
    assert [(one["status"], one["outcome"]) for one in lines] == [(answer.status_code, "cancelled")]


def test_metrics_count(serve):
    server = serve()
    server.text(prompt="a cat", max_tokens=30)
    server.post(prompt=1)
    assert server.metric("tokens_written_total") == 30
    assert server.metric("tokens_read_total") == 5
    assert server.metric('requests_total{code="200"}') >= 1
    assert server.metric('requests_total{code="400"}') == 1
    assert server.metric('outcomes_total{outcome="client_error"}') == 1
    assert server.metric('outcomes_total{outcome="ok"}') >= 1
    assert server.metric("streams_active") == 0
    assert server.metric("slots") == server.settings.max_streams
    assert server.metric("first_token_seconds_count") == 1
    kind = server.client.get("/metrics").headers["content-type"]
    assert kind == "text/plain; version=0.0.4; charset=utf-8"


def test_the_page_is_one_file_that_loads_nothing(server):
    answer = server.client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", answer.text)
    assert "@import" not in answer.text
    assert "innerHTML" not in answer.text
    for needed in ("/v1/completions", "/v1/models", "prefers-color-scheme", 'name="viewport"'):
        assert needed in answer.text


def test_a_model_says_what_it_is(serve, lm, tmp_path):
    data = {"data": {"source": "/home/me/books/book.txt"}}
    server = serve(model=replace(lm, config=data, bits_per_char=1.5))
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model == server.client.get("/v1/models/tiny").json()
    sizes = {"units": 24, "layers": 1, "vocab": "char", "vocab_size": 30, "weights": "fp32"}
    H, E, V = 24, 8, 30
    count = V * E + 4 * H * (E + H + 2) + V * H + V
    own = {"parameters": count, "top_p": 1.0, "bits_per_char": 1.5, "text": "book.txt"}
    assert model["about"] == {**sizes, **own}, "the name of the text, not its folder"
    for forged in ({}, {"data": 3}, {"data": {"source": None}}):
        (model,) = serve(model=replace(lm, config=forged)).client.get("/v1/models").json()["data"]
        assert not {"text", "bits_per_char"} & model["about"].keys()


def test_bits_per_character_are_of_the_best_validation(tmp_path):
    assert bits_per_char(str(tmp_path)) is None
    events = [{"event": "eval", "step": k, "bits_per_char": 2 + abs(k - 2)} for k in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    assert bits_per_char(str(tmp_path)) == 2.0


def test_while_the_model_loads_nothing_is_ready(lm):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    loaded = threading.Event()

    def load() -> Any:
        assert loaded.wait(10)
        return lm

    from dataclasses import replace

    starting: list[Running] = []
    settings = replace(SETTINGS, port=port)
    thread = threading.Thread(target=lambda: starting.append(Running(lm, settings, load=load)))
    thread.start()
    url = f"http://127.0.0.1:{port}"
    for _ in range(200):
        try:
            assert httpx.get(f"{url}/health/live").status_code == 200
            break
        except httpx.ConnectError:
            time.sleep(0.02)
    for path in ("/health/ready", "/health"):
        assert httpx.get(f"{url}{path}").status_code == 503
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503
    assert "still being loaded" in answer.json()["error"]["message"]
    loaded.set()
    thread.join(10)
    for path in ("/health/ready", "/health"):
        assert httpx.get(f"{url}{path}").status_code == 200
    starting[0].end()


def test_a_signal_ends_the_server_while_the_model_loads(lm):
    loads, loaded = threading.Event(), threading.Event()
    said: list[str] = []

    def load() -> Any:
        loads.set()
        assert loaded.wait(60)
        return lm

    async def run() -> None:
        runner = ServerRunner(load, SETTINGS, say=said.append)
        running = asyncio.create_task(runner.run())
        assert await asyncio.to_thread(loads.wait, 10)
        runner.end()
        await asyncio.wait_for(running, 20)

    try:
        asyncio.run(run())
        assert not any(line.startswith("serving") for line in said)
    finally:
        loaded.set()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[(name, 200) for name in ("127.0.0.1", "127.0.0.1:80", "localhost:8000", "[::1]:8000")],
        *[(name, 200) for name in ("LOCALHOST", "a.localhost", "10.0.0.7")],
        *[
            (name, 421)
            for name in ("evil.example", "127.0.0.1.evil.example:8000", "localhost.evil")
        ],
        *[(name, 421) for name in ("x", "a@localhost:1:2", "127.0.0.1,evil.example")],
    ],
)
def test_a_foreign_host_name_is_refused(server, host, status):
    answer = server.client.get("/v1/models", headers={"host": host})
    assert answer.status_code == status
    assert server.client.get("/health/live", headers={"host": host}).status_code == 200
    if status == 421:
        assert f"'{host}'" in answer.json()["error"]["message"]


def test_with_keys_any_host_name_is_accepted(guarded):
    headers = {"host": b"evil.example", **with_key(KEY)}
    assert guarded.client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("address", "local"),
    [
        *(("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("::ffff:127.0.0.1", True)),
        *(("0.0.0.0", False), ("::", False), ("fe80::1%eth0", False), ("10.0.0.7", False)),
    ],
)
def test_an_address_is_local_only_if_it_is_loopback(address, local):
    assert is_local(address) is local


def test_a_key_that_is_given_twice_is_one():
    assert not Keys(["one", "one"]).are_several
    assert Keys(["one", "two", "one"]).are_several
