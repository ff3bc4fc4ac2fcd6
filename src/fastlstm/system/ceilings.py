"""The measured speed of this machine: matrix products and memory copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from fastlstm.errors import ConfigError
from fastlstm.system import hardware, measurements

GEMM_SHAPE = (2048, 512, 2048)
"""(M, K, N) of the matrix product: a chunk of steps through a layer with H=512."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "tf32": "float32"}
_COPY_BYTES, _LEAST_COPY_BYTES = 256 << 20, 1 << 20
_MEASURE_S, _GPU_MEASURE_S = 0.4, 0.05
_QUIET_SHARE = 0.9
_BUSY_TRIES = 3
_BUSY_KEPT_S = 24 * 3600.0


@dataclass(frozen=True)
class Ceilings:
    """The measured speed of the machine.

    Attributes:
        gemm_gflops: best matrix product, GFLOP/s.
        gemm_by: its library: "torch.mm" or "oneDNN".
        copy_gb_s: memory copy, read plus written, GB/s (1e9 bytes).
        is_busy: other processes used the cores, so figures may be low.
        tries: number of measurements; the figures are the best of them.
        measured_at: Unix time of the newest measurement.
        is_recalled: measured by an earlier call.
    """

    gemm_gflops: float
    gemm_by: str
    copy_gb_s: float
    is_busy: bool = False
    tries: int = 1
    measured_at: float = 0.0
    is_recalled: bool = False


def measured_ceilings(
    dtype: str = "fp32",
    threads: int | None = None,
    *,
    device: str = "cpu",
    shape: tuple[int, int, int] = GEMM_SHAPE,
    fresh: bool = False,
) -> Ceilings:
    """Returns the machine's measured speed; measures once (about a second) and stores the result.

    If the machine was busy, later calls measure again: every call until there are three
    measurements, then one a day. The best measurement is kept.

    Args:
        dtype: fp32, bf16, fp16 or tf32 (fp32 on the CPU).
        threads: CPU threads; default `hardware.default_threads()`.
        device: "cpu" or "cuda".
        shape: (M, K, N) of the matrix product.
        fresh: measure in any case.

    Raises:
        ConfigError: an unknown dtype.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, expected one of {', '.join(_DTYPES)}")
    threads = hardware.default_threads() if threads is None else threads
    dtype = ceiling_dtype(dtype, device)
    of = _about(dtype, threads, device, shape)
    known = _stored(of)
    if known is not None and _is_final(known) and not fresh:
        return replace(known, is_recalled=True)
    measured = _measure(dtype, threads, device, shape)
    known = _stored(of)  # another process may have measured meanwhile
    if known is not None:
        measured = replace(
            max(known, measured, key=lambda ceilings: ceilings.gemm_gflops),
            copy_gb_s=max(known.copy_gb_s, measured.copy_gb_s),
            is_busy=known.is_busy and measured.is_busy,
            tries=known.tries + 1,
        )
    measured = replace(measured, measured_at=time.time())
    measurements.remember("ceilings", of, asdict(measured))
    return measured


def ceiling_dtype(dtype: str, device: str) -> str:
    """Returns the dtype whose ceiling counts: fp32 for bf16 on a CPU without bf16 instructions.

    There fastlstm's kernels multiply bf16 at the speed of fp32, and torch is slower than that.
    """
    is_widened = dtype == "bf16" and device == "cpu" and hardware.bf16_instructions() is None
    return "fp32" if is_widened else dtype


def doubt_ceilings(dtype: str, threads: int, *, device: str = "cpu") -> None:
    """Marks a stored ceiling as too low: the next `measured_ceilings` measures again."""
    of = _about(ceiling_dtype(dtype, device), threads, device, GEMM_SHAPE)
    known = _stored(of)
    if known is not None:
        measurements.remember("ceilings", of, asdict(replace(known, is_busy=True)))


def _about(dtype: str, threads: int, device: str, shape: tuple[int, int, int]) -> dict[str, object]:
    return {**hardware.machine(device, threads), "dtype": dtype, "shape": list(shape)}


def _is_final(known: Ceilings) -> bool:
    """Returns whether a stored measurement needs no other."""
    age_s = time.time() - known.measured_at
    return not known.is_busy or (known.tries >= _BUSY_TRIES and 0 <= age_s < _BUSY_KEPT_S)


def _stored(of: dict[str, object]) -> Ceilings | None:
    known = measurements.recall("ceilings", of)
    return None if known is None else Ceilings(**known)


def _measure(dtype: str, threads: int, device: str, shape: tuple[int, int, int]) -> Ceilings:
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
            products = _cpu_products(x, weight)
            seconds = {name: _best_seconds(call, _MEASURE_S) for name, call in products.items()}
    finally:
        torch.set_num_threads(before)
    by = min(seconds, key=lambda name: seconds[name])
    copied = hardware.native().copy_gb_s(threads, _COPY_BYTES // threads, 3)
    return Ceilings(flop / seconds[by] / 1e9, by, copied, is_busy=timer.was_busy(_QUIET_SHARE))


def _cpu_products(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Returns torch's ways to multiply x (M, K) by weight (N, K) transposed."""
    products: dict[str, Callable[[], object]] = {"torch.mm": lambda: torch.mm(x, weight.t())}
    if hardware.has_onednn():
        linear = torch.ops.mkldnn._linear_pointwise
        products["oneDNN"] = lambda: linear(x, weight, None, "none", [], "")
    return products


def _measure_cuda(
    x: torch.Tensor, weight: torch.Tensor, flop: float, *, allow_tf32: bool
) -> Ceilings:
    wait, during_s = torch.cuda.synchronize, _GPU_MEASURE_S
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    try:
        # Eight products per wait, to hide the launches.
        seconds = _best_seconds(lambda: [torch.mm(x, weight.t()) for _ in range(8)], during_s, wait)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    source, target = _copied_on_gpu(_COPY_BYTES)
    copied = 2.0 * source.nbytes / _best_seconds(lambda: target.copy_(source), during_s, wait)
    return Ceilings(8 * flop / seconds / 1e9, "torch.mm", copied / 1e9)


def _copied_on_gpu(num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors of `num_bytes` each, smaller ones if the GPU is short of memory."""
    try:
        source = torch.ones(num_bytes // 4, dtype=torch.float32, device="cuda")
        return source, torch.empty_like(source)
    except torch.cuda.OutOfMemoryError:
        if num_bytes <= _LEAST_COPY_BYTES:
            raise
    torch.cuda.empty_cache()
    return _copied_on_gpu(num_bytes // 4)


def _best_seconds(
    call: Callable[[], object], during_s: float, wait: Callable[[], object] = lambda: None
) -> float:
    """Returns the shortest time of at least 3 calls within about `during_s` seconds; `wait` returns
    once a call has ended."""
    call()
    wait()
    seconds: list[float] = []
    end = time.perf_counter() + during_s
    while len(seconds) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
