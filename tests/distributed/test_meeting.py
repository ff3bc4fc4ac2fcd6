"""Who else reaches the processes of a run: of one machine nobody beyond it."""

from __future__ import annotations

import os
import socket
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

import fastlstm.distributed.meeting as meeting
from fastlstm.errors import UsageError
from listening import listening


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
