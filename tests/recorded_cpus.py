"""CPUs as they describe themselves, so that no test depends on the one it runs on."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastlstm.system import environment, hardware

# Bits as the manuals number them.
OSXSAVE, AVX, FMA, F16C = 1 << 27, 1 << 28, 1 << 12, 1 << 29
AVX2, AVX512F, AVX512DQ, AVX512BW, AVX512VL = 1 << 5, 1 << 16, 1 << 17, 1 << 30, 1 << 31
AVX512_VNNI, AVX512_BF16 = 1 << 11, 1 << 5
AMX_BF16, AMX_TILE, AMX_INT8 = 1 << 22, 1 << 24, 1 << 25
NEON, NEON_DOTPROD, NEON_I8MM, NEON_BF16 = 1 << 1, 1 << 20, 1 << 13, 1 << 14
XCR0_AVX, XCR0_AVX512, XCR0_AMX = 0x7, 0xE7, 0x600E7

_LESS: dict[str, dict[str, int]] = {
    "amx_bf16": {},
    "avx512_bf16": {"leaf7_edx": 0},
    "avx512": {"leaf7_edx": 0, "leaf7_1_eax": 0},
    "avx2": {"leaf7_edx": 0, "leaf7_1_eax": 0, "leaf7_ecx": 0, "leaf7_ebx": AVX2},
    "scalar": {"leaf1_ecx": 0},
    "neon": {"leaf1_ecx": 0, "hwcap": NEON},
    "neon_bf16": {"leaf1_ecx": 0, "hwcap": NEON | NEON_DOTPROD, "hwcap2": NEON_I8MM | NEON_BF16},
}
assert _LESS.keys() >= set(environment.ISA_NAMES)


def sapphire_rapids(**changes: Any) -> Any:
    """Returns the record of a CPU with everything on, less what `changes` takes away."""
    record = hardware.native().CpuidRecord()
    record.vendor = "GenuineIntel"
    record.max_leaf = 0x20
    record.leaf1_ecx = OSXSAVE | AVX | FMA | F16C
    record.leaf7_ebx = AVX2 | AVX512F | AVX512DQ | AVX512BW | AVX512VL
    record.leaf7_ecx = AVX512_VNNI
    record.leaf7_edx = AMX_BF16 | AMX_TILE | AMX_INT8
    record.leaf7_1_eax = AVX512_BF16
    record.xcr0 = XCR0_AMX
    record.is_amx_permitted = True
    for name, value in changes.items():
        setattr(record, name, value)
    return record


class Cpu(NamedTuple):
    """A CPU that a wider one can imitate.

    Attributes:
        isa: widest instruction set of fastlstm's kernels.
        changes: of the record of `_LESS[isa]`.
        onednn: widest instruction set of oneDNN, as ONEDNN_MAX_CPU_ISA names it.
        aten: that of torch's own kernels, as ATEN_CPU_CAPABILITY names it.
    """

    isa: str
    changes: dict[str, int]
    onednn: str
    aten: str

    def variables(self) -> dict[str, str]:
        """Returns the environment in which a process runs as on this CPU."""
        return {
            "FASTLSTM_ISA": self.isa,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "ATEN_CPU_CAPABILITY": self.aten,
        }


_CPUS = {
    "scalar": Cpu("scalar", {}, "SSE41", "default"),
    "avx2": Cpu("avx2", {}, "AVX2", "avx2"),
    "avx512": Cpu("avx512", {"leaf7_ecx": 0}, "AVX512_CORE", "avx512"),
    "avx512_vnni": Cpu("avx512", {}, "AVX512_CORE_VNNI", "avx512"),
    "avx512_bf16": Cpu("avx512_bf16", {}, "AVX512_CORE_BF16", "avx512"),
    "amx_bf16": Cpu("amx_bf16", {}, "ALL", "avx512"),
    "neon": Cpu("neon", {}, "ALL", "default"),
    "neon_dotprod": Cpu("neon", {"hwcap": NEON | NEON_DOTPROD}, "ALL", "default"),
    "neon_bf16": Cpu("neon_bf16", {}, "ALL", "default"),
}
CPUS = {name: cpu for name, cpu in _CPUS.items() if cpu.isa in environment.ISA_NAMES}
"""Narrow to wide; `pytest --cpu NAME` runs the tests as on one of them."""


def narrower() -> list[str]:
    """Returns the names of the CPUs that this one can imitate."""
    _, own, features = hardware._detected()
    widest = environment.ISA_NAMES.index(own)
    return [
        name
        for name, cpu in CPUS.items()
        if environment.ISA_NAMES.index(cpu.isa) < widest
        or (cpu.isa == own and cpu.changes and features > detected(own, **cpu.changes)[2])
    ]


def detected(isa: str, **changes: Any) -> tuple[Any, str, frozenset[str]]:
    """Returns what `hardware._detected` finds on a CPU whose widest instruction set is `isa`.

    `changes` are of the record, as for `sapphire_rapids`.
    """
    native = hardware.native()
    record = sapphire_rapids(**{**_LESS[isa], **changes})
    assert native.choose_isa(record) == isa
    return record, isa, frozenset(native.usable_features(record))
