"""`--nproc N`: runs a command in N processes on this machine, as torchrun does."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fastlstm.errors import EXIT_FAILED, EXIT_LOST, EXIT_OK, EXIT_STOPPED
from fastlstm.system import environment
from fastlstm.system.processes import can_list_children, children
from fastlstm.system.signal_handlers import ONE_SIGNAL_S, STOP_SIGNALS, handling, is_not_ignored

_MAX_RESTARTS = 100
_SIGNALS = "signals_to_handle"
_NEWER: dict[str, Any] = {_SIGNALS: "SIGQUIT", "shutdown_timeout": 8}
"""Fields of LaunchConfig, the second from torch 2.12 on. Without the first, torch handles signals
and kills the processes after 30 s."""
_KEEP_ALIVE_S = 24 * 3600
"""Long, because each sign of life of the only agent makes the file longer."""
_LEADER_FIRST_S = 2.0
"""Longest wait of other ranks after an error; the agent ends them as soon as rank 0 ends."""


def launch(arguments: Sequence[str], num_processes: int) -> int:
    """Runs `fastlstm ARGUMENTS` in several processes; returns the exit code.

    If one process dies, all restart from the last checkpoint. An error that would come again ends
    all, and so does a signal (`StopSignals`). The processes meet in a private directory, not at a
    port: torch's agent unpickles what it receives.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory() as place:
        verdict = Path(place) / "exit-code"
        environment.set_verdict_file(str(verdict))
        fields = {field.name for field in dataclasses.fields(LaunchConfig)} & _NEWER.keys()
        if not can_list_children():
            fields -= {_SIGNALS}
        signals = StopSignals(verdict)
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=num_processes, run_id=uuid.uuid4().hex,
            rdzv_backend="c10d", rdzv_endpoint=str(Path(place) / "agent"), local_addr="localhost",
            rdzv_configs={"store_type": "file", "keep_alive_interval": _KEEP_ALIVE_S},
            max_restarts=_MAX_RESTARTS, monitor_interval=0.1,
            **{name: _NEWER[name] for name in fields},
        )  # fmt: skip
        try:
            with signals.handled() if _SIGNALS in fields else nullcontext():
                elastic_launch(config, sys.executable)("-m", "fastlstm", *arguments)
        except ChildFailedError as error:
            code = max((failure.exitcode for failure in error.failures.values()), default=1)
            return _left(verdict, code if code > 0 else 1)
        except SignalException as error:
            return _left(verdict, 128 + error.sigval)
        if signals.number:
            return _left(verdict, 128 + signals.number)
        return _left(verdict, EXIT_FAILED if verdict.exists() else EXIT_OK)


class StopSignals:
    """Passes the first signal on to the processes and waits while they save; a second kills them.

    torch's agent would kill them after a timeout. A second signal within a second counts as the
    first, because schedulers send it to every process. A second SIGHUP counts as the first too,
    because a closing terminal and its shell send one each.

    `verdict` is a file of a private directory; once it exists, processes that start later end at
    once. `number` is the first signal, or 0.
    """

    def __init__(self, verdict: Path) -> None:
        self._verdict, self.number, self._came_at = verdict, 0, 0.0

    @contextmanager
    def handled(self) -> Iterator[None]:
        try:
            with handling(dict.fromkeys(STOP_SIGNALS, self._handle), is_not_ignored):
                yield
        finally:
            logging.disable(logging.NOTSET)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._came_at = number, time.monotonic()
            with suppress(OSError):
                self._verdict.touch()
            logging.disable(logging.ERROR)  # torch would log the end of the processes as errors
            _send(number)
        elif number != signal.SIGHUP and time.monotonic() >= self._came_at + ONE_SIGNAL_S:
            _send(signal.SIGKILL)
            shutil.rmtree(self._verdict.parent, ignore_errors=True)
            os._exit(128 + number)  # torch would wait for dead processes


def _send(number: int) -> None:
    for process in children():
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _left(verdict: Path, otherwise: int) -> int:
    text = verdict.read_text() if verdict.exists() else ""
    return int(text) if text else otherwise


def end_process(code: int) -> NoReturn:
    """Ends this process of several with an exit code.

    An agent restarts processes that fail. If a restart is no use, `launch` gets the code in a file;
    the agent of torchrun is ended.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # `main` has reported it
            stream.flush()
    text = environment.value("FASTLSTM_VERDICT")
    verdict = Path(text) if text else None
    if verdict is not None and code == EXIT_OK and verdict.exists():
        with suppress(OSError):  # a signal came too late
            verdict.write_text(verdict.read_text() or str(code))
    if code not in (EXIT_OK, EXIT_LOST):
        if verdict is not None:
            with suppress(OSError):  # with a full disk an empty file is enough
                verdict.write_text(str(code))
            os._exit(0)
        if environment.number("RANK") > 0 and code != EXIT_STOPPED:
            time.sleep(_LEADER_FIRST_S)  # else the agent might end rank 0 before its message
        if environment.number("TORCHELASTIC_MAX_RESTARTS") > 0 and _is_agent(os.getppid()):
            os.kill(os.getppid(), signal.SIGTERM)
    os._exit(code)  # without waiting for the threads of the transport


def _is_agent(process: int) -> bool:
    """Returns whether a process is torchrun: a shell may have left-over variables."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return not Path("/proc/self").exists()  # unknown without Linux
    return b"torchrun" in words or b"torch.distributed" in words


def end_if_over() -> None:
    """Ends this process if its agent has restarted it after the end of the command."""
    path = environment.value("FASTLSTM_VERDICT")
    if path and environment.world_size() > 1 and Path(path).exists():
        os._exit(EXIT_OK)


def is_started_by_torchrun() -> bool:
    """Returns whether this process is one of several."""
    return environment.world_size() > 1
