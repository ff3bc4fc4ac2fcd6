"""Clients that leave, stall, send slowly, come in crowds, or send invalid HTTP."""

import json
import random
import socket
import struct
import time
from dataclasses import replace

import httpx
import pytest

from running_server import FaultyDecoder, raw_request, solo, wait_until

ENDLESS = {"prompt": "a", "max_tokens": 100_000, "stream": True}
GET = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
JSON = POST + b"content-type: application/json\r\n"


def request(body):
    return raw_request("/v1/completions", json.dumps(body).encode())


def connect(server, receive_buffer=None):
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(10)
    client.connect(server.address)
    return client


def answer_of(client):
    data = b""
    while True:
        try:
            part = client.recv(65536)
        except ConnectionResetError:
            return data
        if not part:
            return data
        data += part


def status_of(server, data):
    """Sends raw bytes on a connection of their own."""
    with connect(server) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        answer = answer_of(client)
    return int(answer.split()[1]) if answer else 0


@pytest.mark.parametrize("how", ["close", "reset", "half", "before the first chunk"])
def test_a_client_that_leaves_frees_its_place(serve, how):
    server = serve()
    held = server.scheduler
    for _ in range(20):
        client = connect(server)
        client.sendall(request({**ENDLESS, "n": 3}))
        if how != "before the first chunk":
            client.recv(100)
        if how == "half":
            client.shutdown(socket.SHUT_WR)
            answer_of(client)
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    wait_until(lambda: held.num_held == 0 and held.num_active == 0)
    wait_until(lambda: server.metric('outcomes_total{outcome="disconnected"}') == 20)
    assert server.text(prompt="a", max_tokens=20, seed=3) == solo(server.model, "a", 20, seed=3)


def test_others_get_exact_texts_while_clients_leave(serve):
    server = serve(max_streams=24, max_queue=200)
    rng = random.Random(0)
    staying = []
    for k in range(30):
        client = connect(server)
        length = rng.randint(500, 3000)
        client.sendall(request({"prompt": "a", "max_tokens": length, "seed": k}))
        staying.append((client, k, length))
        leaving = connect(server)
        leaving.sendall(request(ENDLESS))
        time.sleep(rng.random() * 0.01)
        leaving.close()
    for client, k, length in staying:
        with client:
            data = b""
            while b"usage" not in data:
                data += client.recv(1 << 20)
        body = json.loads(data.partition(b"\r\n\r\n")[2])
        assert body["choices"][0]["text"] == solo(server.model, "a", length, seed=k)
        assert body["usage"]["completion_tokens"] == length


def test_beyond_its_capacity_the_server_refuses(serve):
    server = serve(max_streams=2, max_queue=1, max_tokens=10**9, stall=60.0)
    holding = []
    for _ in range(3):
        client = connect(server)
        client.sendall(request({**ENDLESS, "max_tokens": 10**9}))
        holding.append(client)
    wait_until(lambda: server.scheduler.num_held == 3)
    for _ in range(50):
        # The prompt could not be tokenized: it is not looked at.
        answer = server.post(prompt="QQQ" * 10_000)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
    assert server.client.get("/health/ready").status_code == 200
    for client in holding:
        client.close()
    wait_until(lambda: server.scheduler.num_held == 0)
    assert server.post(prompt="a").status_code == 200
    assert server.metric('outcomes_total{outcome="rejected"}') == 50


def test_a_stalled_reader_is_disconnected_and_others_continue(serve):
    server = serve(stall=0.5, max_tokens=10**9)
    slow = [connect(server, receive_buffer=4096) for _ in range(10)]
    for client in slow:
        client.sendall(request({**ENDLESS, "max_tokens": 10**9, "n": 4}))
    wait_until(lambda: server.scheduler.num_held == 40)
    deadline_s = time.monotonic() + 20
    while server.scheduler.num_held and time.monotonic() < deadline_s:
        text = server.text(prompt="a", max_tokens=50, seed=1)
        assert text == solo(server.model, "a", 50, seed=1)
    assert server.scheduler.num_held == 0
    assert server.metric('outcomes_total{outcome="stalled"}') == 10
    for client in slow:
        assert b"[DONE]" not in answer_of(client)
        client.close()


