"""Threads have equal shares of a step, however many there are: counted, not timed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_nine_tenths_of_all_threads_time_are_work(tmp_path: Path) -> None:
    assert COMPILER is not None
    program = tmp_path / "shares"
    flags = ["-std=c++20", "-O1", "-Wno-psabi", f"-I{ROOT / 'src/fastlstm/csrc'}"]
    source = Path(__file__).with_name("shares.cpp")
    subprocess.run([COMPILER, *flags, source, "-o", program], check=True)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split("\n")
    rows = [line.split() for line in lines if line]
    assert len(rows) == 2 * 3 * 11
    for *size, forward, backward, weights in rows:
        assert min(float(forward), float(backward), float(weights)) >= 0.9, size
