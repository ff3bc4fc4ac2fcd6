"""Rates beside the ceiling: how the benchmarks measure the one and show the other."""

from __future__ import annotations

import math

from shapes import Shape

from fastlstm.system import hardware
from fastlstm.system.ceilings import measured_ceilings


def ceilings(shape: Shape) -> dict[str, float]:
    """Returns GFLOP/s of the product of one recurrent step, (B, H) x (H, 4H), by dtype."""
    gemm = (shape.B, shape.H, 4 * shape.H)
    return {
        dtype: measured_ceilings(dtype, shape=gemm, fresh=True).gemm_gflops
        for dtype in ("fp32", "bf16")
    }


def torch_has_bf16() -> bool:
    """Returns whether torch's LSTM computes in bf16 on this CPU, and says where it does not."""
    found = hardware.has_bf16_products()
    if not found:
        print("torch in bf16: left out, oneDNN has no bf16 LSTM on this CPU", flush=True)
    return found


def show(median: dict[str, float], flop: float, ceiling: dict[str, float]) -> None:
    """Prints a line per candidate: milliseconds, rate, share of the ceiling, ratio to torch."""
    for name, seconds in median.items():
        rate = flop / seconds / 1e9
        share = 100 * rate / ceiling["bf16" if "bf16" in name else "fp32"]
        ratio = median.get("torch fp32", math.nan) / seconds
        print(
            f"  {name:<18} {seconds * 1e3:8.2f} ms  {rate:6.0f} GFLOP/s"
            f"  {share:4.0f} % of the ceiling  {ratio:5.2f}x torch fp32",
            flush=True,
        )
