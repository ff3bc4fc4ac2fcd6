import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from fastlstm.system import signal_handlers
from fastlstm.system.signal_handlers import Arrivals, handling
from fastlstm.training import signals
from fastlstm.training.signals import StopFlag


def test_first_signal_sets_the_flag_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopFlag() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
        assert stop.name == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("hang_up_at_default")
@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGINT, "SIGINT: saving, then stopping; press Ctrl-C again to stop"),
        (signal.SIGTERM, "SIGTERM: saving, then stopping; a second SIGTERM stops"),
        (signal.SIGHUP, "SIGHUP: saving, then stopping; a second SIGTERM stops"),
    ],
)
def test_the_first_signal_is_acknowledged_once_and_at_once(capfd, number, text):
    with StopFlag() as stop:
        stop.can_save = True
        os.kill(os.getpid(), number)
        assert stop()
        assert stop()
        assert capfd.readouterr().err == f"fastlstm: {text} at once without saving\n"
    assert capfd.readouterr().err == ""


def test_only_the_first_process_of_a_machine_acknowledges_a_signal(monkeypatch, capfd):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.name == "SIGTERM"
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("hang_up_at_default")
def test_a_closed_terminal_and_its_shell_may_each_send_sighup(monkeypatch):
    monkeypatch.setattr(signals.os, "_exit", lambda code: pytest.fail("not saved"))
    with StopFlag() as stop:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert stop.name == "SIGHUP"


def test_second_signal_ends_the_process_with_the_documented_code():
    code = (
        "import os, signal, time\n"
        "from fastlstm.training.signals import StopFlag\n"
        "with StopFlag() as stop:\n"
        "    stop.can_save = True\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(10)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode
        == 128 + signal.SIGINT
    )


def test_the_second_signal_may_be_handled_late(monkeypatch):
    """The main thread was in native code for three seconds."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended, handled = [], [10.0, 13.0, 16.0]
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    monkeypatch.setattr(signals.time, "monotonic", lambda: handled[0])
    with StopFlag() as stop:
        for age_s in (0.0, 2.9, 1.5):
            monkeypatch.setattr(signal_handlers.Arrivals, "age_s", lambda _, age=age_s: age)
            assert not ended
            os.kill(os.getpid(), signal.SIGINT)
            handled.pop(0)
        assert stop.name == "SIGINT"
    assert ended == [128 + signal.SIGINT], "the third came seconds later"


def test_the_time_of_a_signal_is_known():
    with handling({signal.SIGTERM: lambda *_: None}, lambda _: True), Arrivals() as arrivals:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert 0.03 < arrivals.age_s() < 20


def test_with_several_processes_a_second_signal_at_once_counts_as_the_first(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # would end the process
        assert stop.name == "SIGINT"
    assert capfd.readouterr().err.count("saving, then stopping") == 1


@pytest.mark.parametrize(
    ("signals", "seen"), [("INT HUP", "False None"), ("INT TERM", "True SIGTERM")], ids=str
)
def test_ignored_signals_of_background_processes_stay_ignored(signals, seen):
    """Ctrl-C is meant for the foreground, such as `less` beside `nohup fastlstm train … &`."""
    code = (
        "import os, signal\n"
        "from fastlstm.training.signals import StopFlag\n"
        "with StopFlag() as stop:\n"
        f"    for name in {signals.split()}:\n"
        "        os.kill(os.getpid(), getattr(signal, f'SIG{name}'))\n"
        "print(stop(), stop.name)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    words = ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh", sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{seen}\n"


def test_ctrl_c_ends_at_once_while_there_is_nothing_to_save(capfd):
    with StopFlag() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.name == "SIGINT", "a poll ends what swallows the exception"
    text = "fastlstm: SIGINT: stopped before the first step; nothing was saved\n"
    assert capfd.readouterr().err == text


def test_ctrl_c_while_torch_is_loaded_raises_nothing(monkeypatch):
    """An exception within its import aborted the process, with a traceback of C++."""
    ended = []
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    monkeypatch.setattr(torch.__spec__, "_initializing", True, raising=False)
    with StopFlag(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)  # goes on, as nothing ends here
    assert ended == [128 + signal.SIGINT]
