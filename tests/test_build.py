"""Installing: one sentence says what is missing; sdist and wheel hold what they should."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath

import pytest

import fastlstm
from fastlstm.system import hardware

REPOSITORY = Path(__file__).parent.parent
COMPILER_SENTENCE = (
    "fastlstm needs a C++20 compiler and found none: install one with 'apt-get install g++' on"
    " Debian or Ubuntu, 'dnf install gcc-c++' on Fedora, 'xcode-select --install' on macOS."
)


@pytest.fixture
def bare_path(tmp_path):
    """A directory of programs without a compiler."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "make", "cmake", "cat", "pwd", "rm", "sed", "test", "touch", "uname"):
        found = shutil.which(name)
        if found:
            (programs / name).symlink_to(found)
    return programs


def run(command, directory, programs, **variables):
    environment = {"PATH": str(programs), "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def checkout(tmp_path, repository):
    """What make reads, in a directory with a space in its name."""
    directory = tmp_path / "a checkout"
    directory.mkdir()
    for name in ("Makefile", "CMakeLists.txt", "pyproject.toml"):
        shutil.copy(repository / name, directory)
    return directory


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


@needs_make
def test_make_without_a_compiler_says_what_to_install(checkout, bare_path):
    done = run(["make", "install", f"PYTHON={sys.executable}"], checkout, bare_path)
    assert done.returncode != 0
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == COMPILER_SENTENCE
    assert all(line.startswith("make") for line in lines[1:])
    assert not (checkout / ".venv").exists()


@needs_make
def test_make_without_python_says_what_to_install(checkout, bare_path):
    done = run(["make", "install"], checkout, bare_path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == (
        "fastlstm needs Python 3.11 or newer:"
        " install it with 'apt-get install python3.11 python3.11-venv python3.11-dev'."
    )


@needs_make
def test_make_with_an_old_python_names_it(checkout, bare_path):
    old = bare_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    done = run(["make", "install", "PYTHON=python3.9"], checkout, bare_path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == (
        "fastlstm needs Python 3.11 or newer, python3.9 is older or does not run:"
        " install one and run 'make PYTHON=python3.11'."
    )


@needs_make
def test_targets_of_one_command_do_not_run_side_by_side(checkout):
    """`make wheels test-wheel` tests the new wheels."""
    first, second = "--eval=first: ; @sleep 0.3; echo first", "--eval=second: ; @echo second"
    done = run(["make", first, second, "first", "second"], checkout, os.environ["PATH"])
    assert done.stdout.split() == ["first", "second"], done


@needs_make
def test_make_forgets_an_environment_that_was_moved(checkout, bare_path):
    (checkout / ".venv").mkdir()
    marks = (".place", ".native", ".packages", ".dev-packages", ".made", ".dev")
    for name in marks:
        (checkout / ".venv" / name).write_text(f"{checkout}\n", encoding="utf-8")
    run(["make", "help"], checkout, bare_path)
    assert (checkout / ".venv/.made").exists()
    moved = checkout.rename(checkout.with_name("moved here"))
    run(["make", "help"], moved, bare_path)
    assert not [name for name in marks if (moved / ".venv" / name).exists()]


@needs_make
def test_make_wheels_keeps_the_last_good_ones_until_all_are_built(checkout):
    tools = checkout / "build/tools/bin"
    tools.mkdir(parents=True)
    fakes = {
        "python": """case $2 in
build) mkdir -p "$6"; touch "$6/new.tar.gz";;
pip) test "$ARCH" != "$BROKEN"; mkdir build/wheel; touch "build/wheel/$ARCH.whl";;
esac""",
        "auditwheel": 'cp "$4" "$3"',
    }
    for name, body in fakes.items():
        lines = f"#!/bin/sh\nset -e\nARCH=${{_PYTHON_HOST_PLATFORM#linux-}}\n{body}\n"
        (tools / name).write_text(lines, encoding="utf-8")
        (tools / name).chmod(0o755)
    dist = checkout / "dist"
    dist.mkdir()
    (dist / "old.whl").touch()
    made = ["make", "wheels", "--assume-old=build/tools/.made", "PYTHONS=python", "ARCHS=a b"]
    for broken, names in (("b", {"old.whl"}), ("", {"new.tar.gz", "a.whl", "b.whl"})):
        done = run(made, checkout, os.environ["PATH"], BROKEN=broken)
        assert (done.returncode != 0) == bool(broken), done.stderr
        assert {path.name for path in dist.iterdir()} == names


@needs_make
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake here; pip brings its own")
def test_cmake_without_a_compiler_says_what_to_install(checkout, bare_path, tmp_path):
    command = ["cmake", "-S", ".", "-B", str(tmp_path / "built"), "-G", "Unix Makefiles"]
    done = run(command, checkout, bare_path)
    assert done.returncode != 0
    assert COMPILER_SENTENCE in " ".join(done.stderr.split())
    assert "CMAKE_CXX_COMPILER" not in done.stderr


def test_lists_in_braces_have_their_header():
    """g++ 13 and newer refuse `for (x : {a, b})` without it; older ones include it by chance."""
    sources = REPOSITORY / "src" / "fastlstm" / "csrc"
    files = [path for path in sources.rglob("*.*") if re.search(r"for \(.*: \{", path.read_text())]
    assert files
    for path in files:
        assert "#include <initializer_list>" in path.read_text(), path


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A directory with the sdist and the wheel of this checkout, the wheel without native code."""
    directory = tmp_path_factory.mktemp("dist")
    code = (
        "import sys; from scikit_build_core.build import build_sdist, build_wheel;"
        " build_sdist(sys.argv[1]);"
        " build_wheel(sys.argv[1], {'wheel.cmake': 'false', 'wheel.platlib': 'true'})"
    )
    command = [sys.executable, "-c", code, directory]
    subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
    return directory


def test_the_sdist_has_what_builds_and_tests_it(archives):
    (path,) = archives.glob("fastlstm-*.tar.gz")
    with tarfile.open(path) as file:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in file.getnames()}
    needed = {"PKG-INFO", "CMakeLists.txt", "pyproject.toml", "LICENSE", "CITATION.cff"}
    assert needed <= names
    csrc = REPOSITORY / "src/fastlstm/csrc"
    assert {str(path.relative_to(REPOSITORY)) for path in csrc.rglob("*.*")} <= names
    assert "tests/conftest.py" in names
    left_out = re.compile(r"\.ci|\.venv|build|dist|runs|.*/results/")
    assert not [name for name in names if left_out.match(name)]
    assert path.stat().st_size < 4_000_000


def test_the_wheel_has_every_file_of_the_package_but_no_source_of_the_native_code(archives):
    (path,) = archives.glob("fastlstm-*.whl")
    with zipfile.ZipFile(path) as file:
        names = {name for name in file.namelist() if name.startswith("fastlstm/")}
        told = file.read(next(n for n in file.namelist() if n.endswith("/METADATA"))).decode()
        commands = file.read(next(n for n in file.namelist() if n.endswith("points.txt"))).decode()
    source = REPOSITORY / "src"
    assert names == {
        str(path.relative_to(source))
        for path in (source / "fastlstm").rglob("*.*")
        if path.is_file() and not {"csrc", "__pycache__"} & set(path.parts)
    }
    assert "fastlstm/ops/cuda/training.cu" in names  # NVRTC compiles it at run time
    assert {"fastlstm/serve/page.html", "fastlstm/py.typed"} < names
    assert "fastlstm = fastlstm.cli.main:console" in commands
    assert "\nRequires-Python: >=3.11\n" in told
    assert "\nLicense-Expression: Apache-2.0\n" in told


def test_python_3_11_has_its_own_wheel_and_newer_ones_that_of_the_stable_abi():
    tag = re.search(r"^Tag: (.*)$", distribution("fastlstm").read_text("WHEEL") or "", re.MULTILINE)
    own, stable = ("cp311-cp311-", ".cpython-311-"), ("cp312-abi3-", ".abi3.so")
    expected, suffix = own if sys.version_info < (3, 12) else stable
    assert tag[1].startswith(expected)
    assert suffix in Path(hardware.native().__file__).name


def test_every_place_that_names_the_version_names_the_same():
    assert distribution("fastlstm").version == fastlstm.__version__
    cited = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {fastlstm.__version__}\n" in cited