def test_a_slow_reader_stays_connected_and_loses_nothing(serve):
    server = serve(stall=3.0, max_tokens=10**7)
    with connect(server) as client:
        length = 2_000_000
        client.sendall(request({"prompt": "a", "max_tokens": length, "stream": True, "seed": 8}))
        data = b""
        end_s = time.monotonic() + 2
        while time.monotonic() < end_s:
            data += client.recv(2000)
            time.sleep(0.005)
        assert server.scheduler.num_held == 1  # its text waits for it
        parts = [data]
        while b"[DONE]" not in parts[-1]:
            parts.append(client.recv(1 << 20))
    events = [json.loads(part) for part in split_events(b"".join(parts))]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == solo(server.model, "a", length, seed=8)


def split_events(data):
    """The events of a chunked answer, without [DONE]."""
    body, at = [], data.index(b"\r\n\r\n") + 4
    while at < len(data):
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        body.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    events = [part.removeprefix(b"data: ") for part in b"".join(body).split(b"\n\n") if part]
    return [event for event in events if event != b"[DONE]"]


def test_unread_answers_do_not_hold_connections(serve):
    server = serve(stall=0.3)
    clients = []
    for _ in range(2):
        client = connect(server, receive_buffer=2048)
        client.sendall(request({"prompt": "a", "max_tokens": 100_000, "n": 15}))
        clients.append(client)
    while (written := server.metric("tokens_written_total")) < 2 * 15 * 100_000:  # on any CPU
        wait_until(lambda before=written: server.metric("tokens_written_total") > before)
    wait_until(lambda: server.scheduler.num_held == 0)
    time.sleep(1.5)
    for client in clients:
        with client:
            assert len(answer_of(client)) < 1_000_000  # cut: the whole has 1.5 million


def send_on(client, data):
    while True:
        client.sendall(data)
        time.sleep(0.05)


def test_a_client_that_sends_but_never_reads_is_disconnected(serve):
    """Requests one behind the other: there is always one that is being answered."""
    server = serve(stall=0.3)
    ask = GET.replace(b"/health/live", b"/openapi.json") + b"\r\n"
    with connect(server, receive_buffer=2048) as client:
        client.settimeout(20)
        with pytest.raises(ConnectionError):
            send_on(client, ask * 50)
    assert server.client.get("/health/live").status_code == 200


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (b"", None),
        (b"POST /v1/completions HTT", b"408"),
        (POST + b"x: ", b"408"),
        (JSON + b"content-length: 5000\r\n\r\n", b"408"),
        (b"POST /nope HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000\r\n\r\n", b"404"),
    ],
)
def test_slow_senders_are_disconnected(serve, start, status):
    server = serve(header_timeout=0.4, body_timeout=0.4)
    with connect(server) as client:
        client.sendall(start)
        client.settimeout(0.05)
        data = b""
        begin_s = time.monotonic()
        while time.monotonic() - begin_s < 30:
            try:
                if start:
                    client.send(b"a")
                part = client.recv(4096)
                if not part:
                    break
                data += part
            except TimeoutError:
                pass
            except OSError:
                break
        assert time.monotonic() - begin_s < 30, "never cut"
    if status is None:
        assert data == b""
    else:
        assert data.split()[1] == status


def test_a_kept_alive_connection_has_a_deadline_for_every_request(serve):
    server = serve(header_timeout=0.4)
    with connect(server) as client:
        for _ in range(2):
            client.sendall(request({"prompt": "a", "max_tokens": 1}))
            data = b""
            while b"usage" not in data:
                data += client.recv(65536)
            assert b"200 OK" in data
            time.sleep(0.6)  # idle is no trickling
        client.sendall(b"GET /")
        assert b"408" in answer_of(client)


