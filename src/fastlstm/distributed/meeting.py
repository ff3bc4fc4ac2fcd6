"""Where the processes of a run meet, and who else can reach them there."""

from __future__ import annotations

import errno
import secrets
import socket
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from fastlstm.errors import LostProcessError, UsageError
from fastlstm.system import environment

MEETING = timedelta(minutes=10)
"""For all processes to come, from the first on."""
_INVITATION, _POLL_S = "fastlstm-invitation", 0.02
_OPEN = (
    "{} listens at {} without authentication: whoever reaches it can change the run and execute"
    " code; use a trusted network only"
)


def met() -> tuple[Store, bytes]:
    """Returns a store that the processes of this start share, and a key that they alone know.

    On one machine nothing listens beyond it: gloo and NCCL use the loopback device, and
    `--nproc` has a file in place of a port.
    """
    if _is_one_machine() and (name := _loopback_name()) is not None:
        environment.use_network_device(name, replaces=environment.verdict_file() is not None)
    store, rank = _store(), environment.rank()
    meeting = _agreed(store, rank, environment.world_size())
    store = PrefixStore(meeting, store)
    if rank == 0:
        store.set("key", secrets.token_hex(32))
    return store, store.get("key")


def _is_one_machine() -> bool:
    if environment.verdict_file() is not None:
        return True
    return environment.is_one_machine() or _is_loopback(environment.master()[0])


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _loopback_name() -> str | None:
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def _store() -> Store:
    if (place := environment.verdict_file()) is not None:
        file = FileStore(str(Path(place).with_name("store")), -1)
        file.set_timeout(MEETING)
        return file
    rank, (address, port) = environment.rank(), environment.master()
    if environment.has_agent_store():
        if rank == 0:
            warnings.warn(_OPEN.format("torchrun", f"port {port} of all addresses"), stacklevel=2)
    elif rank == 0:
        return _own_store(address, port)
    store: Store = next(rendezvous("env://", timeout=MEETING))[0]
    return store


def _own_store(address: str, port: int) -> Store:
    """Returns a store that listens at one address, where that is one of this machine."""
    listener = _listener(address, port)
    bound, size = listener.getsockname(), environment.world_size()
    if not _is_loopback(bound[0]):
        is_every = bound[0] in ("::", "0.0.0.0")
        place = f"port {bound[1]} of all addresses" if is_every else f"{bound[0]}:{bound[1]}"
        warnings.warn(_OPEN.format("rank 0", place), stacklevel=2)
    return TCPStore(address, bound[1], size, True, MEETING, master_listen_fd=listener.detach())


def _listener(address: str, port: int) -> socket.socket:
    """Listens at an address, or at all: where it is none of this machine's, where its name has
    several, and where `/etc/hosts` has loopback for a name that others know by another address.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        kind, place = min((int(one[0]), str(one[4][0])) for one in found)  # IPv4 first
        is_known = len({one[4][0] for one in found}) == 1 and not _is_loopback(place)
        if _is_loopback(address) or (is_known and _is_of_this_machine(kind, place)):
            return _listening(kind, place, port)
        return _listening(socket.AF_INET6 if socket.has_dualstack_ipv6() else kind, "", port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} of {address} is in use: another rank 0 runs there, of this run or of"
                " another; give each process a RANK of its own, and each run a MASTER_PORT"
            ) from error
        raise LostProcessError(
            f"rank 0 cannot listen at {address}:{port} ({error.strerror}); set MASTER_ADDR to an"
            " address of the machine of rank 0"
        ) from error


def _is_of_this_machine(kind: int, address: str) -> bool:
    with suppress(OSError), socket.socket(kind) as probe:
        probe.bind((address, 0))
        return True
    return False


def _listening(kind: int, address: str, port: int) -> socket.socket:
    both = kind == socket.AF_INET6 and not address and socket.has_dualstack_ipv6()
    return socket.create_server((address, port), family=kind, dualstack_ipv6=both, backlog=1024)


def _agreed(store: Store, rank: int, size: int) -> str:
    """Returns a name that the processes of this start, and only they, agree upon.

    The store of the agents still has what earlier starts wrote, and the agents of several machines
    need not have started their processes equally often. So rank 0 invites, the others answer, each
    with a word of its own, and rank 0 repeats all words.
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
