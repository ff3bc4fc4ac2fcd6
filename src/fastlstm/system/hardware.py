"""This machine: instruction sets, cores, caches, GPU, and its measured speed.

Only `gpu`, `ceilings` and `peak_memory_bytes` import torch.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastlstm
from fastlstm.errors import ConfigError, KernelError
from fastlstm.system import cgroup, environment, measurements

if TYPE_CHECKING:
    import torch

GEMM_SHAPE = (2048, 512, 2048)
"""(M, K, N) of the GEMM ceiling: a chunk of steps through a layer with H=512."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "tf32": "float32"}
_COPY_BYTES = 256 << 20
_MEASURE_S = 0.4
_QUIET_SHARE = 0.9
_PRODUCTS = ("torch.mm", "oneDNN")
_BUSY_TRIES = 3


@dataclass(frozen=True)
class CpuInfo:
    """The CPU as available to this process; cache sizes are 0 if unknown.

    Attributes:
        vendor: "GenuineIntel", "AuthenticAMD", or the architecture.
        model: brand string.
        isa: widest usable instruction set of `environment.ISA_NAMES`, limited by FASTLSTM_ISA.
        bf16_isa: instruction set with the fastest bf16 kernels (`fastest_bf16`).
        features: enabled by CPU and operating system, whatever FASTLSTM_ISA says.
        cores: the smaller of affinity mask and control-group quota.
        l1d_bytes: level-1 data cache of a core.
        l2_bytes: level-2 cache of a core.
        l3_bytes: level-3 cache of a core.
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
    """The first CUDA device.

    Attributes:
        name: from the driver.
        capability: compute capability, (major, minor).
        total_bytes: memory of the device.
        num_multiprocessors: streaming multiprocessors.
        cuda_version: that torch was built for.
        cudnn_version: 0 without cuDNN.
    """

    name: str
    capability: tuple[int, int]
    total_bytes: int
    num_multiprocessors: int
    cuda_version: str
    cudnn_version: int


@dataclass(frozen=True)
class Ceilings:
    """The measured speed of the machine.

    Attributes:
        gemm_gflops: best matrix product, GFLOP/s.
        gemm_by: its library: "torch.mm" or "oneDNN".
        copy_gb_s: memory copy, read plus written, GB/s (1e9 bytes).
        is_busy: other processes used the cores, so figures may be low; the next caller measures
            again, up to three times in total.
        tries: number of measurements that this is the best of.
        is_recalled: measured by an earlier call.
    """

    gemm_gflops: float
    gemm_by: str
    copy_gb_s: float
    is_busy: bool = False
    tries: int = 1
    is_recalled: bool = False


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

    A step of H=512, B=32, T=128 takes 900 page faults instead of 21,000 and runs at 44 instead of
    34 k tokens/s (docs/log.md); the process never shrinks.

    Returns:
        False if the C library (other than glibc) has no such option.
    """
    return bool(native().keep_freed_memory())


def cores() -> int:
    """Returns the cores available to this process, by affinity mask and control-group quota."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    quota = cgroup.cpu_quota()
    # Rounded down: a thread beyond the quota is throttled in mid-step, and all others wait.
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def default_threads() -> int:
    """Returns the default number of threads: every core, or OMP_NUM_THREADS."""
    limit = environment.thread_limit()
    return cores() if limit is None else min(limit, cores())


def cpu() -> CpuInfo:
    """Returns the CPU as available to this process.

    Raises:
        ConfigError: FASTLSTM_ISA exceeds this CPU.
        KernelError: the native code cannot be loaded.
    """
    return _described(_lowered(_detected()[1]), environment.forced_isa() is not None)


def fastest_bf16(isa: str, vendor: str) -> str:
    """Returns the fastest instruction set for bf16 matrix products.

    Intel cores run VDPBF16PS at half the rate of two float32 FMAs; without AMX, kernels that
    convert in registers are faster: 1.16x to 1.33x per step (H = 128 to 1024, docs/log.md).
    """
    return "avx512" if isa == "avx512_bf16" and vendor == "GenuineIntel" else isa


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


def _lowered(isa: str) -> str:
    forced = environment.forced_isa()
    if forced is None:
        return isa
    if environment.ISA_NAMES.index(forced) > environment.ISA_NAMES.index(isa):
        raise ConfigError(f"FASTLSTM_ISA is {forced}, this CPU has {isa}; unset or lower it")
    return forced


def _cache_bytes(root: Path = Path("/")) -> dict[int, int]:
    """Returns bytes by level of the data caches of this process's first core."""
    first = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    sizes: dict[int, int] = {}
    for directory in (root / f"sys/devices/system/cpu/cpu{first}/cache").glob("index*"):
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


def peak_gflops(threads: int) -> dict[str, float]:
    """Returns GFLOP/s of register-tile loops, an upper bound for matrix products.

    By instruction set up to `cpu().isa`; "avx512_bf16" and "amx_bf16" count bf16 products.
    """
    measured: dict[str, float] = native().peak_gflops(cpu().isa, threads)
    return measured


