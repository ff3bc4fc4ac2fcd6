"""Servers behind nginx, with the configuration of docs/serving.md."""

from __future__ import annotations

import itertools
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from running_server import Running, solo

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx (apt-get install nginx-light)")


def documented(replicas: list[Running], port: int) -> str:
    found = re.search(r"```nginx\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    text = found[1].replace("listen 127.0.0.1:8000;", f"listen 127.0.0.1:{port};")
    for place, server in zip(("8001", "8002"), replicas, strict=True):
        assert f"server 127.0.0.1:{place} " in text
        text = text.replace(f"server 127.0.0.1:{place} ", f"server 127.0.0.1:{server.address[1]} ")
    return text


@pytest.fixture
def replicas(serve):
    return [serve(max_streams=2, max_queue=0, max_tokens=10**9) for _ in range(2)]


@pytest.fixture
def proxy(replicas, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folders = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    conf = tmp_path / "nginx.conf"
    conf.write_text(
        f"daemon off;\nmaster_process off;\npid {tmp_path}/pid;\nerror_log stderr warn;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{folders}{documented(replicas, port)}}}\n"
    )
    assert NGINX is not None
    process = subprocess.Popen([NGINX, "-c", str(conf), "-p", str(tmp_path), "-e", "stderr"])
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        for _ in range(200):
            try:
                client.get("/health/live")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield client
    process.terminate()
    process.wait(10)


def test_a_text_continues_on_any_replica(replicas, proxy):
    text, session = "", None
    for _ in range(12):
        prompt = "a cat" if session is None else ""
        body = {"prompt": prompt, "max_tokens": 10, "seed": 4, "return_session": True}
        answer = proxy.post("/v1/completions", json={**body, "session": session})
        assert answer.status_code == 200, answer.text
        text += answer.json()["choices"][0]["text"]
        session = answer.json()["choices"][0]["session"]
    assert text == solo(replicas[0].model, "a cat", 120, seed=4)
    assert all(replica.metric("tokens_written_total") >= 10 for replica in replicas)


def test_the_proxy_passes_the_host_name_on(proxy):
    assert proxy.get("/v1/models", headers={"host": "evil.example"}).status_code == 421
    assert proxy.get("/v1/models", headers={"host": "localhost"}).status_code == 200


def test_chunks_of_a_stream_come_as_they_are_written(proxy):
    body = {"prompt": "a", "max_tokens": 10**9, "stream": True}
    with proxy.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        first = list(itertools.islice(lines, 40))
        assert sum(line.startswith("data: {") for line in first) > 10


def test_a_full_replica_passes_requests_on_and_full_replicas_answer_429(replicas, proxy):
    endless = {"prompt": "a", "max_tokens": 10**9, "stream": True, "n": 2}
    with replicas[0].client.stream("POST", "/v1/completions", json=endless) as first:
        kept = first.iter_lines()
        next(kept)
        for _ in range(6):
            answer = proxy.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
            assert answer.status_code == 200
        with replicas[1].client.stream("POST", "/v1/completions", json=endless) as second:
            also_kept = second.iter_lines()
            next(also_kept)
            answer = proxy.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
    for _ in range(100):  # and nobody is left out for having been full
        if proxy.post("/v1/completions", json={"prompt": "a"}).status_code == 200:
            break
        time.sleep(0.05)
    else:
        pytest.fail("refused for ever")


def test_a_replica_that_ends_completes_its_texts(replicas, proxy):
    wanted = solo(replicas[0].model, "the", 20_000, seed=9)
    found: list[str] = []

    def ask() -> None:
        body = {"prompt": "the", "max_tokens": 20_000, "seed": 9}
        found.append(proxy.post("/v1/completions", json=body).json()["choices"][0]["text"])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    while sum(replica.scheduler.num_active for replica in replicas) < 2:
        time.sleep(0.001)
    replicas[0].end()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 2
    for _ in range(6):
        body = {"prompt": "a", "max_tokens": 5, "seed": 1}
        answer = proxy.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == solo(replicas[0].model, "a", 5, seed=1)
