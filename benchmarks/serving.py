"""What of the engine's rate reaches the clients of `fastlstm serve`.

usage: python benchmarks/serving.py [RUN] [--clients 256] [--seconds 10] [--weights int8]
First the engine alone: as many streams as clients, in this process, no server. Then the server, as
a process of its own, and this process as its clients: each streams one text after the other, of
unequal lengths, and reads whatever comes, all on the cores that the server has, too. Without RUN
an untrained model (H=512, 96 characters) is used: its speed is that of any. Stores one JSON line
in results/<machine>/serving.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import simulated_gpu
from machine import describe_machine, results_folder

from fastlstm import LM
from fastlstm.system import hardware
from fastlstm.system.fields import Device
from fastlstm.text.sampling import Sampling

CHARS = "".join(map(chr, range(32, 127))) + "\n"
WARMUP_S = 2.0


@dataclass
class Client:
    """What one client saw."""

    num_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    num_texts: int = 0
    num_bad: int = 0


def make_run(path: Path, H: int) -> Path:
    import torch

    from fastlstm.runs.run_directory import RunDirectory
    from fastlstm.text.config import ModelConfig
    from fastlstm.text.data.tokenizer import CharTokenizer
    from fastlstm.text.files import save_language_model
    from fastlstm.text.model import LanguageModel

    torch.manual_seed(0)
    tokenizer = CharTokenizer("".join(sorted(set(CHARS))))
    config = ModelConfig(vocab_size=tokenizer.vocab_size, embed_size=H // 2, rnn_size=H)
    run = RunDirectory(path)
    run.create()
    run.publish(save_language_model(LanguageModel(config), tokenizer, train={"split": "80/15/5"}))
    return path


def engine_rate(
    run: Path, weights: str | None, num_streams: int, threads: int, device: Device
) -> float:
    """Tokens per second of the engine alone: no text, no clients."""
    decoder = LM.load(run, weights=weights, device=device).decoder_for(num_streams)
    streams = []
    for k in range(num_streams):
        stream = decoder.stream()
        stream.set(Sampling(seed=k))
        stream.feed([0])
        stream.begin(1 << 40)
        streams.append(stream)
    steps, rates = 64, []
    for number in range(12):
        start_s = time.perf_counter()
        decoder.run(streams, steps, threads)
        if number >= 2:
            rates.append(num_streams * steps / (time.perf_counter() - start_s))
        for stream in streams:
            stream.take()
    return statistics.median(rates)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(
    run: Path, port: int, *flags: str, program: Sequence[str] = ("-m", "fastlstm")
) -> subprocess.Popen[str]:
    command = [sys.executable, *program, "serve", str(run), "--port", str(port), "--no-log"]
    process = subprocess.Popen(
        [*command, *flags], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if " at http://" in line:
            return process
    raise SystemExit("the server did not start")


class Reader(asyncio.Protocol):
    """One client on a plain socket, as cheap as can be: the server is to be measured."""

    def __init__(self, client: Client, lengths: random.Random, until_s: float, start_s: float):
        self.client, self.lengths, self.until_s, self.start_s = client, lengths, until_s, start_s
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        # Log-uniform: many short texts, a few long ones; they end and begin all the time.
        self.length = int(10 ** self.lengths.uniform(2, 4.5))
        body = json.dumps(
            {"prompt": "The ", "max_tokens": self.length, "stream": True, "seed": self.length}
        ).encode()
        self.transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.asked_s, self.last_s, self.text_tokens = time.perf_counter(), 0.0, 0
        self.is_over = False

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        counts = self.start_s <= now_s < self.until_s
        if counts:
            if self.last_s:
                self.client.gaps_s.append(now_s - self.last_s)
            else:
                self.client.first_s.append(now_s - self.asked_s)
        if not self.last_s and not data.startswith(b"HTTP/1.1 200 "):
            sys.exit(f"the server answered {data[:300]!r}")
        self.last_s = now_s
        if self.is_over:  # only the end of the chunked answer was missing
            self.go_on(data, now_s)
            return
        data = self.tail + data
        cut = data.rfind(b"\n\n")
        if cut < 0:
            self.tail = data
            return
        whole, self.tail = data[: cut + 2], data[cut + 2 :]
        tokens = sum(len(json.loads(text)) for text in TEXT.findall(whole))
        self.text_tokens += tokens
        if counts:
            self.client.num_tokens += tokens
        if b"[DONE]" in whole:
            self.client.num_texts += 1
            self.client.num_bad += self.text_tokens != self.length
            self.tail, self.is_over = b"", True
            self.go_on(data, now_s)

    def go_on(self, data: bytes, now_s: float) -> None:
        if not data.endswith(b"\r\n0\r\n\r\n") and data != b"0\r\n\r\n":
            return
        if now_s >= self.until_s:
            self.transport.close()
        else:
            self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


TEXT = re.compile(rb'"text":("(?:[^"\\]|\\.)*")')


async def load(port: int, num_clients: int, seconds: float) -> tuple[list[Client], float]:
    loop = asyncio.get_running_loop()
    start_s = time.perf_counter() + WARMUP_S
    until_s = start_s + seconds
    clients = [Client() for _ in range(num_clients)]
    readers = []
    for number, client in enumerate(clients):
        rng = random.Random(number)
        _, reader = await loop.create_connection(
            lambda client=client, rng=rng: Reader(client, rng, until_s, start_s),  # type: ignore[misc]
            "127.0.0.1",
            port,
        )
        readers.append(reader)
    await asyncio.wait([reader.done for reader in readers], timeout=WARMUP_S + seconds + 30)
    for reader in readers:
        reader.transport.abort()
    return clients, seconds


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", nargs="?")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--weights", help="default: int8, on a GPU fp16")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rnn-size", type=int, default=512)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--simulated", action="store_true", help="see simulated_gpu.py")
    options = parser.parse_args()
    program = ["-m", "fastlstm"]
    if options.simulated:
        simulated_gpu.install()
        options.device, program = "cuda", [simulated_gpu.__file__]
    if options.weights is None and options.device == "cpu":
        options.weights = "int8"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(options.run) if options.run else make_run(Path(folder) / "run", options.rnn_size)
        alone = {
            threads: engine_rate(run, options.weights, options.clients, threads, options.device)
            for threads in sorted({1, hardware.default_threads()})
        }
        port = free_port()
        flags = ("--device", options.device, "--threads", str(options.threads))
        flags += ("--weights", options.weights) if options.weights else ()
        flags += ("--max-streams", str(max(256, options.clients)))
        process = start_server(run, port, *flags, program=program)
        try:
            clients, seconds = asyncio.run(load(port, options.clients, options.seconds))
            server_cpu_s, own_cpu_s = cpu_seconds(process.pid), time.process_time()
        finally:
            process.terminate()
            process.wait(60)
    gaps = [gap for client in clients for gap in client.gaps_s]
    first = [gap for client in clients for gap in client.first_s]
    rate = sum(client.num_tokens for client in clients) / seconds
    best = max(alone.values())
    result = {
        "clients": options.clients,
        "weights": options.weights,
        "device": "simulated GPU" if options.simulated else options.device,
        "seconds": seconds,
        "engine_tokens_per_s": {str(threads): value for threads, value in alone.items()},
        "client_tokens_per_s": rate,
        "share": rate / best,
        "chunk_p50_s": percentile(gaps, 0.5),
        "chunk_p99_s": percentile(gaps, 0.99),
        "first_p50_s": percentile(first, 0.5),
        "first_p99_s": percentile(first, 0.99),
        "texts": sum(client.num_texts for client in clients),
        "wrong_lengths": sum(client.num_bad for client in clients),
        "server_cpu_s": server_cpu_s,
        "client_cpu_s": own_cpu_s,
        "machine": describe_machine(),
    }
    with (results_folder() / "serving.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    shown = ", ".join(f"{value:,.0f} on {threads}" for threads, value in alone.items())
    print(f"engine alone: {shown} thread(s), tokens/s")
    print(f"clients:      {rate:,.0f} tokens/s = {100 * rate / best:.0f} % of the best of these")
    print(
        f"between chunks p50 {1e3 * result['chunk_p50_s']:.0f} ms,"
        f" p99 {1e3 * result['chunk_p99_s']:.0f} ms;"
        f" first piece p50 {1e3 * result['first_p50_s']:.0f} ms,"
        f" p99 {1e3 * result['first_p99_s']:.0f} ms"
    )
    print(f"{result['texts']} texts, {result['wrong_lengths']} of a wrong length")
    print(
        f"CPU: server {server_cpu_s:.1f} s, clients {own_cpu_s:.1f} s of {seconds:.0f} s measured"
    )


if __name__ == "__main__":
    main()
