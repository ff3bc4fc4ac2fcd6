"""Servers on real sockets, with a small model that was made without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from fastlstm.data.tokenizer import ByteTokenizer
from fastlstm.infer.loading import Writer
from running_server import SETTINGS, Running, make_writer


@pytest.fixture(scope="session")
def writer() -> Writer:
    return make_writer()


@pytest.fixture(scope="session")
def byte_writer() -> Writer:
    return make_writer(ByteTokenizer(), seed=3)


@pytest.fixture
def serve(writer: Writer) -> Iterator[Callable[..., Running]]:
    """Starts servers; they end with the test."""
    started: list[Running] = []

    def start(
        *, model: Writer | None = None, keys: tuple[str, ...] = (), session_key: Any = b"k" * 32,
        **changes: Any,
    ) -> Running:  # fmt: skip
        server = Running(model or writer, replace(SETTINGS, **changes), keys, session_key)
        started.append(server)
        return server

    yield start
    for server in started:
        server.end()


@pytest.fixture(scope="session")
def server(writer: Writer) -> Iterator[Running]:
    """A server that tests share; they leave it as it was."""
    running = Running(writer, SETTINGS)
    yield running
    assert running.scheduler.num_held == 0
    assert running.scheduler.num_active == 0
    running.end()
