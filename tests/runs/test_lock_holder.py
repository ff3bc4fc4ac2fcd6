import fcntl
import os
import threading
import time
from pathlib import Path

from fastlstm.runs.lock_holder import held_locks, lock_holder
from fastlstm.runs.run_directory import RunDirectory


def test_the_holder_is_named(tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    assert lock_holder(run.path / ".lock") == (False, -1)
    nobody = held_locks()
    with run.lock():
        for held in (None, held_locks(), nobody):
            assert lock_holder(run.path / ".lock", held) == (True, os.getpid())
    assert lock_holder(run.path / ".lock", held_locks()) == (False, -1)
    for held in (None, nobody):
        assert lock_holder(tmp_path / "none", held) == (None, -1)


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
