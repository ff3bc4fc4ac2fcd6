"""Log lines that cannot be written are counted and reported."""

import errno
import threading

from prometheus_client import CollectorRegistry, Counter

from fastlstm.serve import log
from fastlstm.serve.log import Log
from running_server import wait_until


def test_a_surrogate_is_written_escaped(capfd):
    dropped = Counter("dropped", "lines", registry=CollectorRegistry())
    lines = Log(dropped)
    lines.write("a file called \ud800 é")
    lines.close()
    assert capfd.readouterr().err == "a file called \\ud800 é\n"
    assert dropped._value.get() == 0


def test_lines_that_could_not_be_written_are_counted(monkeypatch):
    opens, fails, written = threading.Event(), [True], list[str]()

    def write(text):
        assert opens.wait(20)
        if fails[0]:
            raise OSError(errno.ENOSPC, "planted")
        written.append(text)

    monkeypatch.setattr(log, "_write", write)
    dropped = Counter("dropped", "lines", registry=CollectorRegistry())
    lines = Log(dropped)
    for number in range(5):
        lines.write(f"line {number}")
    opens.set()
    wait_until(lambda: dropped._value.get() == 5)
    fails[0] = False
    lines.write("after it")
    lines.close()
    said = "fastlstm: 5 log lines dropped: standard error was not read in time"
    assert "".join(written) == f"{said}\nafter it\n"
