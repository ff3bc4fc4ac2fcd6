import fcntl
import os
import threading
import time
from pathlib import Path

from fastlstm.runs.lock_holder import held_locks, is_locked
from fastlstm.runs.run_directory import RunDirectory


def test_a_locked_file_is_seen(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    assert is_locked(run.path / ".lock") is False
    nobody = held_locks()
    with run.lock():
        for held in (None, held_locks(), nobody):
            assert is_locked(run.path / ".lock", held)
    assert is_locked(run.path / ".lock", held_locks()) is False
    for held in (None, nobody):
        assert is_locked(tmp_path / "none", held) is None


def test_a_run_that_is_looked_at_can_be_locked(tmp_path: Path):
    """Where /proc/locks does not tell, looking takes the lock for an instant."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    descriptor = os.open(run.path / ".lock", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)

    def release() -> None:
        time.sleep(0.02)
        os.close(descriptor)

    thread = threading.Thread(target=release)
    thread.start()
    with run.lock():
        pass
    thread.join()
