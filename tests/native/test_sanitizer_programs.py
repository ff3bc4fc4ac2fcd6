"""The programs that `make sanitize` runs are compiled as the kernels' headers are today."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "program", sorted(path.name for path in Path(__file__).parent.glob("*.cpp"))
)
def test_it_compiles(program: str) -> None:
    assert COMPILER is not None
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    include = f"-I{ROOT / 'src/fastlstm/csrc'}"
    path = Path(__file__).with_name(program)
    done = subprocess.run([COMPILER, *flags, include, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
