"""`staged_directory`: all of a directory, or nothing of it and of what was made for it."""

import os
import signal
from contextlib import suppress

import pytest

from fastlstm.exchange.export import staged_directory
from fastlstm.system import storage


def test_the_directory_gets_its_name_after_the_block(tmp_path):
    out = tmp_path / "a" / "b" / "out"
    with staged_directory(out) as staged:
        assert not out.exists()
        (staged / "model").write_text("m")
    assert os.listdir(out.parent) == ["out"]
    assert os.listdir(out) == ["model"]


def write(out, number):
    """Writes a file, and is stopped."""
    with staged_directory(out) as staged:
        (staged / "1").mkdir()
        (staged / "1" / "model").write_text("m")
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path, number):
    with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt):
        write(tmp_path / "a" / "b" / "out", number)
    assert not os.listdir(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_parents_that_others_use_stay(tmp_path):
    other = tmp_path / "a" / "b" / "other"
    with suppress(ValueError), staged_directory(other.with_name("out")):
        other.mkdir()
        raise ValueError
    assert os.listdir(tmp_path / "a" / "b") == ["other"]


def test_files_of_a_killed_process_are_removed(tmp_path):
    out = tmp_path / "out"
    for path in (out, tmp_path / "other"):
        left = storage.temporary_name(path)
        left.mkdir()
        (left / "model").write_text("m")
    with staged_directory(out) as in_use:
        with suppress(ValueError), staged_directory(out):
            raise ValueError
        assert in_use.is_dir()
    assert sorted(path.name[:6] for path in tmp_path.iterdir()) == [".other", "out"]
