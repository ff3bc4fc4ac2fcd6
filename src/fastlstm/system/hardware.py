"""This machine: instruction sets, cores, caches and GPU.

`has_onednn`, `has_bf16_products`, `bf16_instructions`, `gpu`, `machine` and `peak_memory_bytes`
import torch.
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
import resource
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import fastlstm
from fastlstm.errors import ConfigError, KernelError, nearest_hint
from fastlstm.system import cgroup, environment
from fastlstm.system.fields import Device

if TYPE_CHECKING:
    import torch

_CEILING_ERROR = 1.05
"""A rate this many times a measured ceiling shows that the ceiling is too low."""
_DRIVER = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""Files of an NVIDIA driver, on Linux and in its subsystem for Windows."""


@dataclass(frozen=True)
class CpuInfo:
    """The CPU as available to this process.

    Attributes:
        vendor: "GenuineIntel", "AuthenticAMD", or the architecture.
        model: brand string.
        isa: widest usable instruction set of `environment.ISA_NAMES`, limited by FASTLSTM_ISA.
        bf16_isa: instruction set with the fastest bf16 kernels (`fastest_bf16`).
        features: instructions enabled by CPU and operating system, not limited by FASTLSTM_ISA.
        cores: the smaller of affinity mask and control-group quota.
        l1d_bytes, l2_bytes, l3_bytes: caches of one core; 0 if unknown.
    """

    vendor: str
    model: str
    isa: str
    bf16_isa: str
    features: frozenset[str]
    cores: int
    l1d_bytes: int
    l2_bytes: int
    l3_bytes: int


@dataclass(frozen=True)
class GpuInfo:
    """The first CUDA device. `capability` is (major, minor); `cuda_version` is the one torch was
    built for; `cudnn_version` is 0 without cuDNN."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    num_multiprocessors: int
    cuda_version: str
    cudnn_version: int


def native() -> Any:
    """Returns the compiled module; raises KernelError if it cannot be loaded."""
    try:
        return importlib.import_module("fastlstm._native")
    except ImportError as error:
        raise KernelError(
            f"fastlstm's native code cannot be loaded ({error}); build it with 'pip install .'"
            " in the checkout"
        ) from error


def keep_freed_memory() -> bool:
    """Keeps freed memory in the process, so that buffers of a training step are not mapped again.

    A step of H=512, B=32, T=128 then takes 900 page faults, not 21,000, and runs at 44 k tokens/s,
    not 34 k (benchmarks/log); the process never shrinks. Returns False without glibc.
    """
    return bool(native().keep_freed_memory())


def cores() -> int:
    """Returns the cores available to this process, by affinity mask and control-group quota."""
    limit = quota()
    # Rounded down; `training/device.py` times what another thread gains.
    return allowed_cores() if limit is None else max(1, int(limit))


def allowed_cores() -> int:
    """Returns the cores in the affinity mask, whatever the quota."""
    return len(affinity())


def affinity() -> set[int]:
    """Returns the numbers of the cores that the system allows this process."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def quota() -> float | None:
    """Returns the control group's quota in cores, None if it is not below `allowed_cores`."""
    found = cgroup.cpu_quota()
    return None if found is None or found >= allowed_cores() else found


def default_threads() -> int:
    """Returns the default number of threads: every core, or OMP_NUM_THREADS."""
    limit = environment.thread_limit()
    return cores() if limit is None else min(limit, cores())


def cpu() -> CpuInfo:
    """Returns the CPU as available to this process. Raises ConfigError: FASTLSTM_ISA exceeds this
    CPU; KernelError: the native code cannot be loaded."""
    isa, forced = widest_isa(), environment.forced_isa()
    if forced is None:
        return _described(isa, False)
    if environment.ISA_NAMES.index(forced) > environment.ISA_NAMES.index(isa):
        raise ConfigError(f"FASTLSTM_ISA is {forced}, this CPU has {isa}; unset or lower it")
    return _described(forced, True)


def widest_isa() -> str:
    """Returns the widest instruction set of this CPU, not limited by FASTLSTM_ISA."""
    return str(_detected()[1])


def fastest_bf16(isa: str, vendor: str) -> str:
    """Returns the fastest instruction set for bf16 matrix products.

    Intel cores run VDPBF16PS at half the rate of two float32 FMAs. Without AMX, kernels that
    convert in registers are faster: 1.16x to 1.33x per step (H = 128 to 1024, benchmarks/log).
    """
    return "avx512" if isa == "avx512_bf16" and vendor == "GenuineIntel" else isa


