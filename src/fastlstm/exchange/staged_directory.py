"""`staged_directory`: what is written beside a path and gets its name when it is complete."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastlstm.system import storage
from fastlstm.training.signals import ended_like_ctrl_c


@contextmanager
def staged_directory(path: Path) -> Iterator[Path]:
    """Yields a new directory beside `path`, which is renamed to `path` after the block.

    An error, SIGTERM, SIGHUP or Ctrl-C removes it, and the parents that were made for it. What
    killed processes left of the same `path` is removed first: the directory is locked while it is
    in use.
    In the main thread SIGTERM raises SystemExit(143) within the block.

    Raises:
        OSError: a directory cannot be made or renamed.
    """
    made = [parent for parent in path.parents if not parent.exists()]
    staged, lock = storage.temporary_name(path), -1
    with ended_like_ctrl_c():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_left_overs(path)
            storage.make_dir(staged)
            lock = os.open(staged, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield staged
            storage.rename(staged, path)
        except BaseException:
            with suppress(OSError):
                storage.remove_tree(staged)
            with suppress(OSError):
                for parent in made:
                    parent.rmdir()
            raise
        finally:
            if lock >= 0:
                os.close(lock)


def _remove_left_overs(path: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(path.name)}\.tmp-[0-9]+-[0-9a-f]{{8}}")
    for old in list(path.parent.iterdir()):
        if pattern.fullmatch(old.name) and old.is_dir() and not old.is_symlink():
            storage.remove_unlocked(old)
