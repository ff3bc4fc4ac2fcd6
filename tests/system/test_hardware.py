import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastlstm.errors import ConfigError, KernelError
from fastlstm.system import environment, hardware
from recorded_cpus import (
    AMX_INT8,
    AMX_TILE,
    AVX,
    AVX2,
    AVX512F,
    F16C,
    FMA,
    NEON,
    NEON_BF16,
    NEON_DOTPROD,
    NEON_I8MM,
    OSXSAVE,
    XCR0_AVX,
    XCR0_AVX512,
    sapphire_rapids,
)

pytestmark = pytest.mark.isa

native = hardware.native()


@pytest.mark.parametrize(
    ("changes", "isa"),
    [
        ({}, "amx_bf16"),
        ({"is_amx_permitted": False}, "avx512_bf16"),
        ({"xcr0": XCR0_AVX512}, "avx512_bf16"),  # the kernel does not save tiles
        ({"leaf7_edx": AMX_TILE | AMX_INT8}, "avx512_bf16"),
        ({"leaf7_1_eax": 0}, "avx512"),  # AMX alone does not stand in for AVX512-BF16
        ({"xcr0": XCR0_AVX}, "avx2"),  # the CPU has AVX-512, the kernel does not save ZMM
        ({"xcr0": 0x600E7 & ~0x20}, "avx2"),  # opmask state not saved
        ({"leaf7_ebx": AVX2 | AVX512F}, "avx2"),  # Knights Landing: F without BW, VL, DQ
        ({"leaf7_ebx": AVX2}, "avx2"),
        ({"leaf1_ecx": OSXSAVE | AVX}, "scalar"),  # AVX2 without FMA
        ({"leaf7_ebx": 0}, "scalar"),
        ({"xcr0": 0x1}, "scalar"),  # the kernel saves x87 only
        ({"xcr0": 0x3}, "scalar"),  # the upper halves of YMM are lost on a task switch
        ({"leaf1_ecx": AVX | FMA | F16C}, "scalar"),  # OSXSAVE off: XCR0 means nothing
    ],
)
def test_isa_needs_cpu_and_operating_system(changes, isa):
    assert native.choose_isa(sapphire_rapids(**changes)) == isa


@pytest.mark.parametrize(
    ("hwcap", "hwcap2", "isa"),
    [
        (NEON, 0, "neon"),
        (NEON | NEON_DOTPROD, 0, "neon"),  # Neoverse N1; int8 takes neon_dotprod all the same
        (NEON | NEON_DOTPROD, NEON_BF16, "neon"),
        (NEON | NEON_DOTPROD, NEON_I8MM, "neon"),
        (NEON, NEON_I8MM | NEON_BF16, "neon"),
        (NEON | NEON_DOTPROD, NEON_I8MM | NEON_BF16, "neon_bf16"),  # Neoverse V1, N2, V2
    ],
)
def test_isa_of_arm(hwcap, hwcap2, isa):
    record = native.CpuidRecord()
    record.hwcap, record.hwcap2 = hwcap, hwcap2
    assert native.choose_isa(record) == isa
    features = native.usable_features(record)
    assert ("neon_dotprod" in features) == bool(hwcap & NEON_DOTPROD)
    assert ("neon_bf16" in features) == bool(hwcap2 & NEON_BF16)


def test_a_machine_without_cpuid_is_scalar():
    record = native.CpuidRecord()
    assert native.choose_isa(record) == "scalar"
    assert native.usable_features(record) == []


def test_features_follow_the_operating_system():
    everything = set(native.usable_features(sapphire_rapids()))
    assert {"avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"} <= everything
    without_zmm = set(native.usable_features(sapphire_rapids(xcr0=XCR0_AVX)))
    assert without_zmm == {"avx", "fma", "f16c", "avx2"}
    assert native.usable_features(sapphire_rapids(leaf1_ecx=AVX | FMA)) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the flags of an x86-64 Linux")