def has_onednn() -> bool:
    """Returns whether torch may compute with oneDNN: built with it, and not switched off."""
    import torch

    return torch.backends.mkldnn.is_available() and bool(torch._C._get_mkldnn_enabled())


def has_bf16_products() -> bool:
    """Returns whether torch has matrix products in bf16 on this CPU, fast or emulated by oneDNN.

    Where it has none, as on AVX2, `torch.mm` is a plain loop (70 times as slow as float32 in a
    forward and backward pass of 3200 x 512 x 96), and `nn.LSTM` raises RuntimeError.
    """
    return has_onednn() and _onednn_has_bf16()


@functools.cache
def _onednn_has_bf16() -> bool:
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def bf16_instructions() -> str | None:
    """Returns the bf16 matrix instructions that oneDNN uses, "AMX" or "AVX512-BF16", or None.

    ``FASTLSTM_ISA`` does not limit oneDNN; ``ONEDNN_MAX_CPU_ISA`` does.
    """
    if not has_bf16_products():
        return None
    features = environment.onednn_features(cpu().features)
    if "amx_bf16" in features:
        return "AMX"
    return "AVX512-BF16" if "avx512_bf16" in features else None


def may_gain_by_bf16() -> bool:
    """Returns whether fastlstm's kernels or oneDNN have bf16 instructions on this CPU."""
    return "bf16" in cpu().isa or bf16_instructions() is not None


@functools.cache
def _described(isa: str, is_forced: bool) -> CpuInfo:
    """Cached because it reads some 30 files and every kernel call asks."""
    record, _, features = _detected()
    caches = _cache_bytes()
    return CpuInfo(
        vendor=record.vendor or platform.machine(),
        model=record.model or platform.processor() or platform.machine(),
        isa=isa,
        bf16_isa=isa if is_forced else fastest_bf16(isa, record.vendor),
        features=features,
        cores=cores(),
        l1d_bytes=caches.get(1, 0),
        l2_bytes=caches.get(2, 0),
        l3_bytes=caches.get(3, 0),
    )


@functools.cache
def _detected() -> tuple[Any, str, frozenset[str]]:
    module = native()
    record = module.record_cpuid()
    return record, module.choose_isa(record), frozenset(module.usable_features(record))


def _cache_bytes(root: Path = Path("/")) -> dict[int, int]:
    """Returns bytes by level of the data caches of this process's first core."""
    sizes: dict[int, int] = {}
    for directory in (root / f"sys/devices/system/cpu/cpu{min(affinity())}/cache").glob("index*"):
        try:
            kind = (directory / "type").read_text().strip()
            level = int((directory / "level").read_text())
            text = (directory / "size").read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
            size = int(text.rstrip("KMG")) * unit
        except (OSError, ValueError):
            continue
        if kind in ("Data", "Unified"):
            sizes[level] = size
    return sizes


def gpu() -> GpuInfo | None:
    """Returns the first CUDA device, or None; initialises CUDA."""
    import torch

    if not torch.backends.cuda.is_built() or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return GpuInfo(
        name=properties.name,
        capability=(properties.major, properties.minor),
        total_bytes=properties.total_memory,
        num_multiprocessors=properties.multi_processor_count,
        cuda_version=torch.version.cuda or "",
        cudnn_version=torch.backends.cudnn.version() or 0,
    )


NO_GPU = "this torch is built without CUDA", "torch finds none"


def gpu_refusal() -> str | None:
    """Returns why torch cannot compute on a GPU here, or None; initialises CUDA.

    It is one of `NO_GPU` if torch looks for no GPU or finds none.
    """
    import torch

    warning = _cuda_warning()
    if not torch.cuda.is_available():
        without, none = NO_GPU
        return (warning or none) if torch.backends.cuda.is_built() else without
    capability = torch.cuda.get_device_capability()
    have = [name for name in torch.cuda.get_arch_list() if _runs_on(name, capability)]
    if have or not torch.cuda.get_arch_list():
        return None
    built = ", ".join(torch.cuda.get_arch_list())
    return f"its compute capability is {capability[0]}.{capability[1]}, this torch is for {built}"


def check_device(device: Any) -> None:
    """Raises ConfigError for an unknown device and for one that this machine lacks."""
    if device not in get_args(Device):
        expected = ", ".join(get_args(Device))
        raise ConfigError(
            f"`device` is {device!r}{nearest_hint(device, get_args(Device))}, expected one of"
            f" {expected}"
        )
    if device == "cuda" and (why := _refusal()) is not None:
        raise no_gpu(why)