def ceilings(
    dtype: str = "fp32",
    threads: int | None = None,
    *,
    device: str = "cpu",
    shape: tuple[int, int, int] = GEMM_SHAPE,
    fresh: bool = False,
) -> Ceilings:
    """Returns the machine's measured speed; measures once (about a second) and stores the result.

    A measurement on a busy machine is repeated by later calls, up to three in total, as with
    `fresh`; the best is kept.

    Args:
        dtype: fp32, bf16, fp16 or tf32 (fp32 on the CPU).
        threads: CPU threads; default `default_threads()`.
        device: "cpu" or "cuda".
        shape: (M, K, N) of the matrix product.
        fresh: measure even if there is a stored result.

    Raises:
        ConfigError: an unknown dtype.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, expected one of {', '.join(_DTYPES)}")
    threads = default_threads() if threads is None else threads
    of = {**machine(device, threads), "dtype": dtype, "shape": list(shape)}
    known = _as_ceilings(measurements.recall("ceilings", of))
    is_final = known is not None and (not known.is_busy or known.tries >= _BUSY_TRIES)
    if known is not None and is_final and not fresh:
        return replace(known, is_recalled=True)
    measured = _measure(dtype, threads, device, shape)
    if known is not None:
        measured = replace(
            max(known, measured, key=lambda ceilings: ceilings.gemm_gflops),
            copy_gb_s=max(known.copy_gb_s, measured.copy_gb_s),
            is_busy=known.is_busy and measured.is_busy,
            tries=known.tries + 1,
        )
    stored = asdict(measured)
    del stored["is_recalled"]
    measurements.remember("ceilings", of, stored)
    return measured


def machine(device: str, threads: int) -> dict[str, object]:
    """Returns what every measurement depends on: device ("cpu" or "cuda"), threads, versions."""
    import torch

    return {
        "device": _device_name(device),
        "threads": threads,
        "torch": torch.__version__,
        "fastlstm": fastlstm.__version__,
    }


def _device_name(device: str) -> str:
    if device == "cpu":
        info = cpu()
        return f"{info.vendor} {info.model} {info.isa}"
    first_gpu = gpu()
    if first_gpu is None:
        raise ConfigError("device is 'cuda', but torch finds no GPU")
    return first_gpu.name


def _as_ceilings(value: dict[str, Any] | None) -> Ceilings | None:
    """Returns the stored ceilings, or None if they are invalid."""
    if value is None:
        return None
    try:
        gemm, copied = float(value["gemm_gflops"]), float(value["copy_gb_s"])
        is_busy, tries = bool(value["is_busy"]), int(value["tries"])
        is_valid = 0 < gemm < math.inf and 0 < copied < math.inf and value["gemm_by"] in _PRODUCTS
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return Ceilings(gemm, value["gemm_by"], copied, is_busy, tries) if is_valid else None


def _measure(dtype: str, threads: int, device: str, shape: tuple[int, int, int]) -> Ceilings:
    import torch

    num_rows, num_inner, num_columns = shape
    kind = getattr(torch, _DTYPES[dtype])
    x = torch.ones(num_rows, num_inner, dtype=kind, device=device)
    weight = torch.ones(num_columns, num_inner, dtype=kind, device=device)
    flop = 2.0 * num_rows * num_inner * num_columns
    if device == "cuda":
        return _measure_cuda(x, weight, flop, allow_tf32=dtype == "tf32")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), measurements.CpuTimer(threads) as timer:
            seconds = {name: _best_seconds(call) for name, call in _cpu_products(x, weight).items()}
    finally:
        torch.set_num_threads(before)
    by = min(seconds, key=lambda name: seconds[name])
    copied = native().copy_gb_s(threads, _COPY_BYTES // threads, 3)
    return Ceilings(flop / seconds[by] / 1e9, by, copied, is_busy=timer.was_busy(_QUIET_SHARE))


def _cpu_products(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Returns torch's ways to multiply x (M, K) by weight (N, K) transposed."""
    import torch

    products: dict[str, Callable[[], object]] = {"torch.mm": lambda: torch.mm(x, weight.t())}
    if torch.backends.mkldnn.is_available():
        linear = torch.ops.mkldnn._linear_pointwise
        products["oneDNN"] = lambda: linear(x, weight, None, "none", [], "")
    return products


def _measure_cuda(
    x: torch.Tensor, weight: torch.Tensor, flop: float, *, allow_tf32: bool
) -> Ceilings:
    import torch

    def finish(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            call()
            torch.cuda.synchronize()

        return run

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    try:
        # Eight products per wait, to hide the launches.
        seconds = _best_seconds(finish(lambda: [torch.mm(x, weight.t()) for _ in range(8)])) / 8
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    source = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    copied = 2.0 * _COPY_BYTES / _best_seconds(finish(lambda: target.copy_(source)))
    return Ceilings(flop / seconds / 1e9, "torch.mm", copied / 1e9)


def _best_seconds(call: Callable[[], object]) -> float:
    """Returns the shortest time of a call, in about `_MEASURE_S` seconds and at least 3 calls."""
    call()
    best = float("inf")
    count = 0
    end = time.perf_counter() + _MEASURE_S
    while count < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        count += 1
    return best


def join_openmp() -> bool:
    """Lets the kernels use the threads of torch's OpenMP runtime; cheap enough for every call.

    Returns:
        False without a runtime, and in a forked child, where it has no threads; the kernels then
        start threads of their own.
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
