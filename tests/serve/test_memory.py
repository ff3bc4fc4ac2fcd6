"""Memory of requests stays within the bounds of docs/serving.md."""

import json
import re
import socket
import time
from pathlib import Path

import httpx
import pytest

from fastlstm.serve.settings import Settings
from forecast_server import PAST, L
from running_server import raw_request, wait_until

MIB = 1 << 20
CONNECTION = MIB // 2
SPARE = 32 * MIB
"""What allocators keep, and what is loaded at the first request."""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="there is no /proc to read memory from"
)


def peak(server):
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    return int(found[1]) << 10


def send(server, content):
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60)
    client.connect((host, int(port)))
    client.sendall(raw_request(PAST, content))
    return client


def request(windows, levels):
    tensor = {"name": "past", "datatype": "FP32", "shape": [windows, L, 2]}
    data = {"inputs": [{**tensor, "data": [0] * (windows * L * 2)}]}
    quantiles = [round(0.2 + 0.003 * k, 3) for k in range(levels)]
    return json.dumps({**data, "parameters": {"quantiles": quantiles}}).encode()


def test_memory_of_unread_answers_is_bounded(start):
    server = start("--max-streams", "600", "--max-queue", "9000", "--stall", "60")
    with send(server, request(1, 1)) as client:
        client.recv(100)
    before = peak(server)
    content = request(600, 199)
    clients = [send(server, content) for _ in range(12)]
    for client in clients:
        assert client.recv(12) == b"HTTP/1.1 200"
    time.sleep(0.5)
    numbers = 600 * 6 * 200
    bound = 12 * (CONNECTION + 8 * len(content) + 8 * numbers) + 24 * len(content) + SPARE
    assert peak(server) - before < bound
    for client in clients:
        client.close()


def test_memory_of_a_table_is_bounded(start):
    """Rows of as many series as fit into a table, and rows of JSON."""
    settings = Settings()
    server = start()
    lines = (b"%x,2020,1,2\n" % k for k in range(1 << 20))
    table = b"unique_id,ds,y,temp\n" + b"".join(lines)
    table = table[: 8 * settings.max_body].rpartition(b"\n")[0]
    rows = b"[" + b'{"a":9.5},' * (settings.max_body // 10 - 1) + b'{"a":9.5}]'
    warm = httpx.post(f"{server.url}/forecast", json=[{"y": 1}], timeout=60)
    assert warm.status_code == 400
    before = peak(server)
    for kind, content in (("text/csv", table), ("application/json", rows)):
        answer = httpx.post(
            f"{server.url}/forecast", content=content, headers={"content-type": kind}, timeout=300
        )
        assert answer.status_code == 400, answer.text
        assert "the table" in answer.json()["error"]
    assert peak(server) - before < 400 * settings.max_body + SPARE


def test_memory_of_waiting_bodies_is_bounded(start):
    settings = Settings()
    server = start("--max-streams", "8", "--max-queue", "8")
    with send(server, request(1, 1)) as client:
        client.recv(100)
    before = peak(server)
    content = (b'{"inputs":[' + b"[]," * 90_000 + b"0.1," * 180_000 + b"[]]}").ljust(
        settings.max_body
    )
    clients = [send(server, content) for _ in range(60)]
    answers = [client.recv(12)[9:] for client in clients]
    assert set(answers) <= {b"400", b"503"}
    assert b"503" in answers
    bound = 16 * 8 * settings.max_body + 60 * CONNECTION + 24 * settings.max_body + SPARE
    assert peak(server) - before < bound
    wait_until(lambda: server.metric("queue_depth") == 0)
    for client in clients:
        client.close()
