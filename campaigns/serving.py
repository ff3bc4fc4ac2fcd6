"""A server under clients that leave, stall, trickle and come in crowds, and a signal in the middle.

Every campaign checks that others get their exact texts meanwhile, that no place, connection or
memory is left behind, and prints what it measured.

usage: python campaigns/serving.py [--disconnects 10000] [--overload 120] [--readers 300]
       [--senders 500] [--sigterm 20]
A campaign runs when its flag is given; without any, all run at these sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import ClassVar

STALLED = 'fastlstm_outcomes_total{outcome="stalled"}'
SIZES = {"disconnects": 10_000, "overload": 120, "readers": 300, "senders": 500, "sigterm": 20}
RSS_SPARE = 48 << 20
"""Memory that a campaign may add: buffers that the allocator keeps."""
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def make_run(path: Path) -> Path:
    import torch

    from fastlstm.runs.run_directory import RunDirectory
    from fastlstm.text.config import ModelConfig
    from fastlstm.text.data.tokenizer import CharTokenizer
    from fastlstm.text.files import save_language_model
    from fastlstm.text.model import LanguageModel

    torch.manual_seed(0)
    tokenizer = CharTokenizer("\n abcdefghijklmnopqrstuvwxyz")
    config = ModelConfig(vocab_size=tokenizer.vocab_size, embed_size=64, rnn_size=256)
    run = RunDirectory(path)
    run.create()
    run.publish(save_language_model(LanguageModel(config), tokenizer, train={}))
    return path


class Server:
    """`fastlstm serve` as a process."""

    started: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self, run: Path, *flags: str, files: int = 0) -> None:
        """Starts it; with `files` it may open only so many."""
        self.log = run.parent / f"server-{len(self.started)}.log"
        command = [sys.executable, "-m", "fastlstm", "serve", str(run), "--port", "0", *flags]
        if files:
            command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)
        self.started.append(self.process)
        for _ in range(600):
            if match := re.search(r"at http://127.0.0.1:(\d+)/", self.log.read_text()):
                self.port = int(match[1])
                return
            time.sleep(0.1)
        raise SystemExit("the server did not start")

    def logged(self) -> list[dict[str, object]]:
        """What it wrote about requests so far."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if line[0] != "#"}

    def rss(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) << 10  # type: ignore[index]

    def num_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def wait_idle(self, timeout_s: float = 30) -> float:
        start_s = time.monotonic()
        while True:
            found = self.metrics()
            if found["fastlstm_streams_active"] == found["fastlstm_queue_depth"] == 0:
                return time.monotonic() - start_s
            require(time.monotonic() - start_s < timeout_s, "places were not given back")
            time.sleep(0.05)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        require(code == 0, f"exit code {code}")


def require(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"FAILED: {what}")


def request(**body: object) -> bytes:
    data = json.dumps({"prompt": "the ", **body}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(data), data)
    )


async def connect(server: Server, receive_buffer: int = 0) -> Stream:
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", server.port))
    return await asyncio.open_connection(sock=connection)


async def ask(server: Server, **body: object) -> tuple[int, bytes, float]:
    """Returns status, body and seconds of a request, on a connection of its own."""
    stream = await connect(server)
    try:
        return await exchange(stream, **body)
    finally:
        stream[1].close()


async def exchange(stream: Stream, **body: object) -> tuple[int, bytes, float]:
    """As `ask`, on a connection that stays open."""
    reader, writer = stream
    start_s = time.perf_counter()
    writer.write(request(**body))
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
    return int(head.split()[1]), await reader.readexactly(length), time.perf_counter() - start_s


def text_of(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["text"])


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Witness:
    """A client that does nothing wrong: its text must stay what it was, and come in time."""

    def __init__(self, server: Server) -> None:
        self.server, self.seconds = server, list[float]()

    async def learn(self) -> None:
        _, body, _ = await ask(self.server, max_tokens=300, seed=4)
        self.text = text_of(body)

    async def watch(self) -> None:
        while True:
            status, body, seconds = await ask(self.server, max_tokens=300, seed=4)
            require(status == 200 and text_of(body) == self.text, "another client's text changed")
            self.seconds.append(seconds)
            await asyncio.sleep(0.05)

    def describe(self) -> str:
        p50, p99 = percentile(self.seconds, 0.5), percentile(self.seconds, 0.99)
        return f"witness {len(self.seconds)} texts, p50 {1e3 * p50:.0f} ms, p99 {1e3 * p99:.0f} ms"


@contextlib.asynccontextmanager
async def witnessed(server: Server):  # type: ignore[no-untyped-def]
    witness = Witness(server)
    await witness.learn()
    task = asyncio.create_task(witness.watch())
    await asyncio.sleep(0.5)
    try:
        yield witness
    finally:
        if task.done():
            task.result()
        task.cancel()


