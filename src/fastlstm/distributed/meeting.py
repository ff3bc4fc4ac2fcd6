"""The store in which the processes of a run meet."""

from __future__ import annotations

import secrets
import socket
import time
import warnings
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
    "{} listens at port {} of all addresses without authentication: whoever reaches it can change"
    " the run and execute code; use a trusted network only"
)


def met() -> Store:
    """Returns a store that the processes of this start share.

    On one machine nothing listens beyond it: gloo and NCCL use the loopback device, and
    `--nproc` has a file in place of a port.
    """
    is_local = environment.is_one_machine() or _is_loopback(environment.master()[0])
    if environment.verdict_file() is not None or is_local:
        names = {name for _, name in socket.if_nameindex()}
        if (name := next((own for own in ("lo", "lo0") if own in names), None)) is not None:
            environment.use_network_device(name, replaces=environment.verdict_file() is not None)
    store = _store()
    return PrefixStore(_agreed(store, environment.rank(), environment.world_size()), store)


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _store() -> Store:
    if (place := environment.verdict_file()) is not None:
        file = FileStore(str(Path(place).with_name("store")), -1)
        file.set_timeout(MEETING)
        return file
    rank, (address, port) = environment.rank(), environment.master()
    who = "torchrun" if environment.has_agent_store() else "rank 0"
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
        warnings.warn(_OPEN.format(who, port), stacklevel=2)
    store: Store = next(rendezvous("env://", timeout=MEETING))[0]
    return store


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
