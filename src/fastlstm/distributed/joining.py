"""How a process joins the others of a run, which torchrun or a scheduler has started."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import secrets
import signal
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from fastlstm.distributed.launch import is_started_by_torchrun
from fastlstm.distributed.world import DEADLINE, PATIENCE, World
from fastlstm.errors import ConfigError, Dismissed, LostProcessError, Stopped, UsageError
from fastlstm.system import environment, hardware
from fastlstm.system.processes import die_with_parent
from fastlstm.system.signal_handlers import STOP_SIGNALS, handling, is_not_ignored

_SAID_AFTER_S = 15.0
MEETING = timedelta(minutes=10)
"""Limit of the wait for all processes, from the first one on."""
_INVITATION, _POLL_S = "fastlstm-invitation", 0.02
_ISA = "instruction set"
MAY_DIFFER = frozenset(
    {"cache_dir", "valid", "test", "log_every", "tensorboard", "keep_checkpoints", "sample_every"}
)
"""Options that may differ between processes: paths, and what only rank 0 shows and writes."""


@contextmanager
def joined(options: Any = None, stop: Callable[[], bool] | None = None) -> Iterator[World]:
    """Joins the processes of a run for the block; all must have the same options, a dataclass.

    If the stop flag has a `name`, a signal has come already, and the process ends.
    """
    if not dist.is_initialized():
        environment.require_torchrun()
    if not is_started_by_torchrun() or dist.is_initialized():
        if dist.is_initialized() and dist.get_world_size() > 1:
            warnings.warn(
                f"torch.distributed is already initialized with {dist.get_world_size()} processes:"
                " each of them trains a model of its own; to train one model together, leave"
                " init_process_group to fastlstm", stacklevel=2,
            )  # fmt: skip
        yield World()
        return
    die_with_parent()
    if getattr(stop, "name", None) is not None:
        if environment.number("LOCAL_RANK") > 0:
            raise Dismissed(Stopped.exit_code)
        raise Stopped(f"stopped by {stop.name} before training began; nothing was stored")  # type: ignore[union-attr]
    if torch.cuda.is_available():
        torch.cuda.set_device(environment.number("LOCAL_RANK") % torch.cuda.device_count())
    world = World(environment.number("RANK"), environment.world_size(), environment.num_restarts())
    try:
        # A signal ends the process: there is nothing to save, and it may wait long for the others.
        ended = handling(dict.fromkeys(STOP_SIGNALS, signal.SIG_DFL), is_not_ignored)
        with ended, _waiting(world):
            world.store = _met()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=DEADLINE,
                store=world.store, rank=world.rank, world_size=world.size,
            )  # fmt: skip
            world.patient = dist.new_group(timeout=PATIENCE, backend="gloo")
            about = world.gathered(_own())
        hosts = Counter(own["host"] for own in about)
        world.num_machines = len(hosts)
        world.threads = max(1, hardware.cores() // hosts[socket.gethostname()])
        world.names = [f"{own['host']}, process {own['process']}" for own in about]
        world.attempt = max(own["attempt"] for own in about)  # each agent counts its restarts
        with world.saying_errors():
            _require_alike(world, [own["alike"] for own in about])
            if options is not None:
                _require_own_gpus([own["gpu"] for own in about], options.device)
                _require_same(world, world.gathered(dataclasses.asdict(options)))
            yield world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _own() -> dict[str, Any]:
    """Returns facts about this process for the others; those under "alike" determine its bits."""
    alike = {
        "fastlstm": importlib.metadata.version("fastlstm"),
        "torch": torch.__version__,
        _ISA: hardware.cpu().isa,
        "bf16 products": "no" if hardware.bf16_instructions() is None else "yes",
    }
    return {
        "host": socket.gethostname(), "process": os.getpid(), "attempt": environment.num_restarts(),
        "gpu": hardware.gpu_id() if torch.cuda.is_available() else "", "alike": alike,
    }  # fmt: skip


def _require_alike(world: World, own: Sequence[Mapping[str, str]]) -> None:
    for rank, other in enumerate(own):
        for what, value in other.items():
            if value != own[0][what]:
                raise UsageError(
                    f"{world.name_of(rank)} has {what} {value}, rank 0 has {own[0][what]}; make"
                    " them the same on all machines"
                    + (" (FASTLSTM_ISA limits the wider one)" if what == _ISA else "")
                )


def _require_same(world: World, told: Sequence[Mapping[str, Any]]) -> None:
    for rank, own in enumerate(told):
        for name, value in own.items():
            first = told[0][name]
            if name not in MAY_DIFFER and value != first:
                raise ConfigError(
                    f"{world.name_of(rank)} was started with {_spelt(name, value)}, rank 0 with"
                    f" {_spelt(name, first)}; give all processes the same options"
                )


def _spelt(name: str, value: Any) -> str:
    return f"no `{name}`" if value is None else f"`{name}={value!r}`"


def _require_own_gpus(gpus: Sequence[str], device: str) -> None:
    """Raises ConfigError if processes would share a GPU, which NCCL does not support."""
    shared = Counter(gpu for gpu in gpus if gpu).most_common(1)
    if device == "cpu" or not shared or shared[0][1] == 1:
        return
    gpu, num = shared[0]
    ranks = ", ".join(str(rank) for rank, other in enumerate(gpus) if other == gpu)
    raise ConfigError(
        f"{num} processes would compute on one GPU (ranks {ranks}); start one for each GPU, or"
        " give `device='cpu'`"
    )


@contextmanager
def _waiting(world: World) -> Iterator[None]:
    """Warns if the other processes take long to come."""
    place = "{}:{}".format(*environment.master())
    here = f"rank {world.rank} waits at {place} for {world.size} processes"
    timer = threading.Timer(
        _SAID_AFTER_S, warnings.warn, [f"{here}; to train in this one alone, unset RANK"]
    )
    timer.daemon = True
    if environment.number("LOCAL_RANK") == 0:
        timer.start()
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(
            f"{here}, and not all have come ({str(error).splitlines()[0][:200]}); start all of them"
            f" within {MEETING.seconds // 60} minutes, with an address that all machines reach"
        ) from error
    finally:
        timer.cancel()


def _met() -> Store:
    """Returns a store that the processes of this start share.

    On one machine no port is open to others: gloo and NCCL use the loopback device, and `--nproc`
    uses a file.
    """
    is_local = environment.is_one_machine() or _is_loopback(environment.master()[0])
    if (verdict := environment.value("FASTLSTM_VERDICT")) or is_local:
        names = {name for _, name in socket.if_nameindex()}
        if (name := next((own for own in ("lo", "lo0") if own in names), None)) is not None:
            environment.use_network_device(name, replaces=bool(verdict))
    store = _store()
    return PrefixStore(_agreed(store, environment.number("RANK"), environment.world_size()), store)


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _store() -> Store:
    if place := environment.value("FASTLSTM_VERDICT"):
        file = FileStore(str(Path(place).with_name("store")), -1)
        file.set_timeout(MEETING)
        return file
    rank, (address, port) = environment.number("RANK"), environment.master()
    who = "torchrun" if environment.value("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
    if rank == 0 and who == "rank 0" and _is_loopback(address):
        try:
            listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        except OSError as error:
            raise UsageError(
                f"port {port} of {address} is in use: another rank 0 runs there, of this run or of"
                " another; give each process a RANK of its own, and each run a MASTER_PORT"
            ) from error
        size = environment.world_size()
        return TCPStore(address, port, size, True, MEETING, master_listen_fd=listener.detach())
    if rank == 0:
        warnings.warn(
            f"{who} listens at port {port} of all addresses without authentication: whoever reaches"
            " it can change the run and execute code; use a trusted network only", stacklevel=2,
        )  # fmt: skip
    store: Store = next(rendezvous("env://", timeout=MEETING))[0]
    return store


def _agreed(store: Store, rank: int, size: int) -> str:
    """Returns a name that only the processes of this start know.

    The agents' store still holds keys of earlier starts, and agents may count starts differently.
    So rank 0 writes a random word, each other rank answers with one, and rank 0 repeats them all.
    """
    own = secrets.token_hex(8)
    if rank == 0:
        store.set(_INVITATION, own)
        words = [store.get(f"fastlstm-{own}-{other}").decode() for other in range(1, size)]
        store.set(f"fastlstm-{own}", " ".join(words))
        return f"fastlstm-{own}"
    deadline = time.monotonic() + MEETING.total_seconds()
    while time.monotonic() < deadline:
        meeting = f"fastlstm-{store.get(_INVITATION).decode()}"
        store.set(f"{meeting}-{rank}", own)
        if store.check([meeting]) and own in store.get(meeting).decode().split():
            return meeting
        time.sleep(_POLL_S)
    raise LostProcessError("rank 0 did not start; look at the output of its machine")
