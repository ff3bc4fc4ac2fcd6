"""Replays distributed training over links of a given speed, beside what `fastlstm scale` predicts.

    fastlstm scale SOURCE … --link 1gbit --json > STEP.json
    python tests/campaigns/shaped_links.py STEP.json [NAME ...]
    python tests/campaigns/shaped_links.py sums

Every rank is a process in a network namespace of its own; a bridge joins them, and `tc tbf` limits
both directions of each link. Where a cell has a latency, a relay between TUN devices takes the
place of the bridge. A step's compute is a sleep of the length that was measured (several ranks
cannot compute at once on two cores); what travels is real: orders, reports, sums and exchanges of
the classes that train. A line of JSON per cell of CELLS, predicted before it is measured.
`sums` has benchmarks/tree_sum.py on the links. Needs root, `ip` and `tc`; all namespaces are
removed at the end.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

PREFIX = "flshaped"
_HUB = f"{PREFIX}-hub"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_CONGESTION = "cubic"
_IS_WARM = os.environ.get("SHAPED_LINKS_WARM") == "1"
"""Windows of TCP stay as they are in pauses (net.ipv4.tcp_slow_start_after_idle=0)."""
_CLONE_NEWNET = 0x40000000
_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
_BRIDGE_MS = 0.05
"""Latency of a bridge."""
_WARM_UP = 3
_FEWEST_STEPS = 32
_LIMIT_S = 170
_AT_ONCE = 32
"""Packets that the relay reads from a device before it looks at the others."""


@dataclass(frozen=True)
class Cell:
    """What is replayed: the batch of the step divided among `ranks`, or with `is_weak` on each."""

    ranks: int
    mbit: float
    wire: str
    every: int = 1
    latency_ms: float = 0.0
    is_weak: bool = False


CELLS = {
    "fp32": Cell(4, 1000, "fp32"),
    "bf16": Cell(4, 1000, "bf16"),
    "fp32-8": Cell(4, 1000, "fp32", 8),
    "bf16-8": Cell(4, 1000, "bf16", 8),
    "bf16-25": Cell(4, 1000, "bf16", 25),
    "far-25": Cell(2, 100, "bf16", 25, latency_ms=25),
    "two": Cell(2, 1000, "fp32"),
    "two-bf16": Cell(2, 1000, "bf16"),
    "two-weak": Cell(2, 1000, "bf16", is_weak=True),
    "slow": Cell(4, 100, "bf16"),
    "slow-8": Cell(4, 100, "bf16", 8),
    "weak": Cell(4, 1000, "bf16", is_weak=True),
    "far": Cell(2, 100, "fp32", latency_ms=25, is_weak=True),
    "near-8": Cell(4, 300, "fp32", 8, latency_ms=2),
}


def main() -> None:
    if os.environ.get("RANK"):
        replay(json.loads(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that namespaces are removed
    if sys.argv[1:] == ["sums"]:
        command = [sys.executable, str(_BENCHMARKS / "tree_sum.py"), "4,16"]
        with network(4, 1000, 0.0):
            print("\n".join(outputs_of(4, command)[0].splitlines()))
        return
    errors, names = list[float](), sys.argv[2:] or list(CELLS)
    for name in names:
        cell = CELLS[name]
        way = predict(cell, json.loads(Path(sys.argv[1]).read_text())["step"])
        measured = measure(cell, way)
        predicted = {"efficiency": 100 * way["efficiency"], "exposed_ms": 1e3 * way["exposed_s"]}
        errors.append(predicted["efficiency"] - measured["efficiency"])
        line = {"name": name, **asdict(cell), "compute_ms": 1e3 * way["compute_s"]}
        print(json.dumps({**line, "measured": measured, "predicted": predicted}), flush=True)
    print(f"{len(errors)} cells, largest error {max(map(abs, errors)):.1f} points")


def predict(cell: Cell, step: dict[str, Any]) -> dict[str, Any]:
    """Returns what `fastlstm scale` says of a cell, and what its processes exchange."""
    from fastlstm.tuning.scale_law import Link
    from fastlstm.tuning.step_cost import StepCost

    from fastlstm.tuning.scale import predict_scale

    names = {field.name for field in fields(StepCost)}
    cost = StepCost(**{name: value for name, value in step.items() if name in names})
    link = Link(cell.mbit * 125e3, (cell.latency_ms or _BRIDGE_MS) / 1e3)
    found = predict_scale(cost, cell.ranks, link, cell.wire, cell.every)
    way = (found.weak if cell.is_weak else found.strong)[0]
    exchange = cost.exchange(cell.wire, way.rows, cell.every > 1)
    return {**way.to_dict(), **asdict(exchange)}


def measure(cell: Cell, way: dict[str, Any]) -> dict[str, float]:
    """Runs the ranks of a cell; returns the efficiency and the exposed milliseconds of a step."""
    with network(cell.ranks, cell.mbit, cell.latency_ms):
        outputs = outputs_of(cell.ranks, [sys.executable, __file__, json.dumps(way)])
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


def outputs_of(num: int, command: list[str]) -> list[str]:
    """Runs a command in each of `num` namespaces; returns what each prints."""
    processes = list[subprocess.Popen[str]]()
    try:
        for rank in range(num):
            variables = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(num), "LOCAL_RANK": "0",
                "MASTER_ADDR": address(0), "MASTER_PORT": "29611",
                "GLOO_SOCKET_IFNAME": "eth", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            inside = ["ip", "netns", "exec", name_of(rank), *command]
            processes.append(
                subprocess.Popen(inside, env=variables, text=True, stdout=subprocess.PIPE)
            )
        return [process.communicate(timeout=_LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


# the processes ----------------------------------------------------------------------------------


def replay(way: dict[str, Any]) -> None:
    """Takes the steps of a way to train in one of the processes; rank 0 prints what came of it."""
    import torch
    from torch import distributed

    from fastlstm.distributed.joining import joined
    from fastlstm.distributed.world import Order
    from fastlstm.training.options import OVERLAP

    torch.set_num_threads(1)
    every, compute_s = way["every"], way["compute_s"]
    steps = every * -(-max(_FEWEST_STEPS, 2 * every) // every)
    wire = torch.bfloat16 if way["wire"] == "bf16" else torch.float32
    with joined() as world:
        reduce = world.reduction(torch.zeros(way["numbers"]), wire)
        behind = world.reduction(torch.zeros(way["background"]), torch.bfloat16)
        own = torch.zeros(way["gathered"] // world.size, dtype=torch.bfloat16)
        carried, in_background = bytes(way["carried"]), None

        def step(number: int) -> None:
            nonlocal in_background
            if number % every == 0:
                world.order(Order.STEP, 1.0) if world.is_leader else world.next_order()
                if way["background"]:
                    about = torch.zeros(1, dtype=torch.float64)
                    in_background = threading.Thread(target=behind, args=(about,))
                    in_background.start()
            time.sleep(compute_s)
            if in_background is not None and number % every == math.ceil(every / OVERLAP) - 1:
                in_background.join()
            if number % every == every - 1:
                exchange()

        def exchange() -> None:
            report = world.report(world.size)
            if carried:
                world.begin_copy(carried)
            reduce(report.numbers)
            if carried:
                world.finish_copy()
            if len(own):
                world.all_gathered(own, [len(own)] * world.size)

        for number in range(_WARM_UP * every if every < 4 else every):
            step(number)
        distributed.barrier()
        began = time.perf_counter()
        for number in range(steps):
            step(number)
        distributed.barrier()
        step_s = (time.perf_counter() - began) / steps
        if world.is_leader:
            exposed_ms = 1e3 * (step_s - compute_s)
            found = {"efficiency": 100 * compute_s / step_s, "exposed_ms": exposed_ms}
            print(json.dumps(found | {"steps": steps}), flush=True)
        distributed.barrier()
    os._exit(0)


# the network ------------------------------------------------------------------------------------


def name_of(rank: int) -> str:
    return f"{PREFIX}-{rank}"


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


@contextmanager
def network(num: int, mbit: float, latency_ms: float) -> Iterator[None]:
    """Joins `num` namespaces for the length of the block."""
    names = [name_of(rank) for rank in range(num)]
    stop = threading.Event()
    relay: threading.Thread | None = None
    clean_up()
    try:
        for name in (*names, _HUB):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        if latency_ms:
            devices = [tun_in(name) for name in names]
            for rank, name in enumerate(names):
                set_up(name, "eth", rank)
                shape(name, "eth", mbit)
            relay = threading.Thread(target=forward, args=(devices, latency_ms / 1e3, stop))
            relay.start()
        else:
            bridge(names, mbit)
        yield
    finally:
        stop.set()
        if relay is not None:
            relay.join()
        clean_up()


def bridge(names: list[str], mbit: float) -> None:
    run("ip", "-n", _HUB, "link", "add", "bridge", "type", "bridge")
    run("ip", "-n", _HUB, "link", "set", "bridge", "up")
    for rank, name in enumerate(names):
        port = f"port{rank}"
        run(
            "ip",
            "-n",
            _HUB,
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth",
            "netns",
            name,
        )
        run("ip", "-n", _HUB, "link", "set", port, "master", "bridge", "up")
        set_up(name, "eth", rank)
        shape(name, "eth", mbit)
        shape(_HUB, port, mbit)


def set_up(name: str, device: str, rank: int) -> None:
    run("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", device)
    run("ip", "-n", name, "link", "set", device, "up")
    # What Linux does by default, whatever this machine does.
    if _IS_WARM:
        run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")
    route = ["10.77.0.0/24", "dev", device, "src", address(rank), "congctl", _CONGESTION]
    run("ip", "-n", name, "route", "replace", *route)


def shape(name: str, device: str, mbit: float) -> None:
    """Limits what leaves a device; a burst is what the timer of the kernel needs."""
    burst = max(16_000, int(mbit * 125e3 / 1000))
    limits = ["rate", f"{mbit:g}mbit", "burst", str(burst), "latency", "50ms"]
    run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def clean_up() -> None:
    """Removes all namespaces of this script, with what is in them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        if line.startswith(f"{PREFIX}-"):
            run("ip", "netns", "del", line.split()[0])


