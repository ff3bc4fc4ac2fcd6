"""How many forecasts per second `fastlstm serve` gives, one by one and batched.

usage: python benchmarks/forecast_serving.py [--clients 64] [--seconds 5]
An untrained forecaster (L=336, h=96, 7 columns, H=256) behind a server of its own process; the
clients are this process, on the cores that the server has, too. Each sends its next request when
the answer to the last has come. A request is a window, or one new row of a sequence. "No batching"
is the server with one window per pass. Stores
one JSON line in results/<machine>/forecast_serving.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine, results_folder
from serving import free_port, percentile, start_server

from fastlstm import Forecaster

L, h, C = 336, 96, 7
WARMUP_S = 1.0
CASES = (("window", "window"), ("one row of a sequence", "row"))


def make_forecaster(path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2000, C)).cumsum(0).astype(np.float32)
    model = Forecaster(horizon=h, input_size=L, steps=2, batch_size=8)
    model.fit(values).save(path)


def request(values: Any, **parameters: Any) -> bytes:
    """The bytes of a POST."""
    tensor: dict[str, Any] = {"name": "past", "datatype": "FP32", "shape": [1, *values.shape]}
    tensor["data"] = values.ravel().tolist()
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    return (
        b"POST /v2/models/model/infer HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )


async def exchange(reader: Any, writer: Any, data: bytes) -> None:
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"\ncontent-length: (\d+)", head)
    assert length is not None
    body = await reader.readexactly(int(length[1]))
    if not head.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(f"the server answered {head[:100]!r} {body[:300]!r}")


async def client(port: int, number: int, kind: str, start_s: float, until_s: float) -> list[float]:
    """Returns the seconds of every request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    values = np.random.default_rng(number).normal(size=(L, C)).astype("<f4")
    data = request(values)
    if kind == "row":
        begin = request(values, sequence_id=number + 1, sequence_start=True)
        await exchange(reader, writer, begin)
        data = request(values[:1], sequence_id=number + 1)
    found = []
    while (now_s := time.perf_counter()) < until_s:
        await exchange(reader, writer, data)
        if now_s >= start_s:
            found.append(time.perf_counter() - now_s)
    writer.close()
    return found


async def load(port: int, num_clients: int, kind: str, seconds: float) -> list[float]:
    start_s = time.perf_counter() + WARMUP_S
    asking = [client(port, k, kind, start_s, start_s + seconds) for k in range(num_clients)]
    return [one for found in await asyncio.gather(*asking) for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5)
    options = parser.parse_args()
    result: dict[str, Any] = {"clients": options.clients, "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        make_forecaster(path)
        for what, flags, num_clients in (
            ("one client", (), 1),
            ("no batching", ("--max-streams", "1", "--max-queue", "1000"), options.clients),
            ("batched", (), options.clients),
        ):
            port = free_port()
            process = start_server(path, port, *flags)
            try:
                for title, kind in CASES:
                    times = asyncio.run(load(port, num_clients, kind, options.seconds))
                    found = {
                        "requests_per_s": len(times) / options.seconds,
                        "p50_s": percentile(times, 0.5),
                        "p99_s": percentile(times, 0.99),
                    }
                    result["cases"][f"{title}, {what}"] = found
                    print(
                        f"{title:22} {what:12} {found['requests_per_s']:8,.0f} requests/s,"
                        f" p50 {1e3 * found['p50_s']:6.1f} ms, p99 {1e3 * found['p99_s']:6.1f} ms"
                    )
            finally:
                process.terminate()
                process.wait(60)
    result["machine"] = describe_machine()
    with (results_folder() / "forecast_serving.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