async def disconnects(run: Path, count: int) -> None:
    server = Server(run)
    rng = random.Random(0)

    async def leave(number: int) -> None:
        reader, writer = await connect(server)
        data = request(max_tokens=100_000, stream=True, n=rng.choice((1, 1, 3)))
        kind = number % 5
        if kind == 0:  # in the middle of the request
            writer.write(data[: rng.randrange(1, len(data))])
        else:
            writer.write(data)
        if kind in (2, 3, 4):
            await reader.read(100)
        if kind == 3:  # a reset instead of an end
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif kind == 4:  # only its sending half
            writer.write_eof()
            await asyncio.sleep(0.01)
        writer.close()

    async with witnessed(server) as witness:
        for number in range(500):
            await leave(number)
        server.wait_idle()
        rss, files = server.rss(), server.num_files()
        for first in range(500, count, 20):
            await asyncio.gather(*(leave(number) for number in range(first, first + 20)))
    idle_s = server.wait_idle()
    await asyncio.sleep(1)
    grown = server.rss() - rss
    print(
        f"disconnects: {count}; idle after {idle_s:.2f} s; memory {grown / 1e6:+.1f} MB, files"
        f" {server.num_files() - files:+d}; {witness.describe()}",
        flush=True,
    )
    require(grown < RSS_SPARE, "memory grew")
    require(server.num_files() - files <= 2, "connections are left over")
    server.end()


async def overload(run: Path, seconds: float) -> None:
    """Ten times as many clients as places; each asks again as soon as it is answered.

    Each keeps its connection, as clients do: with a new one per request the machine would run out
    of ports after half a minute, and the search for a free one would be what is measured.
    """
    slots, queue = 32, 32
    server = Server(run, "--max-streams", str(slots), "--max-queue", str(queue))
    refused: list[float] = []

    async def crowd(number: int, results: list[float], until_s: float) -> None:
        rng = random.Random(number)
        stream = await connect(server)
        while time.monotonic() < until_s:
            length = rng.randint(200, 4000)
            status, body, taken_s = await exchange(stream, max_tokens=length, seed=number)
            if status == 200:
                tokens = json.loads(body)["usage"]["completion_tokens"]
                require(tokens == length, f"{tokens} tokens instead of {length}")
                results.append(taken_s)
            else:
                require(status == 429 and b"overloaded" in body, f"status {status}")
                refused.append(taken_s)
                await asyncio.sleep(rng.random())  # Retry-After says 1
        stream[1].close()

    os.nice(10)  # clients elsewhere would take nothing of the server's cores
    os.nice(10)  # clients elsewhere would take nothing of the server's cores
    for_s = min(20.0, seconds / 4)
    phases: list[list[float]] = []  # of the clients, and the server's log about each
    logs: list[list[float]] = []
    num_lines = 0
    # Before and after, since the machine is not the same from one minute to the next.
    for number, (count, lasts_s) in enumerate([(1, for_s), (10, seconds), (1, for_s)]):
        if number == 1:
            require(not refused, "refused at its capacity")
            rss = server.rss()
        phases.append([])
        until_s = time.monotonic() + lasts_s
        clients = range(count * (slots + queue))
        await asyncio.gather(*(crowd(k, phases[-1], until_s) for k in clients))
        if number == 1:
            recovered_s, grown = server.wait_idle(), server.rss() - rss
            num_refused = len(refused)
        lines = server.logged()
        logs.append([float(str(x["seconds"])) for x in lines[num_lines:] if x["status"] == 200])
        num_lines = len(lines)
    alone_s = statistics.mean(percentile(log, 0.99) for log in (logs[0], logs[2]))
    admitted_s, seen_s = percentile(logs[1], 0.99), percentile(phases[1], 0.99)
    print(
        f"overload: {len(phases[1])} answered, {len(phases[1]) / seconds:.0f}/s (at capacity"
        f" {len(phases[0]) / for_s:.0f}/s before, {len(phases[2]) / for_s:.0f}/s after); by the"
        f" server's log p99 {admitted_s:.2f} s, {admitted_s / alone_s:.1f} times the"
        f" {alone_s:.2f} s at capacity; as the clients see it {seen_s:.2f} s\n"
        f"  {num_refused} refused, as the clients see it p50"
        f" {1e3 * percentile(refused, 0.5):.1f} ms, p99 {1e3 * percentile(refused, 0.99):.1f} ms;"
        f" idle after {recovered_s:.2f} s; memory {grown / 1e6:+.1f} MB",
        flush=True,
    )
    require(num_refused == len(refused), "refused at its capacity after the crowd had left")
    require(grown < RSS_SPARE, "memory grew")
    server.end()


