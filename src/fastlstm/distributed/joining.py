"""How a process joins the others that torchrun started, and leaves them."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fastlstm.distributed.launch import is_started_by_torchrun
from fastlstm.distributed.meeting import MEETING, met
from fastlstm.distributed.messages import Messages
from fastlstm.distributed.pulse import Pulse
from fastlstm.distributed.world import DEADLINE_S, World
from fastlstm.errors import (
    Dismissed,
    DistributedError,
    FastLSTMError,
    LostProcessError,
    Stopped,
    UsageError,
)
from fastlstm.system import environment, hardware
from fastlstm.system.numa import Place, bound_to_nodes
from fastlstm.system.parent import die_with_parent
from fastlstm.system.signal_handlers import STOP_SIGNALS, handling, is_not_ignored

_PATIENCE = timedelta(days=7)
"""With rank 0 while it evaluates and writes."""
_SAID_AFTER_S = 15.0
_ALONE = (
    "torch.distributed is already initialized with {} processes: each of them trains a model of its"
    " own; to train one model together, leave init_process_group to fastlstm"
)
_ISA = "instruction set"


@contextmanager
def joined(stop: Callable[[], bool] | None = None) -> Iterator[World]:
    """Joins the processes that torchrun started, for the length of the block.

    Args:
        stop: of the run. Where its `name` says that a signal has come already, the others are not
            waited for.
    """
    if not dist.is_initialized():
        environment.require_torchrun()
    if not is_started_by_torchrun() or dist.is_initialized():
        if dist.is_initialized() and dist.get_world_size() > 1:
            warnings.warn(_ALONE.format(dist.get_world_size()), stacklevel=2)
        yield World()
        return
    die_with_parent()
    if torch.cuda.is_available():
        torch.cuda.set_device(environment.local_rank() % torch.cuda.device_count())
    world = World(environment.rank(), environment.world_size(), environment.num_restarts())
    # While processes meet nothing is to be saved, and the wait for one that died is long.
    with _handled(signal.SIG_DFL), _waiting(world):
        _end_if_stopped(getattr(stop, "name", None))
        store, key = met()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            timeout=timedelta(seconds=DEADLINE_S), store=store, rank=world.rank,
            world_size=world.size,
        )  # fmt: skip
        world.messages = Messages(key)
        name = f"{socket.gethostname()}, process {os.getpid()}"
        own_gpu = hardware.gpu_id() if torch.cuda.is_available() else ""
        own_facts = (name, world.attempt, Place.own(), own_gpu, _own())
        about = world.messages.gathered(own_facts, in_all=True)
        world.names, attempts, places, world.gpus, own = map(list, zip(*about, strict=True))
        world.attempt = max(attempts)  # each agent counts its own failures only
        machines = Counter(place.machine for place in places)
        world.num_machines, world.machine_size = len(machines), max(machines.values())
        sharers = [other for other, place in enumerate(places) if place == places[world.rank]]
        world.threads = max(1, hardware.cores() // len(sharers))
        world.orders = dist.new_group(timeout=_PATIENCE, backend="gloo")
        world.pulse = Pulse(world.is_leader, DEADLINE_S)
    try:
        with world.together():
            _require_alike(world, own)
        # Rank 0 saves the state, and needs the others for that.
        noting = nullcontext() if world.is_leader else _handled(partial(_note, world))
        with noting, bound_to_nodes(sharers.index(world.rank), len(sharers)), _told(world):
            yield world
    finally:
        if world.pulse is not None:
            world.pulse.end()
        dist.destroy_process_group()


@contextmanager
def _told(world: World) -> Iterator[None]:
    """Tells the others of an error of rank 0; another rank says itself what it alone has found."""
    try:
        yield
    except FastLSTMError as error:
        is_told = world.is_over or isinstance(error, DistributedError)
        if world.is_leader and not is_told:
            world.abandon(error)
        error.is_of_one_rank = not world.is_leader
        raise


def _end_if_stopped(name: str | None) -> None:
    if name is not None and environment.local_rank() > 0:
        raise Dismissed(Stopped.exit_code)
    if name is not None:
        raise Stopped(f"stopped by {name} before training began; nothing was stored")


def _own() -> dict[str, str]:
    """Returns what the results of this process depend on beside its input.

    FASTLSTM_ISA does not limit the products of Muon, which travel in their dtype.
    """
    return {
        "fastlstm": importlib.metadata.version("fastlstm"),
        "torch": torch.__version__,
        _ISA: hardware.cpu().isa,
        "bf16 products": "no" if hardware.bf16_instructions() is None else "yes",
    }


def _require_alike(world: World, own: list[dict[str, str]]) -> None:
    """Raises UsageError unless all ranks compute alike; `own` is what each computes with."""
    for rank, other in enumerate(own):
        for what, value in other.items():
            if value != own[0][what]:
                raise UsageError(
                    f"{world.name_of(rank)} has {what} {value}, rank 0 has {own[0][what]}; make"
                    " them the same on all machines"
                    + (" (FASTLSTM_ISA limits the wider one)" if what == _ISA else "")
                )


@contextmanager
def _waiting(world: World) -> Iterator[None]:
    """Says that the other processes are waited for, and where, if they take long to come."""
    place = "{}:{}".format(*environment.master())
    here = f"rank {world.rank} waits at {place} for {world.size} processes"
    timer = threading.Timer(
        _SAID_AFTER_S, warnings.warn, [f"{here}; to train in this one alone, unset RANK"]
    )
    timer.daemon = True
    if environment.local_rank() == 0:
        timer.start()
    try:
        yield
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise LostProcessError(
            f"{here}, and not all have come ({str(error).splitlines()[0][:200]}); start all of them"
            f" within {MEETING.seconds // 60} minutes, with an address that all machines reach"
        ) from error
    finally:
        timer.cancel()


def _note(world: World, number: int, frame: FrameType | None) -> None:
    """Notes a signal, which rank 0 learns of with the next step; a further one changes nothing."""
    world.signal = world.signal or number


def _handled(handler: Any) -> AbstractContextManager[None]:
    """Handles the signals that stop a run so within the block; one that is ignored stays so."""
    return handling(dict.fromkeys(STOP_SIGNALS, handler), is_not_ignored)
