"""Every kernel compiles for every GPU that it is meant for, and what was compiled is stored."""

import re

import pytest

from fastlstm.errors import KernelError
from fastlstm.ops.cuda import compiler
from fastlstm.system import environment

pytest.importorskip("cuda.bindings.nvrtc")

NAMES = ["DTYPE", "H", "NS", "SAVE", "TOKENS", "LENGTHS", "MASK", "ZONEOUT", "ACT", "REC", "NORM"]
PLAIN = 24
"""Bytes that a plain kernel for 512 units may spill."""
NORMED = 48
"""The same with a layer norm and 3 groups of rows."""
ALL_OPTIONS = 240
"""The same with all groups of rows and every option."""


@pytest.mark.parametrize(
    ("values", "arch", "max_spill"),
    [
        *[((0, 512, groups, 1, 0, 0, 0, 0, 1, 0), "sm_90", PLAIN) for groups in (1, 2, 3, 6)],
        ((1, 512, 6, 1, 1, 1, 1, 1, 1, 0), "sm_90", ALL_OPTIONS),
        ((1, 512, 3, 1, 0, 0, 0, 0, 1, 0, 1), "sm_90", NORMED),
        ((0, 512, 4, 1, 1, 1, 1, 1, 1, 0, 1), "sm_90", ALL_OPTIONS),
        ((0, 512, 4, 1, 1, 0, 0, 1, 3, 5), "sm_120", PLAIN),
        ((0, 512, 1, 0, 1, 0, 0, 0, 1, 0), "sm_120", 0),
        ((1, 512, 2, 0, 0, 1, 0, 2, 5, 4), "sm_100", 0),
        ((0, 512, 6, 0, 1, 1, 1, 1, 0, 1), "sm_100", PLAIN),
        ((0, 256, 6, 1, 1, 1, 1, 1, 1, 0), "sm_120", PLAIN),
        ((1, 256, 3, 1, 0, 0, 0, 0, 1, 0), "sm_100", 0),
        ((0, 256, 5, 1, 0, 1, 0, 2, 2, 3), "sm_90", 0),
        ((1, 128, 6, 1, 1, 1, 1, 1, 5, 2), "sm_90", 0),
        ((0, 128, 6, 1, 1, 0, 1, 0, 1, 0), "sm_120", 0),
        ((1, 128, 5, 0, 0, 0, 1, 1, 1, 2), "sm_100", 0),
        ((0, 128, 1, 1, 0, 0, 0, 0, 4, 0), "sm_90", 0),
    ],
)
def test_a_kernel_compiles_and_stays_in_its_registers(values, arch, max_spill):
    check_compiled(values, arch, max_spill, GRID=0, UNITS=32)


@pytest.mark.parametrize(
    ("values", "arch", "max_spill"),
    [
        ((0, 512, 1, 1, 0, 0, 0, 0, 1, 0), "sm_80", 0),
        ((0, 512, 6, 1, 0, 0, 0, 0, 1, 0), "sm_86", PLAIN),
        ((1, 384, 3, 1, 1, 1, 1, 1, 1, 0), "sm_89", PLAIN),
        ((1, 128, 2, 1, 0, 0, 0, 0, 1, 0, 1), "sm_80", 0),
        ((0, 512, 1, 1, 1, 1, 1, 1, 1, 0, 1), "sm_120", PLAIN),
        ((0, 1024, 1, 1, 0, 0, 0, 0, 1, 0), "sm_80", 0),
        ((1, 1024, 3, 1, 1, 0, 1, 0, 1, 0), "sm_89", PLAIN),
        ((0, 1024, 4, 1, 0, 0, 0, 0, 1, 0), "sm_90", PLAIN),
        ((0, 640, 2, 0, 1, 1, 0, 2, 1, 2), "sm_100", 0),
        ((1, 1024, 2, 1, 0, 0, 0, 0, 1, 0, 1), "sm_86", PLAIN),
    ],
)
def test_a_kernel_without_clusters_compiles_and_stays_in_its_registers(values, arch, max_spill):
    check_compiled(values, arch, max_spill, GRID=1, UNITS=32 if values[1] <= 512 else 16)