async def readers(run: Path, count: int) -> None:
    """Clients that take nothing, or a byte a second."""
    flags = ("--stall", "5", "--max-streams", "400", "--max-tokens", "1000000000")
    server = Server(run, *flags)
    rss = server.rss()
    async with witnessed(server) as witness:
        before = len(witness.seconds)
        connections = []
        for _ in range(count):
            reader, writer = await connect(server, receive_buffer=4096)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request(max_tokens=1_000_000_000, stream=True))
            connections.append((reader, writer))
        start_s = time.monotonic()
        peak = 0
        while server.metrics().get(STALLED, 0.0) < count:
            peak = max(peak, server.rss())
            require(time.monotonic() - start_s < 120, "stalled readers were not cut off")
            await asyncio.sleep(0.5)
        cut_s = time.monotonic() - start_s
        for _, writer in connections:
            writer.transport.abort()
    server.wait_idle()
    print(
        f"readers: {count} cut off after {cut_s:.0f} s; memory at most"
        f" {(peak - rss) / 1e6:+.1f} MB; {witness.describe()} ({before} before)",
        flush=True,
    )
    require(peak - rss < count * (1 << 20), "memory is not bounded")
    server.end()


async def senders(run: Path, count: int) -> None:
    """Requests that come byte by byte, and never end."""
    server = Server(run, "--header-timeout", "5", "--body-timeout", "5")
    files = server.num_files()
    lasted: list[float] = []

    async def trickle(number: int) -> None:
        reader, writer = await connect(server)
        start_s = time.monotonic()
        data = request(max_tokens=5)
        data = data.replace(b"content-length: ", b"content-length: 9") if number % 2 else data
        at = 0 if number % 2 == 0 else data.index(b"\r\n\r\n") + 4
        writer.write(data[:at])
        with contextlib.suppress(OSError):
            while time.monotonic() - start_s < 60:
                writer.write(data[at : at + 1] or b" ")
                at = min(at + 1, len(data) - 20 if number % 2 == 0 else len(data))
                with contextlib.suppress(TimeoutError):
                    if not await asyncio.wait_for(reader.read(4096), 0.5):
                        break
        lasted.append(time.monotonic() - start_s)
        writer.close()

    async with witnessed(server) as witness:
        await asyncio.gather(*(trickle(number) for number in range(count)))
    await asyncio.sleep(1)
    print(
        f"senders: {count} cut off after {min(lasted):.1f} to {max(lasted):.1f} s;"
        f" files {server.num_files() - files:+d}; {witness.describe()}",
        flush=True,
    )
    require(max(lasted) < 10, "a trickling sender was not cut off")
    require(server.num_files() - files <= 2, "connections are left over")
    server.end()


async def sigterm(run: Path, count: int) -> None:
    """A signal while 64 clients stream: every text ends whole, or with an error that says why."""
    whole = ended = 0
    slowest = 0.0
    for number in range(count):
        grace = (0.0, 0.5, 20.0)[number % 3]
        server = Server(run, "--grace", str(grace))
        data = request(max_tokens=3000 if number % 2 else 100_000, stream=True)
        connections = [await connect(server) for _ in range(64)]
        for _, writer in connections:
            writer.write(data)
        await connections[-1][0].read(10)
        await asyncio.sleep(random.Random(number).uniform(0, 0.5))
        server.process.send_signal(signal.SIGTERM)
        start_s = time.monotonic()
        for reader, writer in connections:
            text = await asyncio.wait_for(reader.read(-1), grace + 20)
            writer.close()
            require(
                text == b"" or b"[DONE]" in text or b"shutting down" in text, f"{text[-200:]!r}"
            )
            whole += b"[DONE]" in text
            ended += b"shutting down" in text
        code = await asyncio.to_thread(server.process.wait, grace + 20)
        slowest = max(slowest, time.monotonic() - start_s - grace)
        require(code == 0, f"exit code {code}")
    print(
        f"sigterm: {count} servers, {whole} texts whole, {ended} ended with an event; at most"
        f" {slowest:.1f} s beyond the grace",
        flush=True,
    )


CAMPAIGNS = {
    "disconnects": disconnects,
    "overload": overload,
    "readers": readers,
    "senders": senders,
    "sigterm": sigterm,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, const=size, nargs="?")
    options = vars(parser.parse_args())
    chosen = {name: size for name, size in options.items() if size is not None} or SIZES
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run")
        try:
            for name, size in chosen.items():
                asyncio.run(CAMPAIGNS[name](run, size))
        finally:
            for process in Server.started:
                process.kill()


if __name__ == "__main__":
    main()
