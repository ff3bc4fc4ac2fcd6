"""A server under requests that are made to cost it much: time, memory, connections.

Each attack runs against `fastlstm serve` as a process, with every setting at its default.
`/health/live` is asked again and again meanwhile, on a connection of its own each time; printed are
how long its slowest answer took, the answers to the attack, and by how much the server's memory
grew at most.

usage: python campaigns/attacks.py [nothing] [keys] [bodies] [answer] [echo] [chunks] [files]
       [idle] [flood] [small]
Without names, all of them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving import Server, make_run

LIMIT_S = 120
INFER, COMPLETIONS = "/v2/models/model/infer", "/v1/completions"
L, h, C = 336, 96, 7


def make_forecaster(path: Path) -> Path:
    """Saves a forecaster of 7 columns: 336 rows in, 96 steps out."""
    import numpy as np

    from fastlstm import Forecaster

    values = np.random.default_rng(0).normal(size=(2000, C)).cumsum(0).astype(np.float32)
    model = Forecaster(horizon=h, input_size=L, hidden_size=64, steps=2, batch_size=8)
    model.fit(values).save(path)
    return path


def ask(port: int, slowest_s: Any, began_s: Any, count: Any) -> None:
    """Asks for /health/live for ever."""
    while True:
        began_s.value = time.monotonic()
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            connection.request("GET", "/health/live")
            connection.getresponse().read()
            connection.close()
            count.value += 1
        slowest_s.value = max(slowest_s.value, time.monotonic() - began_s.value)
        began_s.value = 0.0
        time.sleep(0.02)


class Witness:
    """Asks for /health/live by a process of its own, and looks at the server's memory."""

    def __init__(self, server: Server) -> None:
        self._server, self._stops = server, threading.Event()
        self._slowest_s, self._began_s = multiprocessing.Value("d"), multiprocessing.Value("d")
        self._count = multiprocessing.Value("i")
        self._first = self._peak = server.rss()
        self._asking = multiprocessing.Process(
            target=ask, args=(server.port, self._slowest_s, self._began_s, self._count), daemon=True
        )
        self._weighing = threading.Thread(target=self._weigh)

    def _weigh(self) -> None:
        while not self._stops.is_set():
            self._peak = max(self._peak, self._server.rss())
            time.sleep(0.02)

    def __enter__(self) -> Witness:
        self._asking.start()
        self._weighing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._asking.kill()
        self._asking.join()
        if self._began_s.value:  # it has no answer yet
            waits_s = time.monotonic() - self._began_s.value
            self._slowest_s.value = max(self._slowest_s.value, waits_s)
        self._stops.set()
        self._weighing.join()

    def describe(self) -> str:
        return (
            f"/health/live {self._count.value} times, slowest"
            f" {1e3 * self._slowest_s.value:.0f} ms; memory"
            f" {(self._peak - self._first) / 1e6:+.0f} MB at most"
        )


