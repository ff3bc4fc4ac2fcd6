"""What the agent of `--nproc` does with the signals that stop a run."""

import logging
import os
import signal
import subprocess
import sys

import pytest
import torch.distributed.launcher.api as torch_launcher

import fastlstm.distributed.launch as launching
from fastlstm.distributed.launch import StopSignals, end_process, launch
from fastlstm.system.processes import children

HANDS_SIGNALS_OVER = "signals_to_handle" in torch_launcher.LaunchConfig.__dataclass_fields__


class Exited(Exception):
    """A process has ended itself."""


@pytest.fixture
def exits(monkeypatch):
    """Has `os._exit` raise."""

    def leave(code):
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", leave)


@pytest.fixture
def worker(monkeypatch):
    with subprocess.Popen(["sleep", "30"]) as process:
        assert process.pid in children()
        monkeypatch.setattr(launching, "children", lambda: [process.pid])
        try:
            yield process
        finally:
            process.kill()


def test_the_first_signal_is_passed_on_and_one_right_after_it_is_the_same(tmp_path, worker, exits):
    signals, before = StopSignals(tmp_path / "place" / "code"), signal.getsignal(signal.SIGTERM)
    (tmp_path / "place").mkdir()
    with signals.handled():
        signal.raise_signal(signal.SIGTERM)
        assert worker.wait(10) == -signal.SIGTERM
        assert (signals.number, (tmp_path / "place" / "code").read_text()) == (signal.SIGTERM, "")
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
    assert logging.root.manager.disable == logging.NOTSET


def stopped(worker):
    """Stops a process, and waits for that: a SIGTERM that is pending beside SIGSTOP comes first."""
    worker.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)


def test_the_second_signal_kills_processes_that_still_save(tmp_path, worker, exits, monkeypatch):
    signals, place = StopSignals(tmp_path / "place" / "code"), tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(launching, "ONE_SIGNAL_S", 0.0)
    stopped(worker)
    with signals.handled():
        signal.raise_signal(signal.SIGTERM)
        assert worker.poll() is None
        with pytest.raises(Exited, match="130"):
            signal.raise_signal(signal.SIGINT)
    assert worker.wait(10) == -signal.SIGKILL
    assert not place.exists()


@pytest.mark.usefixtures("hang_up_at_default")
def test_a_second_sighup_kills_nothing_and_an_ignored_one_stops_nothing(
    tmp_path, worker, exits, monkeypatch
):
    monkeypatch.setattr(launching, "ONE_SIGNAL_S", 0.0)
    signals = StopSignals(tmp_path / "code")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.handled():  # as below nohup
        signal.raise_signal(signal.SIGHUP)
        assert signals.number == 0
    signal.signal(signal.SIGHUP, before)
    stopped(worker)
    with signals.handled():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # `os._exit` would raise
        assert signals.number == signal.SIGHUP


@pytest.mark.skipif(not HANDS_SIGNALS_OVER, reason="torch before 2.9")
@pytest.mark.parametrize(
    ("left", "code"),
    [([75, 75], 75), ([0, 0], 0), ([141, 0], 141), ([], 128 + signal.SIGINT)],
    ids=["saved", "was done already", "was done but for its output", "was not up yet"],
)
def test_the_agent_waits_for_the_exit_code_after_a_signal(left, code, exits, monkeypatch):
    """torch would have ended the processes, and the agent with 130."""

    def elastic_launch(config, _):
        def run(*_):
            assert not {"SIGTERM", "SIGINT", "SIGHUP"} & set(config.signals_to_handle.split(","))
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            signal.raise_signal(signal.SIGINT)
            for number in left:
                with pytest.raises(Exited, match="0"):
                    end_process(number)

        return run

    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")
    monkeypatch.setenv("FASTLSTM_VERDICT", "")  # and as it was afterwards
    monkeypatch.setattr(torch_launcher, "elastic_launch", elastic_launch)
    monkeypatch.setattr(launching, "children", list)
    assert launch(["train"], 2) == code


def test_an_older_torch_handles_the_signals_itself(monkeypatch):
    seen = []

    def elastic_launch(config, _):
        names = getattr(config, "signals_to_handle", "SIGINT")
        return lambda *_: seen.append(("SIGINT" in names, signal.getsignal(signal.SIGINT)))

    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")
    monkeypatch.setenv("FASTLSTM_VERDICT", "")
    monkeypatch.setattr(torch_launcher, "elastic_launch", elastic_launch)
    monkeypatch.setattr(launching, "can_list_children", lambda: False)
    assert launch(["train"], 2) == 0
    assert seen == [(True, signal.getsignal(signal.SIGINT))]


def test_a_process_that_starts_after_the_end_ends_at_once(tmp_path):
    (tmp_path / "code").touch()
    values = {"RANK": "0", "WORLD_SIZE": "2", "FASTLSTM_VERDICT": str(tmp_path / "code")}
    done = subprocess.run(
        [sys.executable, "-m", "fastlstm", "--version"], env={**os.environ, **values},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == ""
