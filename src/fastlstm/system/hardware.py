"""What this machine is (instruction sets, cores, caches, GPU) and how fast it was measured to go.

Nothing here runs on import; torch is loaded by `gpu`, `ceilings` and `peak_memory_bytes` only.
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
"""(M, K, N) at which the GEMM ceiling is measured: a chunk of steps through an H=512 layer."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "tf32": "float32"}
_COPY_BYTES = 256 << 20
_MEASURE_S = 0.4
_QUIET_SHARE = 0.9
_PRODUCTS = ("torch.mm", "oneDNN")
_BUSY_TRIES = 3


@dataclass(frozen=True)
class CpuInfo:
    """The CPU as this process may use it.

    Attributes:
        vendor: "GenuineIntel", "AuthenticAMD"; on other architectures their name.
        model: the brand string.
        isa: widest usable instruction set, one of `environment.ISA_NAMES`; FASTLSTM_ISA lowers it.
        bf16_isa: the one whose kernels are fastest in bf16 (`fastest_bf16`).
        features: what the CPU has and the operating system enables; FASTLSTM_ISA leaves it alone.
        cores: cores this process may use: the smaller of affinity mask and control-group quota.
        l1d_bytes: level-1 data cache of one core; 0 where unknown.
        l2_bytes: level-2 cache of one core; 0 where unknown.
        l3_bytes: level-3 cache seen by one core; 0 where unknown or absent.
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
        name: as the driver gives it.
        capability: compute capability, (major, minor).
        total_bytes: memory of the device.
        num_multiprocessors: streaming multiprocessors.
        cuda_version: version torch was built for.
        cudnn_version: version of cuDNN, 0 when there is none.
    """

    name: str
    capability: tuple[int, int]
    total_bytes: int
    num_multiprocessors: int
    cuda_version: str
    cudnn_version: int


@dataclass(frozen=True)
class Ceilings:
    """What the machine was measured to reach.

    Attributes:
        gemm_gflops: best matrix product, GFLOP/s.
        gemm_by: which library reached it: "torch.mm" or "oneDNN".
        copy_gb_s: memory copy, read plus written, GB/s (1e9 bytes).
        is_busy: the threads did not get their cores for themselves, so the figures may be low;
            the next caller measures again, up to three times in all.
        tries: measurements that this is the best of.
        is_recalled: it was measured before this process asked.
    """

    gemm_gflops: float
    gemm_by: str
    copy_gb_s: float
    is_busy: bool = False
    tries: int = 1
    is_recalled: bool = False


def native() -> Any:
    """Returns the compiled module.

    Raises:
        KernelError: it was not built, or for another Python.
    """
    try:
        return importlib.import_module("fastlstm._native")
    except ImportError as error:
        raise KernelError(
            f"fastlstm's native code cannot be loaded ({error}); build it with 'pip install .'"
            " in the checkout"
        ) from error


def keep_freed_memory() -> bool:
    """Keeps freed memory in this process, so that a training step's buffers are not mapped anew.

    Returns:
        False where the C library has no such switch (anything but glibc).

    Cost:
        The process stays as large as it ever was. In return a step of H=512, B=32, T=128 takes
        900 page faults instead of 21,000: 44 against 34 k tokens/s (docs/log.md).
    """
    return bool(native().keep_freed_memory())