def run(*command: str) -> None:
    subprocess.run(command, check=True)


# latency ----------------------------------------------------------------------------------------


def tun_in(name: str) -> int:
    """Returns a TUN device named `eth` in a namespace; it is opened there, and used from here."""
    libc, home = ctypes.CDLL(None, use_errno=True), os.open("/proc/self/ns/net", os.O_RDONLY)
    place = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(place, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth", _IFF_TUN | _IFF_NO_PI))
    finally:
        libc.setns(home, _CLONE_NEWNET)
        os.close(place)
        os.close(home)
    return device


def forward(devices: list[int], latency_s: float, stop: threading.Event) -> None:
    """Hands packets to the device of their destination, `latency_s` after they were sent."""
    waiting: deque[tuple[float, int, bytes]] = deque()  # all wait as long: in order
    while not stop.is_set():
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, device, packet = waiting.popleft()
            os.write(device, packet)
        limit_s = min(0.05, waiting[0][0] - now) if waiting else 0.05
        for source in select.select(devices, [], [], max(0.0, limit_s))[0]:
            due = time.monotonic() + latency_s
            with suppress(BlockingIOError):
                for _ in range(_AT_ONCE):
                    packet = os.read(source, 65536)
                    rank = packet[19] - 1 if packet[0] >> 4 == 4 else len(devices)
                    if rank < len(devices):
                        waiting.append((due, devices[rank], packet))
    for device in devices:
        os.close(device)


if __name__ == "__main__":
    main()
