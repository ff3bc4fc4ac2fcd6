"""Threads have equal shares of a step, and memory of their own: counted, not timed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def lines_of(name: str, tmp_path: Path) -> list[str]:
    """Returns what the program `name` prints."""
    assert COMPILER is not None
    program = tmp_path / name
    flags = ["-std=c++20", "-O1", "-Wno-psabi", f"-I{ROOT / 'src/fastlstm/csrc'}"]
    source = Path(__file__).with_name(f"{name}.cpp")
    subprocess.run([COMPILER, *flags, source, "-o", program], check=True)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()


def test_nine_tenths_of_all_threads_time_are_work(tmp_path: Path) -> None:
    rows = [line.split() for line in lines_of("shares", tmp_path)]
    assert len(rows) == 2 * 3 * 11
    for *size, forward, backward, weights in rows:
        assert min(float(forward), float(backward), float(weights)) >= 0.9, size


def test_threads_that_own_lanes_write_no_page_of_another(tmp_path: Path) -> None:
    assert not lines_of("scratch", tmp_path)
