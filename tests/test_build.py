"""Installing where something is missing: one sentence says what to install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER_SENTENCE = (
    "fastlstm needs a C++20 compiler and found none: install one with 'apt-get install g++' on"
    " Debian or Ubuntu, 'dnf install gcc-c++' on Fedora, 'xcode-select --install' on macOS."
)


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A directory of programs without a compiler."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "make", "cmake", "cat", "pwd", "rm", "sed", "test", "touch", "uname"):
        found = shutil.which(name)
        if found:
            (programs / name).symlink_to(found)
    return programs


def run(
    command: list[str], directory: Path, programs: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(programs), "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def checkout(tmp_path: Path, repository: Path) -> Path:
    """What make reads, in a directory with a space in its name."""
    directory = tmp_path / "a checkout"
    directory.mkdir()
    for name in ("Makefile", "CMakeLists.txt", "pyproject.toml"):
        shutil.copy(repository / name, directory)
    return directory


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


@needs_make
def test_make_without_a_compiler_says_what_to_install(checkout: Path, bare_path: Path) -> None:
    done = run(["make", "install", f"PYTHON={sys.executable}"], checkout, bare_path)
    assert done.returncode != 0
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == COMPILER_SENTENCE
    assert all(line.startswith("make") for line in lines[1:])
    assert not (checkout / ".venv").exists()


@needs_make
def test_make_without_python_says_what_to_install(checkout: Path, bare_path: Path) -> None:
    done = run(["make", "install"], checkout, bare_path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == (
        "fastlstm needs Python 3.11 or newer:"
        " install it with 'apt-get install python3.11 python3.11-venv python3.11-dev'."
    )


@needs_make
def test_make_with_an_old_python_names_it(checkout: Path, bare_path: Path) -> None:
    old = bare_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    done = run(["make", "install", "PYTHON=python3.9"], checkout, bare_path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == (
        "fastlstm needs Python 3.11 or newer, python3.9 is older:"
        " install one and run 'make PYTHON=python3.11'."
    )


@needs_make
def test_make_forgets_an_environment_that_was_moved(checkout: Path, bare_path: Path) -> None:
    (checkout / ".venv").mkdir()
    for name in (".place", ".made", ".dev"):
        (checkout / ".venv" / name).write_text(f"{checkout}\n", encoding="utf-8")
    run(["make", "help"], checkout, bare_path)
    assert (checkout / ".venv/.made").exists()
    moved = checkout.rename(checkout.with_name("moved here"))
    run(["make", "help"], moved, bare_path)
    assert not (moved / ".venv/.made").exists()


@needs_make
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake here; pip brings its own")
def test_cmake_without_a_compiler_says_what_to_install(
    checkout: Path, bare_path: Path, tmp_path: Path
) -> None:
    command = ["cmake", "-S", ".", "-B", str(tmp_path / "built"), "-G", "Unix Makefiles"]
    done = run(command, checkout, bare_path)
    assert done.returncode != 0
    assert COMPILER_SENTENCE in " ".join(done.stderr.split())
    assert "CMAKE_CXX_COMPILER" not in done.stderr


def test_lists_in_braces_have_their_header() -> None:
    """g++ 13 and newer refuse `for (x : {a, b})` without it; older ones include it by chance."""
    sources = Path(__file__).parent.parent / "src" / "fastlstm" / "csrc"
    files = [path for path in sources.rglob("*.*") if re.search(r"for \(.*: \{", path.read_text())]
    assert files
    for path in files:
        assert "#include <initializer_list>" in path.read_text(), path