HOSTILE = [
    (b"\x00\x01\x02\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nhost x\r\n\r\n", 400),
    (b"GET /health/live HTTP/1.1\r\n\r\n", 400),
    (GET + b"host: y\r\n\r\n", 400),
    (GET + b"a b: c\r\n\r\n", 400),
    (GET + b"x: " + b"y" * 100_000 + b"\r\n\r\n", 431),
    (GET + b"x: y\r\n" * 200 + b"\r\n", 431),
    (GET + b"x: y\r\n" * 20_000 + b"\r\n", 431),
    (POST + b"content-length: -1\r\n\r\n", 400),
    (POST + b"content-length: 9e9\r\n\r\n", 400),
    (POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
    (JSON + b"content-length: 99999999999\r\n\r\n", 413),
    (JSON + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    (JSON + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400),
    (JSON.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400),
    (POST + b"transfer-encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n", 501),
    (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    (POST + b"content-length: 1, 2\r\n\r\n", 400),
    (GET + b"x: y\rz: 1\r\n\r\n", 400),
    (GET + b"x : y\r\n\r\n", 400),
    *[(JSON + b"transfer-encoding: chunked\r\n\r\n%s\r\n{}\r\n0\r\n\r\n" % size, 400)
      for size in (b"-2", b"0x2", b"2_0", b"+2", b" 2", b"2\n", b"f" * 21)],
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 404),
    (b"CONNECT x:1 HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
    (b"GET http://evil/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
    (GET + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n", 200),
]  # fmt: skip


@pytest.mark.parametrize(("data", "status"), HOSTILE, ids=range(len(HOSTILE)))
def test_invalid_http_gets_its_status(server, data, status):
    assert status_of(server, data) == status
    assert server.client.get("/health/live").status_code == 200


def test_a_pipelined_request_is_checked_like_the_first(server):
    smuggled = GET + b"x : y\r\n\r\n"
    with connect(server) as client:
        client.sendall(GET + b"\r\n" + smuggled)
        answer = answer_of(client)
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert answer.count(b"HTTP/1.1 400 ") == 1
    assert b"not valid HTTP/1.1" in answer
    unread = b"POST /nope HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n"
    with connect(server) as client:
        client.sendall(unread)
        assert client.recv(4096).startswith(b"HTTP/1.1 404 ")
        client.sendall(b"{}" + smuggled)
        assert b"not valid HTTP/1.1" in answer_of(client)


def test_two_equal_content_lengths_are_accepted(server):
    body = b'{"prompt": "a", "max_tokens": 1}'
    length = b"content-length: %d\r\n" % len(body)
    assert_ok(server, JSON + length + length + b"\r\n" + body)


def assert_ok(server, data):
    with connect(server) as client:
        client.sendall(data)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_body_in_tiny_chunks_is_refused_early(server):
    head = JSON + b"transfer-encoding: chunked\r\n\r\n"
    with connect(server) as client:
        client.sendall(head + b"1\r\n \r\n" * 1100)
        answer = answer_of(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"expected 256 bytes or more in each" in answer
    body = json.dumps({"prompt": "a" * 100_000, "max_tokens": 1}).encode()
    parts = [body[k : k + 256] for k in range(0, len(body), 256)]
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    assert_ok(server, head + chunked + b"0\r\n\r\n")
    small = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"prompt": "a", "max_tokens": 1}')
    assert_ok(server, head + small + b"0\r\n\r\n")


def test_small_chunks_count_for_their_request_only(server):
    body = json.dumps({"prompt": "a", "max_tokens": 1}).ljust(600).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with connect(server) as client:
        for _ in range(3):
            client.sendall(JSON + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
            answer = b""
            while b"total_tokens" not in answer:
                part = client.recv(65536)
                answer += part
                assert part
                assert answer.startswith(b"HTTP/1.1 200 "), answer


def test_a_frozen_engine_is_noticed_and_a_long_prompt_is_not(serve, lm):
    decoder = FaultyDecoder(lm.decoder)
    server = serve(model=replace(lm, decoder=decoder), watchdog=2.0)
    live = httpx.Client(base_url=server.url)
    with connect(server) as client:
        client.sendall(request({"prompt": "a " * 100_000, "max_tokens": 1}))
        wait_until(lambda: server.scheduler.num_active == 1)
        while server.scheduler.num_active:
            assert live.get("/health/live").status_code == 200
        decoder.freezes.set()
        assert live.get("/health/live").status_code == 200  # nothing to do is not stuck
        client.recv(65536)
        client.sendall(request(ENDLESS))
        wait_until(lambda: live.get("/health/live").status_code == 503)
        decoder.freezes.clear()
        wait_until(lambda: live.get("/health/live").status_code == 200)
    live.close()
