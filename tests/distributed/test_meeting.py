"""Who else reaches the processes of a run: nobody beyond the machine, and nothing is unpickled."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import socket
import struct
import subprocess
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import fastlstm.distributed.meeting as meeting
from distributed_run import ENVIRONMENT, train_command
from fastlstm.distributed.messages import Messages
from fastlstm.errors import LostProcessError, UsageError
from listening import descendants, is_loopback, listening

EVERY = "0.0.0.0"
_MAGIC = 0x3C85F7CE
"""With which a client of torch's TCPStore begins."""


class Intruder:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def two_processes(tmp_path):
    """A run in two processes, while it trains; ended afterwards."""
    book = tmp_path / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    command = train_command(book, "--out", tmp_path / "run", "--steps", 10**6, "--log-every", 1)
    words = [*command, "--nproc", "2"]
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as process:
        try:
            log, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
            while not log.exists() or '"event":"step"' not in log.read_text():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_nproc_listens_on_loopback_only_and_unpickles_nothing_foreign(two_processes, tmp_path):
    places, forged = listening(two_processes.pid), tmp_path / "forged"
    assert len(places) >= 2  # gloo's
    data = base64.b64encode(pickle.dumps(Intruder(forged))).decode()
    worker = descendants(two_processes.pid)[-1]
    variables = dict(
        word.split("=", 1)
        for word in Path(f"/proc/{worker}/environ").read_text().split("\0")
        if "=" in word
    )
    key = f"torch.rendezvous.{variables['TORCHELASTIC_RUN_ID']}"
    for place in {(variables["MASTER_ADDR"], int(variables["MASTER_PORT"])), *places}:
        _overwrite(place, key, data)
    time.sleep(1)  # the agent looks ten times a second
    assert [place for place in places if not is_loopback(place[0])] == []
    assert not forged.exists()
    assert two_processes.poll() is None
    two_processes.send_signal(signal.SIGTERM)
    assert two_processes.wait(60) == 75


def _overwrite(place: tuple[str, int], key: str, value: str) -> None:
    """Sends what torch's client of a store sends to set a key, and waits for no answer."""
    told = b"\0" + struct.pack("<I", _MAGIC) + b"\1"  # who is there; set
    for word in ("/" + key, value):
        told += struct.pack("<Q", len(word)) + word.encode()
    with suppress(OSError), socket.create_connection(place, timeout=2) as stranger:
        stranger.sendall(told)


def test_a_message_without_the_key_of_the_run_is_not_unpickled(tmp_path):
    forged = tmp_path / "forged"
    stranger, own = Messages(b"guessed"), Messages(b"known to the processes")
    packed = stranger._packed(Intruder(forged))
    with pytest.raises(RuntimeError, match="without the signature"):
        own._opened(packed)
    assert not forged.exists()
    assert own._opened(own._packed([1, "two"])) == [1, "two"]
    changed = own._packed([1, "two"])
    changed[-3] += 1
    with pytest.raises(RuntimeError, match="without the signature"):
        own._opened(changed)


@pytest.fixture
def rank_0(monkeypatch):
    """Rank 0 of two, which nobody but the test has started."""

    def set_all(address, port, **more):
        values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        for name in ("FASTLSTM_VERDICT", "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in (values | more).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")

    return set_all


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_rank_0_without_an_agent_listens_at_the_given_address(rank_0):
    rank_0("127.0.0.1", port := free_port())

    def follow():
        return dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=20)).get("told")

    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        heard = pool.submit(follow)
        store = meeting._store()
        assert {place for place in listening(os.getpid()) if place[1] == port} == {
            ("127.0.0.1", port)
        }
        store.set("told", "all")
        assert heard.result() == b"all"


@pytest.mark.parametrize(
    "resolved",
    [["192.0.2.77"], ["127.0.1.1"], ["127.0.0.1", "::1"]],
    ids=["of another machine", "of /etc/hosts", "several"],
)
def test_an_address_that_others_know_by_another_is_listened_to_everywhere_and_said(
    rank_0, monkeypatch, resolved
):
    rank_0("node-1", 0)
    kinds = [socket.AF_INET6 if ":" in one else socket.AF_INET for one in resolved]
    found = [(kind, 1, 6, "", (one, 0)) for kind, one in zip(kinds, resolved, strict=True)]
    monkeypatch.setattr(meeting.socket, "getaddrinfo", lambda *_, **__: found)
    taken = list[str]()

    class Listener:
        def getsockname(self):
            return taken[-1] or EVERY, 1

        def detach(self):
            return 1

    def listen(kind, address, port):
        taken.append(address)
        return Listener()

    monkeypatch.setattr(meeting, "_listening", listen)
    monkeypatch.setattr(meeting, "TCPStore", lambda *_, **__: None)
    with pytest.warns(UserWarning, match=r"at port 1 of all addresses .* trusted network only"):
        meeting._store()
    assert taken == [""]


def test_a_name_that_is_unknown_says_so(rank_0):
    rank_0("no-such-host.invalid", 29400)
    with pytest.raises(LostProcessError, match="cannot listen at no-such-host"):
        meeting._store()


def test_a_second_rank_0_hears_that_the_port_is_in_use(rank_0):
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        rank_0("127.0.0.1", port)
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 is in use"):
            meeting.met()


def test_torchruns_open_store_is_said(rank_0, monkeypatch):
    rank_0("node-1", 29400, TORCHELASTIC_USE_AGENT_STORE="True")
    monkeypatch.setattr(meeting, "rendezvous", lambda *_, **__: iter([(None, 0, 2)]))
    with pytest.warns(UserWarning, match="torchrun listens at port 29400 of all addresses without"):
        meeting._store()


@pytest.mark.parametrize(
    ("address", "more", "device"),
    [
        ("10.0.0.1", {}, ""),
        ("10.0.0.1", {"LOCAL_WORLD_SIZE": "2"}, "lo"),
        ("127.0.0.1", {}, "lo"),
        ("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
    ],
)
def test_processes_of_one_machine_use_its_loopback_device(
    rank_0, monkeypatch, address, more, device
):
    rank_0(address, 29400)
    for name, value in more.items():
        monkeypatch.setenv(name, value)

    def store():
        raise UsageError("far enough")

    monkeypatch.setattr(meeting, "_store", store)
    with pytest.raises(UsageError, match="far enough"):
        meeting.met()
    assert os.environ["GLOO_SOCKET_IFNAME"] == device
