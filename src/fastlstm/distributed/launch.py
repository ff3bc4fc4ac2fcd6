"""`--nproc N`: starts N processes of a command on this machine, as torchrun does."""

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
"""What torch's LaunchConfig has from 2.9 and 2.12 on; without the first, torch handles all signals,
and kills the processes 30 s later."""

_KEEP_ALIVE_S = 24 * 3600
"""Each sign of life of the one agent makes its file longer, and nobody waits for it."""
_LEADER_FIRST_S = 2.0
"""So long other ranks wait after an error, or less: the agent ends them when rank 0 ends."""


def launch(arguments: Sequence[str], num_processes: int) -> int:
    """Runs `fastlstm ARGUMENTS` in several processes; returns the exit code.

    All are started again when one dies, and continue from what the others saved. An error that
    would only come again ends them, and so does a signal (`StopSignals`). They meet in a private
    directory: no port is open to others, who could have torch's agent unpickle what they like.
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
    """Passes the first signal on to the processes, and waits as long as they take to save.

    torch's agent would kill them after its shutdown timeout, and see a second signal only then.
    Here the second one kills them at once. One that comes within a second of the first counts as
    the same: schedulers send it to every process. So does a second SIGHUP: a
    terminal that closes and its shell send one each.

    Args:
        verdict: the file that says that the command is over, in a folder of its own: a process
            that is started after a signal ends at once.

    Attributes:
        number: of the first signal, 0 before it.
    """

    def __init__(self, verdict: Path) -> None:
        self._verdict, self.number, self._came_at = verdict, 0, 0.0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles the signals within the block; one that is ignored stays so."""
        handlers = dict[int, Any].fromkeys(STOP_SIGNALS, self._handle)
        try:
            with handling(handlers, is_not_ignored):
                yield
        finally:
            logging.disable(logging.NOTSET)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._came_at = number, time.monotonic()
            with suppress(OSError):
                self._verdict.touch()
            logging.disable(logging.ERROR)  # torch's, of processes that the signal has ended
            _send(number)
        elif number != signal.SIGHUP and time.monotonic() >= self._came_at + ONE_SIGNAL_S:
            _send(signal.SIGKILL)
            shutil.rmtree(self._verdict.parent, ignore_errors=True)
            os._exit(128 + number)  # torch would wait for what is dead already


def _send(number: int) -> None:
    for process in children():
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _left(verdict: Path, otherwise: int) -> int:
    text = verdict.read_text() if verdict.exists() else ""
    return int(text) if text else otherwise


def end_process(code: int) -> NoReturn:
    """Ends this process of several with what the command came to.

    An agent starts processes that fail again. Where nothing is to be tried again the code is left
    in a file for `launch`, and under torchrun its agent is ended: it would only come again.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # `main` has said it
            stream.flush()
    text = environment.verdict_file()
    verdict = None if text is None else Path(text)
    if verdict is not None and code == EXIT_OK and verdict.exists():
        with suppress(OSError):  # a signal came, but too late
            verdict.write_text(verdict.read_text() or str(code))
    if code not in (EXIT_OK, EXIT_LOST):
        if verdict is not None:
            with suppress(OSError):  # a full disk: an empty file says that it is over
                verdict.write_text(str(code))
            os._exit(0)
        if environment.rank() > 0 and code != EXIT_STOPPED:
            time.sleep(_LEADER_FIRST_S)  # else the agent might end rank 0 before it says why
        if environment.max_restarts() > 0 and _is_agent(os.getppid()):
            os.kill(os.getppid(), signal.SIGTERM)
    os._exit(code)  # without waiting for the threads of the transport


def _is_agent(process: int) -> bool:
    """Returns whether a process is torchrun's; a shell may have kept its variables."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return not Path("/proc/self").exists()  # no Linux: not to be known
    return b"torchrun" in words or b"torch.distributed" in words


def end_if_over() -> None:
    """Ends this process where the command is over, though its agent has started it once more."""
    path = environment.verdict_file()
    if path is not None and environment.world_size() > 1 and Path(path).exists():
        os._exit(EXIT_OK)


def is_started_by_torchrun() -> bool:
    """Returns whether this process is one of several of a run."""
    return environment.world_size() > 1