def test_features_agree_with_the_kernel():
    info = Path("/proc/cpuinfo")
    if not info.exists():
        pytest.skip("no /proc/cpuinfo here")
    lines = info.read_text(encoding="utf-8").splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split(":")[1].split())
    ours = native.usable_features(native.record_cpuid())
    same = ("avx", "fma", "f16c", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_bf16")
    assert {name for name in same if name in ours} == {name for name in same if name in flags}


def test_cpu_describes_this_machine():
    info = hardware.cpu()
    assert hardware.cpu() is info  # every call of a kernel asks
    assert info.isa in environment.ISA_NAMES
    assert 1 <= info.cores <= (os.cpu_count() or 1)
    assert info.vendor
    assert info.model
    assert all(size >= 0 for size in (info.l1d_bytes, info.l2_bytes, info.l3_bytes))


@pytest.mark.parametrize(
    ("isa", "vendor", "expected"),
    [
        ("amx_bf16", "GenuineIntel", "amx_bf16"),
        ("avx512_bf16", "GenuineIntel", "avx512"),
        ("avx512_bf16", "AuthenticAMD", "avx512_bf16"),
        ("avx512", "GenuineIntel", "avx512"),
        ("avx2", "AuthenticAMD", "avx2"),
    ],
)
def test_bf16_takes_the_instructions_that_are_fastest(isa, vendor, expected, monkeypatch):
    assert hardware.fastest_bf16(isa, vendor) == expected
    record = sapphire_rapids()
    record.vendor = vendor
    monkeypatch.delenv("FASTLSTM_ISA", raising=False)
    monkeypatch.setattr(hardware, "_detected", lambda: (record, isa, frozenset()))
    hardware._described.cache_clear()
    try:
        assert hardware.cpu().bf16_isa == expected
        monkeypatch.setenv("FASTLSTM_ISA", isa)  # who asks for it gets it
        assert hardware.cpu().bf16_isa == isa
    finally:
        hardware._described.cache_clear()


def test_forced_isa_lowers_but_never_raises(monkeypatch):
    monkeypatch.setenv("FASTLSTM_ISA", "scalar")
    assert hardware.cpu().isa == "scalar"
    monkeypatch.setattr(hardware, "_detected", lambda: (sapphire_rapids(), "avx2", frozenset()))
    monkeypatch.setenv("FASTLSTM_ISA", "avx512")
    with pytest.raises(ConfigError) as caught:
        hardware.cpu()
    assert str(caught.value) == "FASTLSTM_ISA is avx512, this CPU has avx2; unset or lower it"


@pytest.mark.parametrize(
    ("quota", "allowed", "expected"),
    [(None, 4, 4), (2.0, 4, 2), (1.9, 4, 1), (0.5, 4, 1), (8, 2, 2)],
)
def test_cores_are_affinity_and_quota(monkeypatch, quota, allowed, expected):
    monkeypatch.setattr(hardware.cgroup, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
    assert hardware.cores() == expected


def test_default_threads_obey_omp_num_threads(monkeypatch):
    monkeypatch.setattr(hardware, "cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert hardware.default_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert hardware.default_threads() == 4
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert hardware.default_threads() == 4


def test_cache_sizes_are_of_the_data_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    caches = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K")]
    for index, values in enumerate([*caches, ("3", "Unified", "96M"), ("4", "Unified", "odd")]):
        directory = tmp_path / f"sys/devices/system/cpu/cpu3/cache/index{index}"
        directory.mkdir(parents=True)
        for name, value in zip(("level", "type", "size"), values, strict=True):
            (directory / name).write_text(value + "\n", encoding="utf-8")
    assert hardware._cache_bytes(tmp_path) == {1: 48 << 10, 2: 2 << 20, 3: 96 << 20}


def test_missing_native_code_says_how_to_build_it(monkeypatch):
    def refuse(name):
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr(hardware.importlib, "import_module", refuse)
    with pytest.raises(KernelError, match=r"build it with 'pip install \.' in the checkout"):
        hardware.native()


def test_peak_is_measured_for_every_usable_instruction_set():
    isa = hardware.cpu().isa
    measured = native.peak_gflops(isa, 1, 0.02)
    names = [name for name in environment.ISA_NAMES if name in measured]
    assert list(measured) == names
    assert names[0] == "scalar"
    assert all(value > 0.1 for value in measured.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: native.peak_gflops("sse9", 1), "unknown instruction set"),
        (lambda: native.peak_gflops("scalar", 0), "threads must be from 1 to 4096"),
        (lambda: native.peak_gflops("scalar", 1, float("nan")), "seconds must be from 0 to 60"),
        (lambda: native.copy_gb_s(0, 1), "threads must be from 1 to 4096"),
        (lambda: native.copy_gb_s(1, 0), "bytes_per_thread must be at least 1"),
        (lambda: native.copy_gb_s(1, 1, 0), "rounds must be at least 1"),
    ],
)
def test_native_code_checks_its_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_copies_that_do_not_fit_are_a_memory_error():
    with pytest.raises(MemoryError):
        native.copy_gb_s(1, 1 << 60)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_there_is_none():
    assert hardware.gpu() is None
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        hardware.machine("cuda", 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_describes_the_first_device():
    first = hardware.gpu()
    assert first.total_bytes > 0


def test_freed_memory_is_kept_and_a_large_buffer_costs_no_page_faults_again():
    code = (
        "import resource, torch\n"
        "from fastlstm.system import hardware\n"
        "assert hardware.keep_freed_memory()\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.zeros(16 << 20)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "taken = [faults() for _ in range(16)]\n"
        "assert min(taken[8:]) < 1000, taken  # else every buffer of 64 MB is mapped anew\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_library_without_openmp_is_refused():
    before = native.has_openmp()
    assert not native.use_openmp("libc.so.6")
    assert not native.use_openmp("libnosuch.so")
    assert native.has_openmp() == before


@pytest.mark.parametrize(
    ("isa", "changes", "limit", "unit"),
    [
        ("amx_bf16", {}, "", "AMX"),
        ("amx_bf16", {}, "default", "AMX"),
        ("amx_bf16", {}, "AVX10_1_512_AMX", "AMX"),
        ("amx_bf16", {}, "avx512_core_bf16", "AVX512-BF16"),
        ("amx_bf16", {}, "AVX512_CORE", None),
        ("avx512_bf16", {"leaf7_edx": AMX_TILE | AMX_INT8}, "", "AVX512-BF16"),
        ("avx512", {}, "", None),
        ("avx2", {}, "", None),
    ],
)
def test_bf16_instructions_are_oneDNNs_whatever_fastlstm_isa_says(  # noqa: N802
    on_cpu, monkeypatch, isa, changes, limit, unit
):
    on_cpu(isa, **changes)
    monkeypatch.setattr(hardware, "has_onednn", lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert hardware.bf16_instructions() == unit
    monkeypatch.setenv("FASTLSTM_ISA", "scalar")
    assert hardware.bf16_instructions() == unit
    monkeypatch.setattr(hardware, "_onednn_has_bf16", lambda: False)
    assert hardware.bf16_instructions() is None


def test_without_onednn_torch_has_no_bf16_products(monkeypatch):
    before = torch._C._get_mkldnn_enabled()
    monkeypatch.setattr(hardware, "_onednn_has_bf16", lambda: True)
    try:
        torch._C._set_mkldnn_enabled(False)
        assert not hardware.has_bf16_products()
        assert hardware.bf16_instructions() is None
    finally:
        torch._C._set_mkldnn_enabled(before)


def test_the_kernels_have_bf16_instructions_without_onednn(on_cpu, monkeypatch):
    monkeypatch.setattr(hardware, "has_onednn", lambda: False)
    for isa, expected in (("amx_bf16", True), ("avx512_bf16", True), ("avx512", False)):
        on_cpu(isa)
        assert hardware.bf16_instructions() is None
        assert hardware.may_gain_by_bf16() == expected