def cores() -> int:
    """Returns how many cores this process may use: affinity mask and control-group quota."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    quota = cgroup.cpu_quota()
    # Rounded down: a thread beyond the quota is stopped in mid-step, and all others wait for it.
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def default_threads() -> int:
    """Returns the threads to use when none were asked for: every core, or OMP_NUM_THREADS."""
    limit = environment.thread_limit()
    return cores() if limit is None else min(limit, cores())


def cpu() -> CpuInfo:
    """Returns what this process may use of the CPU.

    Raises:
        ConfigError: FASTLSTM_ISA asks for more than this CPU offers.
        KernelError: the native code cannot be loaded.
    """
    return _described(_lowered(_detected()[1]), environment.forced_isa() is not None)


def fastest_bf16(isa: str, vendor: str) -> str:
    """Returns the instruction set for matrix products of bf16.

    Intel's cores do VDPBF16PS at half the rate of two float32 FMAs, so that without AMX the kernels
    that convert in registers are faster: 1.16x to 1.33x a step (H = 128 to 1024, docs/log.md).
    """
    return "avx512" if isa == "avx512_bf16" and vendor == "GenuineIntel" else isa


@functools.cache
def _described(isa: str, is_forced: bool) -> CpuInfo:
    """Reads some 30 files, every call of a kernel asks: once per process."""
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
        raise ConfigError(f"FASTLSTM_ISA is {forced}, this CPU offers {isa}; unset it or lower it")
    return forced


def _cache_bytes(root: Path = Path("/")) -> dict[int, int]:
    """Returns level -> bytes of the data caches of the first core this process may use."""
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
    """Returns the first CUDA device, or None; on a CUDA machine this starts CUDA."""
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
    """Returns GFLOP/s of register-tile loops, per instruction set up to `cpu().isa`.

    No matrix product can be faster than this; "avx512_bf16" and "amx_bf16" count bf16 products.
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
    """Returns what this machine reaches, measured once (about a second) and kept on disk.

    On a busy machine a measurement comes out low: it is then made again by the next caller, as
    it is with `fresh`, and the better one is kept. After three busy ones the best of them stays.

    Args:
        dtype: fp32, bf16, fp16 or tf32 (a GPU's; on the CPU it counts as fp32).
        threads: CPU threads; default `default_threads()`.
        device: "cpu" or "cuda".
        shape: (M, K, N) of the matrix product.
        fresh: measure even if there is a stored result.

    Raises:
        ConfigError: a dtype that is none of these.
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
            max(known, measured, key=lambda found: found.gemm_gflops),
            copy_gb_s=max(known.copy_gb_s, measured.copy_gb_s),
            is_busy=known.is_busy and measured.is_busy,
            tries=known.tries + 1,
        )
    stored = asdict(measured)
    del stored["is_recalled"]
    measurements.remember("ceilings", of, stored)
    return measured


def machine(device: str, threads: int) -> dict[str, object]:
    """Returns what a measurement of speed depends on, apart from what is measured.

    Args:
        device: "cpu" or "cuda".
        threads: CPU threads.
    """
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
    found = gpu()
    if found is None:
        raise ConfigError("ceilings of device 'cuda' were asked for, but torch finds no GPU")
    return found.name


def _as_ceilings(value: dict[str, Any] | None) -> Ceilings | None:
    """Returns what was stored, or None where it makes no sense."""
    if value is None:
        return None
    try:
        found = Ceilings(
            float(value["gemm_gflops"]),
            str(value["gemm_by"]),
            float(value["copy_gb_s"]),
            bool(value["is_busy"]),
            int(value["tries"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    is_speed = all(0 < speed < math.inf for speed in (found.gemm_gflops, found.copy_gb_s))
    return found if is_speed and found.gemm_by in _PRODUCTS else None


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
    """Returns the ways torch can multiply x (M, K) by weight (N, K) transposed."""
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
        # Eight products per wait, so that the launch does not count.
        seconds = _best_seconds(finish(lambda: [torch.mm(x, weight.t()) for _ in range(8)])) / 8
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    source = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    copied = 2.0 * _COPY_BYTES / _best_seconds(finish(lambda: target.copy_(source)))
    return Ceilings(flop / seconds / 1e9, "torch.mm", copied / 1e9)


def _best_seconds(call: Callable[[], object]) -> float:
    """Returns the shortest time of a call, over about `_MEASURE_S` seconds and at least 3 calls."""
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
    """Lets the kernels run on the threads of the OpenMP runtime that torch has loaded.

    Cheap enough for every call: it looks again only when a library was loaded since.

    Returns:
        False where none is found, and in a forked child, where the runtime has lost its threads;
        the kernels then start threads of their own.
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
    # Another library may have brought a runtime of its own; torch's lies beside torch.
    any(map(native().use_openmp, sorted(runtimes, key=_beside_torch)))


def _beside_torch(path: str) -> tuple[bool, str]:
    return not any(part.startswith("torch") for part in Path(path).parts), path


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most memory used so far: the GPU's allocations, or the process' resident set."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
