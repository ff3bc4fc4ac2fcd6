"""Servers on real sockets, with a small model that was made without torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fastlstm.text.data.tokenizer import ByteTokenizer
from running_server import SETTINGS, Running, make_lm
from served_process import processes_of


@pytest.fixture(scope="session")
def lm():
    return make_lm()


@pytest.fixture(scope="session")
def byte_model():
    return make_lm(ByteTokenizer(), seed=3)


@pytest.fixture
def serve(lm):
    """Starts servers; they end with the test."""
    started: list[Running] = []

    def start(*, model=None, keys=(), session_key=b"k" * 32, **changes):
        server = Running(model or lm, replace(SETTINGS, **changes), keys, session_key)
        started.append(server)
        return server

    yield start
    for server in started:
        server.end()


@pytest.fixture(scope="session")
def server(lm):
    """A server that tests share; they leave it as it was."""
    running = Running(lm, SETTINGS)
    yield running
    assert running.scheduler.num_held == 0
    assert running.scheduler.num_active == 0
    running.end()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(20) as found:
        yield found


# What forecasts needs torch, which tests of texts do without: it is imported where it is used.


@pytest.fixture(scope="session")
def plain():
    from forecast_server import fit_plain

    return fit_plain()


@pytest.fixture(scope="session")
def plain_path(plain, tmp_path_factory):
    from forecast_server import save

    return save(plain, tmp_path_factory.mktemp("plain"))


@pytest.fixture
def start(plain_path):
    """Starts servers of the plain model as processes."""
    yield from processes_of(plain_path)


@pytest.fixture(scope="session")
def plain_model(plain_path):
    from fastlstm.forecast.window_forecaster import load_window_forecaster

    return load_window_forecaster(plain_path)


@pytest.fixture
def held(plain_model):
    """The plain model, whose passes can be held up."""
    from forecast_server import HeldModel

    found = HeldModel(plain_model)
    yield found
    found.holds.clear()


@pytest.fixture(scope="session")
def forecasts(plain_model):
    """A server of the plain model that tests share; they leave it as it was."""
    running = Running(plain_model, SETTINGS)
    yield running
    assert running.scheduler.num_held == 0
    running.end()


@pytest.fixture(scope="session")
def whole():
    """A forecaster of columns of every role."""
    from forecast_server import fit_everything

    return fit_everything()


@pytest.fixture(scope="session")
def whole_forecasts(whole, tmp_path_factory):
    from fastlstm.forecast.window_forecaster import load_window_forecaster
    from forecast_server import save

    path = save(whole, tmp_path_factory.mktemp("whole"))
    running = Running(load_window_forecaster(path), SETTINGS)
    yield running
    assert running.scheduler.num_held == 0
    running.end()
