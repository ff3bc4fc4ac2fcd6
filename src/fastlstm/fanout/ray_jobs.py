"""Jobs as tasks of a Ray cluster, whose nodes share the directory of the fan-out."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastlstm.errors import MissingExtraError, UsageError
from fastlstm.fanout.job import Job, Outcome, TrainProcess
from fastlstm.runs.lock_holder import lock_holder
from fastlstm.system import storage

_GO, _STOP = "go", "stop"
_ANSWER_S = 40.0
"""Within which a cluster must answer."""
_LOCK_S = 60.0
"""Within which the process of a lost node must leave its run."""
_END_S = 120.0
"""Within which the jobs must have saved their state."""
_POLL_S = 0.2
_MAX_RETRIES = 20
"""How often a task may lose its node."""
_CONNECT = (
    "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR');"
    " ray.shutdown()"
)


def import_ray() -> Any:
    """Returns the module; raises MissingExtraError without it."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray is not installed: pip install 'fastlstm[ray]'") from error
    return ray


class RayJobs:
    """Hands jobs to the tasks of a cluster.

    Args:
        ray: the module, connected.
        folder: directory of the fan-out, on storage that all nodes share.
        threads: of each job: as many CPUs of a node.

    Raises:
        UsageError: no node has so many CPUs.
    """

    room = 1

    def __init__(self, ray: Any, folder: Path, threads: int) -> None:
        cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        if threads > max(cores, default=0):
            raise UsageError(
                f"--threads is {threads}, the largest node of the Ray cluster has"
                f" {max(cores, default=0):.0f} CPUs; give fewer"
            )
        self._ray, self._slots, self._threads = ray, 1, threads
        self._word = folder.absolute() / f".ray-{secrets.token_hex(8)}"
        self._write(_GO)
        options = {"num_cpus": threads, "max_retries": _MAX_RETRIES}
        self._task = ray.remote(**options)(_train)
        self._running = dict[Any, Job]()
        self._stopped_at: float | None = None

    @property
    def slots(self) -> int:
        """Returns how many jobs the cluster has CPUs for; nodes come and go."""
        cores = [n["Resources"].get("CPU", 0) for n in self._ray.nodes() if n["Alive"]]
        return max(1, sum(int(c // self._threads) for c in cores))

    def _write(self, word: str) -> None:
        text = f"{word} {self._word.name} {version('fastlstm')}"
        storage.write_file(self._word, text.encode())

    def start(self, job: Job) -> None:
        """Hands in a job; it runs when a node has room."""
        self._running[self._task.remote(job, str(self._word), version("fastlstm"))] = job

    def poll(self) -> list[tuple[Job, Outcome]]:
        """Returns the jobs that ended, after a short wait.

        Raises:
            UsageError: a node does not see the directory, or has another version.
        """
        refs = list(self._running)
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=_POLL_S)
        ended = [(self._running.pop(ref), self._outcome(ref)) for ref in ready]
        if self._stopped_at is not None and time.monotonic() - self._stopped_at > _END_S:
            ended += [(job, Outcome("stopped")) for job in self._running.values()]
            self._running.clear()
        return ended

    def _outcome(self, ref: Any) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), "")
            return Outcome("failed", reason=f"Ray: {type(error).__name__}: {reason:.200}")
        if outcome.state == "refused":
            raise UsageError(outcome.reason)
        return outcome

    def stop(self) -> None:
        """Has all jobs save their state and end."""
        self._write(_STOP)
        self._stopped_at = time.monotonic()

    def close(self) -> None:
        """Removes what this start left in the directory."""
        with suppress(OSError):
            self._word.unlink()


@contextmanager
def ray_jobs(address: str, folder: Path, threads: int) -> Iterator[RayJobs]:
    """Connects to a cluster that answers, for the length of the block.

    Raises:
        UsageError: it has no node with so many CPUs.
    """
    ray = import_ray()
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    jobs = None
    try:
        jobs = RayJobs(ray, folder, threads)
        yield jobs
    finally:
        if jobs is not None:
            jobs.close()
        ray.shutdown()


def require_answer(address: str) -> None:
    """Checks that a cluster answers, in a process of its own: Ray waits long, or ends the process.

    Raises:
        UsageError: it does not.
        MissingExtraError: Ray is not installed.
    """
    import_ray()
    argv = [sys.executable, "-c", _CONNECT, address]
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                timeout=_ANSWER_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            why = f"no answer within {_ANSWER_S:.0f} s"
        else:
            errors.seek(0)
            text = errors.read().decode("utf-8", "replace").strip()
            why = "" if done.returncode == 0 else text.rpartition("\n")[2] or "it told nothing"
    if why:
        raise UsageError(
            f"--ray is {address!r}: cannot connect to that Ray cluster ({why:.300}); start one with"
            " `ray start --head`, or give its HOST:PORT"
        )


def _train(job: Job, word: str, release: str) -> Outcome:
    """The task: runs a job on a node, as long as the fan-out says go."""
    place, node = Path(word), socket.gethostname()
    told = _told(place)
    if told is None or place.name not in told:
        return Outcome("refused", reason=(
            f"{place.parent} is not the same directory on node {node}: --out must"
            " be on storage that all nodes of the cluster share"
        ))  # fmt: skip
    if (own := version("fastlstm")) != release:
        return Outcome("refused", reason=(
            f"node {node} has fastlstm {own}, this machine {release}; install the"
            " same on all nodes"
        ))  # fmt: skip
    deadline = time.monotonic() + _LOCK_S
    while lock_holder(job.run / ".lock")[0] and time.monotonic() < deadline:
        time.sleep(_POLL_S)  # the process of a lost node is about to end
    if told[0] == _STOP:
        return Outcome("stopped")
    process = TrainProcess(job.words())
    is_stopping = False
    while (outcome := process.poll()) is None:
        if not is_stopping and (_told(place) or [_STOP])[0] == _STOP:
            is_stopping = True
            process.stop()
        time.sleep(_POLL_S)
    return outcome


def _told(place: Path) -> list[str] | None:
    """Returns the words of the file that the fan-out writes; None where it is not there."""
    try:
        return place.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