def check_compiled(values, arch, max_spill, **of_kind):
    macros = {"NORM": 0, **dict(zip(NAMES, values, strict=False)), **of_kind}
    macros.update(CL=macros["H"] // macros["UNITS"], REAL=macros["H"])
    image, log = compiler.compile_source("lstm_cluster", macros, arch)
    assert image.startswith(b"\x7fELF")
    entries = set(re.findall(r"entry function '(\w+)'", log))
    assert entries == {"lstm_forward", *(["lstm_backward"] if macros["SAVE"] else [])}
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    assert len(spills) == 2 * len(entries)
    assert max(spills) <= max_spill
    assert all(int(n) <= 255 for n in re.findall(r"Used (\d+) registers", log))


MACROS = {"DTYPE": 0, "GRID": 0, "H": 128, "UNITS": 32, "NS": 1, "CL": 4, "ACT": 1, "NORM": 0}
MACROS["REAL"] = 128
MACROS.update(dict.fromkeys(("SAVE", "TOKENS", "LENGTHS", "MASK", "ZONEOUT", "REC"), 0))


def test_a_gpu_without_clusters_is_refused_with_the_reason():
    with pytest.raises(
        KernelError, match=r"NVRTC \d+\.\d+ cannot compile lstm_cluster.cu for sm_80"
    ):
        compiler.compile_source("lstm_cluster", MACROS, "sm_80")


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The architectures that something was compiled for; the cache is at `tmp_path`."""
    made: list[str] = []

    def compile_source(name, macros, arch):
        made.append(arch)
        return f"code {len(made)}".encode(), ""

    monkeypatch.setattr(compiler, "compile_source", compile_source)
    monkeypatch.setattr(environment, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.0")
    return made


def compiled(arch="sm_90", **changes):
    return compiler.compiled("lstm_cluster", {**MACROS, **changes}, arch)


def test_a_kernel_is_compiled_once(calls):
    assert compiled() == compiled() == b"code 1"
    assert compiled(H=256) == b"code 2"
    assert compiled("sm_120") == b"code 3"
    assert calls == ["sm_90", "sm_90", "sm_120"]


def test_another_nvrtc_or_source_compiles_anew(calls, monkeypatch):
    compiled()
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.1")
    assert compiled() == b"code 2"
    monkeypatch.setattr(compiler, "source_text", lambda name: "other")
    assert compiled() == b"code 3"


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_entry_is_replaced(calls, tmp_path, damage):
    compiled()
    (entry,) = (tmp_path / "kernels" / "entries").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1] + b"x" if damage is None else damage)
    assert compiled() == b"code 2"
    assert compiled() == b"code 2"
    assert len(calls) == 2


def test_a_cache_that_cannot_be_written_costs_one_compilation(calls, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setattr(environment, "cache_dir", lambda: tmp_path / "file")
    assert compiled() == b"code 1"

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(environment, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(compiler.storage, "write_file", full)
    assert compiled() == b"code 2"
    assert len(calls) == 2


def test_a_compilation_error_is_remembered(calls, monkeypatch):
    def refuse(*_):
        calls.append("refused")
        raise KernelError("NVRTC cannot compile it")

    monkeypatch.setattr(compiler, "compile_source", refuse)
    with pytest.raises(KernelError, match="cannot compile it"):
        compiled()
    assert calls == ["refused"]


def test_missing_libraries_are_named(monkeypatch):
    def without(name):
        raise ImportError(name)

    compiler.nvrtc_version.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "import_module", without)
        with pytest.raises(KernelError, match=r"cuda\.bindings is missing"):
            compiler.nvrtc_version()

    class NoLibrary:
        @staticmethod
        def nvrtcVersion():  # noqa: N802
            raise RuntimeError("libnvrtc.so.13 not found")

    monkeypatch.setattr(compiler, "bindings", lambda name: NoLibrary())
    with pytest.raises(KernelError, match=r"cannot be loaded \(libnvrtc\.so\.13 not found\)"):
        compiler.nvrtc_version()
    compiler.nvrtc_version.cache_clear()