def no_gpu(why: str) -> ConfigError:
    """Returns the error for a GPU that cannot be used."""
    return ConfigError(
        f"`device='cuda'`: no usable NVIDIA GPU here ({why}); use `device='cpu'` or auto"
    )


def has_gpu() -> bool:
    """Returns whether torch can compute on a GPU here."""
    return _refusal() is None


def _refusal() -> str | None:
    """Returns why there is no usable GPU, or None. Imports torch only if there is a driver."""
    has_driver = any(Path(name).exists() for name in _DRIVER)
    return gpu_refusal() if has_driver else "there is no NVIDIA driver"


@functools.cache
def _cuda_warning() -> str:
    """Returns torch's warning about GPUs, such as a driver that is too old; torch warns once in a
    process."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.is_available()
    return next((str(w.message) for w in caught), "").partition(". ")[0].strip()


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Returns whether code built for `sm_90` or `compute_90` runs on a GPU."""
    kind, _, number = architecture.rstrip("af").partition("_")
    if not number.isdecimal():
        return True
    major, minor = int(number[:-1]), int(number[-1])
    if kind == "compute":
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]


def gpu_id() -> str:
    """Returns an identifier of the current CUDA device, unique over machines."""
    import torch

    device = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"{platform.node()} {device}" if uuid is None else str(uuid)


def peak_gflops(threads: int) -> dict[str, float]:
    """Returns GFLOP/s of register-tile loops, an upper bound for matrix products.

    By instruction set up to `cpu().isa`; names with "bf16" count bf16 products.
    """
    measured: dict[str, float] = native().peak_gflops(cpu().isa, threads)
    return measured


def machine_name(device: str) -> str:
    """Returns the model of the CPU or GPU, its instruction set or memory, and the cores. Raises
    ConfigError: a GPU that torch does not find."""
    if not device.startswith("cuda"):
        info = cpu()
        return f"{info.model}, {info.isa}, {cores()} cores"
    if (first_gpu := gpu()) is None:
        raise ConfigError("device is 'cuda', but torch finds no GPU")
    return f"{first_gpu.name}, {first_gpu.total_bytes / 2**30:.0f} GB, {cores()} cores"


def machine(device: str, threads: int) -> dict[str, object]:
    """Returns the facts that every measurement depends on: device ("cpu" or "cuda") and cores,
    threads, versions and the build of the kernels."""
    import torch

    return {
        "device": machine_name(device),
        "threads": threads,
        "torch": torch.__version__,
        "fastlstm": fastlstm.__version__,
        "kernels": _build_of_kernels(),
    }


def _build_of_kernels() -> list[int]:
    """Returns size and modification time of the native module's file; empty without a file."""
    try:
        info = Path(str(native().__file__)).stat()
    except OSError:
        return []
    return [info.st_size, info.st_mtime_ns]


def ceiling_share(gflops: float, ceiling_gflops: float) -> float | None:
    """Returns the share of a measured ceiling that a rate reaches, 0..1.

    None if the ceiling is unknown (0), or so far below the rate that it was measured on a busy
    machine.
    """
    if not ceiling_gflops or gflops > _CEILING_ERROR * ceiling_gflops:
        return None
    return min(gflops / ceiling_gflops, 1.0)


def join_openmp() -> bool:
    """Lets the kernels use the threads of torch's OpenMP runtime; cheap enough for every call.

    Returns False without a runtime and in a forked child: the kernels then start their own threads.
    """
    module = native()
    if not module.has_openmp():
        _look_for_openmp(module.libraries_loaded())
    return bool(module.has_openmp())


@functools.lru_cache(maxsize=1)
def _look_for_openmp(_libraries_loaded: int) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    loaded = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "/lib" in line}
    runtimes = [p for p in loaded if Path(p).name.startswith(("libgomp", "libiomp5", "libomp"))]
    # Other libraries may load runtimes of their own; torch's is in its directory.
    any(map(native().use_openmp, sorted(runtimes, key=_beside_torch)))


def _beside_torch(path: str) -> tuple[bool, str]:
    return not any(part.startswith("torch") for part in Path(path).parts), path


def peak_memory_bytes(device: torch.device) -> int:
    """Returns peak memory so far: GPU allocations, or the process's resident set."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