def post(server: Server, path: str, body: bytes, timeout_s: float = LIMIT_S) -> str:
    """Returns status and size of the answer, or why there was none."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        size = 0
        text = b""
        while part := answer.read(1 << 20):
            size += len(part)
            text = text or part[:300]
        why = "" if answer.status == 200 else f" {text.decode('ascii', 'replace')[:160]}"
        return f"{answer.status} {size / 1e6:.1f} MB{why}"
    except TimeoutError:
        return f"nothing within {timeout_s:.0f} s"
    except (OSError, http.client.HTTPException) as error:
        return f"cut ({type(error).__name__})"
    finally:
        connection.close()


def crowd(count: int, one: Callable[[int], str]) -> str:
    """Returns how often each answer came to so many requests at the same time."""
    with ThreadPoolExecutor(count) as pool:
        found = collections.Counter(pool.map(one, range(count)))
    return "; ".join(f"{number} times {answer}" for answer, number in found.most_common(4))


@contextlib.contextmanager
def attacked(name: str, path: Path, *flags: str) -> Iterator[tuple[Server, Callable[[str], None]]]:
    """Starts a server, asks it for its health meanwhile and ends it with one signal."""
    server = Server(path, "--no-log", *flags)
    answers: list[str] = []
    start_s = time.monotonic()
    with Witness(server) as witness:
        yield server, answers.append
        taken_s = time.monotonic() - start_s
        time.sleep(0.3)
    print(f"{name}: {taken_s:.1f} s; {witness.describe()}", flush=True)
    for answer in answers:
        print(f"  {answer}", flush=True)
    start_s = time.monotonic()
    server.process.terminate()
    try:
        code = server.process.wait(60)
    except Exception:
        server.process.kill()
        print("  SIGTERM did not end it within 60 s", flush=True)
    else:
        print(f"  SIGTERM ended it after {time.monotonic() - start_s:.1f} s, exit {code}")


def nothing(run: Path, forecaster: Path) -> None:
    """No attack: what the machine itself does to the figures."""
    with attacked("nothing", run) as (_, say):
        time.sleep(10)
        say("none")


def keys(run: Path, forecaster: Path) -> None:
    """A body of 1 MB with 130,000 keys, the last two of them the same."""
    names = [f'"{number:x}":0' for number in range(100_000)]
    body = ("{" + ",".join([*names, '"zz":0', '"zz":0']) + "}").encode()
    small = ("{" + ",".join([*names[:7000], '"zz":0', '"zz":0']) + "}").encode()
    name = f"keys ({len(body)} bytes)"
    with attacked(name, forecaster) as (server, say), ThreadPoolExecutor() as pool:
        big = pool.submit(post, server, INFER, body, 20)
        time.sleep(0.3)
        say("a forecast meanwhile: " + post(server, INFER, window(1), 10))
        say(big.result())
        say("small bodies: " + crowd(20, lambda _: post(server, INFER, small, 60)))


def window(count: int, **parameters: object) -> bytes:
    tensor = {"name": "past", "datatype": "FP32", "shape": [count, L, C]}
    tensor["data"] = [0] * (count * L * C)
    return json.dumps({"inputs": [tensor], "parameters": parameters}).encode()


def bodies(run: Path, forecaster: Path) -> None:
    """150 bodies of 1 MB at once."""
    data = window(1).replace(b"0, " * 100, b"0.1," * 257_000, 1)
    assert 1 << 19 < len(data) < 1 << 20
    with attacked(f"bodies (150 of {len(data)} bytes)", forecaster) as (server, say):
        say(crowd(150, lambda _: post(server, INFER, data)))
    prompt = json.dumps({"prompt": [1] * 340_000}).encode()
    with attacked(f"bodies, text (150 of {len(prompt)} bytes)", run) as (server, say):
        say(crowd(150, lambda _: post(server, COMPLETIONS, prompt)))


def answer(run: Path, forecaster: Path) -> None:
    """Answers as large as one may ask for."""
    levels = [round(0.1 + 0.004 * k, 3) for k in range(199)]
    for count, num_levels in ((100, 199), (100, 14), (7, 199)):
        body = window(count, quantiles=levels[:num_levels])
        name = f"answer ({count} windows, {num_levels} quantiles)"
        with attacked(name, forecaster) as (server, say):
            say(post(server, INFER, body))
    body = window(7, quantiles=levels)
    with attacked("answer (60 clients, 7 windows, 199 quantiles)", forecaster) as (server, say):
        say(crowd(60, lambda _: post(server, INFER, body)))


def echo(run: Path, forecaster: Path) -> None:
    """A prompt of 100,000 tokens, repeated and scored."""
    for n, logprobs in ((8, 5), (8, None), (128, None), (2, 5)):
        fields = {"prompt": [1] * 100_000, "n": n, "max_tokens": 1, "echo": True}
        body = json.dumps({**fields, "logprobs": logprobs}).encode()
        for streams in (b"", b'"stream":true,'):
            name = f"echo (n={n}, logprobs={logprobs}{', streamed' if streams else ''})"
            with attacked(name, run) as (server, say):
                say(post(server, COMPLETIONS, b"{" + streams + body[1:]))
    with attacked("logprobs (n=8, 100,000 tokens to write)", run) as (server, say):
        body = json.dumps({"prompt": "a", "n": 8, "max_tokens": 100_000, "logprobs": 5}).encode()
        say(post(server, COMPLETIONS, body))


def chunks(run: Path, forecaster: Path) -> None:
    """A body in chunks of one byte."""
    head = (
        f"POST {INFER} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        "transfer-encoding: chunked\r\n\r\n"
    ).encode()
    name = "chunks (1,000,000 of a byte each)"
    with (
        attacked(name, forecaster) as (server, say),
        socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as client,
    ):
        with contextlib.suppress(OSError):
            client.sendall(head + b"1\r\n \r\n" * 1_000_000 + b"0\r\n\r\n")
        try:
            say(client.recv(300).decode("ascii", "replace").partition("\r\n")[0])
        except OSError as error:
            say(f"cut ({type(error).__name__})")


def files(run: Path, forecaster: Path) -> None:
    """More connections than the process may open files."""
    server = Server(run, "--no-log", files=64)
    clients = []
    for _ in range(90):
        with contextlib.suppress(ConnectionResetError):
            clients.append(socket.create_connection(("127.0.0.1", server.port), 10))
    time.sleep(2)
    refused = 90 - len(clients)
    for client in clients:
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            with contextlib.suppress(ConnectionResetError):
                client.recv(100)
            refused += 1
        client.close()
    time.sleep(1.5)
    start_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/health/live")
    status = connection.getresponse().status
    taken_s = time.monotonic() - start_s
    size = server.log.stat().st_size
    print(
        f"files: 64 allowed, 90 connections: {refused} closed; {size} bytes written; afterwards"
        f" /health/live {status} in {1e3 * taken_s:.0f} ms",
        flush=True,
    )
    for line in server.log.read_text().splitlines()[:4]:
        print(f"  {line[:200]}")
    server.end()


def idle(run: Path, forecaster: Path) -> None:
    """One client holds every connection and sends nothing, a byte now and then, or a request."""
    for name, sent, more in (
        ("silent", b"", b""),
        ("trickling", b"GET /", b"a"),
        ("answered", b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n", b""),
    ):
        server = Server(run, "--no-log", "--header-timeout", "60", files=400)
        held = []
        for _ in range(400):
            held.append(socket.create_connection(("127.0.0.1", server.port), 10))
            with contextlib.suppress(OSError):
                held[-1].sendall(sent)
        time.sleep(1.5)
        start_s = time.monotonic()
        answers: collections.Counter[str] = collections.Counter()
        while time.monotonic() - start_s < 5:
            with contextlib.suppress(OSError):
                held[0].sendall(more)
            answers[post(server, COMPLETIONS, b'{"prompt":"a","max_tokens":1}', 10)[:3]] += 1
        print(f"idle ({name}, 400 connections, 400 files): another client: {dict(answers)}")
        for client in held:
            client.close()
        server.end()


def knock(port: int, until_s: float) -> None:
    """Connects and goes, again and again."""
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 5).close()


def flood(run: Path, forecaster: Path) -> None:
    """Connections that come faster than they can be refused, every other one taken."""
    name = "flood (4 processes, every connection taken)"
    with attacked(name, run, "--max-streams", "1", "--max-queue", "0") as (server, say):
        until_s = time.monotonic() + 10
        crowd = [
            multiprocessing.Process(target=knock, args=(server.port, until_s)) for _ in range(4)
        ]
        for one in crowd:
            one.start()
        time.sleep(1)
        while time.monotonic() < until_s - 1:
            answer = post(server, COMPLETIONS, b'{"prompt":"a","max_tokens":1}', 10)
        say(answer)
        for one in crowd:
            one.join()
        found = {name: server.metrics()[f"fastlstm_connections_{name}_total"] for name in FATES}
        say(str(found))


FATES = ("dismissed",)


def small(run: Path, forecaster: Path, count: int = 20_000) -> None:
    """20,000 small requests of each kind, one after the other: the memory is to level off."""
    window = [[0.5] * C] * L
    past = {"name": "past", "datatype": "FP32", "shape": [1, L, C], "data": [window]}
    text = {"prompt": "the ", "max_tokens": 8}
    kinds: list[tuple[str, Path, str, dict[str, object]]] = [
        ("text", run, COMPLETIONS, text),
        ("stream", run, COMPLETIONS, {**text, "stream": True, "n": 2}),
        ("logprobs", run, COMPLETIONS, {**text, "logprobs": 5, "echo": True}),
        ("refused", run, COMPLETIONS, {**text, "temperature": 9}),
        ("forecast", forecaster, INFER, {"inputs": [past]}),
        ("refused forecast", forecaster, INFER, {"inputs": [{**past, "shape": [1, L, 1]}]}),
    ]
    for name, path, url, fields in kinds:
        server = Server(path, "--no-log")
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body, sizes = json.dumps(fields), []
        for number in range(count):
            connection.request("POST", url, body, {"Content-Type": "application/json"})
            connection.getresponse().read()
            if number % (count // 10) == count // 10 - 1:
                sizes.append(round(server.rss() / 1e6))
        print(f"small ({name}, {count}): memory in MB after each tenth: {sizes}", flush=True)
        connection.close()
        server.end()


ATTACKS = {
    "nothing": nothing,
    "keys": keys,
    "bodies": bodies,
    "answer": answer,
    "echo": echo,
    "chunks": chunks,
    "files": files,
    "idle": idle,
    "flood": flood,
    "small": small,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*ATTACKS, []])
    chosen = parser.parse_args().names or list(ATTACKS)
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run")
        forecaster = make_forecaster(Path(folder) / "model")
        try:
            for name in chosen:
                ATTACKS[name](run, forecaster)
        finally:
            for process in Server.started:
                process.kill()


if __name__ == "__main__":
    main()
